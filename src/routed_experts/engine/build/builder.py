"""Put an engine together: from ServerArgs and a model to a core that is ready to step, or to a follower's runner."""

import dataclasses
import functools
from collections.abc import Callable

from routed_experts.capture.routed_experts_capturer import RoutedExpertsCapturer
from routed_experts.core.buckets import Buckets
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.core.placement_config import PlacementConfig
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.engine.build.backends import DEFAULT_BACKENDS, BackendRegistry
from routed_experts.engine.build.drafting import create_speculation
from routed_experts.engine.build.runner_builder import build_runner
from routed_experts.engine.build.self_check import check_determinism, check_replay
from routed_experts.engine.build.startup_phases import PhaseClock
from routed_experts.engine.control.components import EngineComponents
from routed_experts.engine.control.expert_load_monitor import ExpertLoadMonitor
from routed_experts.engine.control.expert_offload import ExpertOffload
from routed_experts.engine.control.rebalancer import Rebalancer
from routed_experts.engine.control.score import Scorer
from routed_experts.engine.control.served_model import (
    ServedModel,
)
from routed_experts.engine.group.process_group import AnyGroup, FollowingGroup, LeadingGroup
from routed_experts.engine.loop.core import EngineCore
from routed_experts.engine.loop.rerouting_stats import ReroutingStats
from routed_experts.engine.loop.speculation import Speculation
from routed_experts.execution.memory_demand import format_size
from routed_experts.execution.model_runner import ModelRunner
from routed_experts.execution.replicated_expert_runner import ReplicatedExpertRunner
from routed_experts.models.base.interface import Decoder
from routed_experts.scheduling.data_ranks import DataRanks
from routed_experts.scheduling.scheduler import Scheduler

_ANY_NUMBER = 1 << 30  # requests that may wait where none are of a user


def build_engine(
    args: ServerArgs,
    *,
    model: Decoder | None = None,
    registry: BackendRegistry = DEFAULT_BACKENDS,
    clock: PhaseClock | None = None,
    load_format: str = "auto",
    on_load: Callable[[int, int], None] | None = None,
    experts: ExpertOffloadConfig | None = None,
    placement: PlacementConfig | None = None,
    speculative: SpeculativeConfig | None = None,
    self_check: bool = False,
    group: AnyGroup | None = None,
) -> EngineComponents:
    """Load (random weights with `load_format` "dummy"), plan, allocate and compile. `args.model_path` is a local
    folder, as `with_local_model` returns it. `on_load` is called with (bytes loaded, total bytes); `experts` may
    offload experts to the host, `placement` places them on devices, `speculative` drafts tokens; `self_check` replays
    captured rows; `group`: the other processes of the engine, which `build_follower` builds. Raises ConfigError,
    CheckpointError or CaptureUnsupportedError."""
    clock = clock or PhaseClock(None)
    built = build_runner(
        args,
        model=model,
        registry=registry,
        clock=clock,
        load_format=load_format,
        on_load=on_load,
        experts=experts,
        placement=placement,
        speculative=speculative,
        group=group,
    )
    args, runner, plan, buckets, config = built.args, built.runner, built.plan, built.buckets, built.config
    if isinstance(group, LeadingGroup):
        runner.orders = group
    watch, rebalancer = load_balancers = _create_load_balancers(runner, placement)
    parts = buckets, runner, built.capture, built.offload, load_balancers
    unlimited = dataclasses.replace(args, max_queued_requests=_ANY_NUMBER)  # a check fills batches in one call
    new_core = functools.partial(_new_core, unlimited, *parts)
    speculation = None
    if speculative is not None:
        sizes_of_pool = {"request": built.context_length, "total": (plan.pool.num_pages - 1) * args.page_size}
        speculation = create_speculation(speculative, new_core, buckets, config.vocab_size, **sizes_of_pool)
        by = speculative.algorithm if built.draft is None else f"{speculative.algorithm}, {built.draft.description}"
        more = f"{runner.num_draft_programs} programs and {format_size(plan.of_drafts).strip()} more than without"
        clock.done("calibrate", f"{by}, up to {speculative.num_drafts} drafts a request, {more}")
    core = _new_core(args, *parts, speculation)
    sizes_of_check = {"vocab_size": config.vocab_size, "context_length": built.context_length}
    if args.deterministic:
        kernels, attention = runner.spec.kernels, runner.spec.attention
        names = f"moe_backend={kernels.moe.name!r} and attention_backend={attention.name!r}"
        compared = check_determinism(new_core, backends=names, **sizes_of_check)
        clock.done("self-check", f"{compared} sequences, run alone and batched, bitwise equal")
    if self_check and built.capture is not None and built.offload is None:
        rows = check_replay(new_core, Scorer(args, buckets, runner, lambda start: start()), **sizes_of_check)
        clock.done("self-check", f"{rows} rows captured, and those that were played back are those that ran")
    _reset_balancers(load_balancers)
    return EngineComponents(
        core=core,
        plan=plan,
        buckets=buckets,
        context_length=built.context_length,
        capture=built.capture,
        vocab_size=config.vocab_size,
        prefix_cache=not args.disable_radix_cache,
        served=built.served,
        rebalancer=rebalancer,
        load_monitor=watch,
        group=group if isinstance(group, LeadingGroup) else None,
    )


def build_follower(
    args: ServerArgs,
    group: FollowingGroup,
    *,
    registry: BackendRegistry = DEFAULT_BACKENDS,
    clock: PhaseClock | None = None,
    load_format: str = "auto",
    on_load: Callable[[int, int], None] | None = None,
    placement: PlacementConfig | None = None,
    speculative: SpeculativeConfig | None = None,
) -> tuple[ModelRunner, ServedModel]:
    """Load, allocate and compile this process's part of the engine that process 0 builds with the same arguments."""
    built = build_runner(
        args,
        model=None,
        registry=registry,
        clock=clock or PhaseClock(None),
        load_format=load_format,
        on_load=on_load,
        experts=None,
        placement=placement,
        speculative=speculative,
        group=group,
    )
    return built.runner, built.served


def _create_load_balancers(
    runner: ModelRunner, placement: PlacementConfig | None
) -> tuple[ExpertLoadMonitor | None, Rebalancer | None]:
    """Create the load monitor of placed experts, and the rebalancer where the placement asks for one. Raises what
    planning for this placement would."""
    if placement is None or not isinstance(runner, ReplicatedExpertRunner):
        return None, None
    watch, spec = ExpertLoadMonitor(runner), runner.spec.count_spec
    assert spec is not None, "placed experts are counted"
    return watch, Rebalancer(placement, runner, watch, top_k=spec.top_k) if placement.rebalance_every else None


def _reset_balancers(load_balancers: tuple[ExpertLoadMonitor | None, Rebalancer | None]) -> None:
    """Discard the load of the self-checks."""
    for balancer in load_balancers:
        if balancer is not None:
            balancer.restart()


def _new_core(
    args: ServerArgs,
    buckets: Buckets,
    runner: ModelRunner,
    capture: CaptureSpec | None,
    offload: ExpertOffload | None,
    load_balancers: tuple[ExpertLoadMonitor | None, Rebalancer | None],
    speculation: Speculation | None = None,
) -> EngineCore:
    """A core with queues, pages and rows of its own."""
    pool, enable = runner.config.pool, runner.spec.capture is not None
    has_capacities = runner.spec.kernels.group.rerouter is not None  # then a pass depends on the requests beside it
    schedulers = [
        Scheduler(
            args,
            buckets,
            num_pages=pool.num_pages,
            vocab_size=runner.config.vocab_size,
            one_pass_prefixes=has_capacities,
        )
        for _ in range(runner.num_ranks)
    ]
    capturers = [
        RoutedExpertsCapturer.create(capture, num_slots=pool.num_slots, page_size=args.page_size, enable=enable)
        for _ in schedulers
    ]
    updater = None if offload is None else offload.updater(capturers[0], runner)
    callbacks = [balancer.after_step for balancer in load_balancers if balancer is not None]

    def after_step(took_s: float) -> None:
        for callback in callbacks:
            callback(took_s)

    return EngineCore(
        DataRanks(schedulers, args),
        runner,
        capturers,
        after_step=after_step if callbacks else updater,
        rerouting=ReroutingStats(pool.num_slots) if has_capacities else None,
        speculation=speculation,
        weight_label=args.weight_version,
    )
