"""Types of the arguments of plans and simulations: another one is refused by name, with the type that is expected."""

import math

import numpy as np

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PlacementError


def check_type(name: str, value: object, *kinds: type) -> None:
    """Raise PlacementError for an object of none of these classes."""
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise PlacementError(f"{name} is {type(value).__name__}; expected {expected}")


def check_number(name: str, value: object, expected: str, *, is_positive: bool = False) -> float:
    """Return a finite real number of at least 0, of Python, NumPy or an array without dims, as a float. Raises
    PlacementError for another value, for 0 if it `is_positive`, and for an integer that no float holds."""
    number = _to_float(value)
    if number is None:
        raise PlacementError(f"{name}={short_repr(value)} is {type(value).__name__}; expected {expected}")
    if not math.isfinite(number) or number < 0 or (is_positive and number == 0):
        raise PlacementError(f"{name}={short_repr(value)}; expected {expected}")
    return number


def _to_float(value: object) -> float | None:
    """A real number as a float, infinite for an integer that is too large; None for what is none, as a bool."""
    try:
        if isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        array = np.asarray(value)
        return float(array) if array.shape == () and array.dtype.kind in "iufV" else None  # V: bfloat16
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None
