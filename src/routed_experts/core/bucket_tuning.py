"""Choose padded sizes (buckets) that serve a load at the least expected cost, from measured step times.

A step of n tokens (or requests) runs in the smallest bucket b >= n and costs cost(n, b), which padding raises. Few
buckets compile fast; this module decides which sizes to compile."""

import bisect
import dataclasses
import math
from collections.abc import Mapping

from routed_experts.core.errors import ConfigError

LOADS = ("uniform", "harmonic")


@dataclasses.dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured seconds of a step by bucket (the candidates) and by size, some sizes for each bucket. Raises ConfigError
    unless every bucket was measured at its own size, and every cost is a positive number."""

    seconds: Mapping[int, Mapping[int, float]]

    def __post_init__(self) -> None:
        """Check the measurements."""
        if not self.seconds:
            raise ConfigError("there are costs of no bucket; measure at least one size")
        for bucket, measured in self.seconds.items():
            if bucket < 1 or bucket not in measured or any(not 1 <= size <= bucket for size in measured):
                raise ConfigError(
                    f"bucket {bucket} was measured at {sorted(measured)}; expected sizes in 1..{bucket}, that one "
                    "included"
                )
            if not all(math.isfinite(cost) and cost > 0 for cost in measured.values()):
                raise ConfigError(f"bucket {bucket} costs {dict(measured)}; expected positive seconds")

    @property
    def buckets(self) -> tuple[int, ...]:
        """The candidates, increasing."""
        return tuple(sorted(self.seconds))

    def estimate_seconds(self, size: int, bucket: int) -> float:
        """Seconds of a step of `size` in `bucket`, interpolated between measured sizes; below the smallest, its own."""
        measured = self.seconds[bucket]
        sizes = sorted(measured)
        index = bisect.bisect_left(sizes, size)
        above = sizes[index]
        if above == size or index == 0:
            return measured[above]
        below = sizes[index - 1]
        share = (size - below) / (above - below)
        return measured[below] * (1 - share) + measured[above] * share


def parse_load(name: str, largest: int) -> dict[int, float]:
    """Return the frequency of each size 1..largest; they sum to 1. "uniform": all alike; "harmonic": n in proportion to
    1/n, so that every doubling is as frequent as the next (for a load of unknown scale). Raises ConfigError for another
    name."""
    if name not in LOADS:
        raise ConfigError(f"load {name!r} is unknown; choose one of {', '.join(LOADS)}")
    weights = {size: 1.0 if name == "uniform" else 1.0 / size for size in range(1, largest + 1)}
    total = sum(weights.values())
    return {size: weight / total for size, weight in weights.items()}


def expected_cost(buckets: tuple[int, ...], costs: StepCosts, load: Mapping[int, float]) -> float:
    """Return the mean seconds of a step of this load, each in the smallest of the measured `buckets` that holds it."""
    total = sum(
        weight * costs.estimate_seconds(size, buckets[bisect.bisect_left(buckets, size)])
        for size, weight in load.items()
    )
    return total / sum(load.values())


def choose_buckets(costs: StepCosts, load: Mapping[int, float], *, most: int) -> tuple[int, ...]:
    """Choose at most `most` of the measured buckets, the largest included, with the least expected cost; the shorter of
    equals. Exact, by dynamic programming over (last bucket, number of buckets), in most * candidates^2 steps. Raises
    ConfigError for most < 1, and for a load that is empty or has a size below 1 or above the largest bucket."""
    buckets = costs.buckets
    if most < 1:
        raise ConfigError(f"at most {most} buckets are allowed; expected at least 1")
    if (
        not load
        or min(load) < 1
        or max(load) > buckets[-1]
        or min(load.values()) < 0
        or not 0 < sum(load.values()) < math.inf
    ):
        sizes = f"sizes {min(load)}..{max(load)}" if load else "no size"
        raise ConfigError(
            f"the load has {sizes}; expected shares of sizes in 1..{buckets[-1]}, the largest bucket that was measured"
        )
    between = [[_cost_between(low, high, costs, load) for high in buckets] for low in (0, *buckets)]  # [from, to]
    best: list[tuple[float, tuple[int, ...]]] = [(between[0][last], (bucket,)) for last, bucket in enumerate(buckets)]
    answers = [best[-1]]
    for _ in range(min(most, len(buckets)) - 1):
        best = [
            min(
                ((best[low][0] + between[low + 1][last], (*best[low][1], bucket)) for low in range(last)),
                default=(math.inf, ()),
            )
            for last, bucket in enumerate(buckets)
        ]
        answers.append(best[-1])
    return min(answers, key=lambda answer: (answer[0], len(answer[1])))[1]


def _cost_between(low: int, high: int, costs: StepCosts, load: Mapping[int, float]) -> float:
    """Return the cost of the sizes above `low` in the bucket `high`."""
    return sum(weight * costs.estimate_seconds(size, high) for size, weight in load.items() if low < size <= high)
