"""Rendezvous: how the processes of a group find each other, before JAX knows of any.

Process 0 listens at dist_init_addr. A follower connects and says hello: its rank, and by field everything that must be
equal. Process 0 refuses it with a sentence, or welcomes all once all have come. Afterwards it refuses every newcomer,
so that a stranger, a second rank or a late one never reaches the running group. Where not all come, process 0 sends
those that have the reason: all end with the same sentence, and without an error where process 0 was asked to end."""

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from routed_experts.core.dist_config import DistConfig, format_address
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import ConfigError, MachineError, OrderFormatError
from routed_experts.execution.order_channel import Connection
from routed_experts.execution.orders import Order, OrderKind, OrderReader, encode

logger = logging.getLogger(__name__)
MAX_HELLO_BYTES = 1 << 16
MAX_PENDING = 64  # connections beside one a follower that have not said hello; the oldest makes room
HELLO_TIMEOUT_S = 10.0
_ANSWER_MARGIN_S = 5.0  # of a follower, beyond the time at which process 0 has answered
_ABANDON_S = 2.0  # at most, for followers to get the reason where process 0 was asked to end
_RETRY_S = 0.2
_SHOWN = 4  # fields of a refusal
_MAX_REASON = 1000  # characters
_ABANDONED = "process 0 was asked to end before all processes had come"


class GroupAbandonedError(MachineError):
    """Process 0 was asked to end before all processes had come. Processes of `serve` exit 0 then."""


@dataclass(slots=True)
class _Pending:
    connection: Connection
    since: float
    rank: int | None = None  # once it is a member


def compare_fields(ours: Mapping[str, str], theirs: Mapping[str, object], rank: int) -> str | None:
    """What differs between process 0 and process `rank`, with both values; None if nothing does."""
    names = [name for name in (*ours, *(name for name in theirs if name not in ours))]
    wrong = [name for name in names if ours.get(name) != theirs.get(name)]
    if not wrong:
        return None
    shown = [
        f"{_printable(name, 80)} ({_value(ours, name)} on process 0, {_value(theirs, name)} on {rank})"
        for name in wrong[:_SHOWN]
    ]
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return f"process {rank} differs from process 0 in {', '.join(shown)}{more}; start every process with equal settings"


def _value(fields: Mapping[str, object], name: str) -> str:
    return _printable(fields[name], 80) if name in fields else "absent"


def _printable(value: object, most: int) -> str:
    """A value of another process in one line."""
    return "".join(char if char.isprintable() else " " for char in str(value)[:most])


class Rendezvous:
    """The listening side, of process 0."""

    def __init__(
        self, dist: DistConfig, fields: Mapping[str, str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._dist, self._fields, self._clock = dist, dict(fields), clock
        host, port = dist.address
        self._listener = _bind(host, port, of="dist_init_addr")
        try:
            _bind(host, port + 1, of="JAX's coordinator, the next port after dist_init_addr").close()
        except MachineError:
            self._listener.close()
            raise
        self._max_pending = MAX_PENDING + dist.nnodes  # all followers may come at once
        self._listener.listen(max(128, dist.nnodes))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._pending: dict[socket.socket, _Pending] = {}
        self._members: dict[int, Connection] = {}
        self._stayed_s: dict[int, float] = {}  # by rank, of those that have left and not come again
        self._refusals: list[str] = []
        self._complete = self._is_abandoned = False
        self._welcomed: set[int] = set()  # ranks
        self._ended = threading.Event()  # the wait for all
        self._thread: threading.Thread | None = None

    def wait_for_all(self) -> dict[int, Connection]:
        """Welcome all processes once all have come; returns their connections by rank. Raises MachineError after
        dist_timeout, with who came and who was refused, and GroupAbandonedError after `abandon`. Those that have come
        get the reason."""
        try:
            return self._welcome_all()
        except BaseException as error:
            self._dismiss(error)
            raise
        finally:
            self._ended.set()

    def abandon(self) -> None:
        """End the wait for all without an error: processes that have come exit 0. Returns once they have the reason.
        From any thread."""
        self._is_abandoned = True
        with contextlib.suppress(OSError):  # closed meanwhile
            self._wake.send(b"x")
        self._ended.wait(_ABANDON_S)

    def _welcome_all(self) -> dict[int, Connection]:
        deadline = self._clock() + self._dist.dist_timeout
        while len(self._members) < self._dist.nnodes - 1:
            if self._clock() >= deadline:
                raise MachineError(self._timeout_text())
            if not self._poll(min(deadline, self._clock() + 1.0)):
                raise GroupAbandonedError(_ABANDONED)
        if self._is_abandoned:
            raise GroupAbandonedError(_ABANDONED)
        self._complete = True
        members = dict(sorted(self._members.items()))
        welcome = b"".join(encode(Order(kind=OrderKind.WELCOME, head={"nnodes": self._dist.nnodes})))
        for rank, connection in members.items():
            self._forget(connection.socket)
            connection.expect_orders()
            try:
                connection.send(welcome)
            except OSError as error:
                raise MachineError(f"process {rank} left while the group started ({error}); start it again") from error
            self._welcomed.add(rank)
        self._thread = threading.Thread(target=self._refuse_all, name="rendezvous", daemon=True)
        self._thread.start()
        return members

    def _dismiss(self, error: BaseException) -> None:
        """Send the members the reason why there is no group: an error, or that this process was asked to end. The
        connections of those that were welcomed end."""
        if isinstance(error, Exception) and not isinstance(error, GroupAbandonedError):
            order = Order(kind=OrderKind.REFUSE, head={"reason": str(error)[:_MAX_REASON], "is_machine": True})
        else:
            order = Order(kind=OrderKind.STOP, head={"abandoned": True})
        encoded = b"".join(encode(order))
        for rank, connection in self._members.items():
            if rank not in self._welcomed:
                with contextlib.suppress(OSError):
                    connection.try_send(encoded)
            if self._complete:  # `close` has no part in them
                connection.close()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._listener.fileno() < 0:
            return
        self._wake.send(b"x")
        if self._thread is not None:
            self._thread.join()
        for pending in list(self._pending.values()):
            pending.connection.close()
        for sock in (self._listener, self._wake, self._woken):
            sock.close()
        self._selector.close()

    def _refuse_all(self) -> None:
        while self._poll(self._clock() + 1.0 if self._pending else None):
            continue

    def _poll(self, until: float | None) -> bool:
        """Handle what happens until then, once; False when closing."""
        ready = self._selector.select(None if until is None else max(0.0, until - self._clock()))
        for key, _ in ready:
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif (pending := self._pending.get(cast("socket.socket", key.fileobj))) is not None:  # not dropped above
                self._hear(pending)
        now = self._clock()
        strangers = [entry for entry in self._pending.values() if entry.rank is None]
        for pending in [entry for entry in strangers if entry.since + HELLO_TIMEOUT_S <= now]:
            self._drop(pending)
        return True

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if len(strangers := [entry for entry in self._pending.values() if entry.rank is None]) >= self._max_pending:
                self._drop(strangers[0])
            connection = Connection(sock, OrderReader(max_head=MAX_HELLO_BYTES, max_body=0))
            self._pending[sock] = _Pending(connection, self._clock())
            self._selector.register(sock, selectors.EVENT_READ)

    def _hear(self, pending: _Pending) -> None:
        """Read what a connection sends: a hello, or its end."""
        try:
            orders = pending.connection.receive()
        except (OSError, OrderFormatError):
            self._drop(pending)
            return
        if orders is None:
            self._drop(pending)
        for order in orders or ():
            reason = self._refusal(pending, order)
            if reason is not None:
                if not self._complete:
                    logger.warning("refused %s: %s", pending.connection.address, reason)
                    self._refusals = [*self._refusals[-_SHOWN:], reason]
                with contextlib.suppress(OSError):
                    pending.connection.try_send(b"".join(encode(Order(kind=OrderKind.REFUSE, head={"reason": reason}))))
                self._drop(pending)
                return

    def _refusal(self, pending: _Pending, order: Order) -> str | None:
        """Take a hello; returns the reason where it is refused."""
        rank, nnodes, fields = (order.head.get(name) for name in ("rank", "nnodes", "fields"))
        if order.kind is not OrderKind.HELLO or pending.rank is not None or not isinstance(fields, dict):
            return "this address is the rendezvous of a process group, which expects one hello a connection"
        if self._complete:
            return f"the group of {self._dist.nnodes} processes is complete and runs; stop it before another starts"
        if nnodes != self._dist.nnodes:
            return f"nnodes={short_repr(nnodes)}, and process 0 has nnodes={self._dist.nnodes}; give all the same"
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank < self._dist.nnodes:
            return f"node_rank={short_repr(rank)} is outside 1..{self._dist.nnodes - 1}, the ranks of followers"
        if rank in self._members:
            where = self._members[rank].address
            return f"node_rank={rank} is taken by the process at {where}; give every process a rank of its own"
        failure = order.head.get("failure")
        if failure is not None:
            return f"process {rank} cannot start: {_printable(failure, 600)}"
        if (difference := compare_fields(self._fields, cast("dict[str, object]", fields), rank)) is not None:
            return difference
        pending.rank, self._members[rank] = rank, pending.connection
        self._stayed_s.pop(rank, None)
        logger.info("process %d of %d has come from %s", rank, self._dist.nnodes, pending.connection.address)
        return None

    def _drop(self, pending: _Pending) -> None:
        """Close a connection; a member that leaves before all have come may come again."""
        if pending.rank is not None:
            logger.warning("process %d at %s left before all had come", pending.rank, pending.connection.address)
            del self._members[pending.rank]
            self._stayed_s[pending.rank] = self._clock() - pending.since
        self._forget(pending.connection.socket)
        pending.connection.close()

    def _forget(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._pending[sock]

    def _timeout_text(self) -> str:
        present, departed = sorted(self._members), sorted(self._stayed_s)
        absent = [rank for rank in range(1, self._dist.nnodes) if rank not in {*present, *departed}]
        verb = "did not come to" if absent else "did not stay at"
        text = f"processes {', '.join(map(str, absent or departed))} of {self._dist.nnodes} {verb} "
        arrivals = ", ".join(map(str, [0, *present]))
        arrivals += "".join(f"; {rank} came, and left after {self._stayed_s[rank]:.0f} s" for rank in departed)
        text += f"{self._dist.dist_init_addr} within dist_timeout={self._dist.dist_timeout:g} s (came: {arrivals})"
        refused = f"; refused: {self._refusals[-1]}" if self._refusals else ""
        return f"{text}{refused}; start them, or raise dist_timeout"


def join(
    dist: DistConfig,
    fields: Mapping[str, str],
    *,
    failure: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Connection:
    """Join the group as a follower; returns the connection to process 0 once all have come. `failure`: why this process
    cannot start, which process 0 then reports. Raises ConfigError where process 0 refuses, MachineError where it is not
    reached within dist_timeout, not all come to it, or another program listens there, and GroupAbandonedError where it
    was asked to end."""
    connection = _connect(dist, clock() + dist.dist_timeout, clock)
    head: dict[str, Any] = {"rank": dist.node_rank, "nnodes": dist.nnodes, "fields": dict(fields)}
    head |= {} if failure is None else {"failure": failure}
    try:
        connection.send(b"".join(encode(Order(kind=OrderKind.HELLO, head=head))))
        answer = _answer(connection, clock, dist)
        if answer.kind is OrderKind.REFUSE:
            reason = _printable(answer.head.get("reason"), _MAX_REASON)
            if answer.head.get("is_machine") is True:
                raise MachineError(reason)
            raise ConfigError(f"process 0 at {dist.dist_init_addr} refuses: {reason}")
        if answer.kind is OrderKind.STOP and answer.head.get("abandoned") is True:
            raise GroupAbandonedError(_ABANDONED)
        if answer.kind is not OrderKind.WELCOME:
            raise OrderFormatError(f"order {answer.kind.name} in place of a welcome")
    except (OSError, OrderFormatError) as error:
        connection.close()
        text = f"the program at {dist.dist_init_addr} is no process 0 of this protocol, or it has ended ({error})"
        raise MachineError(f"{text}; check dist_init_addr, and start process 0 there") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(dist: DistConfig, deadline: float, clock: Callable[[], float]) -> Connection:
    """Connect to process 0, as often as needed: it may start later."""
    pause = threading.Event()
    while True:
        left = deadline - clock()
        try:
            sock = socket.create_connection(dist.address, timeout=max(0.1, min(left, 5.0)))
            if sock.getsockname() != sock.getpeername():
                return Connection(sock)
            sock.close()  # TCP connects a socket with itself where its own port is the one that it connects to
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        except OSError as error:
            if left <= _RETRY_S:
                text = f"process 0 is not reached at {dist.dist_init_addr} within dist_timeout={dist.dist_timeout:g} s"
                raise MachineError(
                    f"{text} ({error.strerror or error}); start it, or correct dist_init_addr"
                ) from error
        pause.wait(_RETRY_S)


def _answer(connection: Connection, clock: Callable[[], float], dist: DistConfig) -> Order:
    """Wait for the answer to a hello: process 0, which has begun to wait before, gives one within dist_timeout."""
    timeout_s = dist.dist_timeout + _ANSWER_MARGIN_S
    deadline = clock() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(connection.socket, selectors.EVENT_READ)
        while (left := deadline - clock()) > 0:
            if selector.select(left):
                orders = connection.receive()
                if orders is None:
                    raise ConnectionError("it closed the connection without an answer")
                if orders:
                    return orders[0]
    text = (
        f"the program at {dist.dist_init_addr} gave no answer for {timeout_s:g} s: it is no process 0 of this protocol"
    )
    raise MachineError(f"{text}, or it hangs; check dist_init_addr, and restart process 0")


def _bind(host: str, port: int, *, of: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        where, why = format_address(host, port), error.strerror or str(error)
        fix = "give an address of process 0's machine and a port that is free, as is the next one"
        raise MachineError(f"cannot listen on {where} ({why}), {of}; {fix}") from error
    listener.setblocking(False)
    return listener
