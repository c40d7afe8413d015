"""Registry of kernel backends: their names, what each requires, and the choice of `auto` by platform.

A backend's code is imported when it is chosen, so no machine loads what it cannot run."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

import jax

from routed_experts.core.errors import CaptureUnsupportedError, ConfigError
from routed_experts.core.placement_config import PlacementConfig
from routed_experts.core.server_args import ServerArgs
from routed_experts.layers.attention import AttentionBackend
from routed_experts.layers.attention_variants import ATTENTION_BACKENDS
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.layers.parallel import AxisGroup, Rerouter
from routed_experts.layers.quantized import CODE_DTYPES, E4M3, SPANS
from routed_experts.models.base.interface import PLAIN, RequiredFeatures
from routed_experts.models.base.sharding import AXIS, DATA_AXIS
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.decoder.fused_path import describe_path

T = TypeVar("T", Kernels, AttentionBackend)
logger = logging.getLogger(__name__)


def _always_available() -> str | None:
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackendEntry(Generic[T]):
    """A backend: how to load it, its platform (None: any), and the reason why this machine cannot run it.

    `exclusive`: it runs on one device only."""

    load: Callable[[], T]
    platform: str | None = None
    unavailable_reason: Callable[[], str | None] = _always_available
    exclusive: bool = False

    def refusal(self, platform: str, devices: int = 1) -> str | None:
        """None where it runs; else the reason, with its remedy."""
        if self.platform not in (None, platform):
            return f"it runs on {self.platform}, and this machine's default device is a {platform}"
        if self.exclusive and devices > 1:
            return f"its kernels use all of one CPU, and tp_size={devices} makes {devices} devices of it"
        return self.unavailable_reason()


def _native_kernels() -> Kernels:
    from routed_experts.layers.native.ops import NATIVE_KERNELS

    return NATIVE_KERNELS


def _native_attention() -> AttentionBackend:
    from routed_experts.layers.native.ops import NATIVE_ATTENTION

    return NATIVE_ATTENTION


def _native_unavailable_reason() -> str | None:
    from routed_experts.layers.native.toolchain import unavailable_reason

    return unavailable_reason()


@functools.cache  # one bundle: programs are told apart by what they call
def _gpu_kernels() -> Kernels:
    from routed_experts.layers.gpu.backends import gpu_kernels
    from routed_experts.layers.gpu.warpgroups import find_warpgroups

    return gpu_kernels(interpret=False, warpgroups=find_warpgroups())


@functools.cache
def _gpu_attention() -> AttentionBackend:
    from routed_experts.layers.gpu.attention import gpu_attention_backend
    from routed_experts.layers.gpu.warpgroups import find_warpgroups

    return gpu_attention_backend(interpret=False, warpgroups=find_warpgroups())


def _tpu_kernels() -> Kernels:
    from routed_experts.layers.tpu.backends import TPU_KERNELS

    return TPU_KERNELS


def _tpu_attention() -> AttentionBackend:
    from routed_experts.layers.tpu.backends import TPU_ATTENTION

    return TPU_ATTENTION


def _rerouter(instances: int, *, drops: bool) -> Rerouter:
    from routed_experts.layers.balanced_selection.capacity_routing import reroute_topk

    return functools.partial(reroute_topk, num_instances=instances, drops=drops)


def _constant(value: T) -> BackendEntry[T]:
    return BackendEntry(load=lambda: value)


KERNELS: Mapping[str, BackendEntry[Kernels]] = MappingProxyType(
    {
        name: _constant(Kernels(moe=backend, code_formats=frozenset(CODE_DTYPES), code_spans=SPANS))
        for name, backend in MOE_BACKENDS.items()
    }
    | {
        "native": BackendEntry(
            load=_native_kernels, platform="cpu", unavailable_reason=_native_unavailable_reason, exclusive=True
        )
    }
    | {"gpu": BackendEntry(load=_gpu_kernels, platform="gpu"), "tpu": BackendEntry(load=_tpu_kernels, platform="tpu")}
)
ATTENTION: Mapping[str, BackendEntry[AttentionBackend]] = MappingProxyType(
    {name: _constant(backend) for name, backend in ATTENTION_BACKENDS.items()}
    | {
        "native": BackendEntry(
            load=_native_attention, platform="cpu", unavailable_reason=_native_unavailable_reason, exclusive=True
        )
    }
    | {
        "gpu": BackendEntry(load=_gpu_attention, platform="gpu"),
        "tpu": BackendEntry(load=_tpu_attention, platform="tpu"),
    }
)
# The choices of `auto`: the platform's native kernels where this machine can run them and they support the model; else
# the fallbacks, which run everywhere.
NATIVE_BY_PLATFORM: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cpu": ("native",), "gpu": ("gpu",), "tpu": ("tpu",)}
)
FALLBACK_MOE, FALLBACK_ATTENTION = ("tiled",), ("paged",)
BATCH_INVARIANT = ("reference",)  # the fallback of deterministic mode


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackendRegistry:
    """The kernels that an engine may be built with, by name. `moe_backend` names the kernels of all matrices of a
    layer."""

    moe: Mapping[str, BackendEntry[Kernels]] = dataclasses.field(default_factory=lambda: KERNELS)
    attention: Mapping[str, BackendEntry[AttentionBackend]] = dataclasses.field(default_factory=lambda: ATTENTION)

    def choose(
        self,
        args: ServerArgs,
        needs: RequiredFeatures = PLAIN,
        *,
        platform: str | None = None,
        placement_config: PlacementConfig | None = None,
    ) -> tuple[Kernels, AttentionBackend]:
        """The backends of `args` for a model that `needs` features, on `platform` (default: the default device's).

        With a capacity-limited `placement_config`, routers respect capacities. Deterministic mode uses backends that
        are batch-invariant. A backend that hides the ids it runs is refused with capture on. Raises ConfigError,
        CaptureUnsupportedError."""
        where = platform or jax.default_backend()
        native = NATIVE_BY_PLATFORM.get(where, ())
        moe_auto = (*native, *(BATCH_INVARIANT if args.deterministic else FALLBACK_MOE))
        attention_auto = (*native, *(BATCH_INVARIANT if args.deterministic else FALLBACK_ATTENTION))

        machine, expert_gap, attention_gap = (where, args.tp_size), _expert_gap(needs), _attention_gap(needs)
        pick = functools.partial(_pick, machine=machine, batch_invariant=args.deterministic)
        kernels = pick("moe_backend", args.moe_backend, self.moe, moe_auto, missing=expert_gap)
        attention = pick(
            "attention_backend", args.attention_backend, self.attention, attention_auto, missing=attention_gap
        )
        _check_kv_format(args, attention)
        if args.deterministic:
            _check_batch_invariant("moe_backend", args.moe_backend, kernels.batch_invariant)
            _check_batch_invariant("attention_backend", args.attention_backend, attention.batch_invariant)
        if args.enable_return_routed_experts and not kernels.moe.reveals_ids:
            text = f"moe_backend={kernels.moe.name!r} hides the ids of the experts that it runs"
            raise CaptureUnsupportedError(
                f"{text}, so they cannot be recorded; choose another backend or enable_return_routed_experts=False"
            )
        instances = 0 if placement_config is None else placement_config.initial.num_instances
        rerouter = (
            None
            if placement_config is None or not placement_config.capacity_limited
            else _rerouter(instances, drops=placement_config.on_exhausted == "drop")
        )
        group = AxisGroup(
            axis=AXIS,
            count=args.tp_size,
            expert_parallel=args.ep_size > 1,
            instances=instances,
            rerouter=rerouter,
            ordered=args.deterministic,
        )
        if args.dp_size == 1:
            return kernels.with_group(group), attention
        ranks = AxisGroup(axis=DATA_AXIS, count=args.dp_size, ordered=args.deterministic)
        own = AxisGroup(axis=AXIS, count=args.tp_size // args.dp_size, ordered=args.deterministic)
        experts = dataclasses.replace(group, axis=(DATA_AXIS, AXIS))
        return kernels.with_group(own, experts=experts, ranks=ranks), attention

    def may_compile(self, args: ServerArgs, platform: str) -> bool:
        """Whether `choose` may load kernels that are compiled from C++ on `platform`."""
        names = (args.moe_backend, args.attention_backend)
        return platform == "cpu" and args.tp_size == 1 and any(name in ("auto", "native") for name in names)

    def layer_paths(self, config: FamilyConfig) -> dict[str, str]:
        """How a model's layers run on one device of each platform, by `auto`, on a machine that can run all of the
        platform's kernels: see `describe_path`."""
        paths = dict[str, str]()
        for platform, names in NATIVE_BY_PLATFORM.items():
            kernels = _first(self.moe, (*names, *FALLBACK_MOE), _expert_gap(config.needs))
            attention = _first(self.attention, (*names, *FALLBACK_ATTENTION), _attention_gap(config.needs))
            paths[platform] = describe_path(config, kernels, attention)
        return paths


def _expert_gap(needs: RequiredFeatures) -> Callable[[Kernels], frozenset[str]]:
    """The required features of experts that kernels lack."""
    return lambda kernels: needs.experts - kernels.moe.features


def _attention_gap(needs: RequiredFeatures) -> Callable[[AttentionBackend], frozenset[str]]:
    """The required features of attention that a backend lacks."""
    return lambda attention: needs.attention if attention.run_with_features is None else frozenset()


def _first(entries: Mapping[str, BackendEntry[T]], names: tuple[str, ...], gap: Callable[[T], frozenset[str]]) -> T:
    """The first of these backends that lacks nothing."""
    return next(backend for name in names if not gap(backend := entries[name].load()))


def _check_kv_format(args: ServerArgs, attention: AttentionBackend) -> None:
    """Raise ConfigError for a form of keys and values that the backend does not take."""
    if args.kv_cache_dtype == "fp8_e4m3" and E4M3 not in attention.kv_formats:
        text = (
            f"kv_cache_dtype={args.kv_cache_dtype!r}, but attention_backend={attention.name!r} reads no keys of 8 bits"
        )
        raise ConfigError(f"{text}; choose attention_backend='paged', or leave kv_cache_dtype out")


def _check_batch_invariant(field: str, name: str, batch_invariant: bool) -> None:
    """Raise ConfigError for a backend whose rows depend on the composition of the batch or on chunk boundaries."""
    if not batch_invariant:
        text = f"{field}={name!r} with deterministic=True: its rows may depend on the batch"
        raise ConfigError(f"{text}; choose auto or 'reference'")


def _pick(
    field: str,
    name: str,
    entries: Mapping[str, BackendEntry[T]],
    auto: tuple[str, ...],
    *,
    machine: tuple[str, int],
    missing: Callable[[T], frozenset[str]],
    batch_invariant: bool,
) -> T:
    """The backend of that name, or the first of `auto` that this machine can run, that misses no required feature and
    that is batch-invariant where asked; no other is loaded. `machine`: the platform and its number of devices."""
    if name == "auto":
        for choice in auto[:-1]:
            refusal = entries[choice].refusal(*machine)
            if refusal is not None:
                logger.warning("%s: %r is passed over: %s", field, choice, refusal)
            elif not missing(backend := entries[choice].load()) and (backend.batch_invariant or not batch_invariant):
                return backend
        return entries[auto[-1]].load()
    if name not in entries:
        raise ConfigError(f"{field}={name!r} is unknown; choose auto or one of {', '.join(sorted(entries))}")
    refusal = entries[name].refusal(*machine)
    if refusal is not None:
        raise ConfigError(f"{field}={name!r} cannot run here: {refusal}; or choose auto")
    backend = entries[name].load()
    if features := missing(backend):
        raise ConfigError(
            f"{field}={name!r} cannot do {', '.join(sorted(features))}, which this model has; choose auto"
        )
    return backend


DEFAULT_BACKENDS = BackendRegistry()
