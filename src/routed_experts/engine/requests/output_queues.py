"""Sinks: where the engine thread leaves the news of a call, and how the caller hears that there is some. Knows nothing
of text.

A sink keeps what it is given and rings once a step: waking another thread costs more than most news, and lets that
thread take the interpreter from the step. Engine thread only, but for `coming`, which is the caller's end."""

import asyncio
import queue
from collections.abc import Sequence
from typing import Protocol

from routed_experts.core.io_struct import TokenIDOut

News = tuple[TokenIDOut, ...]


class OutputQueue(Protocol):
    """Takes the news of the requests that were submitted with it."""

    def take(self, out: TokenIDOut) -> bool:
        """Keep news until the next ring. False when nobody listens any more. Never raises."""
        ...

    def ring(self) -> None:
        """The step has no more news: wake whoever waits. Never raises."""
        ...


class ThreadOutputQueue:
    """For a caller that waits in its own thread: `coming` has the news of a step at a time."""

    def __init__(self) -> None:
        self.coming: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._kept: list[TokenIDOut] = []

    def take(self, out: TokenIDOut) -> bool:
        """Keep it."""
        self._kept.append(out)
        return True

    def ring(self) -> None:
        """Hand over what was kept."""
        if self._kept:
            self.coming.put(tuple(self._kept))
            self._kept.clear()


class LoopNotifier:
    """The news for all calls of one event loop: one wake-up a step, however many calls have some."""

    def __init__(self, events: asyncio.AbstractEventLoop) -> None:
        self.events = events
        self._kept: list[tuple[AsyncOutputQueue, TokenIDOut]] = []

    def keep(self, sink: "AsyncOutputQueue", out: TokenIDOut) -> bool:
        """Keep news of a call; False if the event loop has been closed."""
        self._kept.append((sink, out))
        return not self.events.is_closed()

    def ring(self) -> None:
        """Hand over what was kept; the first of the calls that ring does it for all."""
        if not self._kept:
            return
        kept, self._kept = self._kept, []
        try:
            self.events.call_soon_threadsafe(_hand_over, kept)
        except RuntimeError:  # closed meanwhile: nobody is left to be told
            return


class AsyncOutputQueue:
    """For a caller of an event loop: `coming` has its news one by one. `max_waiting`: more than these, and it counts as
    gone."""

    def __init__(self, mail: LoopNotifier, *, max_waiting: int) -> None:
        self.coming: asyncio.Queue[TokenIDOut] = asyncio.Queue()
        self._mail, self._max_waiting = mail, max_waiting

    def take(self, out: TokenIDOut) -> bool:
        """Keep it with the mail of the event loop."""
        return self._mail.keep(self, out) and self.coming.qsize() < self._max_waiting

    def ring(self) -> None:
        """Hand over the mail."""
        self._mail.ring()


def _hand_over(kept: Sequence[tuple[AsyncOutputQueue, TokenIDOut]]) -> None:
    """On the event loop: everyone gets their own."""
    for sink, out in kept:
        sink.coming.put_nowait(out)
