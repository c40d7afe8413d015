"""Prometheus metrics of one server: counts from the engine's stats, and what the routes report."""

import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from routed_experts.core.error_text import short_repr
from routed_experts.core.integrity import Violation
from routed_experts.core.load_metrics import load_entropy, load_imbalance, num_unused
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.core.speculative_stats import SpeculativeTotals
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.engine.control.stats import DataRankStats, EngineStats, PlacementStats
from routed_experts.server.limits import MAX_LOGGED_NAMES
from routed_experts.server.routing.store import RoutingStore

logger = logging.getLogger("routed_experts.server")
_PREFIX = "routed_experts"
Compat = Literal["vllm", "sglang"] | None  # whose names metrics have as well
_SECONDS = tuple(
    float(text) for text in "0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 30 60 120 300 600".split()
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_REQUEST_TOKENS = ("request_prompt_tokens request_generation_tokens request_params_max_tokens request_params_n").split()
_REQUEST_SECONDS = (
    "request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds"
).split()
_SAME = "The same under the name of the other server"
_OUTCOMES = ("stop", "length", "abort", "timeout", "rejected", "error")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """What a finished sequence adds. Times are in seconds since the request arrived."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    max_tokens: int  # that the request allows
    n: int  # sequences of its prompt
    first_token_s: float | None  # None: the request does not stream, so it is not known
    total_s: float
    queue_s: float | None  # from acceptance to its first step


class Metrics:
    """The registry of one server, and the methods by which routes report. `each_expert`: a series for every expert of
    every layer."""

    def __init__(self, *, compat: Compat, each_expert: bool = False, model_name: str = "") -> None:
        self._registry = CollectorRegistry()
        self._routing = _RoutingCollector(each_expert=each_expert)
        self._registry.register(self._routing)
        self._compat = None if compat is None else _CompatMetrics(compat, model_name, self._registry)
        self._logged: set[str] = set()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{_PREFIX}_{name}", text, labels, registry=self._registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"{_PREFIX}_{name}", text, buckets=_SECONDS, registry=self._registry)

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
        self._registry.register(_EngineCollector(engine, store, self._compat))

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


class _EngineCollector(Collector):
    """The engine's counts at the moment of the scrape."""

    def __init__(self, engine: AsyncEngine, store: RoutingStore, compat: "_CompatMetrics | None") -> None:
        self._engine, self._store, self._compat = engine.engine, store, compat
        self._context_length = engine.context_length

    def collect(self) -> Iterator[Metric]:
        stats, compiles = self._engine.stats(), self._engine.compiles
        usage = 1.0 - (stats.free_pages + stats.cached_pages) / stats.total_pages
        host_bytes = stats.capture_host_bytes + self._store.nbytes
        yield from _gauges(
            ("requests_running", "Requests in the batch", stats.running),
            ("requests_waiting", "Requests in the queue", stats.waiting),
            ("kv_usage_ratio", "Fraction of KV pages held by running requests", usage),
            (
                "last_step_age_seconds",
                "Time since the last step while requests run; 0 when idle",
                stats.last_step_age_s,
            ),
            ("capture_host_bytes", "Host memory of rows, with those kept for fetching", host_bytes),
        )
        yield from _kv_pages(stats)
        yield from _counters(("requests_accepted", "Accepted sequences", stats.accepted))
        finished = {outcome: stats.finished.get(outcome, 0) for outcome in _OUTCOMES}
        yield _by_label(CounterMetricFamily, "requests_finished", "Finished sequences", "outcome", finished)
        yield from _counters(
            (
                "preemptions",
                "Requests sent back to the queue: pages ran out, or for a pause, a flush or a release of memory",
                stats.preemptions,
            ),
            ("weight_updates", "Updates of the weights or of their label; rows have this count", stats.update_count),
            ("capture_rows", "Recorded rows", stats.capture_rows),
            ("capture_missing_rows", "Requests that failed because a row was missing", stats.capture_missing_rows),
            ("resident_swaps", "Experts copied to the accelerator while serving", stats.resident_swaps),
            ("deferred_slots", "Slots of deferred host experts, added one layer late", stats.deferred_slots),
            ("host_experts_seconds", "Time of host threads on experts inside programs", stats.host_experts_s),
            (
                "resident_swap_failures",
                "Failed swaps of resident experts; the old ones stayed",
                stats.resident_failures,
            ),
            ("compile_cache_hits", "Programs read from the compilation cache by this process", compiles.cache_hits),
        )
        yield from _placement(stats.placement)
        yield from _speculative(stats.speculative, None if self._compat is None else self._compat.compat)
        if stats.order_lag:
            text = "Orders that a follower has not reported as done; it reports once a second"
            lag = {str(rank): orders for rank, orders in stats.order_lag.items()}
            yield _by_label(GaugeMetricFamily, "order_lag", text, "rank", lag)
        hits = {str(layer): ratio for layer, ratio in stats.resident_hits.items()}
        text = "Fraction of a MoE layer's slots computed on the accelerator, with experts on the host"
        yield _by_label(GaugeMetricFamily, "resident_hit_ratio", text, "layer", hits)
        programs = {"startup": compiles.startup, "serving": compiles.serving}
        yield _by_label(CounterMetricFamily, "compilations", "Programs compiled by this process", "phase", programs)
        phases = {phase.name: phase.seconds for phase in self._engine.phases}
        yield _by_label(GaugeMetricFamily, "startup_seconds", "Time of start-up by phase", "phase", phases)
        version = {stats.weight_version: 1}
        yield _by_label(
            GaugeMetricFamily, "weight_version_info", "Label of the served weights", "weight_version", version
        )
        if self._compat is not None:
            yield from self._compat.collect(
                stats,
                usage,
                page_size=self._engine.server_args.page_size,
                context_length=self._context_length,
            )


class _CompatMetrics:
    """Metrics under the names of vLLM or SGLang, each with the label `model_name`, as their dashboards select them.

    A histogram of what only streams show has streamed requests alone. `vllm:iteration_tokens_total` and
    `vllm:request_num_preemptions` have a sum and a count, and one bucket."""

    def __init__(self, compat: Literal["vllm", "sglang"], model_name: str, registry: CollectorRegistry) -> None:
        self.compat: Literal["vllm", "sglang"] = compat
        self._model_name = model_name
        self._prompt_tokens = self._generated_tokens = self._cached_tokens = 0
        self._requests = 0

        def histogram(name: str, buckets: Sequence[float]) -> Histogram:
            family = Histogram(f"{compat}:{name}", _SAME, ["model_name"], buckets=buckets, registry=registry)
            return family.labels(model_name)

        self._first, self._total, self._between = (
            histogram(name, _SECONDS)
            for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "inter_token_latency_seconds")
        )
        self._of_vllm: dict[str, Histogram] = {}
        if compat == "vllm":
            self._of_vllm = {name: histogram(name, _TOKENS) for name in _REQUEST_TOKENS}
            self._of_vllm |= {name: histogram(name, _SECONDS) for name in _REQUEST_SECONDS}

    def finished(self, request: FinishedRequest) -> None:
        """Count a finished sequence."""
        self._requests += 1
        self._prompt_tokens += request.prompt_tokens
        self._generated_tokens += request.completion_tokens
        self._cached_tokens += request.cached_tokens
        self._total.observe(request.total_s)
        if request.first_token_s is not None:
            self._first.observe(request.first_token_s)
            if request.completion_tokens > 1:
                self._between.observe((request.total_s - request.first_token_s) / (request.completion_tokens - 1))
        values: dict[str, float] = {
            "request_prompt_tokens": request.prompt_tokens,
            "request_generation_tokens": request.completion_tokens,
            "request_params_max_tokens": request.max_tokens,
            "request_params_n": request.n,
        }
        if request.queue_s is not None:
            values |= {
                "request_queue_time_seconds": request.queue_s,
                "request_inference_time_seconds": request.total_s - request.queue_s,
            }
            if request.first_token_s is not None:
                values["request_prefill_time_seconds"] = request.first_token_s - request.queue_s
                values["request_decode_time_seconds"] = request.total_s - request.first_token_s
        for name, metric in self._of_vllm.items():
            if name in values:
                metric.observe(max(0.0, values[name]))

    def collect(self, stats: EngineStats, usage: float, *, page_size: int, context_length: int) -> Iterator[Metric]:
        """The engine's counts. `usage`: fraction of KV pages that running requests hold."""
        num_tokens = stats.total_pages * page_size
        if self.compat == "sglang":
            used = stats.total_pages - stats.free_pages - stats.cached_pages
            yield from self._gauges(
                num_running_reqs=stats.running,
                num_queue_reqs=stats.waiting,
                token_usage=usage,
                num_used_tokens=used * page_size,
                max_total_num_tokens=num_tokens,
                cache_hit_rate=self._cached_tokens / max(1, self._prompt_tokens),
            )
            yield from self._counters(
                prompt_tokens=self._prompt_tokens,
                generation_tokens=self._generated_tokens,
                cached_tokens=self._cached_tokens,
                num_requests=self._requests,
            )
            return
        yield from self._gauges(
            num_requests_running=stats.running, num_requests_waiting=stats.waiting, kv_cache_usage_perc=usage
        )
        yield from self._counters(
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generated_tokens,
            prefix_cache_queries=self._prompt_tokens,
            prefix_cache_hits=self._cached_tokens,
            num_preemptions=stats.preemptions,
            admission_rejections=stats.finished.get("rejected", 0),
        )
        ended = {reason: stats.finished.get(reason, 0) for reason in ("stop", "length", "abort")}
        yield self._by_label(CounterMetricFamily, "request_success", "finished_reason", ended)
        yield self._by_label(GaugeMetricFamily, "num_requests_waiting_by_reason", "reason", {"capacity": stats.waiting})
        tokens = self._prompt_tokens + self._generated_tokens
        yield self._sum_and_count("iteration_tokens_total", tokens, stats.num_steps)
        yield self._sum_and_count("request_num_preemptions", stats.preemptions, self._requests)
        config = {
            "block_size": page_size,
            "num_gpu_blocks": stats.total_pages,
            "kv_cache_size_tokens": num_tokens,
            "kv_cache_max_concurrency": round(num_tokens / context_length, 2),
        }
        family = GaugeMetricFamily("vllm:cache_config_info", _SAME, labels=["model_name", *config])
        family.add_metric([self._model_name, *(str(value) for value in config.values())], 1.0)
        yield family

    def _gauges(self, **values: float) -> Iterator[Metric]:
        for name, value in values.items():
            yield self._by_label(GaugeMetricFamily, name, None, {"": value})

    def _counters(self, **values: float) -> Iterator[Metric]:
        for name, value in values.items():
            yield self._by_label(CounterMetricFamily, name, None, {"": value})

    def _by_label(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        label: str | None,
        values: Mapping[str, float],
    ) -> Metric:
        metric = family(f"{self.compat}:{name}", _SAME, labels=["model_name", *([] if label is None else [label])])
        for value_label, value in values.items():
            metric.add_metric([self._model_name, *([] if label is None else [value_label])], float(value))
        return metric

    def _sum_and_count(self, name: str, total: float, count: int) -> Metric:
        metric = HistogramMetricFamily(f"{self.compat}:{name}", _SAME, labels=["model_name"])
        metric.add_metric([self._model_name], buckets=[("+Inf", count)], sum_value=float(total))
        return metric


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
            yield _by_label(GaugeMetricFamily, name, text, "layer", by_layer)
        if self._each_expert:
            family = CounterMetricFamily(f"{_PREFIX}_expert_tokens", "Slots of each expert", labels=["layer", "expert"])
            for layer, counts in zip(layers, load.tolist(), strict=True):
                for expert, count in enumerate(counts):
                    family.add_metric([layer, str(expert)], count)
            yield family


def _placement(stats: PlacementStats | None) -> Iterator[Metric]:
    """Return the metrics of a live expert placement."""
    if stats is None:
        return
    yield from _balance(stats)
    yield from _plan_check(stats)
    yield from _gauges(("placement_epoch", "Epoch of the placement that runs, as its plan names it", stats.epoch))
    rerouted = "Slots that a capacity moved to an expert outside their token's K best"
    yield from _counters(
        ("eplb_rebalances", "Plans that were applied", stats.rebalances),
        ("eplb_skipped", "Plans whose copies cost more than they gain", stats.skipped),
        ("eplb_failed", "Plans or moves that failed", stats.failed),
        ("expert_copies", "Expert instances copied from another device", stats.copies),
        ("rerouted_slots", rerouted, stats.rerouted_slots),
        ("dropped_slots", "Slots that a capacity left without an expert", stats.dropped_slots),
    )


def _speculative(totals: SpeculativeTotals | None, compat: Compat) -> Iterator[Metric]:
    """Return the metrics of speculative decoding; with `compat` also under the other server's names."""
    if totals is None:
        return
    requests = totals.requests
    counts = (
        ("spec_decode_num_drafts", "Drafts that requests verified", requests.verify_steps),
        ("spec_decode_num_draft_tokens", "Tokens of these drafts", requests.proposed),
        ("spec_decode_num_accepted_tokens", "Tokens of drafts that were accepted and kept", requests.accepted),
    )
    yield from _counters(*counts, ("spec_decode_verify_steps", "Steps that verified drafts", totals.steps))
    text = "Accepted tokens by index in their draft"
    by_index = {str(index): count for index, count in sorted(totals.accepted_at.items())}
    name = "spec_decode_num_accepted_tokens_per_pos"
    yield _by_label(CounterMetricFamily, name, text, "position", by_index)
    for what, by_source in (("draft", totals.proposed_by), ("accepted", totals.accepted_by)):
        text = f"{what.capitalize()} tokens by the text that they were copied from"
        name_by_source = f"spec_decode_{what}_tokens_by_source"
        yield _by_label(CounterMetricFamily, name_by_source, text, "source", dict(by_source))
    text = "Proposals that were not made, by reason"
    yield _by_label(CounterMetricFamily, "spec_decode_skipped", text, "reason", dict(totals.skipped))
    gauges = (
        ("spec_accept_length", "Tokens that a request gained in a verify step, mean", requests.accept_length),
        ("spec_accept_rate", "Accepted over proposed tokens of drafts", requests.accept_rate),
    )
    yield from _gauges(
        *gauges,
        ("spec_decode_draft_seconds", "Time spent in the drafter", totals.draft_s),
        ("spec_decode_store_bytes", "Host memory of the drafter", totals.store_bytes),
    )
    same = "The same value under the name of the other server"
    if compat == "vllm":
        for counter, _, value in counts:
            yield CounterMetricFamily(f"vllm:{counter}", same, value=float(value))
        family = CounterMetricFamily(f"vllm:{name}", same, labels=["position"])
        for index, count in by_index.items():
            family.add_metric([index], float(count))
        yield family
    if compat == "sglang":
        for gauge, _, value in gauges:
            yield GaugeMetricFamily(f"sglang:{gauge}", same, value=float(value))


def _balance(stats: PlacementStats) -> Iterator[Metric]:
    """Return how evenly devices were loaded in the last steps."""
    mean = {str(steps): balance.balancedness for steps, balance in stats.balance.items()}
    text = "Mean over layers of mean over largest device load, in the last steps"
    yield _by_label(GaugeMetricFamily, "eplb_balancedness", text, "window", mean)
    weighted = {str(steps): balance.weighted for steps, balance in stats.balance.items()}
    text = "Mean over largest device load, summed over layers, in the last steps"
    yield _by_label(GaugeMetricFamily, "eplb_balancedness_weighted", text, "window", weighted)
    if stats.balance:
        longest = stats.balance[max(stats.balance)].max_over_mean.tolist()
        text = "Largest over mean device load of a layer, in the longest window"
        by_layer = {str(layer): ratio for layer, ratio in zip(stats.layer_ids, longest, strict=True)}
        yield _by_label(GaugeMetricFamily, "device_load_max_over_mean", text, "layer", by_layer)


def _plan_check(stats: PlacementStats) -> Iterator[Metric]:
    """Return the estimate of the last plan, once there was one."""
    if (estimate := stats.move_estimate) is None:
        return
    yield from _gauges(
        ("eplb_gate_gain_seconds", "Time that the last plan would have saved in its window", estimate.gain_s),
        ("eplb_gate_cost_seconds", "Time that the copies of the last plan take", estimate.cost_s),
        ("eplb_gate_copies", "Expert instances that the last plan copies", estimate.copies),
        ("eplb_gate_worth", "Whether the last plan gains more than it costs", estimate.pays_off),
    )
    balanced = {"now": estimate.balancedness_now, "new": estimate.balancedness_new}
    text = "Weighted balancedness of the last window, with the present placement and with the last plan"
    yield _by_label(GaugeMetricFamily, "eplb_gate_balancedness", text, "placement", balanced)
    if stats.last_move_s is not None:
        text = "Time of the last move, with the steps between its layers"
        yield from _gauges(("eplb_last_move_seconds", text, stats.last_move_s))


def _kv_pages(stats: EngineStats) -> Iterator[Metric]:
    """KV pages, and with data ranks what each rank feeds."""
    text = "KV pages by state"
    if not stats.data_ranks:
        yield _by_label(GaugeMetricFamily, "kv_pages", text, "state", _pages(stats))
        return
    pages = GaugeMetricFamily(f"{_PREFIX}_kv_pages", f"{text} of each data rank", labels=("rank", "state"))
    for number, rank in enumerate(stats.data_ranks):
        for state, count in _pages(rank).items():
            pages.add_metric((str(number), state), count)
    yield pages
    tokens = {str(number): rank.tokens for number, rank in enumerate(stats.data_ranks)}
    yield _by_label(CounterMetricFamily, "dp_tokens", "Tokens that each data rank has fed", "rank", tokens)
    ratio = "Tokens of the last step with padding over those without, of all data ranks"
    yield from _gauges(("dp_padding_ratio", ratio, stats.padding_ratio))


def _pages(stats: EngineStats | DataRankStats) -> dict[str, int]:
    active = stats.total_pages - stats.free_pages - stats.cached_pages
    return {"free": stats.free_pages, "cached": stats.cached_pages, "active": active}


def _gauges(*metrics: tuple[str, str, float]) -> Iterator[Metric]:
    for name, text, value in metrics:
        yield GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=float(value))


def _counters(*metrics: tuple[str, str, float]) -> Iterator[Metric]:
    for name, text, value in metrics:
        yield CounterMetricFamily(f"{_PREFIX}_{name}", text, value=float(value))


def _by_label(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    metric = family(f"{_PREFIX}_{name}", text, labels=[label])
    for value_label, value in values.items():
        metric.add_metric([value_label], float(value))
    return metric
