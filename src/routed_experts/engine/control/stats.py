"""EngineStats: counts of requests, steps, pages and rows of an engine at one moment.

They are read beside the engine thread, so a probe is answered while a step hangs."""

import dataclasses
import time
from collections.abc import Mapping
from types import MappingProxyType

from routed_experts.core.speculative_stats import SpeculativeTotals
from routed_experts.engine.control.components import EngineComponents
from routed_experts.engine.control.expert_load_monitor import DeviceBalance
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.execution.replicated_expert_runner import ReplicatedExpertRunner
from routed_experts.placement.cost_model import MoveEstimate
from routed_experts.scheduling.scheduler import Scheduler


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacementStats:
    """Placement of experts since the engine's start.

    `rebalances`: plans that moved experts; `skipped`: plans not worth their cost; `failed`: plans or moves that ended
    in an error; `copies`: instances that came from another device, by any move; `rerouted_slots`, `dropped_slots`: see
    ReroutingCounts. `balance`: by window of steps, without the last ten to twenty. `move_estimate`: of the last plan;
    `last_move_s`: seconds that the last move took, with the steps between its layers."""

    epoch: int
    rebalances: int = 0
    skipped: int = 0
    failed: int = 0
    copies: int = 0
    rerouted_slots: int = 0
    dropped_slots: int = 0
    balance: Mapping[int, DeviceBalance] = dataclasses.field(default_factory=dict[int, DeviceBalance])
    layer_ids: tuple[int, ...] = ()  # hidden layers of a DeviceBalance
    move_estimate: MoveEstimate | None = None
    last_move_s: float | None = None


def placement_stats(components: EngineComponents, runner: ReplicatedExpertRunner) -> PlacementStats:
    """The present counts of a placement, from any thread."""
    rebalancer, rerouting, monitor = components.rebalancer, components.core.rerouting, components.load_monitor
    spec = components.served.config.capture_spec
    stats = PlacementStats(epoch=runner.placement.epoch, copies=runner.num_copied)
    if rebalancer is not None:
        stats = dataclasses.replace(
            stats,
            rebalances=rebalancer.num_rebalanced,
            skipped=rebalancer.num_skipped,
            failed=rebalancer.num_failed,
            move_estimate=rebalancer.move_estimate,
            last_move_s=rebalancer.last_move_s,
        )
    if monitor is not None and spec is not None:
        stats = dataclasses.replace(stats, balance=monitor.balance(), layer_ids=tuple(spec.layer_ids))
    return stats if rerouting is None else dataclasses.replace(stats, **dataclasses.asdict(rerouting.total))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataRankStats:
    """Counts of one data rank. `tokens`: that it has fed since the start."""

    running: int
    waiting: int
    tokens: int
    free_pages: int
    cached_pages: int
    total_pages: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts of one moment; totals are since the engine started. Some may be a step apart from others.

    `last_step_age_s`: seconds since a step, a pause or an update ended, or since work arrived at an idle engine; 0 when
    idle, and while admission is held and no request has started. `finished`: by outcome. Pages hold `page_size` tokens;
    cached pages belong to no request and are evicted when pages run short."""

    running: int
    waiting: int
    accepted: int
    finished: Mapping[str, int]
    num_steps: int
    last_step_age_s: float
    free_pages: int
    cached_pages: int
    total_pages: int
    preemptions: int
    capture_host_bytes: int
    capture_rows: int
    capture_missing_rows: int
    weight_version: str  # label of the served weights
    update_count: int  # updates of the weights or of their label
    resident_hits: Mapping[int, float]  # by MoE layer, with experts on the host
    resident_swaps: int
    deferred_slots: int  # slots of deferred experts, added one layer late
    host_experts_s: float  # seconds in which host threads ran experts
    resident_failures: int  # swaps of residents that failed and left the old ones
    placement: PlacementStats | None  # None: experts are not placed
    speculative: SpeculativeTotals | None  # None: nothing is drafted
    order_lag: Mapping[int, int]  # orders that each follower of a process group has not done yet, by rank
    data_ranks: tuple[DataRankStats, ...] = ()  # empty: there is one, of which these are the counts
    padding_ratio: float = 1.0  # of data ranks: tokens of the last step, with padding over without


def engine_stats(components: EngineComponents) -> EngineStats:
    """The present counts of an engine, from any thread."""
    core = components.core
    ranks = [_rank_stats(scheduler, tokens) for scheduler, tokens in zip(core.ranks, core.rank_tokens, strict=True)]
    split = core.runner if isinstance(core.runner, OffloadRunner) else None
    host = None if split is None else split.offload_stats()
    group = components.group
    return EngineStats(
        running=sum(rank.running for rank in ranks),
        waiting=sum(rank.waiting for rank in ranks),
        accepted=core.request_table.accepted,
        finished=MappingProxyType(dict(core.request_table.finished)),
        num_steps=core.num_steps,
        last_step_age_s=time.monotonic() - core.last_progress if core.has_admitted_requests else 0.0,
        free_pages=sum(rank.free_pages for rank in ranks),
        cached_pages=sum(rank.cached_pages for rank in ranks),
        total_pages=sum(rank.total_pages for rank in ranks),
        preemptions=sum(scheduler.num_retracted for scheduler in core.ranks),
        capture_host_bytes=sum(capturer.host_bytes() for capturer in core.capturers),
        capture_rows=core.num_rows,
        capture_missing_rows=core.num_requests_missing_rows,
        weight_version=core.weight_version.label,
        update_count=core.weight_version.update_count,
        resident_hits=MappingProxyType({} if host is None else dict(host.hits)),
        deferred_slots=0 if host is None else host.deferred,
        host_experts_s=0.0 if host is None else host.busy_s,
        resident_swaps=0 if split is None else split.num_swapped,
        resident_failures=0 if split is None else split.num_failed,
        placement=placement_stats(components, core.runner) if isinstance(core.runner, ReplicatedExpertRunner) else None,
        speculative=None if core.speculation is None else core.speculation.totals.copy(),
        order_lag=MappingProxyType({} if group is None else group.order_lag()),
        data_ranks=tuple(ranks) if len(ranks) > 1 else (),
        padding_ratio=core.padding_ratio,
    )


def _rank_stats(scheduler: Scheduler, tokens: int) -> DataRankStats:
    """The present counts of a data rank."""
    pages = scheduler.pages
    return DataRankStats(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        tokens=tokens,
        free_pages=pages.allocator.num_free,
        cached_pages=pages.cache.num_evictable,
        total_pages=pages.allocator.num_total,
    )
