"""Chat messages to the text of the prompt, by the template of the checkpoint and no other."""

from collections.abc import Mapping, Sequence

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.engine.requests.tokenizer import Scalar, Tokenizer
from routed_experts.server.protocol import ChatMessage

_CUT = "\ue000\uf8ff\ue000"  # marks the end of the last message; characters of private use, which no text has
MAX_MESSAGES, MAX_ROLE_CHARS = 4096, 64


def render(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage] | None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    scalars: Mapping[str, Scalar] | None = None,
) -> str:
    """Render messages; encode the text without special tokens. `continue_final_message`: the text ends with the content
    of the last message, so that the answer goes on from there. Raises InvalidRequestError naming the message and
    part."""
    if not messages or len(messages) > MAX_MESSAGES:
        text = f"messages holds {len(messages or ())}; send 1 to {MAX_MESSAGES}"
        raise InvalidRequestError(text, param="messages")
    plain = [_to_plain(message, index) for index, message in enumerate(messages)]
    if continue_final_message:
        plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}{_CUT}"}
    text = tokenizer.apply_chat_template(plain, add_generation_prompt=add_generation_prompt, scalars=scalars)
    if not continue_final_message:
        return text
    end = text.rfind(_CUT)
    if end < 0:
        message = "continue_final_message, but the chat template leaves out the last message; send another message last"
        raise InvalidRequestError(message, param="continue_final_message")
    return text[:end].replace(_CUT, "")


def _to_plain(message: ChatMessage, index: int) -> dict[str, object]:
    if not 1 <= len(message.role) <= MAX_ROLE_CHARS:  # which roles there are is up to the template
        text = f"messages[{index}].role={short_repr(message.role)} must be text of 1 to {MAX_ROLE_CHARS} characters"
        raise InvalidRequestError(text, param=f"messages[{index}].role")
    plain: dict[str, object] = {"role": message.role, "content": to_text(message.content, index=index)}
    return plain if message.name is None else {**plain, "name": message.name}


def to_text(content: object, *, index: int) -> str:
    """Return the text of the content of message `index`: its text, or its text parts joined. Raises InvalidRequestError
    for parts of another type."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[object] = content if isinstance(content, list) else []
    texts: list[str] = []
    for part_index, part in enumerate(parts):
        fields = part if isinstance(part, dict) else {}
        text = fields.get("text")
        if fields.get("type") != "text" or not isinstance(text, str):
            param = f"messages[{index}].content[{part_index}]"
            kind = short_repr(fields.get("type"))
            message = f"{param} is of type {kind}; this server takes text parts only, and fetches nothing"
            raise InvalidRequestError(message, param=param)
        texts.append(text)
    return "".join(texts)
