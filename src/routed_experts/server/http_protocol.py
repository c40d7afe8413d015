"""How bytes become HTTP requests: uvicorn's protocol with limits on headers and time, and errors in our form. Knows no route."""

import asyncio

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from routed_experts.server.errors import ApiError, answer_of
from routed_experts.server.limits import HEADER_TIMEOUT_S, MAX_HEADER_BYTES, MAX_HEADERS


class LimitedProtocol(HttpToolsProtocol):
    """One connection. A request whose headers are not there in time, too long or malformed is answered and the connection closed."""

    _header_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, but not for ever."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and nothing waits for it."""
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._header_bytes = 0
        self._start_timer()

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
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Say in our form that this was no HTTP, and close. What can no longer be answered is only closed."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        cycle: RequestResponseCycle | None = vars(self)["cycle"]  # None before the first request, whatever its type says
        answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if not answering:
            text = "the bytes are no HTTP/1.1 request within the limits of its headers; send one"
            body = msgspec.json.encode(answer_of(ApiError(text, status=400, code="malformed_http")).body)
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            raise httptools.HttpParserError(f"more than {MAX_HEADER_BYTES} bytes of headers")

    def _start_timer(self) -> None:
        self._stop_timer()
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._late)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
