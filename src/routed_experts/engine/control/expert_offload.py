"""ExpertOffload: an ExpertOffloadConfig that is checked against a model and a machine. It loads the model, and builds
its runner and the updater of its resident experts."""

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
from routed_experts.engine.control.resident_expert_updater import ResidentExpertUpdater
from routed_experts.engine.loop.core import AfterStep
from routed_experts.execution.aot_programs import RunnerConfig
from routed_experts.execution.model_runner import ModelRunner
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.execution.offload.offload_step import OffloadSpec
from routed_experts.execution.programs import ProgramSpec
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
    """How the experts of a model are split between `device` and `host`, which are the same with one CPU device."""

    experts: ExpertOffloadConfig
    config: FamilyConfig
    residency: ResidencyMap
    device: Any
    host: Any

    @staticmethod
    def check(experts: ExpertOffloadConfig, args: ServerArgs, config: DecoderConfig) -> "ExpertOffload":
        """Raise ConfigError or PlacementError for an unsupported combination, before anything is allocated."""
        if not isinstance(config, FamilyConfig):
            kind = type(config).__name__.removesuffix("Config")
            raise ConfigError(
                f"model= is a {kind}, whose experts cannot run apart from its layers; give the folder, "
                "or a FamilyDecoder"
            )
        spec = config.capture_spec
        residency = (
            experts.build_residency(0, 0)
            if spec is None
            else experts.build_residency(spec.num_moe_layers, spec.num_experts)
        )
        if features := sorted(config.needs.experts.union(*(layer.needs for layer in config.layers))):
            raise ConfigError(
                f"experts= offloads SiLU-gated experts without biases, and this model has {', '.join(features)}; "
                "leave it out"
            )
        if args.deterministic:
            raise ConfigError(
                "deterministic=True with experts=: sums of two tables depend on which experts are resident; "
                "leave one of them out"
            )
        for name, size in (("tp_size", args.tp_size), ("ep_size", args.ep_size)):
            if size != 1:
                raise ConfigError(
                    f"{name}={size} with experts=: one accelerator shares with its host in this release; leave it at 1"
                )
        device, host = _devices()
        check_platform(device.platform, needs_library=residency.num_resident < residency.num_experts)
        if experts.kt_cpuinfer is not None and experts.kt_cpuinfer > _num_cores():
            raise ConfigError(
                f"kt_cpuinfer={experts.kt_cpuinfer} is above the {_num_cores()} cores that this process may run on; "
                f"lower it to at most {_num_cores()}"
            )
        return ExpertOffload(experts=experts, config=config, residency=residency, device=device, host=host)

    def load(
        self, source: ModelFolder | Decoder | None, dtype: str, *, progress: Callable[[int, int], None] | None
    ) -> OffloadedModel:
        """Load a folder, or a module's arrays, onto their devices. Raises CheckpointError for a kt_weight_path
        that lacks experts or has them in another shape, before any is read."""
        model, path = source, self.experts.kt_weight_path
        if path is not None and not isinstance(source, ModelFolder):
            raise ConfigError(
                f"kt_weight_path={path!r} with model=, which brings its experts along; leave one of them out"
            )
        if isinstance(source, ModelFolder):
            source = source if path is None else source.with_experts_from(path, is_expert)
            model = source.load(source.dtype(dtype), progress=progress, device_for=self._device_for)
        assert isinstance(model, FamilyDecoder), type(model)
        host_dtype = _DTYPES[self.experts.kt_method]
        return offload_model(model, self.residency, device=self.device, host=self.host, host_dtype=host_dtype)

    def runner(self, model: OffloadedModel, spec: ProgramSpec, config: RunnerConfig) -> OffloadRunner:
        """The runner of the loaded model."""
        offload = OffloadSpec(
            program=spec,
            config=self.config,
            num_moe_layers=self.residency.num_layers,
            num_experts=self.residency.num_experts,
            num_resident=self.residency.num_resident,
            num_deferred=self.experts.kt_max_deferred_experts_per_token,
        )
        threshold = self.experts.stream_threshold
        return OffloadRunner(
            model, offload, config, device=self.device, stream_threshold=threshold, num_threads=self.num_threads
        )

    @property
    def num_threads(self) -> int:
        """Threads for the host's experts. By default one core is left to start programs."""
        return self.experts.kt_cpuinfer or max(1, _num_cores() - 1)

    @property
    def summary(self) -> str:
        """Where experts run, for the log."""
        residency = self.residency
        on_host = residency.num_experts - residency.num_resident
        if on_host == 0:
            return f"all {residency.num_experts} experts of a layer on the {self.device.platform}"
        return f"{on_host} of {residency.num_experts} experts of a layer on {self.num_threads} threads of the host"

    @property
    def needs_counts(self) -> bool:
        """Whether the updater of residents needs expert counts."""
        return self.experts.residency == "adaptive"

    def updater(self, capturer: RoutedExpertsCapturer, runner: ModelRunner) -> AfterStep | None:
        """The callback that swaps resident experts after a step; None where only `apply_residency` does."""
        if not self.needs_counts:
            return None
        spec = self.config.capture_spec
        assert isinstance(runner, OffloadRunner) and spec is not None, type(runner)
        return ResidentExpertUpdater(capturer, runner, top_k=spec.top_k).after_step

    def _device_for(self, target: str) -> Any:
        return self.host if is_expert(target) else self.device


def check_platform(platform: str, *, needs_library: bool) -> None:
    """Raise ConfigError where no expert can run on the host beside a default device of this platform."""
    if platform not in ("cpu", "gpu"):
        raise ConfigError(
            f"experts= runs the host's experts beside a CPU or an NVIDIA GPU, and the default device is a {platform}; "
            "leave it out, or use several devices (tp_size)"
        )
    if needs_library and (reason := unavailable_reason()) is not None:
        raise ConfigError(f"experts= runs the host's experts with the native library, which cannot be built: {reason}")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _devices() -> tuple[Any, Any]:
    """The default device, and this machine's CPU. Where the default device is a CPU, the host is a second CPU device if
    JAX shows two."""
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return devices[0], devices[min(1, len(devices) - 1)]
    try:
        return devices[0], jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ConfigError(
            f"experts= needs the host's CPU beside the {devices[0].platform} ({error}); add cpu to JAX_PLATFORMS"
        ) from error
