"""Server-sent events: a stream that notices at once when its reader leaves, and a plain answer that does. Knows no
dialect."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from routed_experts.core.errors import RoutedExpertsError
from routed_experts.server.body import ClientGone
from routed_experts.server.errors import ApiError, answer_of
from routed_experts.server.limits import SSE_COMMENT_S, STREAM_GRACE_S

DONE = b"data: [DONE]\n\n"
logger = logging.getLogger("routed_experts.server")
_T = TypeVar("_T")


def event(body: object) -> bytes:
    """One event of JSON."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class RequestTimeout(ApiError):
    """The request took longer than the server allows."""

    def __init__(self, timeout_s: float) -> None:
        text = f"the request was not done within {timeout_s:g} s; ask for fewer tokens, or raise --request-timeout"
        super().__init__(text, status=408, code="request_timeout")


class EventStream(Response):
    """Sends what `events` yields; an error becomes one error event, and [DONE] comes last, with the last event if that
    brings it along: a write less for each stream. `close` runs at the end, whatever it was, and `expire` before it when
    time is up. A reader that has not taken the last words some seconds after `timeout_s` is cut off."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        close: Callable[[], None],
        expire: Callable[[], None],
        timeout_s: float,
        headers: Mapping[str, str],
    ) -> None:
        self._events, self._close, self._expire, self._timeout_s = events, close, expire, timeout_s
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end or the reader is gone."""
        pump, gone = asyncio.create_task(self._pump(send)), asyncio.create_task(_wait_disconnect(receive))
        try:
            limit = self._timeout_s + STREAM_GRACE_S
            await asyncio.wait({pump, gone}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not pump.done():
                _cut_off(scope)
                raise ClientGone
            pump.result()
        finally:
            self._close()
            for task in (pump, gone):
                task.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = DONE
        try:
            async with asyncio.timeout(self._timeout_s):
                last = await self._send_events(send)
        except TimeoutError:
            self._expire()
            await _send(send, event(answer_of(RequestTimeout(self._timeout_s)).body))
        except Exception as error:
            if not isinstance(error, RoutedExpertsError):
                logger.exception("a stream failed")
            await _send(send, event(answer_of(error).body))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_events(self, send: Send) -> bytes:
        """Send all that comes, but for the last words, which are returned: [DONE], and what came with it."""
        self._last_sent = time.monotonic()
        comments = asyncio.create_task(self._comment(send))
        try:
            async for chunk in self._events:
                if chunk.endswith(DONE):
                    return chunk
                await _send(send, chunk)
                self._last_sent = time.monotonic()
            return DONE
        finally:
            comments.cancel()
            (end,) = await asyncio.gather(comments, return_exceptions=True)
            if isinstance(end, Exception):  # it ended before it was cancelled
                raise end

    async def _comment(self, send: Send) -> None:
        """Keep proxies from closing a quiet connection: a comment for each while without an event."""
        while True:
            rest = self._last_sent + SSE_COMMENT_S - time.monotonic()
            if rest > 0:
                await asyncio.sleep(rest)
            else:
                await _send(send, b": waiting\n\n")
                self._last_sent = time.monotonic()


async def watched(request: Request, work: Awaitable[_T], *, timeout_s: float) -> _T:
    """Do `work` for a client that waits for it; when the client leaves (ClientGone) or time is up (RequestTimeout) it is
    cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_wait_disconnect(request.receive))
    try:
        done, _ = await asyncio.wait({task, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        raise ClientGone if gone in done else RequestTimeout(timeout_s)
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _cut_off(scope: Scope) -> None:
    """Drop the connection with what is still to be read on it, where the protocol lends a way to."""
    abort = scope.get("extensions", {}).get("routed_experts.abort")
    if abort is not None:
        abort["call"]()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _send(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})
