"""Chat messages to the text of the prompt, by the template of the checkpoint and no other."""

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
    plain = [_to_plain(message, index) for index, message in enumerate(messages)]
    return tokenizer.apply_chat_template(plain, add_generation_prompt=add_generation_prompt, scalars=scalars)


def _to_plain(message: ChatMessage, index: int) -> dict[str, object]:
    if message.role not in _ROLES:
        text = f"messages[{index}].role={short_repr(message.role)} is unknown; choose one of {', '.join(_ROLES)}"
        raise InvalidRequestError(text, param=f"messages[{index}].role")
    plain: dict[str, object] = {"role": message.role, "content": _text(message.content, index)}
    return plain if message.name is None else {**plain, "name": message.name}


def _text(content: object, message_index: int) -> str:
    """Return the text, or the text parts joined."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[object] = content if isinstance(content, list) else []
    texts: list[str] = []
    for index, part in enumerate(parts):
        fields = part if isinstance(part, dict) else {}
        text = fields.get("text")
        if fields.get("type") != "text" or not isinstance(text, str):
            param = f"messages[{message_index}].content[{index}]"
            kind = short_repr(fields.get("type"))
            message = f"{param} is of type {kind}; this server takes text parts only, and fetches nothing"
            raise InvalidRequestError(message, param=param)
        texts.append(text)
    return "".join(texts)
