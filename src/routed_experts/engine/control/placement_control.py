"""PlacementControl: moves the experts of a running engine: between devices, or between the accelerator and its host.

Experts move between two steps, while requests go on. Dims: M MoE layers."""

import functools
from fractions import Fraction

import numpy as np
from jaxtyping import Float64

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.placement import ExpertPlacement, ResidencyMap
from routed_experts.core.placement_config import parse_fraction
from routed_experts.engine.control.context import EngineContext
from routed_experts.engine.control.stats import PlacementStats, placement_stats
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.execution.replicated_expert_runner import ReplicatedExpertRunner


class PlacementControl:
    """The placement of one engine's experts. Thread-safe. A rebalancer applies its plans with it."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        if context.components.rebalancer is not None:
            context.components.rebalancer.start(self._apply_if_resident)

    def apply(self, placement: ExpertPlacement) -> int:
        """`Engine.apply_placement`."""
        runner = self._replicated_runner()
        _check_type("placement", placement, ExpertPlacement)
        runner.check(placement)
        with self._context.exclusive_weights():
            self._context.check_not_released("apply_placement")
            self._context.check_not_prepared("apply_placement")
            return self._move_layers(placement, 1)

    def set_capacity_factor(self, factor: Fraction | float | str) -> None:
        """`Engine.set_capacity_factor`."""
        runner, parsed = self._replicated_runner(), parse_fraction(factor)
        if runner.factor is None:
            text = (
                "this engine's instances have no capacities; "
                "build it with Engine(..., placement=PlacementConfig(mode='reroute', ...))"
            )
            raise InvalidRequestError(text, param="factor")
        with self._context.weights_lock:
            self._context.check_not_released("set_capacity_factor")
            self._context.check_not_prepared("set_capacity_factor")
            self._context.thread.run_drained(lambda: runner.set_capacity(parsed))

    def stats(self) -> PlacementStats:
        """`Engine.placement_stats`."""
        return placement_stats(self._context.components, self._replicated_runner())

    def apply_residency(self, residency: ResidencyMap) -> int:
        """`Engine.apply_residency`."""
        runner = self._offload_runner()
        _check_type("residency", residency, ResidencyMap)
        return self._context.thread.run_between_steps(lambda: runner.apply_residency(residency))

    def residency(self) -> tuple[ResidencyMap, Float64[np.ndarray, " M"]]:
        """`Engine.residency`."""
        runner = self._offload_runner()
        residency, counts = self._context.thread.run_between_steps(lambda: (runner.residency, runner.slot_counts()))
        return residency, 1.0 - counts[:, 0] / np.where(counts[:, 1] == 0, np.nan, counts[:, 1])

    def _apply_if_resident(self, placement: ExpertPlacement, layers_per_step: int) -> int | None:
        """Apply a rebalancer's plan; None while memory is released, for then no expert can move, and while new weights
        are prepared, which lie as the present placement has them."""
        with self._context.exclusive_weights():
            is_fixed = self._context.core.released or self._context.prepared.weights is not None
            return None if is_fixed else self._move_layers(placement, layers_per_step)

    def _move_layers(self, placement: ExpertPlacement, layers_per_step: int) -> int:
        runner = self._replicated_runner()
        layers = runner.layers()

        def move(first: int) -> int:
            moved = sum(runner.move_layer(*layer, placement) for layer in layers[first : first + layers_per_step])
            if first + layers_per_step >= len(layers):
                runner.set_placement(placement)
            return moved

        firsts = range(0, len(layers), layers_per_step)
        return sum(self._context.thread.run_drained(functools.partial(move, first)) for first in firsts)

    def _offload_runner(self) -> OffloadRunner:
        runner = self._context.offload_runner
        if runner is None:
            text = (
                "this engine has all experts on the accelerator; build it with Engine(..., "
                "experts=ExpertOffloadConfig(...))"
            )
            raise InvalidRequestError(text, param="residency")
        return runner

    def _replicated_runner(self) -> ReplicatedExpertRunner:
        runner = self._context.core.runner
        if not isinstance(runner, ReplicatedExpertRunner):
            text = (
                "this engine has one instance of every expert, where it is; build it with Engine(..., "
                "ep_size=..., placement=...)"
            )
            raise InvalidRequestError(text, param="placement")
        return runner


def _check_type(param: str, value: object, expected: type) -> None:
    """Raise InvalidRequestError for what is no such plan."""
    if not isinstance(value, expected):
        text = (
            f"{param} is {short_repr(value)}; give a {expected.__name__}, as {expected.__name__}.read(path) returns it"
        )
        raise InvalidRequestError(text, param=param)
