"""ChatHandler: one call with one response that is made of items: /v1/responses and /v1/messages.

A dialect writes items from deltas; the handler generates, parses and streams. Both ways of answering feed the same
writer, so that a stream joins to the full response."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from starlette.responses import Response

from routed_experts.core.io_struct import StrOut, TokenizedGenerateReqInput
from routed_experts.engine.requests.placement_fields import exactness_fields
from routed_experts.engine.requests.sequence_state import SequenceState
from routed_experts.parsing import ContentDelta, Delta
from routed_experts.server.body import json_response
from routed_experts.server.chat_prompt import ChatPrompt
from routed_experts.server.generation_handler import CallOptions, GenerationHandler
from routed_experts.server.state import ServerState


class ItemWriter(Protocol):
    """Writes the response of one call in a dialect."""

    def start(self) -> list[bytes]:
        """Return the first events."""
        ...

    def add(self, delta: Delta) -> list[bytes]:
        """Add a delta; returns its events."""
        ...

    def finish(self, sequence: SequenceState) -> list[bytes]:
        """End the response with the end of its sequence; returns the last events."""
        ...

    def body(self) -> dict[str, object]:
        """Return the response, after its end."""
        ...


class ChatHandler(GenerationHandler):
    """One call of one sequence."""

    def __init__(
        self,
        server: ServerState,
        requests: Sequence[TokenizedGenerateReqInput],
        prompt: ChatPrompt,
        writer: ItemWriter,
        options: CallOptions,
    ) -> None:
        super().__init__(server, prompt.with_markers(server, requests), options, prompt_only=False)
        self._parser, self._writer = prompt.create_parser(), writer
        (self._sequence,) = self._generation.sequences

    async def _full_response(self) -> Response:
        async for index, output in self._generation.outputs():
            self._observe(index, output)
            for delta in self._parse(output):
                self._writer.add(delta)
        self._writer.finish(self._sequence)
        return json_response(self._writer.body(), headers=self._options.headers)

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        for event in self._writer.start():
            yield event
        async for index, output in self._generation.outputs():
            self._observe(index, output)
            for delta in self._parse(output):
                for event in self._writer.add(delta):
                    yield event
        for event in self._writer.finish(self._sequence):
            yield event

    def _parse(self, output: StrOut) -> list[Delta]:
        if self._parser is None:
            return [ContentDelta(output.text)] if output.text else []
        deltas = self._parser.feed(output.text) if output.text else []
        reason = output.out.finish_reason
        return deltas if reason is None else deltas + self._parser.finish(is_cut=reason.is_cut)


def changes(sequence: SequenceState) -> dict[str, object]:
    """Return `meta_info` with what the placement of experts changed, where it can change an answer."""
    fields = exactness_fields(sequence.last) if sequence.has_output else {}
    return {"meta_info": fields} if fields else {}


def num_tokens(sequence: SequenceState) -> tuple[int, int, int]:
    """Return the tokens of the prompt, those of them that came from the prefix cache, and the generated tokens."""
    prompt = int(sequence.request.input_ids.size)
    return (
        (prompt, sequence.last.cached_tokens, sequence.last.completion_tokens)
        if sequence.has_output
        else (prompt, 0, 0)
    )
