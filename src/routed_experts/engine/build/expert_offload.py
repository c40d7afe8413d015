"""How an engine shares its experts out between accelerator and host: what is refused, where things go, which runner
runs them. Knows nothing of requests. This is where a residency (core/placement.py) and the programs that obey it
(execution/) meet."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from routed_experts.capture.routed_experts_capturer import RoutedExpertsCapturer
from routed_experts.core.errors import ConfigError
from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.core.placement import ResidencyMap
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import BackendRegistry
from routed_experts.engine.control.resident_expert_updater import ResidentExpertUpdater
from routed_experts.engine.loop.core import AfterStep
from routed_experts.execution.aot_programs import RunnerConfig
from routed_experts.execution.model_runner import ModelRunner
from routed_experts.execution.offload.fused_offload_runner import FusedOffloadRunner
from routed_experts.execution.offload.offload_jobs import DevicePair
from routed_experts.execution.offload.offload_programs import OffloadSpec
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.execution.programs import ProgramSpec
from routed_experts.layers.moe import MoeBackend
from routed_experts.layers.native.toolchain import unavailable_reason
from routed_experts.models.base.interface import Decoder, DecoderConfig
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.model_folder import ModelFolder
from routed_experts.models.offload.offloaded_model import OffloadedModel, is_expert, offload_model

_DTYPES: Mapping[str, jnp.dtype | None] = MappingProxyType(
    {"auto": None, "bf16": jnp.dtype("bfloat16"), "f32": jnp.dtype("float32")}
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOffload:
    """An ExpertOffloadConfig that fits a model and a machine."""

    experts: ExpertOffloadConfig
    config: FamilyConfig
    residency: ResidencyMap
    sides: DevicePair
    host_experts: MoeBackend
    backend: str  # dispatch or ffi
    reason: str  # why that one

    @staticmethod
    def check(
        experts: ExpertOffloadConfig, args: ServerArgs, config: DecoderConfig, registry: BackendRegistry
    ) -> "ExpertOffload":
        """Raise ConfigError or PlacementError for what cannot be shared out so, before anything is allocated."""
        if not isinstance(config, FamilyConfig):
            kind = type(config).__name__.removesuffix("Config")
            raise ConfigError(
                f"model= is a {kind}, whose layers cannot be cut at the experts; give the folder, or a FamilyDecoder"
            )
        spec = config.capture_spec
        residency = (
            experts.residents_of(0, 0) if spec is None else experts.residents_of(spec.num_moe_layers, spec.num_experts)
        )
        if words := sorted(config.needs.experts):
            raise ConfigError(
                f"experts= shares out SiLU-gated experts without biases, and this model has {', '.join(words)}; leave it out"
            )
        if args.deterministic:
            raise ConfigError(
                "deterministic=True with experts=: sums of two tables depend on who is resident; leave one of them out"
            )
        for name, size in (("tp_size", args.tp_size), ("ep_size", args.ep_size)):
            if size != 1:
                raise ConfigError(
                    f"{name}={size} with experts=: one accelerator shares with its host in this release; leave it at 1"
                )
        sides = _sides()
        backend, reason = backend_of(experts, sides.device.platform)
        _check_threads(experts, backend)
        auto = dataclasses.replace(args, moe_backend="auto", attention_backend="auto")
        host_experts = registry.choose(auto, platform="cpu")[0].moe
        return ExpertOffload(
            experts=experts,
            config=config,
            residency=residency,
            sides=sides,
            host_experts=host_experts,
            backend=backend,
            reason=reason,
        )

    def load(
        self, source: ModelFolder | Decoder | None, dtype: str, *, progress: Callable[[int, int], None] | None
    ) -> OffloadedModel:
        """Load a folder, or take a module's arrays, to where they belong. Raises CheckpointError for a kt_weight_path
        that lacks experts or has them in another shape, before any is read."""
        model, path = source, self.experts.kt_weight_path
        if path is not None and not isinstance(source, ModelFolder):
            raise ConfigError(
                f"kt_weight_path={path!r} with model=, which brings its experts along; leave one of them out"
            )
        if isinstance(source, ModelFolder):
            source = source if path is None else source.with_experts_of(path, is_expert)
            model = source.load(source.dtype(dtype), progress=progress, place=self._place)
        assert isinstance(model, FamilyDecoder), type(model)
        host_dtype = _DTYPES[self.experts.kt_method]
        return offload_model(
            model, self.residency, device=self.sides.device, host=self.sides.host, host_dtype=host_dtype
        )

    def runner(self, model: OffloadedModel, spec: ProgramSpec, config: RunnerConfig) -> OffloadRunner:
        """What runs it."""
        split = OffloadSpec(
            config=self.config,
            capture=spec.capture,
            kernels=spec.kernels,
            attention=spec.attention,
            host_experts=self.host_experts,
            num_pages=spec.num_pages,
            num_moe_layers=self.residency.num_layers,
            num_experts=self.residency.num_experts,
            num_resident=self.residency.num_resident,
            deferred=self.experts.kt_max_deferred_experts_per_token,
            counted=spec.counted,
        )
        if self.backend != "ffi" and split.has_host:
            return OffloadRunner(model, split, spec, config, sides=self.sides, streams_from=self.experts.streams_from)
        threads = self.experts.kt_cpuinfer or usual_threads()
        streams_from = self.experts.streams_from if split.has_host else None
        return FusedOffloadRunner(
            model, split, spec, config, sides=self.sides, streams_from=streams_from, num_threads=threads
        )

    @property
    def told(self) -> str:
        """What runs the host's experts, and why."""
        return f"experts on the host by {self.backend}: {self.reason}"

    @property
    def counts(self) -> bool:
        """Whether it wants to know which experts are busy."""
        return self.experts.residency == "adaptive"

    def follower(self, capturer: RoutedExpertsCapturer, runner: ModelRunner) -> AfterStep | None:
        """What exchanges residents after a step; None where they stay until somebody else does."""
        if not self.counts:
            return None
        spec = self.config.capture_spec
        assert isinstance(runner, OffloadRunner) and spec is not None, type(runner)
        return ResidentExpertUpdater(capturer, runner, top_k=spec.top_k).after_step

    def _place(self, target: str) -> Any:
        return self.sides.host if is_expert(target) else self.sides.device


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def usual_threads() -> int:
    """Threads of the host's experts: one core is left to start programs."""
    return max(1, _num_cores() - 1)


def backend_of(experts: ExpertOffloadConfig, platform: str) -> tuple[str, str]:
    """How the host's experts run beside a default device of this platform (`dispatch` or `ffi`), and why so: `auto` is
    what was measured to be the faster, where it can be had. Raises ConfigError where `ffi` is asked for and cannot."""
    asked = experts.host_backend
    if asked == "dispatch":
        return asked, "as asked"
    if asked == "ffi":
        if missing := ffi_unavailable_reason(platform):
            raise ConfigError(f"host_backend='ffi' cannot be had: {missing}; or take 'dispatch'")
        return asked, "as asked"
    if experts.kt_max_deferred_experts_per_token:
        return "dispatch", "one program adds no expert late"
    if platform != "gpu":
        return (
            "dispatch",
            f"one program was measured to be the faster on NVIDIA GPUs alone, and the default device is a {platform}",
        )
    if missing := ffi_unavailable_reason(platform):
        return "dispatch", missing
    return "ffi", "one program takes 0.3 to 0.7 of the time of a step that is cut (H200)"


def _check_threads(experts: ExpertOffloadConfig, backend: str) -> None:
    """Raise ConfigError for a number of threads that the host's experts cannot have."""
    cores, wanted = _num_cores(), experts.kt_cpuinfer
    if wanted is None:
        return
    if backend == "ffi":
        if wanted > cores:
            raise ConfigError(
                f"kt_cpuinfer={wanted} is above the {cores} cores that this process may run on; lower it to at most {cores}"
            )
    elif wanted != cores:
        raise ConfigError(
            f"kt_cpuinfer={wanted}, but XLA's CPU client has {cores} threads, one a core that this process may run on, fixed at start; "
            "leave it out, start the process on that many cores (taskset), or take host_backend='ffi'"
        )


def ffi_unavailable_reason(platform: str) -> str | None:
    """None where the host's experts can run inside a program of this platform; else the reason."""
    if platform not in ("cpu", "gpu"):
        return f"it runs beside a CPU or an NVIDIA GPU, and the default device is a {platform}"
    reason = unavailable_reason()
    return None if reason is None else f"it needs the native library: {reason}"


def _sides() -> DevicePair:
    """The default device, and this machine's CPU; where the default device is a CPU, the second one if JAX shows
    two."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return DevicePair(device=device, host=jax.local_devices()[-1 if len(jax.local_devices()) == 1 else 1])
    try:
        return DevicePair(device=device, host=jax.local_devices(backend="cpu")[0])
    except RuntimeError as error:
        raise ConfigError(
            f"experts= needs the host's CPU beside the {device.platform} ({error}); add cpu to JAX_PLATFORMS"
        ) from error
