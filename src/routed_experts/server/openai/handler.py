"""OpenAIHandler: one call of /v1, from its checked requests to an answer at once or in a stream. Chat and text differ in
their form only.

First chunk, deltas, a last chunk with the finish reason for each choice, then usage if asked."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from starlette.responses import Response

from routed_experts.core.io_struct import StrOut, TokenizedGenerateReqInput
from routed_experts.server.generation_handler import CallName, GenerationHandler
from routed_experts.server.limits import INLINE_BYTES
from routed_experts.server.openai.choice_state import Choice, Piece, usage_of
from routed_experts.server.reply import json_reply
from routed_experts.server.routing.response import Placed, increments, ref_url, routing_fields, rows_of
from routed_experts.server.sse import event
from routed_experts.server.state import ServerState


class Form(Protocol):
    """How one of the two surfaces writes its answers."""

    object_name: str
    chunk_name: str

    def whole(self, choice: Choice) -> dict[str, object]:
        """The body of a finished choice."""
        ...

    def opening(self, choice: Choice) -> dict[str, object] | None:
        """The body of a choice's first chunk, if it has one of its own."""
        ...

    def delta(self, choice: Choice, piece: Piece) -> dict[str, object]:
        """The body of what a piece adds."""
        ...

    def closing(self, choice: Choice) -> dict[str, object]:
        """The body of a choice's last chunk, without its finish reason."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What a call is beside its requests. `echo`: texts of the prompts, which come first; `ignored`: names that had no
    effect."""

    request_id: str
    owner: str
    echo: Sequence[str] | None = None
    prompt_only: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    headers: dict[str, str] = dataclasses.field(default_factory=dict[str, str])


class OpenAIHandler(GenerationHandler):
    """Runs on the event loop."""

    def __init__(
        self, service: ServerState, requests: Sequence[TokenizedGenerateReqInput], form: Form, options: CallOptions
    ) -> None:
        super().__init__(service, requests, CallName(options.request_id, options.owner, options.headers))
        self._form, self._options = form, options
        n = requests[0].sampling.n
        echo = options.echo
        self._choices = [
            Choice(index, request, echo=None if echo is None else echo[index // n], prompt_only=options.prompt_only)
            for index, request in enumerate(requests)
        ]
        self._created = int(time.time())
        self._prompt_told = False  # in a stream of lists: the rows that stand beside the choices

    async def _whole(self) -> Response:
        await self.accepted()
        async for index, news in self._call.outputs():
            self._take(index, news)
        bodies: list[dict[str, object]] = []
        beside: dict[str, object] = {}
        for choice in self._choices:
            (placed,) = await self._placed(choice, beside=choice.index == 0)
            bodies.append({**self._form.whole(choice), **choice.ending(), **placed.choice})
            beside |= placed.response
        body = {**self._head(self._form.object_name), "choices": bodies, "usage": usage_of(self._choices), **beside}
        return json_reply(body, headers=self._options.headers)

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        for choice in self._choices:
            opening = self._form.opening(choice)
            if opening is not None:
                yield self._chunk(choice, opening)
        async for index, news in self._call.outputs():
            for chunk in await self._chunks_of(self._choices[index], self._take(index, news)):
                yield chunk
        if self._options.include_usage:
            yield event({**self._head(self._form.chunk_name), "choices": [], "usage": usage_of(self._choices)})

    async def _chunks_of(self, choice: Choice, piece: Piece) -> list[bytes]:
        """The chunks of one event: what was said, rows that are streamed, and at the end the finish reason with the
        rows."""
        placed: list[Placed] = []
        if choice.finish is not None or (choice.request.routed_experts.stream and piece.token_ids):
            placed = await self._placed(choice, beside=not self._prompt_told)
            self._prompt_told = True
        last = placed.pop() if choice.finish is not None else None
        chunks: list[bytes] = []
        if piece.text or piece.token_ids:
            first = placed.pop(0) if placed else Placed({}, {})
            chunks.append(
                self._chunk(choice, {**self._form.delta(choice, piece), **first.choice}, beside=first.response)
            )
        chunks += [
            self._chunk(choice, {**self._form.closing(choice), **one.choice}, beside=one.response) for one in placed
        ]
        if last is not None:
            closing = {**self._form.closing(choice), **choice.ending(), **last.choice}
            chunks.append(self._chunk(choice, closing, beside=last.response))
        return chunks

    def _take(self, index: int, news: StrOut) -> Piece:
        choice = self._choices[index]
        piece = choice.take(news)
        self.note(index, news, cached_tokens=choice.cached_tokens, completion_tokens=choice.completion_tokens)
        return piece

    async def _placed(self, choice: Choice, *, beside: bool) -> list[Placed]:
        """The rows that a choice has to tell, in their places: one piece, or several where streamed rows are large.
        Large ones are encoded off the event loop."""
        wanted, answer = choice.request.routed_experts, self._call.sequences[choice.index]
        if not wanted.enabled:
            return [Placed({}, {})]
        record = rows_of(answer, prompt_only=choice.prompt_only)
        size = self.sending(choice.index, record)
        url, version = ref_url(self._options.request_id, choice.index), choice.weight_version

        def place() -> list[Placed]:
            return [
                routing_fields(
                    piece, wanted, aborted=answer.record is None, url=url, weight_version=version, beside=beside
                )
                for piece in increments(record, wanted)
            ]

        return await asyncio.to_thread(place) if size > 4 * INLINE_BYTES else place()

    def _head(self, name: str) -> dict[str, object]:
        return {
            "id": self._options.request_id,
            "object": name,
            "created": self._created,
            "model": self._service.model_name,
        }

    def _chunk(self, choice: Choice, body: dict[str, object], *, beside: dict[str, object] | None = None) -> bytes:
        chunk: dict[str, object] = {
            **self._head(self._form.chunk_name),
            "choices": [{"finish_reason": None, **body}],
            **(beside or {}),
        }
        if self._options.continuous_usage:
            chunk["usage"] = usage_of(self._choices)
        elif self._options.include_usage:
            chunk["usage"] = None
        return event(chunk)
