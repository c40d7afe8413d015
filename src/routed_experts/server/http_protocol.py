"""HTTP connections with limits: uvicorn's httptools protocol with a bound on connections, headers and slow clients.

Headers arrive in time and within their limits, or the connection closes with an error of our form. A client that stops
reading is disconnected. uvicorn has no settings for these limits and does not publish its protocol class, so the range
of its versions in pyproject.toml is a tested one. Of that class this file uses, beyond asyncio.Protocol and httptools'
callbacks: `on_response_complete`, `timeout_keep_alive_handler`, `send_400_response`, and the attributes `transport`,
`loop`, `parser`, `scope`, `headers`, `url`, `cycle`, `pipeline` and `connections`; of a cycle `send`,
`chunked_encoding` and `expected_content_length`."""

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from routed_experts.server.errors import ApiError, to_response, unavailable
from routed_experts.server.limits import (
    HEADER_TIMEOUT_S,
    MAX_CONNECTIONS,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MIN_READ_BYTES,
    RETRY_AFTER_S,
    WRITE_TIMEOUT_S,
)

_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")


class _Timer:
    """At most one pending call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, call: Callable[[], None]) -> None:
        """Run `call` in so many seconds, instead of the call that is pending."""
        self.stop()
        self._handle = self._loop.call_later(seconds, call)

    def stop(self) -> None:
        """Drop the pending call."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def _send_unchunked(cycle: RequestResponseCycle) -> None:
    """Have a response of unknown length end with its connection: HTTP/1.0 has no chunks."""
    send, is_unchunked = cycle.send, False

    async def send_unchunked(message: Any) -> None:
        nonlocal is_unchunked
        if message["type"] == "http.response.start":
            is_unchunked = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if is_unchunked:
                cycle.chunked_encoding, cycle.keep_alive = False, False
        elif is_unchunked:
            cycle.expected_content_length = len(message.get("body", b""))  # of this part of the body
        await send(message)

    cycle.send = send_unchunked  # type: ignore[method-assign]


class _Parser:
    """Parses the bytes of a connection by httptools, which ends a message with an Upgrade header before its body, and
    takes the rest for another protocol. Such a message is parsed again without the header: a server may ignore it
    (RFC 9110, 7.8), and some clients that can speak HTTP/2 always send it."""

    def __init__(self, protocol: "LimitedProtocol") -> None:
        self._protocol = protocol
        self._parser = self._create()

    def _create(self) -> Any:
        parser = httptools.HttpRequestParser(self._protocol)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return parser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        """Parse. Raises HttpParserError."""
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._parser = self._create()

    def _head_without_upgrade(self) -> bytes:
        if all(name != b"upgrade" for name, _ in self._protocol.headers):
            raise httptools.HttpParserError("a tunnel (CONNECT), or an upgrade without a header that asks for it")
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self._protocol.url, version)]
        lines += [b"%b: %b" % header for header in self._protocol.headers if header[0] not in _UPGRADE_HEADERS]
        return b"\r\n".join(lines) + b"\r\n\r\n"


class LimitedProtocol(HttpToolsProtocol):
    """One connection."""

    max_connections = MAX_CONNECTIONS
    write_timeout_s = WRITE_TIMEOUT_S
    cycle: RequestResponseCycle | None  # type: ignore[assignment]  # None before the first request, despite its type
    _unparsed_bytes = 0  # received since the parser last completed the headers or a part of a body
    _has_progressed = False
    _is_write_paused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first headers; refuse a connection above the limit."""
        self._header_timer, self._write_timer = _Timer(self.loop), _Timer(self.loop)
        self.parser = _Parser(self)
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            text = f"{self.max_connections} connections are open; try again later"
            self._respond_and_close(b"503 Service Unavailable", unavailable(text, code="too_many_connections"))
        else:
            self._header_timer.start(HEADER_TIMEOUT_S, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._header_timer.stop()
        self._write_timer.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; bound the bytes and the time that the parser may hold without completing headers or body parts."""
        if self.transport.is_closing():
            return
        self._has_progressed = False
        super().data_received(data)
        self._unparsed_bytes = 0 if self._has_progressed else self._unparsed_bytes + len(data)
        if self._unparsed_bytes > MAX_HEADER_BYTES:
            self.send_400_response("headers too long")

    def on_message_begin(self) -> None:
        """Start the timer of these headers."""
        super().on_message_begin()
        self._header_timer.start(HEADER_TIMEOUT_S, self._close)

    def on_headers_complete(self) -> None:
        """Check the headers; let the application abort the connection, as `routed_experts.abort`."""
        self._header_timer.stop()
        self._has_progressed = True
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEADER_BYTES or len(self.headers) > MAX_HEADERS:
            raise httptools.HttpParserError(f"headers above {MAX_HEADER_BYTES} bytes or {MAX_HEADERS} in number")
        if self.parser.should_upgrade():  # it is parsed once more
            return
        if not self._is_write_paused:  # the end of this response starts the timer again
            self._write_timer.stop()
        self.scope["extensions"] = {"routed_experts.abort": {"call": self.transport.abort}}
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            _send_unchunked(self.cycle)

    def on_message_complete(self) -> None:
        """Pass over the end of a message that is parsed once more."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        """Note the progress."""
        self._has_progressed = True
        super().on_body(body)

    def pause_writing(self) -> None:
        """Start the write timer: the client is behind."""
        self._is_write_paused = True
        super().pause_writing()
        self._check_reader()

    def resume_writing(self) -> None:
        """Stop the write timer: the client has caught up."""
        self._is_write_paused = False
        self._write_timer.stop()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Start the write timer of a response that is written but not yet read, unless another response follows."""
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last:
            self._check_reader()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; the last response may still be unread."""
        self._close()

    def send_400_response(self, msg: str) -> None:
        """Respond with an error of our form and close; during another response only close."""
        self._header_timer.stop()
        if self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self._close()
            return
        text = "the bytes are no HTTP/1.1 request within the limits of its headers; send one"
        self._respond_and_close(b"400 Bad Request", ApiError(text, status=400, code="malformed_http"))

    def _respond_and_close(self, status: bytes, error: ApiError) -> None:
        """Write an error that belongs to no request, and close."""
        body = msgspec.json.encode(to_response(error).body)
        retry = b"retry-after: %d\r\n" % RETRY_AFTER_S if error.status == 503 else b""
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body), retry) + body)
        self._close()

    def _close(self) -> None:
        """Close once everything is read; the write timer bounds how long that takes."""
        if not self.transport.is_closing():
            self.transport.close()
            self._check_reader()

    def _check_reader(self, buffered_before: int | None = None) -> None:
        """Disconnect a client that reads less than MIN_READ_BYTES in `write_timeout_s`.

        `buffered_before`: bytes in the buffer when the timer was started."""
        self._write_timer.stop()
        buffered = self.transport.get_write_buffer_size()
        if buffered_before is not None and buffered > max(0, buffered_before - MIN_READ_BYTES):
            self.transport.abort()
        elif buffered:
            self._write_timer.start(self.write_timeout_s, lambda: self._check_reader(buffered))
