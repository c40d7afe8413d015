"""StopClock: notices that this process did not run for a time: it was stopped by a signal, or its machine was.

A process that runs again finds requests in its sockets whose clients may have left long ago, which a proxy in front
need not show. Event loop only."""

import asyncio
from collections.abc import Callable

BEAT_S = 1.0
STOPPED_S = 10.0  # without a beat: far above what a busy event loop misses
SETTLE_S = 3.0  # after the stop, in which a request may be an old one


class StopClock:
    """`now` and `call_later` are those of the event loop."""

    def __init__(self, now: Callable[[], float], call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self._now, self._call_later = now, call_later
        self._last_beat = now()
        self._stop: tuple[float, float] | None = None  # its length, and its end
        self._call_later(BEAT_S, self._beat)

    @staticmethod
    def start() -> "StopClock":
        """A clock of the running event loop."""
        loop = asyncio.get_running_loop()
        return StopClock(loop.time, loop.call_later)

    @property
    def recent_stop_s(self) -> float | None:
        """The seconds for which this process did not run, where that ended less than SETTLE_S ago."""
        if self._stop is None or self._now() - self._stop[1] >= SETTLE_S:
            return None
        return self._stop[0]

    def _beat(self) -> None:
        now = self._now()
        if now - self._last_beat >= STOPPED_S:
            self._stop = now - self._last_beat, now
        self._last_beat = now
        self._call_later(BEAT_S, self._beat)
