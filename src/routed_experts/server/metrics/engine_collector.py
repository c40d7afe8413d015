"""EngineCollector: the engine's counts at the moment of a scrape, with those of drafts and of expert placement."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from routed_experts.core.speculative_stats import SpeculativeTotals
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.engine.control.stats import DataRankStats, EngineStats, PlacementStats
from routed_experts.server.metrics.compat_metrics import Compat, CompatMetrics
from routed_experts.server.metrics.families import PREFIX, by_label, counters, gauges
from routed_experts.server.routing_store import RoutingStore

_OUTCOMES = ("stop", "length", "abort", "timeout", "rejected", "error")


class EngineCollector(Collector):
    """The engine's counts at the moment of the scrape."""

    def __init__(self, engine: AsyncEngine, store: RoutingStore, compat: "CompatMetrics | None") -> None:
        self._engine, self._store, self._compat = engine.engine, store, compat
        self._context_length = engine.context_length

    def collect(self) -> Iterator[Metric]:
        stats, compiles = self._engine.stats(), self._engine.compiles
        usage = 1.0 - (stats.free_pages + stats.cached_pages) / stats.total_pages
        host_bytes = stats.capture_host_bytes + self._store.nbytes
        yield from gauges(
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
        yield from counters(("requests_accepted", "Accepted sequences", stats.accepted))
        finished = {outcome: stats.finished.get(outcome, 0) for outcome in _OUTCOMES}
        yield by_label(CounterMetricFamily, "requests_finished", "Finished sequences", "outcome", finished)
        yield from counters(
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
            yield by_label(GaugeMetricFamily, "order_lag", text, "rank", lag)
        hits = {str(layer): ratio for layer, ratio in stats.resident_hits.items()}
        text = "Fraction of a MoE layer's slots computed on the accelerator, with experts on the host"
        yield by_label(GaugeMetricFamily, "resident_hit_ratio", text, "layer", hits)
        programs = {"startup": compiles.startup, "serving": compiles.serving}
        yield by_label(CounterMetricFamily, "compilations", "Programs compiled by this process", "phase", programs)
        phases = {phase.name: phase.seconds for phase in self._engine.phases}
        yield by_label(GaugeMetricFamily, "startup_seconds", "Time of start-up by phase", "phase", phases)
        version = {stats.weight_version: 1}
        yield by_label(
            GaugeMetricFamily, "weight_version_info", "Label of the served weights", "weight_version", version
        )
        if self._compat is not None:
            yield from self._compat.collect(
                stats,
                usage,
                page_size=self._engine.server_args.page_size,
                context_length=self._context_length,
            )


def _kv_pages(stats: EngineStats) -> Iterator[Metric]:
    """KV pages, and with data ranks what each rank feeds."""
    text = "KV pages by state"
    if not stats.data_ranks:
        yield by_label(GaugeMetricFamily, "kv_pages", text, "state", _pages(stats))
        return
    pages = GaugeMetricFamily(f"{PREFIX}_kv_pages", f"{text} of each data rank", labels=("rank", "state"))
    for number, rank in enumerate(stats.data_ranks):
        for state, count in _pages(rank).items():
            pages.add_metric((str(number), state), count)
    yield pages
    tokens = {str(number): rank.tokens for number, rank in enumerate(stats.data_ranks)}
    yield by_label(CounterMetricFamily, "dp_tokens", "Tokens that each data rank has fed", "rank", tokens)
    ratio = "Tokens of the last step with padding over those without, of all data ranks"
    yield from gauges(("dp_padding_ratio", ratio, stats.padding_ratio))


def _pages(stats: EngineStats | DataRankStats) -> dict[str, int]:
    active = stats.total_pages - stats.free_pages - stats.cached_pages
    return {"free": stats.free_pages, "cached": stats.cached_pages, "active": active}


def _placement(stats: PlacementStats | None) -> Iterator[Metric]:
    """Return the metrics of a live expert placement."""
    if stats is None:
        return
    yield from _balance(stats)
    yield from _plan_check(stats)
    yield from gauges(("placement_epoch", "Epoch of the placement that runs, as its plan names it", stats.epoch))
    rerouted = "Slots that a capacity moved to an expert outside their token's K best"
    yield from counters(
        ("eplb_rebalances", "Plans that were applied", stats.rebalances),
        ("eplb_skipped", "Plans whose copies cost more than they gain", stats.skipped),
        ("eplb_failed", "Plans or moves that failed", stats.failed),
        ("expert_copies", "Expert instances copied from another device", stats.copies),
        ("rerouted_slots", rerouted, stats.rerouted_slots),
        ("dropped_slots", "Slots that a capacity left without an expert", stats.dropped_slots),
    )


def _balance(stats: PlacementStats) -> Iterator[Metric]:
    """Return how evenly devices were loaded in the last steps."""
    mean = {str(steps): balance.balancedness for steps, balance in stats.balance.items()}
    text = "Mean over layers of mean over largest device load, in the last steps"
    yield by_label(GaugeMetricFamily, "eplb_balancedness", text, "window", mean)
    weighted = {str(steps): balance.weighted for steps, balance in stats.balance.items()}
    text = "Mean over largest device load, summed over layers, in the last steps"
    yield by_label(GaugeMetricFamily, "eplb_balancedness_weighted", text, "window", weighted)
    if stats.balance:
        longest = stats.balance[max(stats.balance)].max_over_mean.tolist()
        text = "Largest over mean device load of a layer, in the longest window"
        by_layer = {str(layer): ratio for layer, ratio in zip(stats.layer_ids, longest, strict=True)}
        yield by_label(GaugeMetricFamily, "device_load_max_over_mean", text, "layer", by_layer)


def _plan_check(stats: PlacementStats) -> Iterator[Metric]:
    """Return the estimate of the last plan, once there was one."""
    if (estimate := stats.move_estimate) is None:
        return
    yield from gauges(
        ("eplb_gate_gain_seconds", "Time that the last plan would have saved in its window", estimate.gain_s),
        ("eplb_gate_cost_seconds", "Time that the copies of the last plan take", estimate.cost_s),
        ("eplb_gate_copies", "Expert instances that the last plan copies", estimate.copies),
        ("eplb_gate_worth", "Whether the last plan gains more than it costs", estimate.pays_off),
    )
    balanced = {"now": estimate.balancedness_now, "new": estimate.balancedness_new}
    text = "Weighted balancedness of the last window, with the present placement and with the last plan"
    yield by_label(GaugeMetricFamily, "eplb_gate_balancedness", text, "placement", balanced)
    if stats.last_move_s is not None:
        text = "Time of the last move, with the steps between its layers"
        yield from gauges(("eplb_last_move_seconds", text, stats.last_move_s))


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
    yield from counters(*counts, ("spec_decode_verify_steps", "Steps that verified drafts", totals.steps))
    text = "Accepted tokens by index in their draft"
    by_index = {str(index): count for index, count in sorted(totals.accepted_at.items())}
    name = "spec_decode_num_accepted_tokens_per_pos"
    yield by_label(CounterMetricFamily, name, text, "position", by_index)
    for what, by_source in (("draft", totals.proposed_by), ("accepted", totals.accepted_by)):
        text = f"{what.capitalize()} tokens by the text that they were copied from"
        name_by_source = f"spec_decode_{what}_tokens_by_source"
        yield by_label(CounterMetricFamily, name_by_source, text, "source", dict(by_source))
    text = "Proposals that were not made, by reason"
    yield by_label(CounterMetricFamily, "spec_decode_skipped", text, "reason", dict(totals.skipped))
    rates = (
        ("spec_accept_length", "Tokens that a request gained in a verify step, mean", requests.accept_length),
        ("spec_accept_rate", "Accepted over proposed tokens of drafts", requests.accept_rate),
    )
    yield from gauges(
        *rates,
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
        for gauge, _, value in rates:
            yield GaugeMetricFamily(f"sglang:{gauge}", same, value=float(value))
