"""IntegrityWatch: asks the engine for broken invariants when the server falls idle, at most once a second. Knows no
route.

A violation never ends the process: it is logged with its numbers, counted, and turns the server degraded. Event loop
only."""

import asyncio
import logging
from collections.abc import Callable

from routed_experts.core.errors import RoutedExpertsError
from routed_experts.core.integrity import Violation
from routed_experts.engine.async_engine import AsyncEngine

INTERVAL_S = 1.0
logger = logging.getLogger("routed_experts.server")


class IntegrityWatch:
    """What was found so far. `on_violation` hears each violation of each look."""

    def __init__(self, clock: Callable[[], float], on_violation: Callable[[Violation], None]) -> None:
        self._clock, self._on_violation = clock, on_violation
        self._next = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self.broken: frozenset[str] = frozenset()

    def look(self, door: AsyncEngine) -> None:
        """Begin to look, unless it is too soon or a look is under way."""
        now = self._clock()
        if now < self._next or (self._task is not None and not self._task.done()):
            return
        self._next = now + INTERVAL_S
        self._task = asyncio.ensure_future(self._look(door))

    async def _look(self, door: AsyncEngine) -> None:
        try:
            found = await asyncio.to_thread(door.engine.check_integrity)
        except RoutedExpertsError as error:  # the engine has ended, and others say so
            logger.debug("no look at the invariants: %s", error)
            return
        for violation in found:
            logger.error("invariant %s is broken: %s", violation.name, violation.detail)
            self._on_violation(violation)
        self.broken |= {violation.name for violation in found}
