"""Which experts stay on the accelerator: the most used of a trace, or the recently used, exchanged while the model
serves; and the coverage that any number of residents reaches.

A miss does not wait for a copy (the host computes it), so a policy only has to be right on average. Rates are slots
a token. `static_coverage(load)[m, n]` and `lru_coverage(records).hits[m, n]` are the shares of slots of MoE layer m
that find their expert among n. Dims: T tokens, M MoE layers, E experts, N resident experts of a layer, K experts per
token."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, Int64

from routed_experts.analysis import known_rows
from routed_experts.core.errors import PlacementError
from routed_experts.core.integers import to_int
from routed_experts.core.placement import ResidencyMap
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.placement.arguments import check_number, check_type
from routed_experts.placement.eplb import checked_load

_FAST, _SLOW = 256.0, 4096.0  # half-lives of the two averages, in tokens
_HORIZON = 4096.0  # tokens over which a promoted expert is expected to stay as busy as it is
_HYSTERESIS = 1.2  # ratio of loads from which an expert replaces a resident
_MAX_SWAPS = 8  # of a layer at once
EVERY = 8  # steps between two exchanges


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCosts:
    """Seconds of one token in one expert on the host and on the accelerator, and of a copy of the expert's weights.

    Defaults: computed for Qwen3-30B-A3B in bfloat16, PCIe 4 and two memory channels."""

    host_s: float = 118e-6
    device_s: float = 6e-6
    copy_s: float = 377e-6

    def __post_init__(self) -> None:
        for name, seconds in dataclasses.asdict(self).items():
            check_number(name, seconds, "a finite number of seconds, 0 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdaptiveResidency:
    """A residency map that follows the load. A value: `observe` returns the next one, whose map has a higher epoch if
    it changed.

    An expert is promoted over a victim if it is busier by 20 % and the time that it saves over the next 4,096 tokens is
    above that of the copy; at most 8 of a layer, every 8 steps. Busy is the mean of two moving averages, with
    half-lives of 256 and 4,096 tokens."""

    residency: ResidencyMap
    costs: ExpertCosts
    fast: Float64[np.ndarray, "M E"]  # slots, decayed
    slow: Float64[np.ndarray, "M E"]
    fast_tokens: float = 0.0  # tokens, decayed alike
    slow_tokens: float = 0.0
    step: int = 0

    @staticmethod
    def start(
        residency: ResidencyMap, *, learned: RoutingStats | None = None, costs: ExpertCosts | None = None
    ) -> "AdaptiveResidency":
        """Begin with this map. Both averages begin with the rates of `learned`, at the weight of one half-life, or else
        with nothing."""
        check_type("residency", residency, ResidencyMap)
        if learned is not None:
            check_type("learned", learned, RoutingStats)
        if costs is not None:
            check_type("costs", costs, ExpertCosts)
        shape = (residency.num_layers, residency.num_experts)
        rate, weight = np.zeros(shape), 0.0
        if learned is not None and learned.num_tokens.any():
            residency.check_model(*learned.load.shape)
            rate, weight = learned.load / learned.num_tokens.sum(), 1.0
        return AdaptiveResidency(
            residency=residency,
            costs=costs or ExpertCosts(),
            fast=rate * _FAST,
            slow=rate * _SLOW,
            fast_tokens=weight * _FAST,
            slow_tokens=weight * _SLOW,
        )

    @property
    def rate(self) -> Float64[np.ndarray, "M E"]:
        """The recent load of each expert, slots a token."""
        return (self.fast / max(self.fast_tokens, 1.0) + self.slow / max(self.slow_tokens, 1.0)) / 2

    def observe(self, counts: Int[np.ndarray, "M E"], num_tokens: int, *, num_steps: int = 1) -> "AdaptiveResidency":
        """Return the residency after `num_steps` more steps of `num_tokens` tokens in total; every eighth step
        exchanges experts. Raises PlacementError."""
        counts = checked_load(counts)
        self.residency.check_model(*counts.shape)
        num_tokens = to_int("num_tokens", num_tokens, 0, error=PlacementError)
        num_steps = to_int("num_steps", num_steps, 1, error=PlacementError)
        fast, slow = 0.5 ** (num_tokens / _FAST), 0.5 ** (num_tokens / _SLOW)
        observed = dataclasses.replace(
            self,
            fast=self.fast * fast + counts,
            slow=self.slow * slow + counts,
            fast_tokens=self.fast_tokens * fast + num_tokens,
            slow_tokens=self.slow_tokens * slow + num_tokens,
            step=self.step + num_steps,
        )
        if observed.step // EVERY == self.step // EVERY:
            return observed
        return dataclasses.replace(observed, residency=_exchange_experts(observed.residency, observed.rate, self.costs))


def most_used(load: Float[np.ndarray, "M E"], per_layer: int, previous: ResidencyMap | None = None) -> ResidencyMap:
    """Keep the `per_layer` experts of the largest load of each layer, ties to the lower id. An expert that was resident
    in `previous` keeps its slot, and the epoch is the next. Raises PlacementError."""
    load = checked_load(load)
    meaning = ", all experts that there are"
    per_layer = to_int("per_layer", per_layer, 0, load.shape[1], error=PlacementError, meaning=meaning)
    chosen = np.sort(np.argsort(-load, axis=1, kind="stable")[:, :per_layer], axis=1)
    if previous is None:
        return ResidencyMap.from_experts(chosen, num_experts=load.shape[1])
    check_type("previous", previous, ResidencyMap)
    previous.check_model(*load.shape)
    if previous.num_resident != per_layer:
        raise PlacementError(
            f"per_layer={per_layer}, but previous has {previous.num_resident} slots a layer; plan with as many"
        )
    is_chosen = np.zeros(load.shape, np.bool_)
    np.put_along_axis(is_chosen, chosen, values=True, axis=1)
    experts = previous.experts
    stays = np.take_along_axis(is_chosen, experts.astype(np.intp), axis=1)
    for layer in range(len(load)):
        comers = np.setdiff1d(chosen[layer], experts[layer], assume_unique=True)
        experts[layer, ~stays[layer]] = comers
    return ResidencyMap.from_experts(experts, num_experts=load.shape[1], epoch=previous.epoch + 1)


def num_promoted(old: ResidencyMap, new: ResidencyMap) -> Int64[np.ndarray, " M"]:
    """Count the experts of each layer that `new` has on the accelerator and `old` has on the host: copies."""
    for name, residency in (("old", old), ("new", new)):
        check_type(name, residency, ResidencyMap)
    old.check_model(new.num_layers, new.num_experts)
    return np.count_nonzero((new.slot_of >= 0) & (old.slot_of < 0), axis=1)


def _exchange_experts(residency: ResidencyMap, rate: Float64[np.ndarray, "M E"], costs: ExpertCosts) -> ResidencyMap:
    """Swap the busiest experts of the host with the idlest residents, pair by pair, where it pays."""
    experts = residency.experts.astype(np.int64)
    count = min(_MAX_SWAPS, residency.num_resident, residency.num_experts - residency.num_resident)
    resident: Bool[np.ndarray, "M E"] = residency.slot_of >= 0
    comers = np.argsort(np.where(resident, np.inf, -rate), axis=1, kind="stable")[:, :count]
    slots = np.argsort(np.take_along_axis(rate, experts, axis=1), axis=1, kind="stable")[:, :count]
    victims = np.take_along_axis(experts, slots, axis=1)
    new, old = np.take_along_axis(rate, comers, axis=1), np.take_along_axis(rate, victims, axis=1)
    saved_s = float(costs.host_s) - float(costs.device_s)  # which may be arrays of JAX
    pays = (new - old) * _HORIZON * saved_s > float(costs.copy_s)
    swaps = pays & (new > _HYSTERESIS * old)
    if not swaps.any():
        return residency
    np.put_along_axis(experts, slots, np.where(swaps, comers, victims), axis=1)
    return ResidencyMap.from_experts(experts, num_experts=residency.num_experts, epoch=residency.epoch + 1)


# --- what any number of residents would catch, before a policy is chosen


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LruCoverage:
    """What a cache of the n experts used last would do, for n of 0 to E: share of hits, and copies a token."""

    hits: Float64[np.ndarray, "M E1"]
    copies_per_token: Float64[np.ndarray, "M E1"]


def static_coverage(load: Float[np.ndarray, "M E"]) -> Float64[np.ndarray, "M E1"]:
    """Share of the load that the n most used experts carry; judged on the load that chose them, so the best that any
    fixed set can do. 0 for a layer without load."""
    ordered = -np.sort(-checked_load(load), axis=1)
    covered = np.concatenate([np.zeros((len(ordered), 1)), np.cumsum(ordered, axis=1)], axis=1)
    return covered / np.maximum(covered[:, -1:], np.finfo(np.float64).tiny)


def concentration(load: Float[np.ndarray, "M E"]) -> Float64[np.ndarray, " M"]:
    """E * sum of the squared shares of the load: 1 where all experts have the same, E where one has all, 0 without
    load."""
    load = checked_load(load)
    share = load / np.maximum(load.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return load.shape[1] * (share**2).sum(axis=1)


def lru_coverage(*records: RoutedExperts) -> LruCoverage:
    """Run caches of all sizes at once over the records, one after the other: an access hits the caches that are larger
    than the number of other experts used since its expert's last use. Caches begin empty, and every miss is a copy.
    Raises RoutingAlignmentError for records of two models."""
    rows, num_experts = known_rows(*records).astype(np.int64), records[0].num_experts
    num_tokens, num_layers, top_k = rows.shape
    last = np.full((num_layers, num_experts), -1)  # the access at which an expert was used last
    distances = np.zeros(
        (num_layers, num_experts + 1), np.int64
    )  # [m, d]: accesses with d others in between; d = E: the first use
    layers = np.arange(num_layers)
    for token in range(num_tokens):
        for slot in range(top_k):
            expert = rows[token, :, slot]
            before = last[layers, expert]
            newer = np.count_nonzero(last > before[:, None], axis=1)
            distances[layers, np.where(before < 0, num_experts, newer)] += 1
            last[layers, expert] = token * top_k + slot
    hits = np.concatenate([np.zeros((num_layers, 1), np.int64), np.cumsum(distances[:, :-1], axis=1)], axis=1)
    accesses = num_tokens * top_k
    return LruCoverage(hits=hits / max(accesses, 1), copies_per_token=(accesses - hits) / max(num_tokens, 1))
