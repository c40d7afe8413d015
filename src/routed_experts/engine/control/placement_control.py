"""PlacementControl: where the experts of a running engine are: on which devices, or on the accelerator or its host. Knows
no request.

Every method may be called from any thread and acts between two steps."""

import functools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from jaxtyping import Float64

from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.placement import ExpertPlacement, ResidencyMap
from routed_experts.core.placement_config import parse_fraction
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.builder import EngineComponents
from routed_experts.engine.control.memory_control import MemoryControl, refuse_released
from routed_experts.engine.control.placement_stats import PlacementStats
from routed_experts.engine.loop.core import EngineCore
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.execution.replicated_expert_runner import ReplicatedExpertRunner


class PlacementControl(MemoryControl):
    """A core in its loop, whose experts may be somewhere else tomorrow."""

    def __init__(self, args: ServerArgs, assembly: EngineComponents) -> None:
        super().__init__(args, assembly)
        if assembly.rebalancer is not None:
            assembly.rebalancer.start(self._follow)

    def apply_placement(self, placement: ExpertPlacement) -> int:
        """Move the experts to where the placement has them, a MoE layer between two steps, while requests go on;
        returns how many instances came from another device. Ids and outputs stay what they are, up to the order of
        sums, and nothing is compiled. Raises PlacementError for a placement of another model or other sizes, and
        InvalidRequestError on an engine that was built without placement=."""
        return self._move(placement, 1)

    def set_capacity_factor(self, factor: Fraction | float | str) -> None:
        """Give the instances of later steps room for this factor of the mean load; nothing is compiled. `factor` as in
        PlacementConfig. Raises ConfigError, and InvalidRequestError on an engine that was built without
        PlacementConfig(mode="reroute")."""
        runner, wanted = _placed_runner(self._assembly.core), parse_fraction(factor)
        if runner.factor is None:
            text = "this engine's instances have no capacities; build it with Engine(..., placement=PlacementConfig(mode='reroute', ...))"
            raise InvalidRequestError(text, param="factor")
        with self._placing:
            refuse_released(self._assembly.core, "set_capacity_factor")
            self._loop.run_drained(lambda: runner.set_capacity(wanted))

    def placement_stats(self) -> PlacementStats:
        """What became of the experts' places since the start. Raises InvalidRequestError on an engine without
        placement=."""
        return PlacementStats.of(self._assembly, _placed_runner(self._assembly.core))

    def _move(self, placement: ExpertPlacement, layers_per_step: int) -> int:
        _placed_runner(self._assembly.core).check(placement)
        with self._placing, self._scorer.turn:
            refuse_released(self._assembly.core, "apply_placement")
            return self._move_layers(placement, layers_per_step)

    def _follow(self, placement: ExpertPlacement, layers_per_step: int) -> int | None:
        """The same for who follows the load; None while memory is released, for then there is nothing to move."""
        with self._placing, self._scorer.turn:
            return None if self._assembly.core.released else self._move_layers(placement, layers_per_step)

    def _move_layers(self, placement: ExpertPlacement, layers_per_step: int) -> int:
        runner = _placed_runner(self._assembly.core)

        def move(layers: Sequence[tuple[int, int]]) -> int:
            return sum(runner.move_layer(*layer, placement) for layer in layers)

        layers = runner.layers()
        chunks = [layers[first : first + layers_per_step] for first in range(0, len(layers), layers_per_step)]
        moved = [self._loop.run_drained(functools.partial(move, chunk)) for chunk in chunks]
        runner.placement = placement
        return sum(moved)

    def apply_residency(self, residency: ResidencyMap) -> int:
        """Make other experts resident on the accelerator, between two steps, and return how many were copied there. Ids
        and outputs stay what they are, up to the order of sums, and nothing is compiled. Raises PlacementError for a
        map of another model or another number of residents, and InvalidRequestError on an engine without
        experts=ExpertOffloadConfig(...)."""
        runner = _split_runner(self._assembly.core)
        return self._loop.run_between_steps(lambda: runner.apply_residency(residency))

    def residency(self) -> tuple[ResidencyMap, Float64[np.ndarray, " M"]]:
        """Which experts are resident, and of each MoE layer the share of all slots so far that residents ran
        (resident_hit_ratio; NaN before the first step). Raises InvalidRequestError on an engine without
        experts=ExpertOffloadConfig(...)."""
        runner = _split_runner(self._assembly.core)
        held, counts = self._loop.run_between_steps(lambda: (runner.residency, runner.slot_counts()))
        return held, 1.0 - counts[:, 0] / np.where(counts[:, 1] == 0, np.nan, counts[:, 1])


def _split_runner(core: EngineCore) -> OffloadRunner:
    if not isinstance(core.runner, OffloadRunner):
        text = "this engine has all experts on the accelerator; build it with Engine(..., experts=ExpertOffloadConfig(...))"
        raise InvalidRequestError(text, param="residency")
    return core.runner


def _placed_runner(core: EngineCore) -> ReplicatedExpertRunner:
    if not isinstance(core.runner, ReplicatedExpertRunner):
        text = "this engine has one instance of every expert, where it is; build it with Engine(..., ep_size=..., placement=...)"
        raise InvalidRequestError(text, param="placement")
    return core.runner
