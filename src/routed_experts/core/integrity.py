"""What every `check_integrity` answers: one broken invariant, named and with its numbers. Knows nothing of who checks
what.

An empty list means that all is well. `name` is stable snake_case (a metric label), `detail` is one line for a
person."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One invariant that does not hold."""

    name: str
    detail: str
