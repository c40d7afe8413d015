"""Build what every process of an engine has: the model on its devices, the memory plan, and the compiled programs.

Unsupported combinations are refused here, before weights are loaded where that is possible."""

import dataclasses
import functools
import hashlib
import itertools
import logging
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from routed_experts.core.buckets import Buckets
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import CaptureUnsupportedError, ConfigError, ProcessMismatchError
from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.placement_config import PlacementConfig, parse_fraction
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.engine.build.backends import BackendRegistry
from routed_experts.engine.build.draft_model import FoundDraft
from routed_experts.engine.build.drafting import check_speculation, find_draft
from routed_experts.engine.build.memory_planning import (
    EnginePlan,
    abstract_arrays,
    plan_engine,
    served_kv_scales,
    with_checkpoint_form,
)
from routed_experts.engine.build.startup_phases import PhaseClock
from routed_experts.engine.control.expert_offload import ExpertOffload
from routed_experts.engine.control.served_model import (
    ServedModel,
    abstract_state,
    check_processes,
    code_support,
    create_sharding,
    load_model,
    serve_codes,
)
from routed_experts.engine.group.process_group import AnyGroup
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
from routed_experts.models.base.sharding import ModelSharding
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.decoder.fused_path import describe_path
from routed_experts.models.decoder.replica_maps import moe_groups
from routed_experts.models.model_folder import ModelFolder
from routed_experts.models.offload.offloaded_model import OffloadedModel

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRunner:
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


def build_runner(
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
) -> BuiltRunner:
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
    if (
        offload is not None
        and args.quantization == "auto"
        and isinstance(source, ModelFolder)
        and source.quantized_form
    ):
        text = "all %d quantised tensors (%s) are dequantised: experts on the host are plain"
        logger.info(text, len(source.quantized_tensors), source.quantized_form)
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
        piggyback_row_words=capture.row_words if capture is not None and mesh_specs is None and offload is None else 0,
        piggyback_modes=_piggyback_modes(),
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
    num_programs = runner.compile() if group is None else compile_together(runner, group)
    clock.done("compile", f"{num_programs} programs")
    return BuiltRunner(
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


def _check_device(device: str) -> None:
    """Raise ConfigError unless JAX's default devices are of this kind."""
    platform = jax.default_backend()
    if device != "auto" and {"cuda": "gpu", "rocm": "gpu"}.get(device, device) != platform:
        text = f"device={device!r}, but the default devices of JAX here are of the platform {platform!r}"
        raise ConfigError(f"{text}; set JAX_PLATFORMS={device} before the start, or leave device out")


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


def _disable_prefix_cache_if_recurrent(args: ServerArgs, config: DecoderConfig) -> ServerArgs:
    """Turn the prefix cache off for a model whose layers keep states."""
    if config.cache.recurrent is None or args.disable_radix_cache:
        return args
    logger.info(
        "prefixes are not cached: %d layers keep a state, which cannot be cut where a prefix ends",
        config.cache.num_recurrent,
    )
    return dataclasses.replace(args, disable_radix_cache=True)


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


def _check_batch_invariant_states(args: ServerArgs, config: DecoderConfig, attention: AttentionBackend) -> None:
    """Raise ConfigError in deterministic mode for states that array code updates in chunks of a step: their last bits
    depend on where a prompt is cut."""
    shape = config.cache.recurrent
    if args.deterministic and isinstance(shape, DeltaShape) and attention.recur is None:
        text = "deterministic=True with a delta rule that runs as array code: its sums depend on where a prompt is cut"
        raise ConfigError(f"{text}; leave deterministic out")


def _should_count_experts(args: ServerArgs, offload: ExpertOffload | None, placement: PlacementConfig | None) -> bool:
    """Whether steps count their experts on the device: a load balancer or gauges need them."""
    if offload is not None:
        return offload.needs_counts and not args.enable_return_routed_experts
    return placement is not None


def _piggyback_modes() -> frozenset[ForwardMode]:
    """Steps whose rows leave in the sampler's output where a step's layers are one program on one device: on a CPU all
    that sample after every token, as the host reads them in place; on a GPU verify steps, as the next step often waits
    for what the host reads of them."""
    decode, verify = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
    by_backend = {"cpu": frozenset({decode, verify}), "gpu": frozenset({verify})}
    return by_backend.get(jax.default_backend(), frozenset())


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


def _runner_config(args: ServerArgs, buckets: Buckets, plan: MemoryPlan, vocab_size: int) -> RunnerConfig:
    shapes = tuple(
        BatchShape(mode=mode, num_tokens=tokens, num_requests=requests, table_width=buckets.table_width)
        for mode, tokens, requests in buckets.all_shapes()
    )
    return RunnerConfig(pool=plan.pool, num_request_slots=args.running_limit + 1, shapes=shapes, vocab_size=vocab_size)


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


def compile_together(runner: ModelRunner, group: AnyGroup) -> int:
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
