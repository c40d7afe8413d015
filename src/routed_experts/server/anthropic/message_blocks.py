"""The blocks of a response of /v1/messages, and the events that bring them: thinking, text and uses of tools, in the
order of the text.

    message_start
    content_block_start     for each block
    content_block_delta ... thinking_delta, text_delta or input_json_delta
    content_block_stop
    message_delta           the reason of the end, and the usage
    message_stop"""

import json
from typing import Any, cast

from routed_experts.engine.requests.sequence_state import SequenceState
from routed_experts.parsing import CallDelta, ContentDelta, Delta, ReasoningDelta
from routed_experts.server.chat_handler import changes, num_tokens
from routed_experts.server.chat_prompt import new_call_id
from routed_experts.server.sse import event

Fields = dict[str, object]


class MessageWriter:
    """Writes one message. `num_prompt_tokens`: for its first event, before it is known how many of them were cached."""

    def __init__(self, message_id: str, model: str, num_prompt_tokens: int) -> None:
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._blocks: list[Fields] = []
        self._kind: type[Delta] | None = None  # of the open block
        self._parts: list[str] = []
        self._end: Fields = {"stop_reason": None, "stop_sequence": None, "usage": _usage(num_prompt_tokens, 0, 0)}

    def start(self) -> list[bytes]:
        """Return the first event."""
        return [event({"type": "message_start", "message": self.body()}, "message_start")]

    def body(self) -> Fields:
        """Return the message so far."""
        return {**self._head, "content": self._blocks, **self._end}

    def add(self, delta: Delta) -> list[bytes]:
        """Add a delta; returns its events."""
        is_new_call = isinstance(delta, CallDelta) and delta.name is not None
        events = self._open(delta) if is_new_call or self._kind is not type(delta) else []
        text = delta.arguments if isinstance(delta, CallDelta) else delta.text
        if text:
            self._parts.append(text)
            events.append(self._event("content_block_delta", delta=_delta(delta, text)))
        return events

    def finish(self, sequence: SequenceState) -> list[bytes]:
        """End the message; returns the last events."""
        reason = sequence.finish_reason
        assert reason is not None, sequence.request.rid
        events = self._close()
        stop_sequence = reason.matched if isinstance(reason.matched, str) else None
        has_calls = any(block["type"] == "tool_use" for block in self._blocks)
        name = {"length": "max_tokens", "stop": "end_turn"}.get(reason.type, reason.type)
        if name == "end_turn":
            name = "stop_sequence" if stop_sequence is not None else "tool_use" if has_calls else name
        end: Fields = {"stop_reason": name, "stop_sequence": stop_sequence}
        fields: Fields = {"usage": _usage(*num_tokens(sequence)), **changes(sequence)}
        self._end = {**end, **fields}
        events.append(event({"type": "message_delta", "delta": end, **fields}, "message_delta"))
        return [*events, event({"type": "message_stop"}, "message_stop")]

    def _open(self, delta: Delta) -> list[bytes]:
        events = self._close()
        self._kind, self._parts = type(delta), []
        block: Fields
        match delta:
            case ReasoningDelta():
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case ContentDelta():
                block = {"type": "text", "text": ""}
            case CallDelta(_, name, _):
                block = {"type": "tool_use", "id": new_call_id().replace("call", "toolu"), "name": name, "input": {}}
        self._blocks.append(block)
        events.append(self._event("content_block_start", content_block=block))
        return events

    def _close(self) -> list[bytes]:
        if self._kind is None:
            return []
        block, text = self._blocks[-1], "".join(self._parts)
        if self._kind is CallDelta:
            block["input"] = to_input(text)
        else:
            block["thinking" if self._kind is ReasoningDelta else "text"] = text
        self._kind = None
        return [self._event("content_block_stop")]

    def _event(self, name: str, **fields: object) -> bytes:
        return event({"type": name, "index": len(self._blocks) - 1, **fields}, name)


def to_input(arguments: str) -> dict[str, Any]:
    """Return arguments as an object. Text that is none, such as that of a call cut by max_tokens, is its `arguments`:
    nothing is lost. So is text with what an answer in JSON cannot hold: half of a surrogate pair, NaN, 1e999."""
    try:
        value = json.loads(arguments)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        value = arguments
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {"arguments": arguments}


def _delta(delta: Delta, text: str) -> Fields:
    match delta:
        case ReasoningDelta():
            return {"type": "thinking_delta", "thinking": text}
        case ContentDelta():
            return {"type": "text_delta", "text": text}
        case CallDelta():
            return {"type": "input_json_delta", "partial_json": text}


def _usage(prompt: int, cached: int, generated: int) -> Fields:
    """Return the usage; cached tokens are no input tokens in this dialect."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }
