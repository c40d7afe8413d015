"""ProcessGroup: this process and its peers, which run one engine over the devices of all.

    rendezvous -> channel with beats -> jax.distributed -> load, plan, compile (values are exchanged) -> orders -> stop
Process 0 leads: it sends orders, and every follower carries them out in their order. When one process is
lost, each of the others ends with exit code 3. No wait is without a bound.

The module is long because both ends of the protocol, LeadingGroup and FollowingGroup, are read side by side."""

import abc
import atexit
import concurrent.futures
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import numpy as np

from routed_experts.core.dist_config import DistConfig
from routed_experts.core.errors import ConfigError, MachineError, PeerLostError, ProcessMismatchError
from routed_experts.engine.group.rendezvous import Rendezvous, join
from routed_experts.engine.group.watchdog import RESTART, Watchdog
from routed_experts.execution.order_channel import Connection, OrderChannel
from routed_experts.execution.orders import NO_HEAD, Order, OrderKind

logger = logging.getLogger(__name__)
EXIT_LOST, EXIT_CONFIG = 3, 2
LAST_OUTPUTS_S = 1.5  # for the last responses of a process that ends with its group
DIGEST_STEPS = 64  # steps of a digest
MAX_UNSENT = 64  # orders that wait to be sent; the engine has two steps in flight
_FINAL_SEND_S = 0.2  # at most, for an order that is being sent to the same peer
_ABANDON_S = 5.0  # at most, for followers to leave a group that still starts
_EXPLAIN_S = 1.5  # in which the reason of a failed collective is known
_MAX_ERROR_CHARS = 600
_JAX_SHUTDOWN_S = 10
_T = TypeVar("_T")
_LONG = frozenset({OrderKind.BEGIN_SCORE, OrderKind.SCORE, OrderKind.PREPARE_WEIGHTS})  # orders that compile or load


class StepDigests:
    """Digests of the orders that a process runs and of the tokens that its steps give, one for each DIGEST_STEPS steps.
    Processes of a group have equal ones. `add_order` and `add_tokens` may be called by a thread each."""

    def __init__(self) -> None:
        self._orders = self._tokens = self._num_run = self._num_read = self._num_due = 0
        self._of_orders, self._of_tokens = deque[int](), deque[int]()  # after each DIGEST_STEPS steps; not due yet
        self._lock = threading.Lock()

    def add_order(self, order: Order) -> tuple[int, str] | None:
        """Add an order; returns as `add_tokens` does."""
        self._orders = zlib.crc32(order.kind.to_bytes(2, "little"), self._orders)
        for array in order.arrays:
            self._orders = zlib.crc32(np.asarray(array, order="C").reshape(-1).view(np.uint8).data, self._orders)
        if order.kind is OrderKind.STEP:
            self._num_run += 1
            if self._num_run % DIGEST_STEPS == 0:
                self._of_orders.append(self._orders)
                return self._take_due()
        return None

    def add_tokens(self, tokens: np.ndarray) -> tuple[int, str] | None:
        """Add the table of a step's tokens; returns the number of steps and a digest of 8 bytes when one is due."""
        self._tokens = zlib.crc32(np.asarray(tokens[:, 0], order="C").view(np.uint8).data, self._tokens)
        self._num_read += 1
        if self._num_read % DIGEST_STEPS:
            return None
        self._of_tokens.append(self._tokens)
        return self._take_due()

    def _take_due(self) -> tuple[int, str] | None:
        """The next digest, once its orders and its tokens are in."""
        with self._lock:
            if not self._of_orders or not self._of_tokens:
                return None
            self._num_due += 1
            return self._num_due * DIGEST_STEPS, f"{self._of_orders.popleft():08x}{self._of_tokens.popleft():08x}"


class ProcessGroup(abc.ABC):
    """What leader and followers share. `exit_process` ends this process at once: after a loss, JAX's own shutdown would
    wait for the lost one. Public methods may be called from any thread."""

    def __init__(
        self,
        dist: DistConfig,
        connections: Mapping[int, Connection],
        *,
        exit_process: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dist, self._exit_process = dist, exit_process
        self._addresses = {rank: connection.address for rank, connection in connections.items()}
        self._watchdog = Watchdog(
            self._addresses, num_processes=dist.nnodes, timeout_s=dist.watchdog_timeout, clock=clock
        )
        self._channel = OrderChannel(connections, self, interval_s=min(1.0, dist.watchdog_timeout / 4), clock=clock)
        self._changed = threading.Condition()  # for what follows
        self._values: dict[str, dict[int, Any]] = {}
        self._error: BaseException | None = None
        self._stopping = self._closed = self._owns_jax = False
        self._pid = os.getpid()
        atexit.register(self._at_exit_of_owner)

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.dist.node_rank

    @property
    @abc.abstractmethod
    def last_order(self) -> int:
        """The number of the last order that this process has sent, or carried out; 0 before the first."""

    @property
    def error(self) -> BaseException | None:
        """Why the group has ended; None while it runs and after a clean end."""
        return self._error

    def start(self) -> None:
        """Start to send beats and to read."""
        self._channel.start()

    def start_jax(self, num_devices: int | None) -> None:
        """Start JAX's distributed runtime, and check that all processes have as many devices of one kind, and
        `num_devices` together. Raises ConfigError or MachineError."""
        self._owns_jax = _initialize_jax(self.dist)
        local = jax.local_devices()
        entries = self.exchange("devices", [len(local), f"{local[0].platform} {local[0].device_kind}"])
        if len({tuple(entry) for entry in entries}) > 1:
            listed = "; ".join(f"process {rank} has {count} x {kind}" for rank, (count, kind) in enumerate(entries))
            raise ConfigError(f"processes must have equal devices: {listed}; start each with as many of one kind")
        if num_devices is not None and (total := sum(count for count, _ in entries)) != num_devices:
            text = f"tp_size={num_devices} is not {self.dist.nnodes} processes x {entries[0][0]} devices"
            each = num_devices // self.dist.nnodes
            raise ConfigError(f"{text}; set tp_size={total}, or give each process {each} devices")

    @abc.abstractmethod
    def exchange(self, name: str, value: Any) -> list[Any]:
        """Give every process the JSON values of all, by rank; each calls it under the same names in the same order.
        Raises PeerLostError."""

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process ends by an error, which ends them too. Idempotent."""
        with self._changed:
            if self._error is not None or self._stopping:
                return
            self._error = error
        self._tell_failure(error)

    def make_beat(self) -> Order:
        """The next sign of life. Channel's thread."""
        return Order(kind=OrderKind.BEAT)

    def on_send(self, order: Order) -> None:
        """Note that an order is about to be sent. Sending thread."""
        del order  # a follower counts none

    def on_unsent(self, error: Exception) -> None:
        """End the group: an order cannot be sent, so its followers would miss it. Sending thread."""
        self._tell_failure(error)
        self._end(error)

    def on_closed(self, rank: int, reason: str) -> None:
        """Note a connection that has ended. Channel's thread."""
        if not self._stopping:
            self._watchdog.closed(rank, reason)
            self.on_tick()

    def on_tick(self) -> None:
        """Check whether a peer is lost, and then end the group. Channel's thread."""
        if not self._stopping and self._error is None and (error := self._watchdog.check()) is not None:
            self._end(error)

    def on_order(self, rank: int, order: Order) -> None:
        """Take what a peer has sent. Channel's thread."""
        self._watchdog.note_alive(rank, order.seq if order.kind is OrderKind.BEAT else None)
        if order.kind is OrderKind.FAIL:
            text = f"{self._name(rank)} has ended by an error: {str(order.head.get('error'))[:_MAX_ERROR_CHARS]}"
            error = PeerLostError(f"{text}; {RESTART}")
            error.exit_code = EXIT_CONFIG if order.head.get("is_config") is True else EXIT_LOST
            self._end(error)
        elif order.kind is OrderKind.EXCHANGE:
            with self._changed:
                self._values.setdefault(str(order.head.get("name")), {})[rank] = order.head.get("value")
                self._changed.notify_all()
        elif order.kind is not OrderKind.BEAT:
            self._take(rank, order)

    def _take(self, rank: int, order: Order) -> None:
        """Take an order of one role alone."""
        self._end(ProcessMismatchError(f"{self._name(rank)} sent the order {order.kind.name}; {RESTART}"))

    def _wait_for(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait under `_changed`. Raises PeerLostError when the group has ended, or time is up."""
        if not self._changed.wait_for(lambda: done() or self._error is not None, timeout_s) and not done():
            raise PeerLostError(f"{what} within {timeout_s:g} s; {RESTART}")
        if self._error is not None and not done():
            raise as_lost(self._error)

    def _end(self, error: BaseException) -> None:
        """End this process with its group; the first error counts."""
        with self._changed:
            if self._error is not None:
                return
            self._error = error
            self._changed.notify_all()
        logger.error("%s", error)
        self._end_process(error)

    @abc.abstractmethod
    def _end_process(self, error: BaseException) -> None:
        """End this process."""

    def _tell_failure(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_ERROR_CHARS]
        head = {"error": text, "is_config": isinstance(error, ConfigError)}
        self._channel.try_send(Order(kind=OrderKind.FAIL, head=head), _FINAL_SEND_S)

    def _exit_soon(self, code: int) -> None:
        threading.Event().wait(LAST_OUTPUTS_S)
        sys.stderr.flush()
        self._exit_process(code)

    def _name(self, rank: int) -> str:
        return f"process {rank} of {self.dist.nnodes} at {self._addresses[rank]}"

    def _shut_down(self) -> None:
        """End JAX's part and the channel, once every process does the same."""
        if self._owns_jax:
            jax.distributed.shutdown()
        self._closed = True
        self._channel.close()

    def _at_exit_of_owner(self) -> None:
        """`_at_exit`, but not in a process that was forked from this one."""
        if os.getpid() == self._pid:
            self._at_exit()

    def _at_exit(self) -> None:
        """Before JAX's own exit handler, which would wait for processes that are gone."""
        if self._error is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            self._exit_process(exit_code(self._error))
        elif not self._closed:
            self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """End this process's part of the group. Idempotent."""


class LeadingGroup(ProcessGroup):
    """Process 0: an OrderSender to all followers."""

    def __init__(self, dist: DistConfig, connections: Mapping[int, Connection], **options: Any) -> None:
        super().__init__(dist, connections, **options)
        self._order = threading.RLock()  # sending and dispatching together
        self._seq = self._sent_seq = 0
        self._is_full = False  # an order waits for room in the queue
        self._replies: dict[int, dict[int, Mapping[str, Any]]] = {}
        self._digests, self._due = StepDigests(), dict[int, str]()  # of own steps, by number of steps
        self._theirs: dict[int, dict[int, str]] = {}  # the same of followers, by steps and rank
        self._rendezvous: Rendezvous | None = None
        self._on_lost: Callable[[BaseException], None] | None = None
        self._ended = set[int]()  # ranks of followers that have replied to STOP
        self._left = set[int]()  # ranks of followers whose connections have ended
        self.on_drain: Callable[[], None] = _terminate

    @property
    def last_order(self) -> int:
        return self._seq

    def refuse_late(self, rendezvous: Rendezvous) -> None:
        """Keep the rendezvous open, which refuses newcomers, until the group ends."""
        self._rendezvous = rendezvous

    def set_on_lost(self, on_lost: Callable[[BaseException], None]) -> None:
        """Call this with the error when the group ends; it must not block."""
        with self._changed:
            self._on_lost, error = on_lost, self._error
        if error is not None:
            on_lost(as_lost(error))

    def in_order(self) -> AbstractContextManager[object]:
        """Hold the order of all dispatches."""
        return self._order

    def send(self, kind: OrderKind, head: Mapping[str, Any] = NO_HEAD, arrays: Sequence[np.ndarray] = ()) -> int:
        """Send an order to every follower; returns its `seq`. It leaves on another thread, in the order of the calls;
        waits where MAX_UNSENT orders have not left. The arrays must not change from now on. Raises PeerLostError once
        the group has ended."""
        with self._order:
            if self._error is not None:
                raise as_lost(self._error)
            if self._seq - self._sent_seq >= MAX_UNSENT:
                self._wait_for_room()
            self._seq += 1
            self._channel.send(Order(kind=kind, seq=self._seq, head=head, arrays=tuple(arrays)))
            return self._seq

    def on_send(self, order: Order) -> None:
        if order.kind < OrderKind.STEP:  # of the connection: it has no `seq`
            return
        bound_s = self.dist.dist_timeout if order.kind in _LONG else None
        self._watchdog.sent(order.seq, order.kind.name, bound_s)
        self._compare_due(self._digests.add_order(order))
        self._sent_seq = order.seq
        if self._is_full:
            with self._changed:
                self._changed.notify_all()

    def _wait_for_room(self) -> None:
        """Wait until fewer orders are queued. Raises PeerLostError."""
        with self._changed:
            self._is_full = True  # before the first look: the sending thread looks at it after each order
            try:
                what = f"process 0 could not send {MAX_UNSENT} orders"
                self._wait_for(lambda: self._seq - self._sent_seq < MAX_UNSENT, self.dist.dist_timeout, what)
            finally:
                self._is_full = False

    def begin_wait(self) -> None:
        """Note that the engine thread now waits for a step."""
        self._watchdog.begin_wait()

    def end_wait(self, tokens: np.ndarray) -> None:
        """Note that the step has ended with this table of tokens."""
        self._watchdog.end_wait()
        self._compare_due(self._digests.add_tokens(tokens))

    def read(self, seq: int, read: Callable[[], _T]) -> _T:
        """Run `read` in a thread of its own, which may never return where the group is lost, and return its result.
        Raises PeerLostError as soon as the group has ended; a failure of `read` ends it."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(read())
            except BaseException as error:
                future.set_exception(error)
            with self._changed:
                self._changed.notify_all()

        self._watchdog.begin_read(seq)
        try:
            threading.Thread(target=run, name="read", daemon=True).start()
            with self._changed:
                self._changed.wait_for(lambda: future.done() or self._error is not None)
            if not future.done():
                assert self._error is not None
                raise as_lost(self._error)
            if (error := future.exception()) is not None:
                raise as_lost(self.explain(error))
            return future.result()
        finally:
            self._watchdog.end_read()

    def collect(self, seq: int, timeout_s: float, what: str) -> dict[int, Mapping[str, Any]]:
        """Wait for the reply of every follower to the order `seq`; returns them by rank. Raises PeerLostError."""
        with self._changed:
            replies = self._replies.setdefault(seq, {})
            self._wait_for(lambda: len(replies) == len(self._addresses), timeout_s, f"not every process has {what}")
            return dict(sorted(self._replies.pop(seq).items()))

    def exchange(self, name: str, value: Any) -> list[Any]:
        with self._changed:
            values = self._values.setdefault(name, {})
            self._wait_for(
                lambda: len(values) == len(self._addresses),
                self.dist.dist_timeout,
                f"not every process has come to the phase {name!r}",
            )
            del self._values[name]
        everything = [value, *(values[rank] for rank in sorted(values))]
        self._channel.send(Order(kind=OrderKind.EXCHANGE, head={"name": name, "value": everything}))
        return everything

    def explain(self, cause: BaseException) -> BaseException:
        """Why the engine thread really ended: a lost process, if there is one. The group ends in any case."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None, _EXPLAIN_S)
        if self._error is None:
            self._tell_failure(cause)
            self._end(cause)
        assert self._error is not None
        return self._error

    def order_lag(self) -> dict[int, int]:
        """By rank, how many orders a follower has not done yet, as far as its beats tell."""
        return self._watchdog.lag()

    def info(self) -> dict[str, object]:
        """Ranks, addresses, and how many orders each follower has not done yet."""
        lag = self.order_lag()
        return {
            "nnodes": self.dist.nnodes,
            "followers": [
                {"rank": rank, "address": address, "order_lag": lag[rank]}
                for rank, address in sorted(self._addresses.items())
            ],
        }

    def abandon(self) -> None:
        """End a group that is still starting, without an error: every process exits 0 at once. Returns when the
        followers have left, as JAX aborts a process that outlives process 0, which coordinates its runtime."""
        self._stopping = True
        self._channel.try_send(Order(kind=OrderKind.STOP, head={"abandoned": True}), _FINAL_SEND_S)
        with self._changed:
            self._changed.wait_for(lambda: self._left.issuperset(self._addresses), _ABANDON_S)

    def close(self) -> None:
        """Stop every follower and end the group; all processes may exit 0 then. Idempotent."""
        if self._closed or self._error is not None:
            return
        try:
            with self._order:
                seq = self.send(OrderKind.STOP)
            self.collect(seq, self.dist.watchdog_timeout + 2.0, "ended")
        except PeerLostError as error:
            self._end(error)
            return
        self._stopping = True
        self._shut_down()
        if self._rendezvous is not None:
            self._rendezvous.close()

    def _take(self, rank: int, order: Order) -> None:
        if order.kind is OrderKind.REPLY:
            with self._changed:
                if order.head.get("stopped"):
                    self._ended.add(rank)
                    self._watchdog.note_alive(rank, order.seq)
                self._replies.setdefault(order.seq, {})[rank] = order.head
                self._changed.notify_all()
        elif order.kind is OrderKind.DRAIN:
            logger.info("%s was asked to end: the group drains", self._name(rank))
            self.on_drain()
        else:
            super()._take(rank, order)

    def on_order(self, rank: int, order: Order) -> None:
        super().on_order(rank, order)
        for steps, digest in order.head.get("digests", ()) if order.kind is OrderKind.BEAT else ():
            with self._changed:
                self._theirs.setdefault(steps, {})[rank] = digest
            self._compare(steps)

    def on_closed(self, rank: int, reason: str) -> None:
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()
        if rank not in self._ended:
            super().on_closed(rank, reason)

    def _compare_due(self, due: tuple[int, str] | None) -> None:
        """Compare an own digest, if one is due."""
        if due is not None:
            with self._changed:
                self._due[due[0]] = due[1]
            self._compare(due[0])

    def _compare(self, steps: int) -> None:
        """Compare the digests after so many steps, as far as they have come."""
        with self._changed:
            own, theirs = self._due.get(steps), self._theirs.get(steps, {})
            wrong = [rank for rank, digest in sorted(theirs.items()) if own is not None and digest != own]
            if own is not None and len(theirs) == len(self._addresses):
                del self._due[steps], self._theirs[steps]
                self._changed.notify_all()
        if wrong:
            text = f"{self._name(wrong[0])} ran other orders or sampled other tokens than process 0"
            where = f"in steps {steps - DIGEST_STEPS + 1} to {steps}"
            self._end(ProcessMismatchError(f"{text} {where}; its machine or its libraries are at fault; {RESTART}"))

    def _end_process(self, error: BaseException) -> None:
        if isinstance(error, ProcessMismatchError):
            self._tell_failure(error)
        if self._on_lost is not None:
            self._on_lost(as_lost(error))
        threading.Thread(target=self._exit_soon, args=(exit_code(error),), name="exit", daemon=True).start()


class FollowingGroup(ProcessGroup):
    """A follower: receives orders and reports what is done."""

    def __init__(self, dist: DistConfig, connections: Mapping[int, Connection], **options: Any) -> None:
        super().__init__(dist, connections, **options)
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._done = 0
        self._digests = deque[tuple[int, str]]()
        self._left_threads: list[threading.Thread] = []

    @property
    def last_order(self) -> int:
        return self._done

    def exchange(self, name: str, value: Any) -> list[Any]:
        self._channel.send(Order(kind=OrderKind.EXCHANGE, head={"name": name, "value": value}))
        with self._changed:
            what = f"process 0 has not come to the phase {name!r}"
            self._wait_for(lambda: name in self._values, self.dist.dist_timeout + self.dist.watchdog_timeout, what)
            return list(self._values.pop(name)[0])

    def receive(self) -> Order:
        """Wait for the next order. Raises PeerLostError when the group has ended."""
        order = self._orders.get()
        if order is None:
            assert self._error is not None
            raise as_lost(self._error)
        return order

    def done(self, seq: int) -> None:
        """Note that the order is carried out; the next beat says so."""
        self._done = seq

    def leave_at_exit(self, thread: threading.Thread) -> None:
        """End this process at once after a clean end where this daemon thread still runs: it may be in JAX, whose own
        exit handler would take its devices away."""
        self._left_threads = [*filter(threading.Thread.is_alive, self._left_threads), thread]

    def add_digest(self, steps: int, digest: str) -> None:
        """Send this digest with the next beat."""
        self._digests.append((steps, digest))

    def reply(self, seq: int, **head: Any) -> None:
        """Send the result of an order."""
        self._channel.send(Order(kind=OrderKind.REPLY, seq=seq, head=head))

    def request_drain(self) -> None:
        """Ask process 0 to drain the group: this process was asked to end."""
        self._channel.try_send(Order(kind=OrderKind.DRAIN), _FINAL_SEND_S)

    def close(self) -> None:
        """End after STOP, with all others. Without a STOP the others are told that this process ends. Idempotent."""
        if self._closed:
            return
        if self._stopping:
            self._shut_down()
        else:
            self.fail(PeerLostError("it left the group"))

    def stopped(self, seq: int) -> None:
        """Reply to STOP, and end with all others."""
        self._stopping = True
        self.reply(seq, stopped=True)
        self.close()

    def _at_exit(self) -> None:
        super()._at_exit()
        if self._closed and any(thread.is_alive() for thread in self._left_threads):
            sys.stdout.flush()
            sys.stderr.flush()
            self._exit_process(0)

    def make_beat(self) -> Order:
        digests = [self._digests.popleft() for _ in range(len(self._digests))]
        return Order(kind=OrderKind.BEAT, seq=self._done, head={"digests": digests} if digests else {})

    def _take(self, rank: int, order: Order) -> None:
        if order.kind is OrderKind.STOP and order.head.get("abandoned"):
            logger.info("process 0 was asked to end while the group started")
            self._exit_process(0)
        elif order.kind >= OrderKind.STEP:
            self._orders.put(order)
        else:
            super()._take(rank, order)

    def _end_process(self, error: BaseException) -> None:
        self._orders.put(None)
        sys.stderr.flush()
        self._exit_process(exit_code(error))


AnyGroup = LeadingGroup | FollowingGroup


def start_group(
    dist: DistConfig,
    fields: Mapping[str, str],
    *,
    num_devices: int | None,
    failure: str | None = None,
    exit_process: Callable[[int], object] = os._exit,
    on_rendezvous: Callable[[Rendezvous], None] | None = None,
    on_joined: Callable[[AnyGroup], None] | None = None,
) -> AnyGroup:
    """Meet the other processes, start JAX's distributed runtime, and check the devices of all. `fields`: by name, what
    must be equal in every process; `num_devices`: of all processes together (None: any); `failure`: why this process
    cannot start; `on_rendezvous` receives the rendezvous of process 0 before others come, `on_joined` the group before
    JAX starts. Raises ConfigError, MachineError (GroupAbandonedError where process 0 was asked to end) or
    PeerLostError."""
    group: AnyGroup
    if dist.is_leader:
        rendezvous = Rendezvous(dist, fields)
        if on_rendezvous is not None:
            on_rendezvous(rendezvous)
        try:
            group = LeadingGroup(dist, rendezvous.wait_for_all(), exit_process=exit_process)
        except BaseException:
            rendezvous.close()
            raise
        group.refuse_late(rendezvous)
    else:
        group = FollowingGroup(dist, {0: join(dist, fields, failure=failure)}, exit_process=exit_process)
    group.start()
    if on_joined is not None:
        on_joined(group)
    try:
        group.start_jax(num_devices)
    except BaseException as error:
        group.fail(error)
        raise
    return group


def _initialize_jax(dist: DistConfig) -> bool:
    """Start JAX's distributed runtime; False where the caller has started it. Raises ConfigError where JAX runs in this
    process already, MachineError where it cannot start."""
    if jax.distributed.is_initialized():
        actual = jax.process_index(), jax.process_count()
        if actual != (dist.node_rank, dist.nnodes):
            text = (
                f"jax.distributed has process {actual[0]} of {actual[1]}, and this is {dist.node_rank} of {dist.nnodes}"
            )
            raise ConfigError(f"{text}; give the same ranks, or leave jax.distributed.initialize out")
        return False
    # Left on, initialize takes SIGTERM for good: no Python handler is called, and the process does not end.
    jax.config.update("jax_enable_preemption_service", False)
    if jax.config.values["jax_cpu_collectives_implementation"] in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator_address=dist.coordinator_address,
            coordinator_bind_address=dist.coordinator_address,
            num_processes=dist.nnodes,
            process_id=dist.node_rank,
            cluster_detection_method="deactivate",
            initialization_timeout=int(dist.dist_timeout),
            heartbeat_timeout_seconds=int(max(100, 3 * dist.watchdog_timeout)),  # the group's own watchdog comes first
            shutdown_timeout_seconds=_JAX_SHUTDOWN_S,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        if "must be called before" in reason:
            text = "JAX has already started its devices in this process, and a group must be joined before"
            raise ConfigError(f"{text}; build the engine first, or call jax.distributed.initialize yourself") from error
        raise MachineError(
            f"JAX's distributed runtime does not start at {dist.coordinator_address}: {reason}"
        ) from error
    return True


def exit_code(error: BaseException) -> int:
    """The exit code of a process that ends by this error: 1 for the machine, 2 for the configuration, else 3."""
    if isinstance(error, PeerLostError):
        return error.exit_code
    return 1 if isinstance(error, MachineError) else EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_LOST


def as_lost(error: BaseException) -> BaseException:
    """A new error of the same class and text, to be raised in another thread."""
    if isinstance(error, PeerLostError):
        copy = PeerLostError(str(error))
        copy.exit_code = error.exit_code
        return copy
    return type(error)(str(error)) if isinstance(error, ProcessMismatchError) else error


def _terminate() -> None:
    """Treat the SIGTERM of a follower as one of this process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(os.getpid(), signal.SIGTERM)
