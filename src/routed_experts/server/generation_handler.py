"""GenerationHandler: what every call of an engine over HTTP does, from its checked requests to its end: wait or stream, keep
rows, count. Knows no dialect."""

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.io_struct import StrOut, FinishReason, TokenizedGenerateReqInput
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.server.admin.metrics import EndedRequest
from routed_experts.server.limits import MAX_BACKLOG
from routed_experts.server.routing.response import check_list, payload_bytes, to_stored
from routed_experts.server.routing.store import StoreEntry
from routed_experts.server.sse import EventStream, RequestTimeout, watched
from routed_experts.server.state import ServerState


@dataclasses.dataclass(frozen=True, slots=True)
class CallName:
    """Whose call it is. `owner`: digest of the key; `headers`: of the answer."""

    request_id: str
    owner: str
    headers: Mapping[str, str]


class GenerationHandler(ABC):
    """One call. Event loop only."""

    def __init__(self, service: ServerState, requests: Sequence[TokenizedGenerateReqInput], name: CallName) -> None:
        check_list(requests, service.door.capture)
        self._service, self._requests, self._name = service, requests, name
        self._call = service.accepting_engine.generate(requests, max_backlog=MAX_BACKLOG)
        self._began = time.monotonic()
        self._first: dict[int, float] = {}
        self._kept: StoreEntry | None = None

    @abstractmethod
    async def _whole(self) -> Response:
        """The answer, once all of it is there."""

    @abstractmethod
    def _chunks(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""

    async def plain(self, request: Request) -> Response:
        """Wait for all of the answer."""
        try:
            return await watched(request, self._whole(), timeout_s=self._service.settings.request_timeout)
        except RequestTimeout:
            self.expire()
            raise
        finally:
            self.close()

    async def stream(self, request: Request) -> Response:
        """Wait until the call is accepted, then answer chunk by chunk."""
        timeout = self._service.settings.request_timeout
        try:
            await watched(request, self.accepted(), timeout_s=timeout)
        except RequestTimeout:
            self.expire()
            raise
        except BaseException:
            self.close()
            raise
        return EventStream(
            self._chunks(), close=self.close, expire=self.expire, timeout_s=timeout, headers=self._name.headers
        )

    async def accepted(self) -> None:
        """Wait until the engine has taken the call in; from then on the store expects its rows, if they are to be
        fetched."""
        await self._call.submit()
        wishes = [request.routed_experts for request in self._requests]
        choices = [index for index, wish in enumerate(wishes) if wish.enabled and wish.format == "ref"]
        if choices:  # only now: a call that is refused may bear the id of one that runs
            self._kept = self._service.store.expect(self._name.request_id, owner=self._name.owner, choices=choices)

    def expire(self) -> None:
        """Time is up: what has not ended ends as `timeout`."""
        self._call.abort(FinishReason(type="timeout", message="above --request-timeout"))
        self.close()

    def close(self) -> None:
        """The call is over, whatever its end; twice is once."""
        self._call.abort()
        if self._kept is not None:
            self._service.store.forget(self._kept)

    def sending(self, index: int, record: RoutedExperts) -> int:
        """Rows are about to leave: count them, and keep those that will be fetched. About how many bytes they will
        be."""
        wanted, answer = self._requests[index].routed_experts, self._call.sequences[index]
        if self._kept is not None:
            self._service.store.put(self._kept, index, to_stored(answer, record, owner=self._name.owner))
        size = payload_bytes(record, wanted)
        self._service.metrics.sent_rows(wanted.format, size)
        return size

    def note(self, index: int, news: StrOut, *, cached_tokens: int, completion_tokens: int) -> None:
        """Something of a choice has come; count the choice if that was its end."""
        now, request = time.monotonic() - self._began, self._requests[index]
        if news.out.new_token_ids:
            self._first.setdefault(index, now)
        if news.out.finish_reason is None:
            return
        ended = EndedRequest(
            prompt_tokens=int(request.input_ids.size),
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens,
            first_token_s=self._first.get(index) if request.stream else None,
            whole_s=now,
            queue_s=news.out.queue_s,
        )
        self._service.metrics.ended(ended)
