"""PlacementConfig: the initial placement of an engine's experts, how slots choose among instances, and rebalancing.

Checked once, when it is made; what depends on the model is checked when the engine is built."""

import dataclasses
import math
import os
from fractions import Fraction

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import ConfigError
from routed_experts.core.integers import to_int, with_python_integers
from routed_experts.core.placement import ExpertPlacement

PLACEMENT_MODES = ("replicas", "reroute")
ON_EXHAUSTED = ("overflow", "drop")
MAX_TERM = 1 << 12  # of a capacity factor's fraction: slots are counted in int32
_EXPONENT_DIGITS, _MAX_CHARS = 3, 100  # of a number that is read as a fraction
UNBOUNDED = (1, 0)  # the fraction of a factor without bound


@with_python_integers
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """An initial placement and its policy. Raises ConfigError for values that cannot work, naming field, value, limit
    and fix.

    "replicas" changes no token: slots of an expert are spread over its instances. "reroute" gives every instance
    room for max(1, ceil(capacity_factor * tokens of the step * K / I)) slots. A slot without room goes to the next
    replica, then to the token's next best expert. This changes the model: a token's experts depend on the other
    requests, and responses report it. `on_exhausted`: a slot whose token finds no room runs its best expert anyway
    ("overflow") or none ("drop"). With `rebalance_every` a new plan is made from the load of that many steps; where
    it pays, the experts move, `layers_per_step` MoE layers between two steps. The gain is estimated from
    `expert_share` of the wall time of the steps (the experts of one program cannot be timed separately), the cost
    from `link_bytes_per_s`."""

    plan: ExpertPlacement | str | os.PathLike[str]  # or the .npz that ExpertPlacement.save wrote
    mode: str = "replicas"
    # Such as 1.25 or "5/4", inf for no bound; "reroute" needs it.
    capacity_factor: Fraction | float | str | None = None
    on_exhausted: str = "overflow"
    rebalance_every: int = 0  # steps; 0: never
    layers_per_step: int = 1
    num_groups: int = 1  # of experts; a group is on one node where num_nodes divides num_groups
    num_nodes: int = 1
    expert_share: float = 0.5
    link_bytes_per_s: float = 25e9

    def __post_init__(self) -> None:
        """Check every field once."""
        if not isinstance(self.plan, ExpertPlacement | str | os.PathLike):
            raise ConfigError(f"plan={self.plan!r} is no placement; give an ExpertPlacement, or the .npz file of one")
        for name, allowed in (("mode", PLACEMENT_MODES), ("on_exhausted", ON_EXHAUSTED)):
            value = self.mode if name == "mode" else self.on_exhausted
            if value not in allowed:
                raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")
        if self.capacity_limited != (self.capacity_factor is not None) or (
            self.on_exhausted == "drop" and not self.capacity_limited
        ):
            fields = f"mode={self.mode!r}, capacity_factor={self.capacity_factor!r}, on_exhausted={self.on_exhausted!r}"
            raise ConfigError(
                f"{fields}; a capacity factor and 'drop' go with mode='reroute', and 'reroute' needs a factor, such "
                "as 1.25"
            )
        parse_fraction(self.capacity_factor)
        for name, value, least in (
            ("rebalance_every", self.rebalance_every, 0),
            ("layers_per_step", self.layers_per_step, 1),
            ("num_groups", self.num_groups, 1),
            ("num_nodes", self.num_nodes, 1),
        ):
            to_int(name, value, least)
        for name, value in (("expert_share", self.expert_share), ("link_bytes_per_s", self.link_bytes_per_s)):
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not (math.isfinite(value) and value > 0)
            ):
                raise ConfigError(f"{name}={value!r} must be a finite number above 0")

    @staticmethod
    def create(
        placement: "ExpertPlacement | PlacementConfig | str | os.PathLike[str] | None",
    ) -> "PlacementConfig | None":
        """Build from the argument of `Engine(placement=)` and read its plan. Raises ConfigError, PlacementError,
        RoutingFormatError."""
        if placement is None:
            return None
        config = placement if isinstance(placement, PlacementConfig) else PlacementConfig(plan=placement)
        return (
            config
            if isinstance(config.plan, ExpertPlacement)
            else dataclasses.replace(config, plan=read_plan(config.plan))
        )

    @property
    def initial(self) -> ExpertPlacement:
        """The initial plan, which `create` has read."""
        assert isinstance(self.plan, ExpertPlacement), "PlacementConfig.create reads it"
        return self.plan

    @property
    def capacity_limited(self) -> bool:
        """Whether instances have capacities."""
        return self.mode == "reroute"


def read_plan(path: str | os.PathLike[str]) -> ExpertPlacement:
    """Read a placement; raises ConfigError where there is no such file, and what `ExpertPlacement.read` raises."""
    if not os.path.isfile(path):
        raise ConfigError(
            f"placement {os.fspath(path)!r} is no file; give the .npz that `routed-experts placement --save` wrote"
        )
    return ExpertPlacement.read(path)


def to_fraction(factor: Fraction | float | str) -> Fraction:
    """The number that a text says, a float by its decimal digits. Raises ValueError for another text, or one with an
    exponent of more than three digits, whose fraction may fill the memory; ZeroDivisionError."""
    text = str(factor)
    if len(text.lower().partition("e")[2].lstrip("+-")) > _EXPONENT_DIGITS or len(text) > _MAX_CHARS:
        raise ValueError(f"{text[:_MAX_CHARS]} is out of range")
    return Fraction(text)


def parse_fraction(factor: Fraction | float | str | None) -> tuple[int, int]:
    """A capacity factor as numerator and denominator, a float by its decimal digits; UNBOUNDED for infinity or None.
    Raises ConfigError."""
    if factor is None or str(factor) in ("inf", "infinity"):
        return UNBOUNDED
    try:
        exact = to_fraction(factor)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"capacity_factor={short_repr(factor)} is no number; give one above 0, such as 1.25 or '5/4', or inf"
        ) from error
    if exact <= 0 or max(exact.numerator, exact.denominator) > MAX_TERM:
        limit = f"above 0, a fraction of integers up to {MAX_TERM}"
        raise ConfigError(f"capacity_factor={short_repr(factor)}; it must be {limit}, such as 1.25, or inf")
    return exact.numerator, exact.denominator
