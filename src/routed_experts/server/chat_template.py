"""Chat messages and tools to the text of the prompt, by the template of the checkpoint and no other.

The keys of a message that templates read are kept: tool_calls, tool_call_id, name, and reasoning, which they know as
`reasoning_content`, `reasoning` or, in GPT-OSS, `thinking`. Arguments of earlier calls are objects, or text where the
template joins them as text."""

import json
from collections.abc import Mapping, Sequence

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PARAM, InvalidRequestError
from routed_experts.engine.requests.tokenizer import Scalar, Tokenizer
from routed_experts.server.protocol import ChatMessage, ToolCall
from routed_experts.server.tools import parse_arguments

_CUT = "\ue000\uf8ff\ue000"  # marks the end of the last message; characters of private use, which no text has
MAX_MESSAGES, MAX_ROLE_CHARS = 4096, 64
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def render(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage] | None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    scalars: Mapping[str, Scalar] | None = None,
    tools: Sequence[Mapping[str, object]] | None = None,
) -> str:
    """Render messages; encode the text without special tokens. `continue_final_message`: the text ends with the content
    of the last message, so that the answer goes on from there. `tools`: in OpenAI's form. Raises InvalidRequestError
    naming the message and part."""
    if not messages or len(messages) > MAX_MESSAGES:
        text = f"messages holds {len(messages or ())}; send 1 to {MAX_MESSAGES}"
        raise InvalidRequestError(text, param="messages")
    if tools and not tokenizer.takes_tools:
        text = "tools are given, but the chat template of this model has no place for them; describe them in a message"
        raise InvalidRequestError(text, param="tools")
    plain = [_to_plain(message, index, tokenizer) for index, message in enumerate(messages)]
    if continue_final_message:
        plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}{_CUT}"}
    text = tokenizer.apply_chat_template(
        plain, add_generation_prompt=add_generation_prompt, scalars=scalars, tools=tools or None
    )
    if not continue_final_message:
        return text
    end = text.rfind(_CUT)
    if end < 0:
        message = (
            f"{PARAM}: the chat template leaves out the last message, which the answer is to continue; send another"
        )
        raise InvalidRequestError(message, param="continue_final_message")
    return text[:end].replace(_CUT, "")


def template_scalars(scalars: Mapping[str, Scalar] | None, effort: str | None) -> Mapping[str, Scalar] | None:
    """Return the variables of a template with `reasoning_effort`; effort none turns thinking off. Raises
    InvalidRequestError."""
    if effort is None:
        return scalars
    if effort not in _EFFORTS:
        text = f"{PARAM}={short_repr(effort)} is unknown; choose one of {', '.join(_EFFORTS)}"
        raise InvalidRequestError(text, param="reasoning_effort")
    own: dict[str, Scalar] = {"reasoning_effort": effort}
    if effort == "none":
        own = {"enable_thinking": False, "thinking": False}
    return {**own, **(scalars or {})}


def _to_plain(message: ChatMessage, index: int, tokenizer: Tokenizer) -> dict[str, object]:
    if not 1 <= len(message.role) <= MAX_ROLE_CHARS:  # which roles there are is up to the template
        text = f"messages[{index}].role={short_repr(message.role)} must be text of 1 to {MAX_ROLE_CHARS} characters"
        raise InvalidRequestError(text, param=f"messages[{index}].role")
    plain: dict[str, object] = {"role": message.role, "content": to_text(message.content, index=index)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            _to_plain_call(call, f"messages[{index}].tool_calls[{number}]", as_text=tokenizer.takes_argument_text)
            for number, call in enumerate(message.tool_calls)
        ]
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        plain["reasoning_content"] = plain["reasoning"] = reasoning
        if not plain["content"]:  # GPT-OSS refuses both
            plain["thinking"] = reasoning
    return plain


def _to_plain_call(call: ToolCall, path: str, *, as_text: bool) -> dict[str, object]:
    arguments: object = parse_arguments(call.function.arguments, f"{path}.function.arguments", param=path)
    if as_text:
        raw = call.function.arguments
        arguments = raw if isinstance(raw, str) and raw else json.dumps(arguments, ensure_ascii=False)
    plain: dict[str, object] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return plain if call.id is None else {"id": call.id, **plain}


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
