"""IntegrityWatch: checks the engine's invariants when the server falls idle, at most once a second.

A violation is logged with its numbers, counted, and turns the server degraded; it never ends the process. Event loop
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
    """The violations so far. `on_violation` receives each violation of each check."""

    def __init__(self, clock: Callable[[], float], on_violation: Callable[[Violation], None]) -> None:
        self._clock, self._on_violation = clock, on_violation
        self._next_check = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self.broken: frozenset[str] = frozenset()

    def check(self, engine: AsyncEngine) -> None:
        """Start a check, unless the last one was less than a second ago or still runs."""
        now = self._clock()
        if now < self._next_check or (self._task is not None and not self._task.done()):
            return
        self._next_check = now + INTERVAL_S
        self._task = asyncio.ensure_future(self._check(engine))

    async def _check(self, engine: AsyncEngine) -> None:
        try:
            violations = await asyncio.to_thread(engine.engine.check_integrity)
        except RoutedExpertsError as error:  # the engine has ended, which other parts report
            logger.debug("the invariants were not checked: %s", error)
            return
        for violation in violations:
            logger.error("invariant %s is broken: %s", violation.name, violation.detail)
            self._on_violation(violation)
        self.broken |= {violation.name for violation in violations}
