"""ExpertOffloadConfig: how a model's experts are shared out between the accelerator and the host. Knows no device and
no weight.

The names are those that KTransformers gave to SGLang; each says here what it means. Checked once, when it is made;
what needs the model or the machine is checked when the engine is built, before anything is allocated."""

import dataclasses

from routed_experts.core.errors import ConfigError
from routed_experts.core.placement import ResidencyMap

KT_METHODS = ("auto", "bf16", "f32")
HOST_BACKENDS = ("auto", "dispatch", "ffi")
RESIDENCIES = ("first", "adaptive")
_COUNTS = (
    "kt_num_gpu_experts",
    "num_device_experts",
    "kt_cpuinfer",
    "kt_threadpool_count",
    "kt_gpu_prefill_token_threshold",
    "kt_max_deferred_experts_per_token",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOffloadConfig:
    """N experts of each MoE layer are on the accelerator, the others run on the host meanwhile. Without N nothing is
    shared out.

    Raises ConfigError for values that cannot work, naming field, value, limit and fix."""

    kt_num_gpu_experts: int | None = (
        None  # N, 0 to all; None: every expert is on the accelerator, as without this config
    )
    num_device_experts: int | None = None  # another name of kt_num_gpu_experts
    kt_weight_path: str | None = None  # safetensors of the experts; None: the model's own
    kt_method: str = "auto"  # number format of experts on the host: auto is the model's
    kt_cpuinfer: int | None = (
        None  # threads of the host's experts; with `dispatch` XLA's CPU client has them all, fixed at start
    )
    kt_threadpool_count: int | None = None  # pools of those threads: 1
    kt_max_deferred_experts_per_token: int = (
        0  # d: of a token's d lightest experts those on the host are added a MoE layer later
    )
    kt_gpu_prefill_token_threshold: int | None = (
        None  # a step of at least that many tokens runs on the accelerator alone; 0, None: never
    )
    host_backend: str = (
        "auto"  # `dispatch`: a step is cut at every layer; `ffi`: it is one program, not on a TPU; auto: the faster
    )
    residency: str | ResidencyMap = (
        "first"  # "first" N by id; "adaptive": these at first, then they follow the load; or those of a plan
    )

    def __post_init__(self) -> None:
        """Check every field once."""
        values = dataclasses.asdict(self)
        for name in _COUNTS:
            value = values[name]
            left_out = value is None and name != "kt_max_deferred_experts_per_token"
            if not left_out and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ConfigError(f"{name}={value!r} must be an integer of at least 0; leave it out if in doubt")
        for name, allowed in (("kt_method", KT_METHODS), ("host_backend", HOST_BACKENDS)):
            if values[name] not in allowed:
                raise ConfigError(
                    f"{name}={values[name]!r} is not among what exists here: {', '.join(allowed)}; choose one of them"
                )
        if self.kt_weight_path is not None and not isinstance(self.kt_weight_path, str):
            raise ConfigError(
                f"kt_weight_path={self.kt_weight_path!r} must be text, the folder of the experts' safetensors, or None"
            )
        if (
            None not in (self.kt_num_gpu_experts, self.num_device_experts)
            and self.kt_num_gpu_experts != self.num_device_experts
        ):
            raise ConfigError(
                f"kt_num_gpu_experts={self.kt_num_gpu_experts} and num_device_experts={self.num_device_experts} are two names of one "
                "number; give one of them"
            )
        if not isinstance(self.residency, ResidencyMap) and self.residency not in RESIDENCIES:
            raise ConfigError(
                f"residency={self.residency!r} is not among what exists here: 'first', 'adaptive', or a ResidencyMap; for residents by "
                "captured frequency plan one from RoutingStats, and give it here or to Engine.apply_residency"
            )
        planned = self.residency.num_resident if isinstance(self.residency, ResidencyMap) else None
        given = self.num_device_experts if self.kt_num_gpu_experts is None else self.kt_num_gpu_experts
        if None not in (planned, given) and planned != given:
            raise ConfigError(
                f"kt_num_gpu_experts={given} and the plan's num_resident={planned} differ; leave the number out"
            )
        if self.kt_threadpool_count not in (None, 1):
            raise ConfigError(
                f"kt_threadpool_count={self.kt_threadpool_count}, but XLA's CPU client has 1 pool; leave it out or give 1"
            )
        if self.host_backend == "ffi" and self.kt_max_deferred_experts_per_token:
            raise ConfigError(
                f"kt_max_deferred_experts_per_token={self.kt_max_deferred_experts_per_token} with host_backend='ffi', which adds all "
                "experts in their own layer; leave it at 0, or take host_backend='dispatch'"
            )
        if self.kt_cpuinfer == 0:
            raise ConfigError(
                "kt_cpuinfer=0, but somebody must run the host's experts; give at least 1 thread, or leave it out"
            )
        told = sorted(field.name for field in dataclasses.fields(self) if values[field.name] != field.default)
        if self.num_resident is None and told:
            raise ConfigError(
                f"{', '.join(told)} without kt_num_gpu_experts, which shares nothing out; give the number too, or none"
            )

    @property
    def num_resident(self) -> int | None:
        """N, under whichever name it was given or of the plan; None: nothing is shared out."""
        if isinstance(self.residency, ResidencyMap):
            return self.residency.num_resident
        return self.num_device_experts if self.kt_num_gpu_experts is None else self.kt_num_gpu_experts

    @property
    def streams_from(self) -> int | None:
        """Tokens from which on a step runs on the accelerator alone; None: no step does."""
        return self.kt_gpu_prefill_token_threshold or None

    def residents_of(self, num_layers: int, num_experts: int) -> ResidencyMap:
        """The residents at the start, of a model of so many MoE layers (0: none) and experts. Raises ConfigError,
        PlacementError."""
        wanted = self.num_resident
        assert wanted is not None, "nothing is shared out"
        if num_layers == 0:
            raise ConfigError(
                f"kt_num_gpu_experts={wanted}, but this model has no MoE layer; serve it without experts="
            )
        if isinstance(self.residency, ResidencyMap):
            self.residency.check_model(num_layers, num_experts)
            return self.residency
        if wanted > num_experts:
            raise ConfigError(
                f"kt_num_gpu_experts={wanted} is above the {num_experts} experts of a layer of this model; lower it to at most "
                f"{num_experts}, or leave experts= out"
            )
        return ResidencyMap.first_n(num_layers, num_experts, wanted)
