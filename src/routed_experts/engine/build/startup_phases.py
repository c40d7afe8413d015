"""Phases of the start of an engine: what was done, and how long it took."""

import dataclasses
import time
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of start-up: what was done, how long it took, and a short result."""

    name: str
    seconds: float
    detail: str
    lines: tuple[str, ...] = ()  # further lines of a verbose report: the memory plan


class PhaseClock:
    """Times phases of start-up, without gaps."""

    def __init__(self, report: Callable[[Phase], None] | None) -> None:
        self.phases: list[Phase] = []
        self._report, self._since = report, time.perf_counter()

    def done(self, name: str, detail: str, *, lines: Sequence[str] = ()) -> None:
        """Close the phase that began when the last one was closed."""
        now = time.perf_counter()
        phase = Phase(name=name, seconds=now - self._since, detail=detail, lines=tuple(lines))
        self.phases.append(phase)
        self._since = now
        if self._report is not None:
            self._report(phase)
