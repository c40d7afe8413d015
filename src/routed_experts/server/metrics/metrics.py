"""Metrics: the registry of one server, and what its routes report."""

import logging
from collections.abc import Collection, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from routed_experts.core.error_text import short_repr
from routed_experts.core.integrity import Violation
from routed_experts.core.load_metrics import load_entropy, load_imbalance, num_unused
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.server.limits import MAX_LOGGED_NAMES
from routed_experts.server.metrics.compat_metrics import Compat, CompatMetrics
from routed_experts.server.metrics.engine_collector import EngineCollector
from routed_experts.server.metrics.families import PREFIX, SECONDS, by_label
from routed_experts.server.metrics.finished_request import FinishedRequest
from routed_experts.server.routing_store import RoutingStore

logger = logging.getLogger("routed_experts.server")


class Metrics:
    """The registry of one server, and the methods by which routes report. `each_expert`: a series for every expert of
    every layer."""

    def __init__(self, *, compat: Compat, each_expert: bool = False, model_name: str = "") -> None:
        self._registry = CollectorRegistry()
        self._routing = _RoutingCollector(each_expert=each_expert)
        self._registry.register(self._routing)
        self._compat = None if compat is None else CompatMetrics(compat, model_name, self._registry)
        self._logged: set[str] = set()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=self._registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", text, buckets=SECONDS, registry=self._registry)

        self._prompt = counter("prompt_tokens", "Prompt tokens of finished requests")
        self._generated = counter("generation_tokens", "Generated tokens of finished requests")
        self._lookups = counter("prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache")
        self._hits = counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache")
        self._payload = counter("capture_payload_bytes", "Bytes of routed experts sent or kept for fetching", "format")
        self._ignored = counter("ignored_parameters", "Request parameters that had no effect")
        self._violations = counter("invariant_violations", "Violated invariants by name", "name")
        self._stalls = counter("watchdog_trips", "Stalls: requests ran and no step ended for --stall-timeout")
        self._queue = seconds("request_queue_time_seconds", "Time from acceptance by the engine to the first step")
        first = "Time from arrival to the first token, of streamed requests alone"
        self._first = seconds("time_to_first_token_seconds", first)
        self._total = seconds("e2e_request_latency_seconds", "Time from arrival to the end")
        between = "Mean time between the tokens of one request, of streamed requests alone"
        self._between = seconds("inter_token_latency_seconds", between)

    def watch(self, engine: AsyncEngine, store: RoutingStore) -> None:
        """Add the engine's own counts."""
        self._registry.register(EngineCollector(engine, store, self._compat))

    def finished(self, request: FinishedRequest) -> None:
        """Count a finished sequence."""
        self._prompt.inc(request.prompt_tokens)
        if request.queue_s is not None:
            self._lookups.inc(request.prompt_tokens)
            self._queue.observe(request.queue_s)
        self._hits.inc(request.cached_tokens)
        self._generated.inc(request.completion_tokens)
        self._total.observe(request.total_s)
        if self._compat is not None:
            self._compat.finished(request)
        if request.first_token_s is not None:
            self._first.observe(request.first_token_s)
            if request.completion_tokens > 1:
                self._between.observe((request.total_s - request.first_token_s) / (request.completion_tokens - 1))

    def sent_rows(self, payload_format: str, num_bytes: int) -> None:
        """Count rows that are sent or kept for fetching."""
        self._payload.labels(payload_format).inc(num_bytes)

    def stalled(self) -> None:
        """Count a stall."""
        self._stalls.inc()

    def violation(self, violation: Violation) -> None:
        """Count a violated invariant."""
        self._violations.labels(violation.name).inc()

    def ignored(self, names: Collection[str]) -> None:
        """Count parameters of a request without effect; log each name once, up to a bound."""
        self._ignored.inc(len(names))
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED_NAMES:
                self._logged.add(name)
                logger.info("the parameter %s of requests has no effect here", short_repr(name))

    def text(self, routing: RoutingStats | None) -> bytes:
        """Return all metrics in the text format of Prometheus. `routing`: the present counts, if any are recorded."""
        self._routing.latest = routing
        return generate_latest(self._registry)


class _RoutingCollector(Collector):
    """How evenly experts were chosen, by hidden layer."""

    def __init__(self, *, each_expert: bool) -> None:
        self._each_expert = each_expert
        self.latest: RoutingStats | None = None

    def collect(self) -> Iterator[Metric]:
        stats = self.latest
        if stats is None:
            return
        load, layers = stats.load, [str(layer) for layer in stats.layer_ids]
        for name, text, values in (
            ("expert_load_imbalance", "Largest over mean count of a layer's experts", load_imbalance(load)),
            ("expert_entropy", "Entropy of a layer's counts; 1 is even", load_entropy(load)),
            ("dead_experts", "Experts of a layer that were never chosen", num_unused(load)),
        ):
            by_layer: dict[str, float] = dict(zip(layers, values.tolist(), strict=True))
            yield by_label(GaugeMetricFamily, name, text, "layer", by_layer)
        if self._each_expert:
            family = CounterMetricFamily(f"{PREFIX}_expert_tokens", "Slots of each expert", labels=["layer", "expert"])
            for layer, counts in zip(layers, load.tolist(), strict=True):
                for expert, count in enumerate(counts):
                    family.add_metric([layer, str(expert)], count)
            yield family
