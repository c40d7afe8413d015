"""How bytes become HTTP requests: uvicorn's protocol with limits on connections, headers and time, and errors in our
form. Knows no route.

Neither side waits for ever: headers come in time, and a reader that takes nothing for a while is cut off."""

import asyncio
from collections.abc import Callable

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from routed_experts.server.errors import ApiError, answer_of, busy
from routed_experts.server.limits import (
    HEADER_TIMEOUT_S,
    MAX_CONNECTIONS,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MIN_READ_BYTES,
    RETRY_AFTER_S,
    WRITE_TIMEOUT_S,
)


class _Deadline:
    """A call that comes unless it is put off."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop, seconds: float, late: Callable[[], None]) -> None:
        """Call `late` in so many seconds, and nothing else that was to be called."""
        self.stop()
        self._timer = loop.call_later(seconds, late)

    def stop(self) -> None:
        """Call nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class WriteTimeoutProtocol(HttpToolsProtocol):
    """One connection whose reader must take some of what is buffered for it every while, or is cut off."""

    write_timeout_s = WRITE_TIMEOUT_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Nothing is to be read yet."""
        self._reading = _Deadline()
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and nobody reads."""
        self._reading.stop()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The reader is behind; it has a while to catch up."""
        super().pause_writing()
        self.watch_reader()

    def resume_writing(self) -> None:
        """The reader has caught up."""
        self._reading.stop()
        super().resume_writing()

    def on_headers_complete(self) -> None:
        """The request is known, and its answer will be watched. Whoever answers may cut the connection:
        `routed_experts.abort`."""
        if not self.flow.write_paused:
            self._reading.stop()
        self.scope["extensions"] = {"routed_experts.abort": {"call": self.transport.abort}}
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """An answer is written, though perhaps not yet read; while others follow, theirs is the last that counts."""
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last:
            self.watch_reader()

    def timeout_keep_alive_handler(self) -> None:
        """No request came for a while."""
        self.close()

    def close(self) -> None:
        """Close once everything is read, which may not take for ever."""
        if not self.transport.is_closing():
            self.transport.close()
            self.watch_reader()

    def watch_reader(self, before: int | None = None) -> None:
        """Cut the connection off unless the reader goes on taking. `before`: bytes buffered a while ago, if it was
        behind then."""
        self._reading.stop()
        left = self.transport.get_write_buffer_size()
        if before is not None and left > max(0, before - MIN_READ_BYTES):
            self.transport.abort()
        elif left:
            self._reading.start(self.loop, self.write_timeout_s, lambda: self.watch_reader(left))


class LimitedProtocol(WriteTimeoutProtocol):
    """One connection. A request whose headers are not there in time, too long or malformed is answered and the
    connection closed."""

    max_connections = MAX_CONNECTIONS
    _header_bytes = 0
    _unfinished_bytes = 0  # came since the parser last had the whole of something
    _has_progressed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, but not for ever; one connection too many is told so and closed."""
        self._heading = _Deadline()
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            text = f"{self.max_connections} connections are open; try again later"
            self._answer(b"503 Service Unavailable", busy(text, code="too_many_connections"))
        else:
            self._heading.start(self.loop, HEADER_TIMEOUT_S, self.close)

    def data_received(self, data: bytes) -> None:
        """Parse what came. What the parser holds back because it is not whole, such as a header without an end, is
        bounded."""
        if self.transport.is_closing():
            return
        self._has_progressed = False
        super().data_received(data)
        self._unfinished_bytes = 0 if self._has_progressed else self._unfinished_bytes + len(data)
        if self._unfinished_bytes > MAX_HEADER_BYTES:
            self.send_400_response("too long")

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and nothing waits for it."""
        self._heading.stop()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._header_bytes = 0
        self._heading.start(self.loop, HEADER_TIMEOUT_S, self.close)

    def on_url(self, url: bytes) -> None:
        """Part of the target; it counts with the headers."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._count(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            raise httptools.HttpParserError(f"more than {MAX_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request is known."""
        self._heading.stop()
        self._has_progressed = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        self._has_progressed = True
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Say in our form that this was no HTTP, and close. What can no longer be answered is only closed."""
        self._heading.stop()
        if self.transport.is_closing():
            return
        cycle: RequestResponseCycle | None = vars(self)[
            "cycle"
        ]  # None before the first request, whatever its type says
        answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if answering:
            self.close()
            return
        text = "the bytes are no HTTP/1.1 request within the limits of its headers; send one"
        self._answer(b"400 Bad Request", ApiError(text, status=400, code="malformed_http"))

    def _answer(self, status: bytes, error: ApiError) -> None:
        """Write an error that answers no request, and close."""
        body = msgspec.json.encode(answer_of(error).body)
        retry = b"retry-after: %d\r\n" % RETRY_AFTER_S if error.status == 503 else b""
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body), retry) + body)
        self.close()

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            raise httptools.HttpParserError(f"more than {MAX_HEADER_BYTES} bytes of headers")
