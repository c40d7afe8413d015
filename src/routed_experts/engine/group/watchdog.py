"""Watchdog: turns a closed connection, silence, or an order that does not end into a PeerLostError.

It judges by the clock of this process alone, from what the group's channel reports. Thread-safe: the channel's thread
reports and checks, the engine thread notes what it sends and awaits."""

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Mapping

from routed_experts.core.errors import PeerLostError

RESTART = "restart the group"
STEP = "STEP"  # the name of an order that has an end


@dataclasses.dataclass(slots=True)
class _Peer:
    address: str
    last_beat_at: float
    done_seq: int = 0
    done_at: float = 0.0
    lost: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Sent:
    seq: int
    name: str
    at: float
    bound_s: float


@dataclasses.dataclass(slots=True)
class _Read:
    seq: int
    is_run: bool  # whether every peer has done the order
    since: float


class Watchdog:
    """The peers of one process: ranks and addresses. `timeout_s`: of silence, and of an order without a bound of its
    own."""

    def __init__(
        self, peers: Mapping[int, str], *, num_processes: int, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._num_processes, self._timeout_s, self._clock = num_processes, timeout_s, clock
        now = clock()
        self._peers = {rank: _Peer(address, last_beat_at=now) for rank, address in peers.items()}
        self._sent = deque[_Sent]()
        self._waiting_since: float | None = None
        self._read: _Read | None = None
        self._num_unread = 0  # steps that were sent and have not ended
        self._progress_at, self._progress_bound_s = now, timeout_s  # since an order was sent or a step has ended
        self._lock = threading.Lock()

    def note_alive(self, rank: int, done_seq: int | None = None) -> None:
        """Note a sign of life of a peer, and the last order that it has done."""
        with self._lock:
            peer, now = self._peers[rank], self._clock()
            peer.last_beat_at = now
            if done_seq is not None and done_seq > peer.done_seq:
                peer.done_seq, peer.done_at = done_seq, now
            least = min(peer.done_seq for peer in self._peers.values())
            while self._sent and self._sent[0].seq <= least:
                self._sent.popleft()
            if self._read is not None and not self._read.is_run and self._read.seq <= least:
                self._read.is_run, self._read.since = True, now

    def closed(self, rank: int, reason: str) -> None:
        """Note that a peer is lost at once; the first reason counts."""
        with self._lock:
            peer = self._peers[rank]
            peer.lost = peer.lost or reason

    def sent(self, seq: int, name: str, bound_s: float | None = None) -> None:
        """Note that every peer was sent an order that must be done within `bound_s`, and a STEP also ended."""
        with self._lock:
            order = _Sent(seq, name, self._clock(), self._timeout_s if bound_s is None else bound_s)
            self._sent.append(order)
            self._num_unread += name == STEP
            self._progress_at, self._progress_bound_s = order.at, order.bound_s

    def begin_wait(self) -> None:
        """Note that this process now waits for a step of all processes."""
        self._waiting_since = self._clock()

    def end_wait(self) -> None:
        """Note that the step has ended."""
        self._waiting_since = None
        with self._lock:
            self._num_unread -= 1
            self._progress_at, self._progress_bound_s = self._clock(), self._timeout_s

    def begin_read(self, seq: int) -> None:
        """Note that this process now reads the results of an order other than a STEP. Once every peer has done the
        order, which is bounded by itself, the read must end within `timeout_s`. One read at a time."""
        with self._lock:
            is_run = all(peer.done_seq >= seq for peer in self._peers.values())
            self._read = _Read(seq, is_run, self._clock())

    def end_read(self) -> None:
        """Note that the results are read."""
        with self._lock:
            self._read = None

    def lag(self) -> dict[int, int]:
        """How many orders each peer has not done yet, as far as its beats tell."""
        with self._lock:
            last = self._sent[-1].seq if self._sent else 0
            return {rank: max(0, last - peer.done_seq) if last else 0 for rank, peer in self._peers.items()}

    def check(self) -> PeerLostError | None:
        """Return the error of the first peer that is lost; None while all are well."""
        with self._lock:
            now = self._clock()
            since, bound_s = self._waiting_since, self._timeout_s
            if since is None and self._num_unread > 0:  # this process has sent a step, and does not come to its end
                since, bound_s = self._progress_at, self._progress_bound_s
            hangs = since is not None and now - since > bound_s
            for rank, peer in self._peers.items():
                if (reason := self._reason(peer, now, hangs=hangs)) is not None:
                    where = f"process {rank} of {self._num_processes} at {peer.address}"
                    return PeerLostError(f"{where} {reason}; {RESTART}")
            if since is not None and hangs:
                return _hang("a step", now - since)
            read = self._read
            if read is not None and read.is_run and now - read.since > self._timeout_s:
                return _hang("a score", now - read.since)
            return None

    def _reason(self, peer: _Peer, now: float, *, hangs: bool) -> str | None:
        """Why a peer is lost, or None. An order counts from when the one before it was done, which beats tell late;
        where a step hangs, from when it was sent: the peer that is behind holds the step up."""
        if peer.lost is not None:
            return peer.lost
        if now - peer.last_beat_at > self._timeout_s:
            return f"sent nothing for {now - peer.last_beat_at:.0f} s: it is stopped, or its network is down"
        for order in self._sent:
            if order.seq > peer.done_seq:
                since = order.at if hangs else max(order.at, peer.done_at)
                if now - since > order.bound_s:
                    return f"answers, but has not finished order {order.seq} ({order.name}) for {now - since:.0f} s"
                return None
        return None


def _hang(what: str, seconds: float) -> PeerLostError:
    text = f"{what} of the group has not ended for {seconds:.0f} s, although every process answers"
    return PeerLostError(f"{text}: a device or the network between devices hangs; {RESTART}")
