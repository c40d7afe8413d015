"""Integers that a caller gives, of Python or NumPy: the one check of them, and its text.

A bool is none, and neither is a float without a fraction."""

import functools
import numbers
from collections.abc import Callable
from typing import TypeGuard, TypeVar

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import ConfigError

_T = TypeVar("_T")


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer of Python or NumPy, and no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def to_int(
    name: str,
    value: object,
    low: int,
    high: int | None = None,
    *,
    error: Callable[[str], Exception] = ConfigError,
    meaning: str = "",
    fix: str = "",
) -> int:
    """Return an integer in low..high as one of Python, which no product overflows and JSON writes.

    Raises `error` of a text with the name, the value, the limits and a fix. `meaning` describes the limits. Without
    `fix` the text says in which direction the value is wrong."""
    if is_integer(value):
        number = int(value)
        if number >= low and (high is None or number <= high):
            return number
        shown, usual_fix = short_repr(number), "raise it" if number < low else "lower it"
    else:
        is_number = isinstance(value, numbers.Number) and not isinstance(value, bool)
        shown = f"{short_repr(value)} ({type(value).__name__})" if is_number else short_repr(value)
        usual_fix = f"give an integer, such as {low if high is None or high < 1 else max(low, 1)}"
    limits = f"of at least {low}" if high is None else f"in {low}..{high}"
    raise error(f"{name}={shown} must be an integer {limits}{meaning}; {fix or usual_fix}")


def with_python_integers(cls: type[_T]) -> type[_T]:
    """Decorate a keyword-only dataclass: its fields hold Python's integers where the caller gives NumPy's, also in a
    tuple. Frozen fields cannot be replaced once they are set, and are written to JSON."""
    init = cls.__init__

    @functools.wraps(init)
    def convert(self: _T, **fields: object) -> None:
        init(self, **{name: _to_python(value) for name, value in fields.items()})

    cls.__init__ = convert
    return cls


def _to_python(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_to_python, value)) if type(value) is tuple else value
    return int(value) if is_integer(value) else value
