"""Chat messages to the text that the model is shown: by the checkpoint's own template and no other. Knows no route."""

from collections.abc import Mapping, Sequence

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.engine.requests.tokenizer import Scalar, Tokenizer
from routed_experts.server.protocol import ChatMessage

MAX_MESSAGES = 4096
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def render(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage] | None,
    *,
    add_generation_prompt: bool = True,
    scalars: Mapping[str, Scalar] | None = None,
) -> str:
    """Render messages; encode the text without special tokens. Raises InvalidRequestError naming the message and
    part."""
    if not messages or len(messages) > MAX_MESSAGES:
        text = f"messages holds {len(messages or ())}; send 1 to {MAX_MESSAGES}"
        raise InvalidRequestError(text, param="messages")
    plain = [_plain(message, place) for place, message in enumerate(messages)]
    return tokenizer.apply_chat_template(plain, add_generation_prompt=add_generation_prompt, scalars=scalars)


def _plain(message: ChatMessage, place: int) -> dict[str, object]:
    if message.role not in _ROLES:
        text = f"messages[{place}].role={short_repr(message.role)} is unknown; choose one of {', '.join(_ROLES)}"
        raise InvalidRequestError(text, param=f"messages[{place}].role")
    plain: dict[str, object] = {"role": message.role, "content": _text(message.content, place)}
    return plain if message.name is None else {**plain, "name": message.name}


def _text(content: object, place: int) -> str:
    """Text, or the text parts joined."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[object] = content if isinstance(content, list) else []
    texts: list[str] = []
    for index, part in enumerate(parts):
        said = part if isinstance(part, dict) else {}
        text = said.get("text")
        if said.get("type") != "text" or not isinstance(text, str):
            param = f"messages[{place}].content[{index}]"
            told = f"{param} is of type {short_repr(said.get('type'))}; this server takes text parts only, and fetches nothing"
            raise InvalidRequestError(told, param=param)
        texts.append(text)
    return "".join(texts)
