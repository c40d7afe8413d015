"""The bundles of Ray's placement groups that the processes of an EngineGroup have."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import ConfigError
from routed_experts.fleet.spec import ReplicaSpec, check_resources

PLACEMENT_S = 60.0  # in which the bundles of a group must be reserved


def check_bundles(placement_group: Any, indices: Sequence[int] | None, number: int) -> list[int]:
    """The bundle of every process. Raises ConfigError."""
    chosen = list(range(number)) if indices is None else [int(index) for index in indices]
    size = len(placement_group.bundle_specs)
    if len(chosen) != number or len(set(chosen)) != number or not all(0 <= index < size for index in chosen):
        text = f"bundle_indices={chosen} for {number} processes and a placement group of {size} bundles"
        raise ConfigError(f"{text}; give each process a bundle of its own")
    return chosen


def check_taken(resources: Mapping[str, float] | None, bundles: Mapping[int, Mapping[str, float]]) -> None:
    """Raise ConfigError for resources that one of these bundles, by index, does not have."""
    for name, amount in (resources or {}).items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < float("inf"):
            raise ConfigError(f"resources: {name}={short_repr(amount)} must be a number from 0 on")
        for index, bundle in bundles.items():
            if amount > bundle.get(name, 0.0):
                listed = ", ".join(f"{kind}: {size:g}" for kind, size in bundle.items())
                text = f"resources: {name}={amount:g} for an engine, above bundle {index} of its placement group"
                raise ConfigError(f"{text} ({listed}); take at most what the bundle has, or give larger bundles")


def await_bundles(
    placement_group: Any, spec: ReplicaSpec, free: Callable[[], Mapping[str, float]], *, is_owned: bool
) -> None:
    """Wait until the bundles are reserved. Raises ConfigError after PLACEMENT_S; of a group that `is_owned` with what
    does not fit the `free` resources then."""
    if placement_group.wait(PLACEMENT_S):
        return
    text = f"the placement group of the engines is not reserved within {PLACEMENT_S:g} s"
    if not is_owned:
        raise ConfigError(f"{text}; wait until it is ready, then create the engines in it")
    try:
        check_resources(spec, free(), field="replicas")
    except ConfigError as error:
        raise ConfigError(f"{text}: {error}") from None
    raise ConfigError(f"{text}; lower replicas, or stop what else runs in this Ray")
