"""Put an engine together: from ServerArgs and a model to a core that is ready to step. Knows nothing of requests.

Everything that cannot work is refused here, before weights are loaded where that is possible."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from routed_experts.capture.routed_experts_capturer import RoutedExpertsCapturer
from routed_experts.core.buckets import Buckets
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import CaptureUnsupportedError, ConfigError
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.core import EngineCore
from routed_experts.engine.self_check import check_determinism
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.memory_plan import MemoryPlan, plan_memory
from routed_experts.execution.model_runner import ModelRunner, RunnerConfig
from routed_experts.execution.programs import ProgramSpec
from routed_experts.layers.attention import ATTENTION_BACKENDS, AttentionBackend
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MOE_BACKENDS, MoeBackend
from routed_experts.layers.tpu.backends import TPU_ATTENTION, TPU_KERNELS
from routed_experts.memory.kv_pool import KVPoolSpec, row_width
from routed_experts.models.interface import Decoder, DecoderConfig
from routed_experts.models.registry import ModelFolder
from routed_experts.scheduling.scheduler import Scheduler


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackendRegistry:
    """The kernels that an engine may be built with, by name."""

    moe: Mapping[str, Kernels] = dataclasses.field(default_factory=lambda: KERNELS)
    attention: Mapping[str, AttentionBackend] = dataclasses.field(default_factory=lambda: ATTENTION)

    def with_moe(self, backend: MoeBackend) -> "BackendRegistry":
        """The same registry with one more MoE backend."""
        return dataclasses.replace(self, moe=MappingProxyType({**self.moe, backend.name: Kernels(moe=backend)}))

    def choose(self, args: ServerArgs, *, platform: str | None = None) -> tuple[Kernels, AttentionBackend]:
        """The backends that `args` name, for `platform` (the default device's). Deterministic mode runs on `reference` alone, whose
        rows do not depend on one another; a backend that hides the ids it runs is refused with capture on."""
        where = platform or jax.default_backend()
        named = {"moe_backend": args.moe_backend, "attention_backend": args.attention_backend}
        fallback = AUTO_BACKENDS.get(where, AUTO_BACKENDS["cpu"])
        auto = {"moe_backend": "reference", "attention_backend": "reference"} if args.deterministic else fallback
        known: dict[str, Mapping[str, Any]] = {"moe_backend": self.moe, "attention_backend": self.attention}
        for field, name in named.items():
            if name != "auto" and name not in known[field]:
                raise ConfigError(f"{field}={name!r} is unknown; choose auto or one of {', '.join(sorted(known[field]))}")
            if PLATFORM_OF.get(name, where) != where:
                raise ConfigError(
                    f"{field}={name!r} runs on a {PLATFORM_OF[name]}, and this machine's default device is a {where}; choose auto"
                )
        picked = {field: auto[field] if name == "auto" else name for field, name in named.items()}
        kernels, attention = self.moe[picked["moe_backend"]], self.attention[picked["attention_backend"]]
        if args.enable_return_routed_experts and not kernels.moe.reveals_ids:
            raise CaptureUnsupportedError(
                f"moe_backend={kernels.moe.name!r} hides the ids of the experts that it runs, so they cannot be recorded; choose "
                "another backend or enable_return_routed_experts=False"
            )
        return kernels, attention


KERNELS: Mapping[str, Kernels] = MappingProxyType(
    {name: Kernels(moe=backend) for name, backend in MOE_BACKENDS.items()} | {"tpu": TPU_KERNELS}
)
ATTENTION: Mapping[str, AttentionBackend] = MappingProxyType({**ATTENTION_BACKENDS, "tpu": TPU_ATTENTION})
PLATFORM_OF: Mapping[str, str] = MappingProxyType({"tpu": "tpu"})  # of backends that do not run everywhere
AUTO_BACKENDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": {"moe_backend": "tiled", "attention_backend": "paged"},
        "gpu": {"moe_backend": "tiled", "attention_backend": "paged"},
        "tpu": {"moe_backend": "tpu", "attention_backend": "tpu"},
    }
)
DEFAULT_BACKENDS = BackendRegistry()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of start-up: what was done, how long it took, and a word on its result."""

    name: str
    seconds: float
    detail: str


class PhaseClock:
    """Times phases of start-up, without gaps."""

    def __init__(self, report: Callable[[Phase], None] | None) -> None:
        self.phases: list[Phase] = []
        self._report, self._since = report, time.perf_counter()

    def done(self, name: str, detail: str) -> None:
        """Close the phase that began when the last one was closed."""
        now = time.perf_counter()
        phase = Phase(name=name, seconds=now - self._since, detail=detail)
        self.phases.append(phase)
        self._since = now
        if self._report is not None:
            self._report(phase)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A core that is ready, and what it was made of."""

    core: EngineCore
    plan: MemoryPlan
    buckets: Buckets
    context_length: int
    capture: CaptureSpec | None
    vocab_size: int


def assemble(
    args: ServerArgs, *, model: Decoder | None = None, registry: BackendRegistry = DEFAULT_BACKENDS, clock: PhaseClock | None = None
) -> Assembly:
    """Load, plan, allocate and compile. Raises ConfigError, CheckpointError or CaptureUnsupportedError."""
    clock = clock or PhaseClock(None)
    kernels, attention = registry.choose(args)
    config, graphdef, state = _load(args, model, clock)
    context_length = _context_length(args, config.context_length)
    buckets = Buckets.of(args, context_length=context_length)
    capture = config.capture_spec if args.enable_return_routed_experts else None
    kv_shapes = _kv_shapes(args, config, state)
    plan = plan_memory(args, buckets, kv_shapes, state, capture, context_length=context_length, vocab_size=config.vocab_size)
    clock.done("plan", f"{plan.weights / 2**20:.1f} MiB weights, {plan.kv / 2**20:.1f} MiB KV")
    spec = ProgramSpec(
        graphdef=graphdef,
        capture=capture,
        kernels=kernels,
        attention=attention,
        num_pages=plan.pool.num_pages,
        raw_logprobs=args.logprobs_mode == "raw",
    )
    shapes = tuple(
        BatchShape(mode=mode, num_tokens=tokens, num_requests=requests, table_width=buckets.table_width)
        for mode, tokens, requests in buckets.all_shapes()
    )
    sizes = RunnerConfig(pool=plan.pool, num_request_slots=args.running_limit + 1, shapes=shapes, vocab_size=config.vocab_size)
    runner = ModelRunner(state, spec, sizes)

    def new_core() -> EngineCore:
        capturer = RoutedExpertsCapturer.create(
            config.capture_spec, num_slots=plan.pool.num_slots, page_size=args.page_size, enable=capture is not None
        )
        scheduler = Scheduler(args, buckets, num_pages=plan.pool.num_pages, vocab_size=config.vocab_size)
        return EngineCore(scheduler, runner, capturer)

    core = new_core()
    clock.done("allocate", f"{(plan.pool.num_pages - 1) * args.page_size:,} KV tokens")
    count = runner.compile()
    clock.done("compile", f"{count} programs")
    if args.deterministic:
        names = f"moe_backend={kernels.moe.name!r} and attention_backend={attention.name!r}"
        compared = check_determinism(new_core, vocab_size=config.vocab_size, context_length=context_length, backends=names)
        clock.done("self-check", f"{compared} sequences, alone and in company, equal to the last bit")
    return Assembly(core=core, plan=plan, buckets=buckets, context_length=context_length, capture=capture, vocab_size=config.vocab_size)


def _load(args: ServerArgs, model: Decoder | None, clock: PhaseClock) -> tuple[DecoderConfig, nnx.GraphDef[Any], nnx.State[Any, Any]]:
    """The model's config, checked against what is asked of it, and then its weights on the device."""
    folder = None
    if model is None:
        if args.model_path is None:
            raise ConfigError("model_path=None and no model was given; pass the folder of a checkpoint, or model=")
        folder = ModelFolder.open(args.model_path)
        config: DecoderConfig = folder.config
    else:
        config = model.config
    if args.enable_return_routed_experts and config.capture_spec is None:
        raise CaptureUnsupportedError(
            f"enable_return_routed_experts=True, but {args.model_path or 'this model'} has no MoE layer; serve it without the flag"
        )
    clock.done("config", f"{config.num_layers} layers, trained for {config.context_length:,} tokens")
    if folder is not None:
        model = folder.load(folder.dtype(args.dtype))
    graphdef, state = nnx.split(model)
    jax.block_until_ready(state)
    clock.done("load", f"{sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e6:.1f} MB")
    return config, graphdef, state


def _kv_shapes(args: ServerArgs, config: DecoderConfig, state: nnx.State[Any, Any]) -> KVPoolSpec:
    """The pool's shapes before its size is known. Keys and values have the weights' dtype, but float32 holds those of bfloat16
    on CPU: XLA has no bfloat16 scatter there and would convert the whole pool in every layer. The values are the same."""
    dtype = jnp.result_type(jax.tree.leaves(state)[0])
    if dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        dtype = jnp.dtype("float32")
    return KVPoolSpec(
        num_layers=config.num_layers,
        num_pages=0,
        page_size=args.page_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=row_width(config.head_dim, jax.default_backend()),
        dtype=dtype,
    )


def _context_length(args: ServerArgs, trained: int) -> int:
    if args.context_length is None:
        return trained
    if args.context_length > trained:
        raise ConfigError(f"context_length={args.context_length} is above the model's {trained} positions; lower it to {trained}")
    return args.context_length
