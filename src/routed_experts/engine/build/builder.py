"""Put an engine together: from ServerArgs and a model to a core that is ready to step.

Unsupported combinations are refused here, before weights are loaded where that is possible."""

import dataclasses
import functools
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from routed_experts.capture.routed_experts_capturer import RoutedExpertsCapturer
from routed_experts.core.buckets import Buckets
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import CaptureUnsupportedError, ConfigError, ProcessMismatchError
from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.core.placement_config import PlacementConfig, parse_fraction
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.engine.build.backends import DEFAULT_BACKENDS, BackendRegistry
from routed_experts.engine.build.draft_model import FoundDraft
from routed_experts.engine.build.drafting import check_speculation, create_speculation, find_draft
from routed_experts.engine.build.memory_planning import (
    EnginePlan,
    abstract_arrays,
    plan_engine,
    served_kv_scales,
    with_checkpoint_form,
)
from routed_experts.engine.build.self_check import check_determinism, check_replay
from routed_experts.engine.control.components import EngineComponents
from routed_experts.engine.control.expert_load_monitor import ExpertLoadMonitor
from routed_experts.engine.control.expert_offload import ExpertOffload
from routed_experts.engine.control.rebalancer import Rebalancer
from routed_experts.engine.control.score import Scorer
from routed_experts.engine.control.served_model import (
    ServedModel,
    abstract_state,
    check_processes,
    code_support,
    create_sharding,
    load_model,
    serve_codes,
)
from routed_experts.engine.loop.core import EngineCore
from routed_experts.engine.loop.rerouting_stats import ReroutingStats
from routed_experts.engine.loop.speculation import Speculation
from routed_experts.engine.process_group import AnyGroup, FollowingGroup, LeadingGroup
from routed_experts.execution.absent_tpu import skip_absent_tpu
from routed_experts.execution.aot_programs import RunnerConfig
from routed_experts.execution.drafting_runner import DraftingRunner, LoadedDraft
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.memory_plan import MemoryPlan, common_dtype
from routed_experts.execution.model_runner import ModelRunner
from routed_experts.execution.programs import ProgramSpec
from routed_experts.execution.replicated_expert_runner import ReplicatedExpertRunner
from routed_experts.execution.spmd import MeshSpecs
from routed_experts.layers.attention import AttentionBackend
from routed_experts.layers.delta_rule import DeltaShape
from routed_experts.models.base.interface import Decoder, DecoderConfig
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.decoder.fused_path import describe_path
from routed_experts.models.decoder.replica_maps import moe_groups
from routed_experts.models.model_folder import ModelFolder
from routed_experts.models.offload.offloaded_model import OffloadedModel
from routed_experts.models.sharding import ModelSharding
from routed_experts.scheduling.data_ranks import DataRanks
from routed_experts.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of start-up: what was done, how long it took, and a short result."""

    name: str
    seconds: float
    detail: str
    lines: tuple[str, ...] = ()  # further lines of a verbose report: the memory plan


class PhaseClock:
    """Times phases of start-up, without gaps."""

    def __init__(self, report: Callable[[Phase], None] | None) -> None:
        self.phases: list[Phase] = []
        self._report, self._since = report, time.perf_counter()

    def done(self, name: str, detail: str, *, lines: Sequence[str] = ()) -> None:
        """Close the phase that began when the last one was closed."""
        now = time.perf_counter()
        phase = Phase(name=name, seconds=now - self._since, detail=detail, lines=tuple(lines))
        self.phases.append(phase)
        self._since = now
        if self._report is not None:
            self._report(phase)


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
    built = _build_runner(
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
    new_core = functools.partial(_new_core, args, buckets, runner, built.capture, built.offload, load_balancers)
    speculation = None
    if speculative is not None:
        sizes_of_pool = {"request": built.context_length, "total": (plan.pool.num_pages - 1) * args.page_size}
        speculation = create_speculation(speculative, new_core, buckets, config.vocab_size, **sizes_of_pool)
        by = speculative.algorithm if built.draft is None else f"{speculative.algorithm}, {built.draft.description}"
        clock.done("calibrate", f"{by}, up to {speculative.num_drafts} drafts a request")
    core = new_core(speculation)
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
    built = _build_runner(
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _BuiltRunner:
    """What every process of an engine has, once its programs are compiled."""

    args: ServerArgs
    config: DecoderConfig
    runner: ModelRunner
    served: ServedModel
    plan: MemoryPlan
    buckets: Buckets
    context_length: int
    capture: CaptureSpec | None
    offload: ExpertOffload | None
    draft: FoundDraft | None


def _check_device(device: str) -> None:
    """Raise ConfigError unless JAX's default devices are of this kind."""
    platform = jax.default_backend()
    if device != "auto" and {"cuda": "gpu", "rocm": "gpu"}.get(device, device) != platform:
        text = f"device={device!r}, but the default devices of JAX here are of the platform {platform!r}"
        raise ConfigError(f"{text}; set JAX_PLATFORMS={device} before the start, or leave device out")


def _build_runner(
    args: ServerArgs,
    *,
    model: Decoder | None,
    registry: BackendRegistry,
    clock: PhaseClock,
    load_format: str,
    on_load: Callable[[int, int], None] | None,
    experts: ExpertOffloadConfig | None,
    placement: PlacementConfig | None,
    speculative: SpeculativeConfig | None,
    group: AnyGroup | None,
) -> _BuiltRunner:
    """Load, plan, allocate and compile; the same in every process of an engine."""
    skip_absent_tpu()
    check_processes(group)
    _check_device(args.device)
    offloads_experts = experts is not None and experts.num_resident is not None
    if args.dp_size > 1:
        _check_data_ranks(args, offloads_experts=offloads_experts, placement=placement, speculative=speculative)
    source, config = _open(args, model, load_format)
    if speculative is not None:
        check_speculation(offloads_experts=offloads_experts, placement=placement)
    draft: FoundDraft | None = None
    if speculative is not None and speculative.has_draft_model:
        draft = find_draft(speculative, source, config, args, registry, has_placement=placement is not None)
    offload = ExpertOffload.check(experts, args, config) if experts is not None and offloads_experts else None
    shards = create_sharding(args, config, placement)
    args = _disable_prefix_cache_if_recurrent(args, config)
    devices = "" if shards is None else f", on {shards.mesh.size} devices"
    clock.done("config", f"{config.num_layers} layers, trained for {config.context_length:,} tokens{devices}")
    kernels, attention = registry.choose(args, config.needs, placement_config=placement)
    _check_batch_invariant_states(args, config, attention)
    kv_scales = served_kv_scales(args, source)
    served_attention = attention.for_kv_scales() if kv_scales else attention
    codes = code_support(args, kernels, offloads_experts=offload is not None)
    source, config, shards = serve_codes(args, source, config, shards, codes, placement)
    chosen = f"{kernels.moe.name} matrices, {attention.name} attention"
    if isinstance(config, FamilyConfig) and offload is None:
        chosen = f"{chosen}; {describe_path(config, kernels, served_attention)}"
    clock.done("kernels", chosen if offload is None else f"{chosen}; {offload.summary}")
    num_drafts = 0 if speculative is None else speculative.num_drafts
    plan_memory = functools.partial(
        _plan_memory,
        clock,
        args,
        source,
        config,
        attention,
        num_drafts=num_drafts,
        draft=draft,
        group=group,
        has_kv_scales=bool(kv_scales),
    )
    planned = None if offload is not None else plan_memory(abstract_arrays(source, config, args.dtype), shards)
    served, state, offloaded = _load(source, config, args.dtype, offload, shards, on_load)
    jax.block_until_ready(state)
    loaded_draft: LoadedDraft | None = None
    if draft is not None:
        assert planned is not None, "experts on the host have no draft model"
        loaded_draft = draft.load(planned.memory.pool, common_dtype(state), (kernels, attention))
    clock.done("load", f"{sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e6:.1f} MB")
    host_bytes = 0 if offloaded is None else offloaded.host_bytes  # known once the model is split
    planned = planned or plan_memory(abstract_state(state), None, experts_host=host_bytes)
    plan, buckets, capture = planned.memory, planned.buckets, planned.capture
    mesh_specs = None if shards is None else MeshSpecs.create(shards.mesh, jax.tree.leaves(state), plan.pool)
    spec = ProgramSpec(
        graphdef=served.graphdef,
        capture=capture,
        kernels=kernels,
        attention=served_attention,
        num_pages=plan.pool.num_pages,
        raw_logprobs=args.logprobs_mode == "raw",
        mesh_specs=mesh_specs,
        count_spec=config.capture_spec if _should_count_experts(args, offload, placement) else None,
        piggyback_row_words=_piggyback_row_words(capture, one_program=mesh_specs is None and offload is None),
        num_drafts=num_drafts,
        batch_invariant=args.deterministic,
        draft_model=loaded_draft is not None,
        tapped_layers=() if loaded_draft is None else loaded_draft.tapped_layers,
        kv_scales=kv_scales,
    )
    sizes = _runner_config(args, buckets, plan, config.vocab_size)
    offload_runner = None if offload is None or offloaded is None else offload.runner(offloaded, spec, sizes)
    runner = offload_runner or _create_runner(state, spec, sizes, config, placement, loaded_draft)
    in_ranks = f" in each of {args.dp_size} data ranks" if args.dp_size > 1 else ""
    clock.done("allocate", f"{(plan.pool.num_pages - 1) * args.page_size:,} KV tokens{in_ranks}")
    num_programs = runner.compile() if group is None else _compile_together(runner, group)
    clock.done("compile", f"{num_programs} programs")
    return _BuiltRunner(
        args=args,
        config=config,
        runner=runner,
        served=served,
        plan=plan,
        buckets=buckets,
        context_length=planned.context_length,
        capture=capture,
        offload=offload,
        draft=draft,
    )


def _compile_together(runner: ModelRunner, group: AnyGroup) -> int:
    """Compile in every process, and compare what was compiled; returns the number of programs. Raises
    ProcessMismatchError naming the first program that differs."""
    digests = runner.compile_in_order()
    hashes = [digest[:12] for digest in digests]
    everything = hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]
    of_all = group.exchange("compile", everything)
    if len(set(of_all)) == 1:
        return len(digests)
    # Of two processes that differ: the lists of all would not fit into one order.
    first = next(rank for rank, theirs in enumerate(of_all) if theirs != of_all[0])
    everywhere = group.exchange("programs", hashes if group.rank in (0, first) else None)
    for rank, others in enumerate(everywhere):
        if others is None:
            continue
        wrong = [ours for ours, theirs in itertools.zip_longest(digests, others) if ours is None or ours[:12] != theirs]
        if wrong:
            text = f"process {rank} compiles another program than process {group.rank}, of {len(wrong)} the first is"
            raise ProcessMismatchError(f"{text} {wrong[0]}; install the same versions everywhere")
    return len(digests)


def _check_batch_invariant_states(args: ServerArgs, config: DecoderConfig, attention: AttentionBackend) -> None:
    """Raise ConfigError in deterministic mode for states that array code updates in chunks of a step: their last bits
    depend on where a prompt is cut."""
    shape = config.cache.recurrent
    if args.deterministic and isinstance(shape, DeltaShape) and attention.recur is None:
        text = "deterministic=True with a delta rule that runs as array code: its sums depend on where a prompt is cut"
        raise ConfigError(f"{text}; leave deterministic out")


def _check_data_ranks(
    args: ServerArgs,
    *,
    offloads_experts: bool,
    placement: PlacementConfig | None,
    speculative: SpeculativeConfig | None,
) -> None:
    """Raise ConfigError for what data ranks do not do in this version."""
    reason = None
    if offloads_experts:
        reason = "experts on the host belong to one device; leave kt_num_gpu_experts out"
    elif placement is not None and placement.capacity_limited:
        reason = "capacities are those of one batch, and each rank routes its own; choose mode='replicas'"
    elif speculative is not None:
        reason = f"speculation by {speculative.algorithm} runs without data ranks; leave speculative decoding out"
    if reason is not None:
        raise ConfigError(f"dp_size={args.dp_size}: {reason}, or set dp_size=1")


def _piggyback_row_words(capture: CaptureSpec | None, *, one_program: bool) -> int:
    """Words of a row where rows leave in the sampler's output: on CPU, where a step is one program on one device."""
    return capture.row_words if capture is not None and one_program and jax.default_backend() == "cpu" else 0


def _plan_memory(
    clock: PhaseClock,
    args: ServerArgs,
    source: ModelFolder | Decoder,
    config: DecoderConfig,
    attention: AttentionBackend,
    arrays: nnx.State[Any, Any],
    shards: ModelSharding | None,
    *,
    num_drafts: int,
    draft: FoundDraft | None,
    group: AnyGroup | None,
    has_kv_scales: bool,
    experts_host: int = 0,
) -> EnginePlan:
    """Plan memory and report it to the clock. A group has the pages of the process with the least."""
    of_draft: dict[str, Any] = {}
    if draft is not None:
        of_draft = {"draft_demand": draft.demand, "lookahead": draft.kind.lookahead(num_drafts)}
    planned = plan_engine(args, config, arrays, shards, attention, num_drafts=num_drafts, **of_draft)
    plan = dataclasses.replace(planned.memory, experts_host=experts_host, has_kv_scales=has_kv_scales)
    plan = with_checkpoint_form(plan, source, args.dtype)
    if group is not None:
        plan = plan.with_pages(min(group.exchange("plan", plan.pool.num_pages)))
    clock.done("plan", f"{plan.weights / 2**20:.1f} MiB weights, {plan.kv / 2**20:.1f} MiB KV", lines=plan.lines())
    return dataclasses.replace(planned, memory=plan)


def _create_runner(
    state: nnx.State[Any, Any],
    spec: ProgramSpec,
    sizes: RunnerConfig,
    config: DecoderConfig,
    placement: PlacementConfig | None,
    draft: LoadedDraft | None,
) -> ModelRunner:
    """Create the runner of a model whose experts are all on accelerators."""
    if draft is not None:
        return DraftingRunner(state, spec, sizes, draft)
    if placement is None or not isinstance(config, FamilyConfig):
        return ModelRunner(state, spec, sizes)
    factor = parse_fraction(placement.capacity_factor) if placement.capacity_limited else None
    return ReplicatedExpertRunner(
        state, spec, sizes, placement=placement.initial, groups=moe_groups(config), factor=factor
    )


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


def _should_count_experts(args: ServerArgs, offload: ExpertOffload | None, placement: PlacementConfig | None) -> bool:
    """Whether steps count their experts on the device: a load balancer or gauges need them."""
    if offload is not None:
        return offload.needs_counts and not args.enable_return_routed_experts
    return placement is not None


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
    sizes = {"num_pages": pool.num_pages, "vocab_size": runner.config.vocab_size}
    schedulers = [Scheduler(args, buckets, **sizes) for _ in range(runner.num_ranks)]
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
        rerouting=None if runner.spec.kernels.group.rerouter is None else ReroutingStats(pool.num_slots),
        speculation=speculation,
        weight_label=args.weight_version,
    )


def _open(args: ServerArgs, model: Decoder | None, load_format: str) -> tuple[ModelFolder | Decoder, DecoderConfig]:
    """Open the model to serve and check its config against the options."""
    if model is None and args.model_path is None:
        raise ConfigError("model_path=None and no model was given; pass the folder of a checkpoint, or model=")
    source = model or ModelFolder.open(str(args.model_path), load_format=load_format)
    config: DecoderConfig = source.config
    if args.enable_return_routed_experts and config.capture_spec is None:
        text = f"enable_return_routed_experts=True, but {args.model_path or 'this model'} has no MoE layer"
        raise CaptureUnsupportedError(f"{text}; serve it without the flag")
    return source, config


def _load(
    source: ModelFolder | Decoder,
    config: DecoderConfig,
    dtype: str,
    offload: ExpertOffload | None,
    shards: ModelSharding | None,
    on_load: Callable[[int, int], None] | None,
) -> tuple[ServedModel, nnx.State[Any, Any], OffloadedModel | None]:
    """Load the model and its arrays onto their devices. With `offload` the graph is that of a decoder without layers,
    and the offloaded model is returned too."""
    if offload is None:
        return *load_model(source, config, shards, dtype=dtype, progress=on_load), None
    offloaded = offload.load(source, dtype, progress=on_load)
    return ServedModel.create(config, offloaded.layerless[0], offloaded.full_state, None), offloaded.state, offloaded


def _disable_prefix_cache_if_recurrent(args: ServerArgs, config: DecoderConfig) -> ServerArgs:
    """Turn the prefix cache off for a model whose layers keep states."""
    if config.cache.recurrent is None or args.disable_radix_cache:
        return args
    logger.info(
        "prefixes are not cached: %d layers keep a state, which cannot be cut where a prefix ends",
        config.cache.num_recurrent,
    )
    return dataclasses.replace(args, disable_radix_cache=True)


def _runner_config(args: ServerArgs, buckets: Buckets, plan: MemoryPlan, vocab_size: int) -> RunnerConfig:
    shapes = tuple(
        BatchShape(mode=mode, num_tokens=tokens, num_requests=requests, table_width=buckets.table_width)
        for mode, tokens, requests in buckets.all_shapes()
    )
    return RunnerConfig(pool=plan.pool, num_request_slots=args.running_limit + 1, shapes=shapes, vocab_size=vocab_size)
