"""SubmitBatcher: calls of an event loop that arrive together are submitted to the engine together.

An idle engine that took the first of many calls would run steps for it alone, on the cores that parse the others; these
would wait for that step, and then for each other. So a call that finds the engine idle waits a moment for others. A
call that finds it busy does not, because it waits for the end of a step anyway. Event loop only, except for the
completion."""

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Sequence

from routed_experts.engine.loop.engine_thread import EngineThread, Submission

IDLE_WINDOW_S = 0.001  # without another call: then they are submitted
MAX_WINDOW_S = 0.01  # from the first call on
_Waiting = tuple[Submission, "asyncio.Future[None]"]


class SubmitBatcher:
    """The calls of one event loop for one engine."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop, thread: EngineThread) -> None:
        self._event_loop, self._thread = event_loop, thread
        self._waiting: list[_Waiting] = []
        self._first_s, self._last_s = 0.0, 0.0  # arrival of the first and the last, on the monotonic clock

    def submit(self, submission: Submission) -> "asyncio.Future[None]":
        """Submit the requests of one call, all or none. The future is done when they are accepted. It raises what
        `EngineThread.submit` raises."""
        accepted: asyncio.Future[None] = self._event_loop.create_future()
        self._last_s = time.monotonic()
        if not self._waiting:
            self._first_s = self._last_s
            self._event_loop.call_later(IDLE_WINDOW_S if self._thread.is_idle else 0.0, self._flush_or_wait)
        self._waiting.append((submission, accepted))
        return accepted

    def withdraw(self, accepted: "asyncio.Future[None]") -> None:
        """Cancel a future of `submit` whose requests wait for the flush: they are never accepted. Those of others must
        be aborted."""
        if any(waiting is accepted for _, waiting in self._waiting):
            accepted.cancel()

    def flush(self) -> None:
        """Submit now what waits."""
        waiting, self._waiting = [(call, accepted) for call, accepted in self._waiting if not accepted.done()], []
        if waiting:
            submitted = self._thread.submit_all([submission for submission, _ in waiting])
            submitted.add_done_callback(lambda done: _notify(self._event_loop, waiting, done))

    def _flush_or_wait(self) -> None:
        rest = min(self._last_s + IDLE_WINDOW_S, self._first_s + MAX_WINDOW_S) - time.monotonic()
        if self._waiting and rest > 0 and self._thread.is_idle:
            self._event_loop.call_later(rest, self._flush_or_wait)
        else:
            self.flush()


def _notify(
    event_loop: asyncio.AbstractEventLoop,
    waiting: Sequence[_Waiting],
    done: "concurrent.futures.Future[list[Exception | None]]",
) -> None:
    """On the engine thread: wake the event loop once for all of them."""
    with contextlib.suppress(RuntimeError):  # the event loop has been closed, and its callers with it
        event_loop.call_soon_threadsafe(_complete, waiting, done)


def _complete(waiting: Sequence[_Waiting], done: "concurrent.futures.Future[list[Exception | None]]") -> None:
    cause = done.exception()
    outcomes = done.result() if cause is None else [cause] * len(waiting)
    for (_, accepted), outcome in zip(waiting, outcomes, strict=True):
        if outcome is None:
            accepted.set_result(None)
        else:
            accepted.set_exception(outcome)
