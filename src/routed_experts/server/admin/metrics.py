"""Metrics: Prometheus text of one server. Counts come from the stats of the engine and from what the routes report.
Knows no route."""

import dataclasses
import logging
from collections.abc import Collection, Iterator
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from routed_experts.core.error_text import short_repr
from routed_experts.core.integrity import Violation
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.engine.control.placement_stats import PlacementStats
from routed_experts.engine.control.stats import EngineStats
from routed_experts.server.limits import MAX_LOGGED_NAMES
from routed_experts.server.routing.stats import load_entropy, load_imbalance
from routed_experts.server.routing.store import RoutingStore

logger = logging.getLogger("routed_experts.server")
_PREFIX = "routed_experts"
_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
_OUTCOMES = ("stop", "length", "abort", "timeout", "rejected", "error")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """What a finished sequence adds. Times are in seconds since the request came."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_s: float | None
    whole_s: float
    queue_s: float | None  # until its first step


class Metrics:
    """The registry of one server, and the doors through which routes report."""

    def __init__(self, *, compat: Literal["vllm", "sglang"] | None, each_expert: bool = False) -> None:
        self._registry = CollectorRegistry()
        self._routing = _RoutingCollector(each_expert=each_expert)
        self._registry.register(self._routing)
        self._compat: Literal["vllm", "sglang"] | None = compat
        self._logged: set[str] = set()

        def counter(name: str, told: str, *labels: str) -> Counter:
            return Counter(f"{_PREFIX}_{name}", told, labels, registry=self._registry)

        def seconds(name: str, told: str) -> Histogram:
            return Histogram(f"{_PREFIX}_{name}", told, buckets=_SECONDS, registry=self._registry)

        self._prompt = counter("prompt_tokens", "Prompt tokens of ended requests")
        self._generated = counter("generation_tokens", "Generated tokens of ended requests")
        self._lookups = counter("prefix_cache_query_tokens", "Prompt tokens that were looked up in the prefix cache")
        self._hits = counter("prefix_cache_hit_tokens", "Prompt tokens that the prefix cache knew")
        self._payload = counter("capture_payload_bytes", "Bytes of routed experts sent or kept for fetching", "format")
        self._ignored = counter("ignored_parameters", "Parameters of requests that had no effect")
        self._violations = counter("invariant_violations", "Broken invariants, as they were found", "name")
        self._stalls = counter(
            "watchdog_trips", "Times that requests ran and no step ended for --stall-timeout, as it was noticed"
        )
        self._queue = seconds("request_queue_time_seconds", "From the engine taking a request in to its first step")
        self._first = seconds("time_to_first_token_seconds", "From a request's arrival to its first token")
        self._whole = seconds("e2e_request_latency_seconds", "From a request's arrival to its end")
        self._between = seconds("inter_token_latency_seconds", "Mean time between the tokens of one request")

    def watch(self, door: AsyncEngine, store: RoutingStore) -> None:
        """Add the engine's own counts."""
        self._registry.register(_EngineCollector(door, store, self._compat))

    def ended(self, request: EndedRequest) -> None:
        """A sequence has ended."""
        self._prompt.inc(request.prompt_tokens)
        if request.queue_s is not None:
            self._lookups.inc(request.prompt_tokens)
            self._queue.observe(request.queue_s)
        self._hits.inc(request.cached_tokens)
        self._generated.inc(request.completion_tokens)
        self._whole.observe(request.whole_s)
        if request.first_token_s is not None:
            self._first.observe(request.first_token_s)
            if request.completion_tokens > 1:
                self._between.observe((request.whole_s - request.first_token_s) / (request.completion_tokens - 1))

    def sent_rows(self, payload_format: str, num_bytes: int) -> None:
        """Rows have left in an answer."""
        self._payload.labels(payload_format).inc(num_bytes)

    def stalled(self) -> None:
        """A stall has been noticed."""
        self._stalls.inc()

    def violation(self, violation: Violation) -> None:
        """An invariant is broken."""
        self._violations.labels(violation.name).inc()

    def ignored(self, names: Collection[str]) -> None:
        """A request named parameters that have no effect; the first of each name is logged, of a bounded number of
        names."""
        self._ignored.inc(len(names))
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED_NAMES:
                self._logged.add(name)
                logger.info("the parameter %s of requests has no effect here", short_repr(name))

    def text(self, routing: RoutingStats | None) -> bytes:
        """All of it in the text format of Prometheus; `routing`: the counts of now, where any are kept."""
        self._routing.latest = routing
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """The engine's counts at the moment they are asked for."""

    def __init__(self, door: AsyncEngine, store: RoutingStore, compat: Literal["vllm", "sglang"] | None) -> None:
        self._door, self._store = door, store
        self._compat: Literal["vllm", "sglang"] | None = compat

    def collect(self) -> Iterator[Metric]:
        seen = self._door.engine.stats()
        usage = 1.0 - (seen.free_pages + seen.cached_pages) / seen.total_pages
        for name, told, value in (
            ("requests_running", "Requests in the batch", seen.running),
            ("requests_waiting", "Requests in the queue", seen.waiting),
            ("kv_usage_ratio", "Share of KV pages that running requests hold", usage),
            ("last_step_age_seconds", "Since a step ended while requests run; 0 when idle", seen.last_step_age_s),
            (
                "capture_host_bytes",
                "Host memory of rows, those kept for fetching included",
                seen.capture_host_bytes + self._store.nbytes,
            ),
        ):
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", told, value=float(value))
        yield _labelled(GaugeMetricFamily(f"{_PREFIX}_kv_pages", "KV pages by state", labels=["state"]), _pages(seen))
        yield CounterMetricFamily(f"{_PREFIX}_requests_accepted", "Sequences accepted", value=float(seen.accepted))
        finished = {outcome: seen.finished.get(outcome, 0) for outcome in _OUTCOMES}
        yield _labelled(
            CounterMetricFamily(f"{_PREFIX}_requests_finished", "Sequences ended", labels=["outcome"]), finished
        )
        compiles = self._door.engine.compiles
        for name, told, count in (
            ("preemptions", "Requests sent back to the queue", seen.preemptions),
            ("capture_rows", "Rows filed", seen.capture_rows),
            ("capture_missing_rows", "Requests that failed for a row that was not known", seen.capture_missing_rows),
            ("resident_swaps", "Experts copied to the accelerator while it served", seen.resident_swaps),
            ("deferred_slots", "Slots whose experts, on the host, were added a layer late", seen.deferred_slots),
            (
                "host_experts_seconds",
                "Seconds that threads of the host ran experts inside programs",
                seen.host_experts_s,
            ),
            (
                "resident_swap_failures",
                "Exchanges of resident experts that failed; those that were there stayed",
                seen.resident_failures,
            ),
            (
                "compile_cache_hits",
                "Programs that were read from the compilation cache, of this process",
                compiles.cache_hits,
            ),
        ):
            yield CounterMetricFamily(f"{_PREFIX}_{name}", told, value=float(count))
        yield from _placement(seen.placement)
        hits = {str(layer): ratio for layer, ratio in seen.resident_hits.items()}
        told = "Share of a MoE layer's slots that ran on the accelerator, where experts are on the host too"
        yield _labelled(GaugeMetricFamily(f"{_PREFIX}_resident_hit_ratio", told, labels=["layer"]), hits)
        programs = {"startup": compiles.startup, "serving": compiles.serving}
        yield _labelled(
            CounterMetricFamily(f"{_PREFIX}_compilations", "Programs made by this process", labels=["phase"]), programs
        )
        phases = {phase.name: phase.seconds for phase in self._door.engine.phases}
        yield _labelled(GaugeMetricFamily(f"{_PREFIX}_startup_seconds", "Start-up by phase", labels=["phase"]), phases)
        version = {str(seen.weight_version): 1}
        yield _labelled(
            GaugeMetricFamily(f"{_PREFIX}_weight_version_info", "Weights served", labels=["weight_version"]), version
        )
        for name, value in _renamed(self._compat, seen, usage).items():
            yield GaugeMetricFamily(name, "As the other server names it", value=float(value))


class _RoutingCollector(Collector):
    """How evenly experts were chosen, by hidden layer. `each_expert`: a series for every expert of every layer."""

    def __init__(self, *, each_expert: bool) -> None:
        self._each_expert = each_expert
        self.latest: RoutingStats | None = None

    def collect(self) -> Iterator[Metric]:
        stats = self.latest
        if stats is None:
            return
        load, layers = stats.load, [str(layer) for layer in stats.layer_ids]
        for name, told, values in (
            ("expert_load_imbalance", "Largest over mean count of a layer's experts", load_imbalance(load)),
            ("expert_entropy", "Entropy of a layer's counts, 1 is even", load_entropy(load)),
            ("dead_experts", "Experts of a layer that were never chosen", (load == 0).sum(axis=1)),
        ):
            by_layer: dict[str, float] = dict(zip(layers, values.tolist(), strict=True))
            yield _labelled(GaugeMetricFamily(f"{_PREFIX}_{name}", told, labels=["layer"]), by_layer)
        if self._each_expert:
            each = CounterMetricFamily(f"{_PREFIX}_expert_tokens", "Slots of each expert", labels=["layer", "expert"])
            for layer, counts in zip(layers, load.tolist(), strict=True):
                for expert, count in enumerate(counts):
                    each.add_metric([layer, str(expert)], count)
            yield each


def _placement(stats: PlacementStats | None) -> Iterator[Metric]:
    """What became of placed experts."""
    if stats is None:
        return
    yield from _balance(stats)
    yield from _gate(stats)
    yield GaugeMetricFamily(
        f"{_PREFIX}_placement_epoch", "Rises with every change of the placement", value=float(stats.epoch)
    )
    for name, told, count in (
        ("eplb_rebalances", "Plans that experts were moved for", stats.rebalances),
        ("eplb_skipped", "Plans that were not worth their copies", stats.skipped),
        ("eplb_failed", "Plans or moves that ended in an error", stats.failed),
        ("expert_copies", "Expert instances copied from another device", stats.copies),
        (
            "rerouted_slots",
            "Slots that capacities moved to an expert outside their token's K best",
            stats.rerouted_slots,
        ),
        ("dropped_slots", "Slots that capacities left without an expert", stats.dropped_slots),
    ):
        yield CounterMetricFamily(f"{_PREFIX}_{name}", told, value=float(count))


def _balance(stats: PlacementStats) -> Iterator[Metric]:
    """How evenly devices were loaded of late."""
    of_layers = {str(steps): told.balancedness for steps, told in stats.balance.items()}
    summed = {str(steps): told.weighted for steps, told in stats.balance.items()}
    for name, told, by_window in (
        ("eplb_balancedness", "Mean over layers of mean over largest device load", of_layers),
        ("eplb_balancedness_weighted", "Mean device loads over the largest, summed over layers", summed),
    ):
        yield _labelled(
            GaugeMetricFamily(f"{_PREFIX}_{name}", f"{told}, in the last steps", labels=["window"]), by_window
        )
    if stats.balance:
        longest = stats.balance[max(stats.balance)].max_over_mean.tolist()
        told = "Largest over mean device load of a layer, in the longest window"
        by_layer = {str(layer): ratio for layer, ratio in zip(stats.layer_ids, longest, strict=True)}
        yield _labelled(GaugeMetricFamily(f"{_PREFIX}_device_load_max_over_mean", told, labels=["layer"]), by_layer)


def _gate(stats: PlacementStats) -> Iterator[Metric]:
    """What was said of the last plan, once there was one."""
    if (verdict := stats.verdict) is None:
        return
    for name, told, value in (
        ("gain_seconds", "Time that the last plan would have saved in its window", verdict.gain_s),
        ("cost_seconds", "Time that its copies would take", verdict.cost_s),
        ("copies", "Expert instances that it would copy", verdict.copies),
        ("worth", "Whether that was worth it", verdict.worth),
    ):
        yield GaugeMetricFamily(f"{_PREFIX}_eplb_gate_{name}", told, value=float(value))
    balanced = {"now": verdict.balancedness_now, "new": verdict.balancedness_new}
    told = "Balancedness (weighted) of the last window as experts were, and by the last plan"
    yield _labelled(GaugeMetricFamily(f"{_PREFIX}_eplb_gate_balancedness", told, labels=["placement"]), balanced)
    if stats.last_move_s is not None:
        told = "What the last move took, the steps between its layers included"
        yield GaugeMetricFamily(f"{_PREFIX}_eplb_last_move_seconds", told, value=stats.last_move_s)


def _pages(seen: EngineStats) -> dict[str, int]:
    active = seen.total_pages - seen.free_pages - seen.cached_pages
    return {"free": seen.free_pages, "cached": seen.cached_pages, "active": active}


def _renamed(compat: str | None, seen: EngineStats, usage: float) -> dict[str, float]:
    if compat == "vllm":
        return {
            "vllm:num_requests_running": seen.running,
            "vllm:num_requests_waiting": seen.waiting,
            "vllm:kv_cache_usage_perc": usage,
        }
    if compat == "sglang":
        return {
            "sglang:num_running_reqs": seen.running,
            "sglang:num_queue_reqs": seen.waiting,
            "sglang:token_usage": usage,
        }
    return {}


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: dict[str, int] | dict[str, float]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], float(value))
    return family
