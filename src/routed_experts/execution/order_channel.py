"""Connections between the processes of a group: orders are sent to all peers and received in order, and one thread
reads, sends beats and calls back.

The thread never runs a program and never blocks on a peer: sockets do not block, and a beat is left out where an order
is being sent to the same peer."""

import contextlib
import logging
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from routed_experts.core.dist_config import format_address
from routed_experts.core.errors import OrderFormatError
from routed_experts.execution.orders import Order, OrderReader, encode

logger = logging.getLogger(__name__)
_CHUNK = 1 << 18  # bytes read at once
_SEND_WAIT_S = 1.0  # between two looks whether the connection was closed meanwhile


class ChannelEvents(Protocol):
    """Receives what happens on the connections, on the channel's thread. No method blocks."""

    def on_order(self, rank: int, order: Order) -> None:
        """Take an order, or a beat, of a peer."""
        ...

    def on_closed(self, rank: int, reason: str) -> None:
        """Note that a connection has ended."""
        ...

    def make_beat(self) -> Order:
        """Return the next sign of life."""
        ...

    def on_tick(self) -> None:
        """Run after each round of beats."""
        ...


class Connection:
    """One TCP connection. `send` may be called from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket, reader: OrderReader | None = None) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.address = sock, format_address(*sock.getpeername()[:2])
        self._reader = reader or OrderReader()
        self._lock = threading.Lock()
        self._unsent = b""  # the rest of a beat
        self._closed = False

    def send(self, data: bytes) -> None:
        """Send all of it, however long the peer takes to read. Raises OSError where the connection has ended."""
        with self._lock:
            rest = memoryview(self._unsent + data if self._unsent else data)
            self._unsent = b""
            while rest:
                if self._closed:
                    raise ConnectionError("the connection was closed")
                try:
                    rest = rest[self.socket.send(rest) :]
                except BlockingIOError:
                    select.select([], [self.socket], [], _SEND_WAIT_S)

    def try_send(self, data: bytes) -> bool:
        """Send without waiting; False if nothing was sent. Raises OSError."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
                return False
            self._unsent = data[self.socket.send(data) :]
            return True
        except BlockingIOError:
            return False
        finally:
            self._lock.release()

    def receive(self) -> list[Order] | None:
        """The orders that have become complete; None at the end of the stream. Raises OSError and OrderFormatError."""
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        return self._reader.feed(data) if data else None

    def expect_orders(self) -> None:
        """Accept orders of full size from now on; until now none may have begun."""
        self._reader = OrderReader()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class OrderChannel:
    """The connections of one process to its peers, by rank."""

    def __init__(
        self,
        connections: Mapping[int, Connection],
        events: ChannelEvents,
        *,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connections, self._events = dict(connections), events
        self._interval_s, self._clock = interval_s, clock
        self._stopping = False
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="orders", daemon=True)

    def start(self) -> None:
        """Start to read and to send beats."""
        self._thread.start()

    def send(self, order: Order) -> None:
        """Send an order to every peer. A connection that has ended is reported to `on_closed` by the thread."""
        data = b"".join(encode(order))
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send(data)

    def try_send(self, order: Order) -> None:
        """Send an order to every peer that takes it at once."""
        data = b"".join(encode(order))
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.try_send(data)

    def close(self) -> None:
        """End the thread and close every connection. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self._wake.send(b"x")
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        for connection in self._connections.values():
            connection.close()
        self._wake.close()
        self._woken.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank, connection in self._connections.items():
                selector.register(connection.socket, selectors.EVENT_READ, rank)
            next_beat = self._clock()
            while not self._stopping:
                for key, _ in selector.select(max(0.0, next_beat - self._clock())):
                    if key.data is not None and not self._stopping and not self._read(key.data):
                        selector.unregister(key.fileobj)
                if self._clock() >= next_beat and not self._stopping:
                    next_beat = self._clock() + self._interval_s
                    self.try_send(self._events.make_beat())
                    self._events.on_tick()

    def _read(self, rank: int) -> bool:
        """Read what has arrived from a peer; False once its connection has ended."""
        try:
            orders = self._connections[rank].receive()
        except OrderFormatError as error:
            self._events.on_closed(rank, f"sent what is no order: {error}")
            return False
        except OSError as error:
            self._events.on_closed(rank, f"lost its connection ({error.strerror or error})")
            return False
        if orders is None:
            self._events.on_closed(rank, "closed its connection")
            return False
        try:
            for order in orders:
                self._events.on_order(rank, order)
        except Exception as error:  # this thread must go on: it watches the other peers
            logger.exception("an order of process %d cannot be handled", rank)
            self._events.on_closed(rank, f"sent an order that cannot be handled ({type(error).__name__})")
            return False
        return True
