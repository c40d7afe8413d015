"""Host-side checks of replica tables and capacities, in NumPy, once a placement: values that a program cannot check.
Dims: E experts, J replica positions, I instances, V sources."""

from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from routed_experts.core.errors import ConfigError, PlacementError
from routed_experts.core.placement_config import to_fraction

INT32_MAX = np.iinfo(np.int32).max


def check_replica_order(replica_order: Any, num_instances: int) -> Int[ndarray, "*V E J"]:
    """Return the table as int32 if it is valid, [E, J] or [V, E, J]: each expert's instances first, -1 behind them;
    every instance 0 .. I-1 in exactly one position of a source's table; the same instances per expert for every
    source. A layer of `ExpertPlacement.logical_to_physical_map` is such a table. Raises PlacementError."""
    table = np.asarray(replica_order)
    if table.ndim not in (2, 3) or 0 in table.shape or not np.issubdtype(table.dtype, np.integer):
        raise PlacementError(
            f"replica_order is {table.dtype}{list(table.shape)}; give integers [E, J], or [V, E, J] for an order per "
            "source"
        )
    for source, order in enumerate(table.reshape(-1, *table.shape[-2:])):
        label = f"replica_order[{source}]" if table.ndim == 3 else "replica_order"
        _check_one_source(order, num_instances, label)
        if source > 0 and not np.array_equal(np.sort(order, axis=1), np.sort(table[0], axis=1)):
            expert = int(np.flatnonzero(np.any(np.sort(order, axis=1) != np.sort(table[0], axis=1), axis=1))[0])
            raise PlacementError(
                f"{label}: expert {expert} has instances {_listed(order[expert])}, source 0 has "
                f"{_listed(table[0, expert])}; "
                "every source lists the same instances of an expert, in an order of its own"
            )
    return table.astype(np.int32)


def _check_one_source(order: Int[ndarray, "E J"], num_instances: int, label: str) -> None:
    outside = np.argwhere((order < -1) | (order >= num_instances))
    if len(outside):
        expert, position = map(int, outside[0])
        raise PlacementError(
            f"{label}[{expert}, {position}] = {int(order[expert, position])}; instances are 0 .. {num_instances - 1}, "
            "-1 fills the tail"
        )
    gaps = np.argwhere((order[:, :-1] < 0) & (order[:, 1:] >= 0))
    if len(gaps):
        expert, position = map(int, gaps[0])
        raise PlacementError(
            f"{label}[{expert}] has a gap at position {position}: {order[expert].tolist()}; instances come first, -1 "
            "behind"
        )
    without = np.flatnonzero(order[:, 0] < 0)
    if len(without):
        raise PlacementError(
            f"{label}: expert {int(without[0])} has no instance ({len(without)} such experts); every expert needs one"
        )
    counts = np.bincount(order[order >= 0], minlength=num_instances)
    if np.any(counts != 1):
        instance = int(np.flatnonzero(counts != 1)[0])
        experts = np.flatnonzero(np.any(order == instance, axis=1)).tolist()
        raise PlacementError(
            f"{label}: instance {instance} of num_instances={num_instances} is in {int(counts[instance])} positions "
            f"(experts {experts}); "
            "every instance belongs to exactly one place of one expert"
        )


def _listed(row: Int[ndarray, " J"]) -> list[int]:
    return row[row >= 0].tolist()


def check_capacity(capacity: Any, num_instances: int) -> Int[ndarray, " I"]:
    """Return the capacities (slots per instance) as int32 [I]: none below 0, at least one above. Raises ConfigError."""
    slots = np.asarray(capacity)
    if slots.shape != (num_instances,) or not np.issubdtype(slots.dtype, np.integer):
        raise ConfigError(
            f"capacity is {slots.dtype}{list(slots.shape)}; give {num_instances} integers, one per instance"
        )
    wrong = np.flatnonzero((slots < 0) | (slots > INT32_MAX))
    if len(wrong):
        instance = int(wrong[0])
        raise ConfigError(
            f"capacity[{instance}] = {int(slots[instance])}; slots per instance are 0 .. {INT32_MAX}: 0 takes it out "
            "of use"
        )
    if not np.any(slots):
        raise ConfigError(
            f"capacity is 0 for all {num_instances} instances: no slot would find room; raise the capacity factor"
        )
    return slots.astype(np.int32)


def expert_capacity(
    num_valid: int, k: int, num_instances: int, factor: Fraction | float | str, rounding: str = "ceil"
) -> Int[ndarray, " I"]:
    """Give every instance max(1, ceil(factor * num_valid * k / num_instances)) slots, int32 [I], in exact rational
    arithmetic.

    `num_valid` counts the tokens of the whole expert-parallel group. A float factor is read as its decimal digits (1.1
    is 11/10). `rounding="floor"` is the published formula without the lower bound, for comparison: it is 0 for small
    batches. Raises ConfigError."""
    if num_valid < 0 or k < 1 or num_instances < 1:
        raise ConfigError(f"num_valid={num_valid}, k={k}, num_instances={num_instances}; expected at least 0, 1 and 1")
    if rounding not in ("ceil", "floor"):
        raise ConfigError(f"rounding={rounding!r}; it is 'ceil' or 'floor'")
    try:
        exact = to_fraction(factor)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"factor={factor!r} is no finite number; give one above 0, such as 1.25 or '5/4'") from error
    if exact <= 0:
        raise ConfigError(f"factor={factor!r}; the capacity factor is above 0, such as 1.25")
    numerator, denominator = exact.numerator * num_valid * k, exact.denominator * num_instances
    slots = numerator // denominator if rounding == "floor" else max(1, -(-numerator // denominator))
    return np.full(num_instances, min(slots, INT32_MAX), np.int32)
