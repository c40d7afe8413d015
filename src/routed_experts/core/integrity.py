"""Violation: one broken invariant, as every `check_integrity` returns it, with its numbers.

An empty list means that all invariants hold. `name` is stable snake_case (a metric label), `detail` is one line for a
person."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One invariant that does not hold."""

    name: str
    detail: str
