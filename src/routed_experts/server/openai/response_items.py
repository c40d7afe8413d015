"""The items of a response of /v1/responses, and the events that bring them: reasoning, messages and calls, in the order
of the text.

    response.created, response.in_progress
    response.output_item.added            for each item
      response.content_part.added         reasoning and messages have one part
      response.output_text.delta ...      or reasoning_text, or function_call_arguments
      response.output_text.done
      response.content_part.done
    response.output_item.done
    response.completed                    or response.incomplete"""

import time
import uuid
from collections.abc import Callable, Mapping
from typing import cast

from routed_experts.engine.requests.sequence_state import SequenceState
from routed_experts.parsing import CallDelta, ContentDelta, Delta, ReasoningDelta
from routed_experts.server.chat_handler import changes, num_tokens
from routed_experts.server.chat_prompt import new_call_id
from routed_experts.server.errors import ErrorResponse
from routed_experts.server.sse import event

Fields = dict[str, object]


class ResponseWriter:
    """Writes one response. `head`: fields that repeat the request; `count_tokens`: those of a text."""

    def __init__(
        self, response_id: str, model: str, head: Mapping[str, object], count_tokens: Callable[[str], int]
    ) -> None:
        self._head = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "model": model,
            **head,
        }
        self._count_tokens = count_tokens
        self._output: list[Fields] = []
        self._kind: type[Delta] | None = None  # of the open item
        self._parts: list[str] = []  # of the text of the open item
        self._reasoning: list[str] = []
        self._sequence_number = 0
        self._end: Fields = {"status": "in_progress", "incomplete_details": None, "usage": None}

    def start(self) -> list[bytes]:
        """Return the first events."""
        return [self._event(name, response=self.body()) for name in ("response.created", "response.in_progress")]

    def body(self) -> Fields:
        """Return the response so far."""
        return {**self._head, **self._end, "output": self._output}

    def add(self, delta: Delta) -> list[bytes]:
        """Add a delta; returns its events."""
        is_new_call = isinstance(delta, CallDelta) and delta.name is not None
        events = self._open(delta) if is_new_call or self._kind is not type(delta) else []
        text = delta.arguments if isinstance(delta, CallDelta) else delta.text
        if text:
            self._parts.append(text)
            fields: Fields = {} if isinstance(delta, CallDelta) else {"content_index": 0}
            if isinstance(delta, ContentDelta):
                fields["logprobs"] = []
            events.append(self._item_event(f"response.{self._text_name()}.delta", delta=text, **fields))
        return events

    def finish(self, sequence: SequenceState) -> list[bytes]:
        """End the response; returns the last events."""
        reason = sequence.finish_reason
        assert reason is not None, sequence.request.rid
        is_complete = reason.type == "stop"
        details = {"length": "max_output_tokens"}.get(reason.type, reason.type)
        events = self._close("completed" if is_complete else "incomplete")
        prompt, cached, generated = num_tokens(sequence)
        self._end = {
            "status": "completed" if is_complete else "incomplete",
            "incomplete_details": None if is_complete else {"reason": details},
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": generated,
                "output_tokens_details": {"reasoning_tokens": self._count_tokens("".join(self._reasoning))},
                "total_tokens": prompt + generated,
            },
            **changes(sequence),
        }
        name = "response.completed" if is_complete else "response.incomplete"
        return [*events, self._event(name, response=self.body())]

    def error_event(self, response: ErrorResponse) -> bytes:
        """Return the event that ends a stream which failed. `error` is where the clients of /v1 look for it."""
        error = cast("Mapping[str, object]", response.body["error"])
        fields = {name: error[name] for name in ("code", "message", "param")}
        return self._event("error", **fields, error=error)

    def _open(self, delta: Delta) -> list[bytes]:
        """Open the item of a delta, after the one before it is closed."""
        events = self._close("completed")
        self._kind, self._parts = type(delta), []
        item: Fields
        match delta:
            case ReasoningDelta():
                item = {"type": "reasoning", "id": _item_id("rs"), "summary": [], "content": []}
            case ContentDelta():
                item = {"type": "message", "id": _item_id("msg"), "role": "assistant", "content": []}
            case CallDelta(_, name, _):
                item = {
                    "type": "function_call",
                    "id": _item_id("fc"),
                    "call_id": new_call_id(),
                    "name": name,
                    "arguments": "",
                }
        self._output.append(item)
        item["status"] = "in_progress"
        events.append(self._event("response.output_item.added", output_index=len(self._output) - 1, item=item))
        if self._kind is not CallDelta:
            events.append(self._item_event("response.content_part.added", content_index=0, part=self._part("")))
        return events

    def _close(self, status: str) -> list[bytes]:
        """Close the open item, if there is one."""
        if self._kind is None:
            return []
        item, text = self._output[-1], "".join(self._parts)
        item["status"] = status
        if self._kind is CallDelta:
            item["arguments"] = text
            events = [self._item_event("response.function_call_arguments.done", arguments=text, name=item["name"])]
        else:
            part = self._part(text)
            item["content"] = [part]
            if self._kind is ReasoningDelta:
                self._reasoning.append(text)
            extra: Fields = {"logprobs": []} if self._kind is ContentDelta else {}
            events = [
                self._item_event(f"response.{self._text_name()}.done", content_index=0, text=text, **extra),
                self._item_event("response.content_part.done", content_index=0, part=part),
            ]
        events.append(self._event("response.output_item.done", output_index=len(self._output) - 1, item=item))
        self._kind = None
        return events

    def _text_name(self) -> str:
        names = {ContentDelta: "output_text", ReasoningDelta: "reasoning_text", CallDelta: "function_call_arguments"}
        assert self._kind is not None
        return names[self._kind]

    def _part(self, text: str) -> Fields:
        if self._kind is ReasoningDelta:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item_event(self, kind: str, /, **fields: object) -> bytes:
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, /, **fields: object) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


def _item_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
