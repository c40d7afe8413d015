"""Connections between the processes of a group: orders are sent to all peers and received in order.

    caller --queue--> sending thread --> every peer         encodes and sends, in the order of the calls
    reading thread <-- every peer                           reads, sends beats and calls back
A caller pays for the queue alone: a system call for each peer and the copy of the bytes are not on its path. The
reading thread never blocks on a peer: sockets do not block, and a beat is left out where an order is being sent to the
same peer. The sending thread waits for a peer that does not read. Neither runs a program."""

import contextlib
import logging
import queue
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from routed_experts.core.dist_config import format_address
from routed_experts.core.errors import OrderFormatError
from routed_experts.execution.orders import Order, OrderReader, encode

logger = logging.getLogger(__name__)
_CHUNK = 1 << 18  # bytes read at once
_MOST_UNREAD = 64  # chunks that are read and dropped at a close
_SEND_WAIT_S = 1.0  # between two looks whether the connection was closed meanwhile
_FLUSH_S = 5.0  # in which a channel that closes sends what is queued


class ChannelEvents(Protocol):
    """Receives what happens on the connections. No method blocks. All but the first two run on the reading thread."""

    def on_send(self, order: Order) -> None:
        """Note that an order is about to be sent. Sending thread, in the order of the orders."""
        ...

    def on_unsent(self, error: Exception) -> None:
        """Note that an order cannot be encoded, or noted; it is not sent. Sending thread."""
        ...

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

    def send(self, encoded: bytes) -> None:
        """Send all of it, however long the peer takes to read. Raises OSError where the connection has ended."""
        with self._lock:
            rest = memoryview(self._unsent + encoded if self._unsent else encoded)
            self._unsent = b""
            while rest:
                if self._closed:
                    raise ConnectionError("the connection was closed")
                try:
                    rest = rest[self.socket.send(rest) :]
                except BlockingIOError:
                    select.select([], [self.socket], [], _SEND_WAIT_S)

    def try_send(self, encoded: bytes, wait_s: float = 0.0) -> bool:
        """Send without waiting for the peer; False if nothing was sent. `wait_s`: at most, for another thread that is
        sending. Raises OSError."""
        if not (self._lock.acquire(timeout=wait_s) if wait_s else self._lock.acquire(blocking=False)):
            return False
        try:
            if self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            if self._unsent:
                return False
            self._unsent = encoded[self.socket.send(encoded) :]
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
        """Close the connection; what was sent still arrives. Idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            for _ in range(_MOST_UNREAD):  # where bytes are unread at its close, the system drops what is on its way
                if not self.socket.recv(_CHUNK):
                    break
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
        self._unsent: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="send orders", daemon=True)

    def start(self) -> None:
        """Start to send, to read and to send beats."""
        self._thread.start()
        self._sender.start()

    def send(self, order: Order) -> None:
        """Queue an order for every peer; returns at once. Its arrays must not change from now on. Orders are sent in
        the order of the calls. A connection that has ended is reported to `on_closed`."""
        self._unsent.put(order)

    def try_send(self, order: Order, wait_s: float = 0.0) -> None:
        """Send an order, before what is queued, to every peer that takes it. `wait_s`: at most, for the thread that is
        sending to a peer."""
        encoded = b"".join(encode(order))
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.try_send(encoded, wait_s)

    def close(self) -> None:
        """Send what is queued, in bounded time; end the threads and close every connection. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self._unsent.put(None)
        self._wake.send(b"x")
        if self._sender.is_alive():
            self._sender.join(_FLUSH_S)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        for connection in self._connections.values():
            connection.close()
        if self._sender.is_alive():
            self._sender.join()
        self._wake.close()
        self._woken.close()

    def _send_all(self) -> None:
        is_open = True
        while is_open:
            orders = [self._unsent.get()]  # and what has come meanwhile: one system call a peer for all of it
            with contextlib.suppress(queue.Empty):
                while orders[-1] is not None:
                    orders.append(self._unsent.get_nowait())
            is_open = orders[-1] is not None
            self._send_now([order for order in orders if order is not None])

    def _send_now(self, orders: Sequence[Order]) -> None:
        parts: list[bytes | memoryview] = []
        for order in orders:
            try:
                encoded = encode(order)
                self._events.on_send(order)
                parts += encoded
            except Exception as error:  # a gap in the orders: the group ends by it
                self._events.on_unsent(error)
        data = b"".join(parts)
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send(data)

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
