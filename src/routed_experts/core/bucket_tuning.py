"""Which padded sizes are worth a program of their own: the list that a load is served by at least cost. Knows no clock
and no device.

A step of n tokens (or requests) runs in the smallest bucket b >= n and costs cost(n, b): more than n of the load would
need alone, by what the padding costs on that machine. Few buckets compile fast; where they stand is decided here, from
what was measured."""

import bisect
import dataclasses
import math
from collections.abc import Mapping

from routed_experts.core.errors import ConfigError

LOADS = ("uniform", "harmonic")


@dataclasses.dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step by (bucket, size of what is in it), as measured: the candidates and, for each, some sizes up to
    its own. Raises ConfigError unless every bucket was measured when it is full, and every cost is a positive
    number."""

    seconds: Mapping[int, Mapping[int, float]]

    def __post_init__(self) -> None:
        """Check what was measured."""
        if not self.seconds:
            raise ConfigError("costs of no bucket were given; measure at least one size")
        for bucket, measured in self.seconds.items():
            if bucket < 1 or bucket not in measured or any(not 1 <= size <= bucket for size in measured):
                raise ConfigError(
                    f"bucket {bucket} was measured at {sorted(measured)}; expected sizes in 1..{bucket}, the last among them"
                )
            if not all(math.isfinite(cost) and cost > 0 for cost in measured.values()):
                raise ConfigError(f"bucket {bucket} costs {dict(measured)}; expected positive seconds")

    @property
    def buckets(self) -> tuple[int, ...]:
        """The candidates, increasing."""
        return tuple(sorted(self.seconds))

    def of(self, size: int, bucket: int) -> float:
        """Seconds of a step of `size` in `bucket`: on the line between the measured sizes around it, and the least
        one's below that."""
        measured = self.seconds[bucket]
        sizes = sorted(measured)
        place = bisect.bisect_left(sizes, size)
        above = sizes[place]
        if above == size or place == 0:
            return measured[above]
        below = sizes[place - 1]
        share = (size - below) / (above - below)
        return measured[below] * (1 - share) + measured[above] * share


def parse_load(name: str, largest: int) -> dict[int, float]:
    """How often each size 1..largest comes: "uniform", all alike, or "harmonic", n in proportion to 1/n, so that every
    doubling is as frequent as the next (what is said when nothing is known of the scale). Shares sum to 1. Raises
    ConfigError for another name."""
    if name not in LOADS:
        raise ConfigError(f"load {name!r} is unknown; choose one of {', '.join(LOADS)}")
    weights = {size: 1.0 if name == "uniform" else 1.0 / size for size in range(1, largest + 1)}
    total = sum(weights.values())
    return {size: weight / total for size, weight in weights.items()}


def expected_cost(buckets: tuple[int, ...], costs: StepCosts, load: Mapping[int, float]) -> float:
    """Mean seconds of a step of this load, each in the smallest of `buckets` that holds it; all of them measured
    ones."""
    total = sum(weight * costs.of(size, buckets[bisect.bisect_left(buckets, size)]) for size, weight in load.items())
    return total / sum(load.values())


def choose_buckets(costs: StepCosts, load: Mapping[int, float], *, most: int) -> tuple[int, ...]:
    """The increasing list of at most `most` of the measured buckets, the largest among them, with the least expected
    cost; of equals the shorter. Exact, by dynamic programming over (where the last bucket stands, how many there are),
    in most * candidates^2 steps. Raises ConfigError for most < 1, and for a load that is empty, has a size below 1 or
    one above the largest bucket."""
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
        told = f"sizes {min(load)}..{max(load)}" if load else "no size"
        raise ConfigError(
            f"the load has {told}; expected shares of sizes in 1..{buckets[-1]}, the largest bucket that was measured"
        )
    between = [[_cost_between(low, high, costs, load) for high in buckets] for low in (0, *buckets)]  # [from, to]
    best: list[tuple[float, tuple[int, ...]]] = [(between[0][place], (bucket,)) for place, bucket in enumerate(buckets)]
    answers = [best[-1]]
    for _ in range(min(most, len(buckets)) - 1):
        best = [
            min(
                ((best[low][0] + between[low + 1][place], (*best[low][1], bucket)) for low in range(place)),
                default=(math.inf, ()),
            )
            for place, bucket in enumerate(buckets)
        ]
        answers.append(best[-1])
    return min(answers, key=lambda answer: (answer[0], len(answer[1])))[1]


def _cost_between(low: int, high: int, costs: StepCosts, load: Mapping[int, float]) -> float:
    """What the sizes above `low` cost in the bucket `high`."""
    return sum(weight * costs.of(size, high) for size, weight in load.items() if low < size <= high)
