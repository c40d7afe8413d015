"""ExpertOffloadConfig: how a model's experts are shared between the accelerator and the host.

The names are those that KTransformers gave to SGLang. Values are checked when the config is made; what depends on the
model or the machine is checked when the engine is built, before anything is allocated."""

import dataclasses

from routed_experts.core.errors import ConfigError
from routed_experts.core.integers import to_int, with_python_integers
from routed_experts.core.placement import ResidencyMap

KT_METHODS = ("auto", "bf16", "f32")
RESIDENCIES = ("first", "adaptive")
_COUNTS = (
    "kt_num_gpu_experts",
    "num_device_experts",
    "kt_cpuinfer",
    "kt_threadpool_count",
    "kt_gpu_prefill_token_threshold",
    "kt_max_deferred_experts_per_token",
)


@with_python_integers
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOffloadConfig:
    """N experts of each MoE layer are on the accelerator; the host runs the others in parallel. Without N all experts
    are on the accelerator.

    Raises ConfigError for values that cannot work, naming field, value, limit and fix."""

    # N, 0 to all; None: every expert is on the accelerator, as without this config
    kt_num_gpu_experts: int | None = None
    # another name of kt_num_gpu_experts
    num_device_experts: int | None = None
    # safetensors of the experts; None: the model's own
    kt_weight_path: str | None = None
    # number format of experts on the host: auto is the model's
    kt_method: str = "auto"
    # threads for the host's experts; None: a core fewer than this process may run on
    kt_cpuinfer: int | None = None
    # pools of those threads: 1
    kt_threadpool_count: int | None = None
    # d: in decode steps, of a token's d lightest experts those on the host are added one MoE layer later
    kt_max_deferred_experts_per_token: int = 0
    # a step of at least that many tokens copies the host's experts to the accelerator; 0, None: never
    kt_gpu_prefill_token_threshold: int | None = None
    # "first" N by id; "adaptive": these at first, then they follow the load; or those of a plan
    residency: str | ResidencyMap = "first"

    def __post_init__(self) -> None:
        """Check every field once."""
        values = dataclasses.asdict(self)
        for name in _COUNTS:
            value = values[name]
            if value is not None or name == "kt_max_deferred_experts_per_token":
                to_int(name, value, 0, fix="leave it out if in doubt")
        if self.kt_method not in KT_METHODS:
            raise ConfigError(f"kt_method={self.kt_method!r} is unknown; choose one of {', '.join(KT_METHODS)}")
        if self.kt_weight_path is not None and not isinstance(self.kt_weight_path, str):
            raise ConfigError(
                f"kt_weight_path={self.kt_weight_path!r} must be text, the folder of the experts' safetensors, or None"
            )
        if (
            None not in (self.kt_num_gpu_experts, self.num_device_experts)
            and self.kt_num_gpu_experts != self.num_device_experts
        ):
            raise ConfigError(
                f"kt_num_gpu_experts={self.kt_num_gpu_experts} and num_device_experts={self.num_device_experts} "
                "are two names of one number; give one of them"
            )
        if not isinstance(self.residency, ResidencyMap) and self.residency not in RESIDENCIES:
            raise ConfigError(
                f"residency={self.residency!r} is unknown; choose 'first', 'adaptive', or a ResidencyMap; "
                "for residents by captured frequency plan one from RoutingStats, and give it here or to "
                "Engine.apply_residency"
            )
        planned = self.residency.num_resident if isinstance(self.residency, ResidencyMap) else None
        number = self.num_device_experts if self.kt_num_gpu_experts is None else self.kt_num_gpu_experts
        if None not in (planned, number) and planned != number:
            raise ConfigError(
                f"kt_num_gpu_experts={number} and the plan's num_resident={planned} differ; leave the number out"
            )
        if self.kt_threadpool_count not in (None, 1):
            raise ConfigError(
                f"kt_threadpool_count={self.kt_threadpool_count}, but the host's experts run in 1 pool of threads; "
                "leave it out or give 1"
            )
        if self.kt_cpuinfer == 0:
            raise ConfigError("kt_cpuinfer=0, but the host's experts need a thread; give at least 1, or leave it out")
        changed = sorted(field.name for field in dataclasses.fields(self) if values[field.name] != field.default)
        if self.num_resident is None and changed:
            raise ConfigError(
                f"{', '.join(changed)} without kt_num_gpu_experts, so no expert is on the host; "
                "give the number too, or none"
            )

    @property
    def num_resident(self) -> int | None:
        """N, by either name or of the plan; None: no expert is on the host."""
        if isinstance(self.residency, ResidencyMap):
            return self.residency.num_resident
        return self.num_device_experts if self.kt_num_gpu_experts is None else self.kt_num_gpu_experts

    @property
    def stream_threshold(self) -> int | None:
        """Tokens from which on a step streams the host's experts to the accelerator; None: no step does."""
        return self.kt_gpu_prefill_token_threshold or None

    def build_residency(self, num_layers: int, num_experts: int) -> ResidencyMap:
        """The resident experts at the start, of a model of so many MoE layers (0: none) and experts. Raises
        ConfigError, PlacementError."""
        num_resident = self.num_resident
        assert num_resident is not None, "all experts are on the accelerator"
        if num_layers == 0:
            raise ConfigError(
                f"kt_num_gpu_experts={num_resident}, but this model has no MoE layer; serve it without experts="
            )
        if isinstance(self.residency, ResidencyMap):
            self.residency.check_model(num_layers, num_experts)
            return self.residency
        if num_resident > num_experts:
            raise ConfigError(
                f"kt_num_gpu_experts={num_resident} is above the {num_experts} experts of a layer of this model; "
                f"lower it to at most {num_experts}, or leave experts= out"
            )
        return ResidencyMap.first_n(num_layers, num_experts, num_resident)
