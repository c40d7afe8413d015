"""Arrivals: calls of an event loop on their way to the engine: those that come together are handed over together.

An idle engine that took the first of many would run steps for it alone, on the cores that read the others: these would
wait for it, and then for each other. So a call that meets an idle engine waits a moment for company; one that meets a
busy engine does not, for there it waits for the end of a step anyway. Event loop only, but for the news that they are
in. Knows nothing of HTTP."""

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Sequence

from routed_experts.engine.loop.engine_thread import EngineThread, Submission, is_idle, submit_all

IDLE_WINDOW_S = 0.001  # without another call: then they go
MAX_WINDOW_S = 0.01  # at most, from the first call on
_Waiting = tuple[Submission, "asyncio.Future[None]"]


class SubmitBatcher:
    """The calls of one event loop for one engine."""

    def __init__(self, events: asyncio.AbstractEventLoop, loop: EngineThread) -> None:
        self.events, self._loop = events, loop
        self._waiting: list[_Waiting] = []
        self._first, self._last = 0.0, 0.0  # when they came, on the monotonic clock

    async def submit(self, submission: Submission) -> None:
        """Hand over the requests of one call, all or none. Raises what `EngineThread.submit` raises; cancelled before
        they are handed over, they never come in, and after that they are to be aborted."""
        accepted: asyncio.Future[None] = self.events.create_future()
        self._last = time.monotonic()
        if not self._waiting:
            self._first = self._last
            self.events.call_later(IDLE_WINDOW_S if is_idle(self._loop) else 0.0, self._look)
        self._waiting.append((submission, accepted))
        await accepted

    def _look(self) -> None:
        """Hand over, or wait for those who still come."""
        now = time.monotonic()
        rest = min(self._last + IDLE_WINDOW_S, self._first + MAX_WINDOW_S) - now
        if self._waiting and rest > 0 and is_idle(self._loop):
            self.events.call_later(rest, self._look)
        else:
            self.hand_over()

    def hand_over(self) -> None:
        """Hand over now whoever waits: before a command that is about all who have called, as an abort is."""
        waiting, self._waiting = [one for one in self._waiting if not one[1].done()], []
        if waiting:
            handed = submit_all(self._loop, [submission for submission, _ in waiting])
            handed.add_done_callback(lambda done: _pass_on(self.events, waiting, done))


def _pass_on(
    events: asyncio.AbstractEventLoop,
    waiting: Sequence[_Waiting],
    done: "concurrent.futures.Future[list[Exception | None]]",
) -> None:
    """From the engine thread: one wake-up for all of them."""
    with contextlib.suppress(RuntimeError):  # the event loop has been closed: nobody is left to be told
        events.call_soon_threadsafe(_tell, waiting, done)


def _tell(waiting: Sequence[_Waiting], done: "concurrent.futures.Future[list[Exception | None]]") -> None:
    cause = done.exception()
    outcomes = done.result() if cause is None else [cause] * len(waiting)
    for (_, accepted), outcome in zip(waiting, outcomes, strict=True):
        if accepted.done():  # its caller has gone meanwhile
            continue
        if outcome is None:
            accepted.set_result(None)
        else:
            accepted.set_exception(outcome)
