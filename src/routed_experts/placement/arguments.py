"""Types of the arguments of plans and simulations: another one is refused by name, with the type that is expected."""

import math

import numpy as np

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PlacementError
from routed_experts.core.record_validation import is_integer


def check_integer(name: str, value: object, expected: str) -> None:
    """Raise PlacementError for what is no integer, as a float or a bool; `expected` describes a valid value."""
    if not is_integer(value):
        raise PlacementError(f"{name}={short_repr(value)} is {type(value).__name__}; expected {expected}")


def check_type(name: str, value: object, *kinds: type) -> None:
    """Raise PlacementError for an object of none of these classes."""
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise PlacementError(f"{name} is {type(value).__name__}; expected {expected}")


def is_finite_number(value: object) -> bool:
    """Whether a value is a finite number of Python or NumPy that a float holds, and no bool."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer
        return False
