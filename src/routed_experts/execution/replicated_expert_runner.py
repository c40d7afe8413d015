"""ReplicatedExpertRunner: a ModelRunner whose experts may have several instances on the devices of a mesh, and may be moved
between two steps. Knows nothing of queues, nor of why an expert is where it is.

Maps are arguments of the step, and so is what is moved: another placement compiles nothing. Dims: M MoE layers, I
instances."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from routed_experts.core.errors import PlacementError
from routed_experts.core.placement import ExpertPlacement
from routed_experts.execution.aot_programs import RunnerConfig
from routed_experts.execution.expert_transfers import abstract_moves, move_experts, plan_moves
from routed_experts.execution.model_runner import ModelRunner
from routed_experts.execution.programs import ProgramSpec
from routed_experts.execution.spmd import REPLICATED, jit_sharded
from routed_experts.models.decoder.replica_maps import CAPACITY, REPLICAS

Places = tuple[
    tuple[str, tuple[int, ...], tuple[str, ...]], ...
]  # dotted path, columns of its layers, names of its expert arrays


class ReplicatedExpertRunner(ModelRunner):
    """Weights, pools and compiled programs of one model whose experts are placed."""

    def __init__(
        self,
        state: nnx.State[Any, Any],
        spec: ProgramSpec,
        config: RunnerConfig,
        *,
        placement: ExpertPlacement,
        places: Iterable[Any],
        factor: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(state, spec, config)
        self.placement, self.factor, self._places = placement, factor, tuple(places)  # factor None: no capacities
        self._held = placement.physical_to_logical_map.copy()  # what is where now, also in the middle of a change
        self.num_copied = 0  # instances that came from another device, since the start

    def check(self, placement: ExpertPlacement) -> None:
        """Raise PlacementError for a placement of another model or of other sizes."""
        placement.check_model(self.placement.num_layers, self.placement.num_experts)
        sizes = {"instances": "num_instances", "devices": "num_devices"}
        ours, theirs = (
            {word: getattr(one, name) for word, name in sizes.items()} for one in (self.placement, placement)
        )
        widths = (self.placement.logical_to_physical_map.shape[2], placement.logical_to_physical_map.shape[2])
        if ours != theirs or widths[0] != widths[1]:
            told = f"the placement has {theirs} and max_replicas={widths[1]}"
            raise PlacementError(f"{told}; this engine was built with {ours} and {widths[0]}: plan with these")

    def update_weights(self, state: nnx.State[Any, Any] | None, *, version: int, donate: bool = False) -> None:
        """As a ModelRunner does; weights that are new lie as `placement` says, also where a change of it had stopped
        half way."""
        same = state is None or all(new is old for new, old in zip(jax.tree.leaves(state), self._weights, strict=False))
        super().update_weights(state, version=version, donate=donate)
        if not same:
            self._held = self.placement.physical_to_logical_map.copy()

    def layers(self) -> list[tuple[int, int]]:
        """(place, row) of every MoE layer: what `move_layer` takes, one after another."""
        return [(place, row) for place, (_, columns, _) in enumerate(self._places) for row in range(len(columns))]

    def move_layer(self, place: int, row: int, placement: ExpertPlacement) -> int:
        """Put one layer's experts where the placement has them, and give the step its maps; returns how many came from
        another device. No step may be in flight: the arrays of experts are donated."""
        at, columns, names = self._places[place]
        column, devices = columns[row], placement.num_devices
        moves = plan_moves(self._held[column], placement.physical_to_logical_map[column], num_devices=devices)
        flat = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(self.state)}
        tables = [flat[f"{at}.{name}"][1].get_raw_value() for name in names]
        self.num_copied += moves.num_copied
        turns = (np.int32(row), np.int32(moves.num_rounds), moves.shown, moves.taken, moves.put)
        moved = dict(zip((f"{at}.{name}" for name in names), self._programs["move", at](tables, *turns), strict=True))
        maps = np.array(flat[f"{at}.{REPLICAS}"][1].get_raw_value())
        maps[row] = placement.logical_to_physical_map[column]
        moved[f"{at}.{REPLICAS}"] = jax.device_put(maps, self._replicated)
        self._put(moved)
        self._held[column] = placement.physical_to_logical_map[column]
        return moves.num_copied

    @property
    def expert_bytes(self) -> int:
        """Bytes of one instance, the mean of the layers: what a copy carries."""
        flat = {".".join(map(str, path)): leaf.get_raw_value() for path, leaf in nnx.to_flat_state(self.state)}
        held = sum(flat[f"{at}.{name}"].nbytes for at, _, names in self._places for name in names)
        return held // (self.placement.num_layers * self.placement.num_instances)

    def set_capacity(self, factor: tuple[int, int]) -> None:
        """Bound the instances of all later steps by another factor, a numerator and a denominator. No step may be in
        flight."""
        flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(self.state)}
        rows = {f"{at}.{CAPACITY}": len(columns) for at, columns, _ in self._places}
        assert rows.keys() <= flat.keys(), "an engine whose instances have capacities"
        self._put(
            {
                name: jax.device_put(np.tile(np.array(factor, np.int32), (count, 1)), self._replicated)
                for name, count in rows.items()
            }
        )
        self.factor = factor

    def _put(self, arrays: dict[str, Any]) -> None:
        """Run later steps with these arrays, by dotted path, in place of those that there are."""
        flat = ((".".join(map(str, path)), path, leaf) for path, leaf in nnx.to_flat_state(self.state))
        filled = [(path, leaf.replace(arrays[name]) if name in arrays else leaf) for name, path, leaf in flat]
        self._weights = jax.tree.leaves(nnx.from_flat_state(filled))

    def _jobs(self) -> dict[tuple[object, ...], Callable[[], jax.stages.Lowered]]:
        on, placement = self.spec.on, self.placement
        assert on is not None, "experts are placed on a mesh"
        axis, own = str(on.mesh.axis_names[0]), placement.instances_per_device
        program = functools.partial(move_experts, own=own, axis=axis)
        flat = {".".join(map(str, path)): leaf.get_raw_value() for path, leaf in nnx.to_flat_state(self.state)}
        jobs = super()._jobs()
        for at, _, names in self._places:
            tables = [jax.ShapeDtypeStruct(flat[f"{at}.{name}"].shape, flat[f"{at}.{name}"].dtype) for name in names]
            dealt = [PartitionSpec(axis)] * len(names)
            run = jit_sharded(program, on, takes=(dealt, *(REPLICATED,) * 5), gives=dealt, donate_argnums=(0,))
            jobs["move", at] = functools.partial(
                run.lower, tables, *abstract_moves(placement.num_instances, placement.num_devices)
            )
        return jobs
