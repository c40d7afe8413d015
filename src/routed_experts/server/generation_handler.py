"""GenerationHandler: one call that generates, from its validated requests to its end; base of each dialect's handler.

It submits the requests, waits or streams, stores rows that will be fetched, counts, and aborts calls without a
client."""

import asyncio
import contextlib
import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PARAM, InvalidRequestError, RoutedExpertsError, field_names
from routed_experts.core.io_struct import FinishReason, StrOut, TokenizedGenerateReqInput
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.server.errors import ApiError
from routed_experts.server.limits import INLINE_BYTES, MAX_BACKLOG, ServerSettings
from routed_experts.server.metrics.finished_request import FinishedRequest
from routed_experts.server.middleware import has_made_id
from routed_experts.server.protocol import StreamOptions
from routed_experts.server.routing.response import (
    PromptRowsIn,
    check_list_format,
    payload_bytes,
    split_for_events,
    to_stored,
)
from routed_experts.server.routing_store import StoreEntry
from routed_experts.server.sse import EventStream, RequestTimeout, StreamForm, run_until_disconnect
from routed_experts.server.state import ServerState

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Options of a call besides its requests. `owner`: digest of its key; `fields`: the dialect's names of the engine's
    parameters, for errors; `headers`: of the response."""

    request_id: str
    owner: str
    fields: Mapping[str, str]
    headers: Mapping[str, str]


class GenerationHandler(ABC):
    """One call. `prompt_only`: 0 new tokens are requested, so the one that the engine generates is left out. Event loop
    only."""

    stream_form = StreamForm()

    def __init__(
        self,
        server: ServerState,
        requests: Sequence[TokenizedGenerateReqInput],
        options: CallOptions,
        *,
        prompt_only: bool,
    ) -> None:
        check_list_format(requests, server.engine.capture)
        self._server, self._requests = server, requests
        self._options, self._prompt_only = options, prompt_only
        self._generation = server.accepting_engine.generate(requests, max_backlog=MAX_BACKLOG)
        self._start_time = time.monotonic()
        self._first_token_s: dict[int, float] = {}  # by index of the request
        self._store_entry: StoreEntry | None = None
        self._has_made_id = False
        self._prompt_rows: RoutedExperts | None = None  # format list: those that are fields of the response
        self._is_closed = False

    @abstractmethod
    async def _full_response(self) -> Response:
        """Build the response of a call that does not stream."""

    @abstractmethod
    def _chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a call that streams."""

    async def respond(self, request: Request, *, stream: bool) -> Response:
        """Run the call: wait for all of it, or until it is accepted and can be streamed."""
        timeout_s = self._server.settings.request_timeout
        self._has_made_id = has_made_id(request)
        has_started = False
        try:
            if not stream:
                return await run_until_disconnect(request, self._submit_and_wait(), timeout_s=timeout_s)
            await run_until_disconnect(request, self._submit(), timeout_s=timeout_s)
            has_started = True
        except RequestTimeout:
            self.timeout()
            raise
        finally:
            if not has_started:
                self.close()
        return EventStream(
            self._chunks(),
            on_close=self.close,
            on_timeout=self.timeout,
            timeout_s=timeout_s,
            headers=self._options.headers,
            form=self.stream_form,
        )

    def timeout(self) -> None:
        """End what has not finished, with the reason `timeout`."""
        self._generation.abort(FinishReason(type="timeout", message="above --request-timeout"))
        self.close()

    def close(self) -> None:
        """Abort what has not finished, and count what it had. Idempotent."""
        self._generation.abort()
        if self._store_entry is not None:
            self._server.store.release(self._store_entry)
        if not self._is_closed and self._generation.is_open:
            self._server.run_in_background(self._observe_rest())
        self._is_closed = True

    async def _submit_and_wait(self) -> Response:
        await self._submit()
        return await self._full_response()

    async def _submit(self) -> None:
        """Submit the requests; once they are accepted, reserve the rows that will be fetched in the store."""
        with field_names(self._options.fields):
            await self._generation.submit()
        options = [request.routed_experts for request in self._requests]
        choices = [index for index, option in enumerate(options) if option.enabled and option.format == "ref"]
        if choices:  # not earlier: a refused call may have the id of a running one
            self._store_entry = self._server.store.reserve(
                self._options.request_id, owner=self._options.owner, choices=choices, is_made=self._has_made_id
            )
            await self._server.reserve_rows(self._store_entry)

    def _prompt_choice(self) -> int:
        """Return the index of the request whose output has the rows and logprobs of a prompt that all choices share:
        the first with a token, as an aborted one may have none; 0 where no request has a token."""
        sequences = self._generation.sequences
        return next((index for index, sequence in enumerate(sequences) if sequence.num_tokens > 0), 0)

    def _assign_prompt_rows(self, index: int) -> PromptRowsIn | None:
        """Return the fields that have the prompt rows of a request's last output in format list. The response has those
        of the first request with a token, from here on, and a choice has its own where they differ; where no request
        has a token, a full response has null."""
        request, sequence = self._requests[index], self._generation.sequences[index]
        if request.routed_experts.format != "list":
            return None
        if sequence.num_tokens == 0:
            return "response" if index == self._prompt_choice() and not request.stream else None
        rows, first = sequence.rows.prompt, self._prompt_rows
        if first is None:
            self._prompt_rows = rows
            return "response"
        return None if rows.num_rows == 0 or np.array_equal(rows.ids, first.ids) else "choice"

    async def _render_rows(self, index: int, render: Callable[[RoutedExperts], _T]) -> list[_T]:
        """Return the rendered rows of a request's last output: one part, or several where streamed rows are large.

        They are counted and, if they will be fetched, stored. Large ones are rendered in a thread."""
        options, sequence = self._requests[index].routed_experts, self._generation.sequences[index]
        record = sequence.rows_of_prompt() if self._prompt_only else sequence.rows
        if self._store_entry is not None:
            self._server.store.fill(self._store_entry, index, to_stored(sequence, record, owner=self._options.owner))
        parts = split_for_events(record, options)
        size = sum(payload_bytes(part, options) for part in parts)
        self._server.metrics.sent_rows(options.format, size)

        def render_parts() -> list[_T]:
            return [render(part) for part in parts]

        return await asyncio.to_thread(render_parts) if size > 4 * INLINE_BYTES else render_parts()

    async def _observe_rest(self) -> None:
        """Measure the outputs that are left of a call without a client, which may still be submitted, or refused."""
        if not await self._generation.was_accepted():
            return
        while self._generation.is_open:
            with contextlib.suppress(RoutedExpertsError):  # it ends one request: the others follow
                async for index, output in self._generation.outputs():
                    self._observe(index, output)

    def _observe(self, index: int, output: StrOut) -> None:
        """Measure one output of a request; count the request when it has finished."""
        elapsed_s, request, out = time.monotonic() - self._start_time, self._requests[index], output.out
        if out.new_token_ids:
            self._first_token_s.setdefault(index, elapsed_s)
        if out.finish_reason is None:
            return
        finished = FinishedRequest(
            prompt_tokens=int(request.input_ids.size),
            cached_tokens=out.cached_tokens,
            completion_tokens=0 if self._prompt_only else out.completion_tokens,
            max_tokens=0 if self._prompt_only else request.sampling.max_tokens,
            n=request.sampling.n,
            first_token_s=self._first_token_s.get(index) if request.stream else None,
            total_s=elapsed_s,
            queue_s=out.queue_s,
        )
        self._server.metrics.finished(finished)


def usage_in_stream(
    settings: ServerSettings, options: StreamOptions | None, *, stream: bool | None
) -> tuple[bool, bool]:
    """Return whether a stream ends with the usage, and whether every chunk has it. Raises ApiError for options without
    a stream."""
    if options is not None and stream is not True:
        text = "stream_options without stream; set stream to true"
        raise ApiError(text, status=400, code="stream_required", param="stream_options")
    is_forced = settings.enable_force_include_usage
    include_usage = is_forced or (options is not None and options.include_usage is True)
    is_continuous = options is not None and options.continuous_usage_stats is True
    return include_usage, is_forced or (include_usage and is_continuous)


def to_seed(seed: int | None, param: str = "seed") -> int | None:
    """Map an int64 to a seed of the engine, which has 63 bits; negative seeds stay distinct. Raises
    InvalidRequestError naming `param`."""
    if seed is not None and not -(2**63) <= seed < 2**63:
        limits = "-2**63 to 2**63 - 1; choose another, or leave it out"
        text = f"{PARAM} is {short_repr(seed)}, but must be an integer of 64 bits, {limits}"
        raise InvalidRequestError(text, param=param)
    return None if seed is None else seed % 2**63
