"""EngineStats: how an engine is at a moment: counts of requests, steps, pages and rows. Knows nothing of who asks.

Read beside the engine's thread, which is not asked: a probe is answered while a step is stuck."""

import dataclasses
import time
from collections.abc import Mapping
from types import MappingProxyType

from routed_experts.engine.build.builder import EngineComponents
from routed_experts.engine.control.placement_stats import PlacementStats
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.execution.replicated_expert_runner import ReplicatedExpertRunner


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts of one moment, since the engine started where they are of what has been; some may be a step apart from
    others. `last_step_age_s`: seconds since a step ended, or since work came to an idle engine; 0 when idle.
    `finished`: by outcome. Pages hold `page_size` tokens; cached ones belong to no request and are given up when pages
    run short."""

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
    weight_version: int
    resident_hits: Mapping[int, float]  # by MoE layer, where experts are shared out with the host
    resident_swaps: int
    deferred_slots: int  # whose experts came a layer late
    host_experts_s: float  # that threads of the host ran experts inside programs
    resident_failures: int  # exchanges of residents that failed; those that were there stayed
    placement: PlacementStats | None  # None: experts are not placed


def engine_stats(assembly: EngineComponents) -> EngineStats:
    """The counts of an engine's parts, from any thread."""
    core = assembly.core
    allocator = core.scheduler.pages.allocator
    split = core.runner if isinstance(core.runner, OffloadRunner) else None
    host = None if split is None else split.host_counts()
    return EngineStats(
        running=len(core.scheduler.running),
        waiting=len(core.scheduler.waiting),
        accepted=core.request_table.accepted,
        finished=MappingProxyType(dict(core.request_table.finished)),
        num_steps=core.num_steps,
        last_step_age_s=0.0 if core.request_table.num_live == 0 else time.monotonic() - core.last_progress,
        free_pages=allocator.num_free,
        cached_pages=core.scheduler.pages.cache.num_evictable,
        total_pages=allocator.num_total,
        preemptions=core.scheduler.num_retracted,
        capture_host_bytes=core.capturer.host_bytes(),
        capture_rows=core.num_rows,
        capture_missing_rows=core.num_missing_rows,
        weight_version=core.runner.weight_version,
        resident_hits=MappingProxyType({} if host is None else dict(host.hits)),
        deferred_slots=0 if host is None else host.deferred,
        host_experts_s=0.0 if host is None else host.busy_s,
        resident_swaps=0 if split is None else split.num_swapped,
        resident_failures=0 if split is None else split.num_failed,
        placement=PlacementStats.of(assembly, core.runner) if isinstance(core.runner, ReplicatedExpertRunner) else None,
    )
