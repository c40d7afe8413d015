"""Server-sent events, and responses that end early: on a client that disconnects and on --request-timeout."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from routed_experts.core.errors import RoutedExpertsError
from routed_experts.server.connection import abort_connection
from routed_experts.server.errors import ApiError, ClientGone, ErrorResponse, to_response
from routed_experts.server.limits import SSE_COMMENT_S, STREAM_GRACE_S

CHUNKS_PER_TURN = 8  # of one stream
DONE = b"data: [DONE]\n\n"
_LINE_SEPARATORS = (("\x85".encode(), rb"\u0085"), ("\u2028".encode(), rb"\u2028"), ("\u2029".encode(), rb"\u2029"))
logger = logging.getLogger("routed_experts.server")
_T = TypeVar("_T")


def event(body: object, name: str | None = None) -> bytes:
    """Encode one event of JSON, with a name where the dialect names its events. Unicode's line separators are escaped:
    some clients (httpx's iter_lines) end a line at them."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    encoded = msgspec.json.encode(body)
    if not encoded.isascii():
        for separator, escape in _LINE_SEPARATORS:
            encoded = encoded.replace(separator, escape)
    return head + b"data: " + encoded + b"\n\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamForm:
    """How a dialect ends a stream, and writes an error in it."""

    done: bytes = DONE
    error: Callable[[ErrorResponse], bytes] = lambda response: event(response.body)


class RequestTimeout(ApiError):
    """The request took longer than --request-timeout."""

    def __init__(self, timeout_s: float) -> None:
        text = f"the request was not done within {timeout_s:g} s; ask for fewer tokens, or raise --request-timeout"
        super().__init__(text, status=408, code="request_timeout")


class EventStream(Response):
    """Streaming response: the chunks of `events`, one error event after a failure, then [DONE].

    [DONE] may be part of the last chunk, which saves one write a stream. `on_close` always runs at the end, and
    `on_timeout` before it when `timeout_s` has passed. A client that does not read the end of the stream within
    STREAM_GRACE_S after that is disconnected. `form`: how the dialect writes errors and ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        on_close: Callable[[], None],
        on_timeout: Callable[[], None],
        timeout_s: float,
        headers: Mapping[str, str],
        form: StreamForm = StreamForm(),
    ) -> None:
        self._events, self._timeout_s, self._form = events, timeout_s, form
        self._on_close, self._on_timeout = on_close, on_timeout
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end or the client disconnects."""
        sending, gone = asyncio.create_task(self._send_all(send)), asyncio.create_task(_wait_disconnect(receive))
        try:
            limit = self._timeout_s + STREAM_GRACE_S
            await asyncio.wait({sending, gone}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                abort_connection(scope)
                raise ClientGone
            sending.result()
        finally:
            self._on_close()
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = self._form.done
        try:
            async with asyncio.timeout(self._timeout_s):
                last = await self._send_events(send)
        except TimeoutError:
            self._on_timeout()
            await _send_chunk(send, self._form.error(to_response(RequestTimeout(self._timeout_s))))
        except Exception as error:
            if not isinstance(error, RoutedExpertsError):
                logger.exception("a stream failed")
            await _send_chunk(send, self._form.error(to_response(error)))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_events(self, send: Send) -> bytes:
        """Send all chunks but the one that ends with [DONE], and return that one."""
        self._last_sent = time.monotonic()
        comments = asyncio.create_task(self._send_comments(send))
        try:
            num_sent = 0
            async for chunk in self._events:
                if chunk.endswith(DONE):
                    return chunk
                await _send_chunk(send, chunk)
                self._last_sent = time.monotonic()
                num_sent += 1
                if num_sent % CHUNKS_PER_TURN == 0:  # a backlog is sent without waiting: let the event loop run
                    await asyncio.sleep(0)
            return self._form.done
        finally:
            comments.cancel()
            (result,) = await asyncio.gather(comments, return_exceptions=True)
            if isinstance(result, Exception):  # it failed before it was cancelled
                raise result

    async def _send_comments(self, send: Send) -> None:
        """Send a comment after every SSE_COMMENT_S without an event, so that proxies keep the connection open."""
        while True:
            remaining = self._last_sent + SSE_COMMENT_S - time.monotonic()
            if remaining > 0:
                await asyncio.sleep(remaining)
            else:
                await _send_chunk(send, b": waiting\n\n")
                self._last_sent = time.monotonic()


async def run_until_disconnect(request: Request, work: Awaitable[_T], *, timeout_s: float) -> _T:
    """Await `work` for a client; cancel it when the client disconnects (ClientGone) or time is up (RequestTimeout)."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_wait_disconnect(request.receive))
    try:
        done, _ = await asyncio.wait({task, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        raise ClientGone if gone in done else RequestTimeout(timeout_s)
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _send_chunk(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})
