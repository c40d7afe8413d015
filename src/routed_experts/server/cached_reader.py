"""CachedReader: the expert counts of an engine, read by several clients at once.

Counts are read on the engine thread, between two steps; concurrent readers share one read. Event loop only."""

import asyncio
from collections.abc import Callable

from routed_experts.core.errors import RoutedExpertsError
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.server.errors import unavailable

_METRICS_TIMEOUT_S = 1.0


class CachedReader:
    """Calls `read`, which blocks on the engine thread, at most once at a time."""

    def __init__(self, read: Callable[[], RoutingStats]) -> None:
        self._read = read
        self._task: asyncio.Task[RoutingStats] | None = None
        self._last: RoutingStats | None = None

    async def get(self) -> RoutingStats:
        """Return the present counts. Raises CaptureDisabledError without capture, EngineDeadError."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(asyncio.to_thread(self._read))
        self._last = stats = await asyncio.shield(self._task)
        return stats

    async def get_within(self, seconds: float) -> RoutingStats:
        """Return the present counts. Raises ApiError (503) when the engine thread does not answer in time."""
        try:
            return await asyncio.wait_for(self.get(), seconds)
        except TimeoutError as error:
            text = "the engine thread did not answer in time; it is stalled"
            raise unavailable(text, code="stalled") from error

    async def get_or_last(self) -> RoutingStats | None:
        """Return the present counts; those of the last read if the engine thread is busy or has ended; else None."""
        try:
            return await asyncio.wait_for(self.get(), _METRICS_TIMEOUT_S)
        except (TimeoutError, RoutedExpertsError):
            return self._last
