"""ReplicatedExpertRunner: a ModelRunner whose experts have instances on the devices of a mesh, movable between steps.

Replica maps and transfers are arguments of the programs, so another placement compiles nothing. Dims: M MoE layers, I
instances."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Int32

from routed_experts.core.errors import PlacementError
from routed_experts.core.placement import ExpertPlacement
from routed_experts.execution.aot_programs import RunnerConfig
from routed_experts.execution.expert_transfers import abstract_transfers, move_experts, plan_transfers
from routed_experts.execution.model_runner import ModelRunner
from routed_experts.execution.orders import OrderKind
from routed_experts.execution.programs import ProgramSpec
from routed_experts.execution.spmd import REPLICATED, jit_sharded
from routed_experts.models.base.sharding import AXIS, DATA_AXIS, put_global
from routed_experts.models.decoder.replica_maps import CAPACITY, REPLICAS

MoeGroup = tuple[str, tuple[int, ...], tuple[str, ...]]  # path of a block, MoE ordinals of its layers, expert arrays


class ReplicatedExpertRunner(ModelRunner):
    """Weights, pools and compiled programs of one model with placed experts; `factor` None: no capacities."""

    def __init__(
        self,
        state: nnx.State[Any, Any],
        spec: ProgramSpec,
        config: RunnerConfig,
        *,
        placement: ExpertPlacement,
        groups: Iterable[MoeGroup],
        factor: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(state, spec, config)
        self.placement, self.factor, self._groups = placement, factor, tuple(groups)
        self._instances = placement.physical_to_logical_map.copy()  # as they are now, also during a change
        self.num_copied = 0  # instances that came from another device, since the start

    def check(self, placement: ExpertPlacement) -> None:
        """Raise PlacementError for a placement of another model or of other sizes."""
        placement.check_model(self.placement.num_layers, self.placement.num_experts)
        sizes = {"instances": "num_instances", "devices": "num_devices"}
        ours, theirs = (
            {word: getattr(plan, name) for word, name in sizes.items()} for plan in (self.placement, placement)
        )
        widths = (self.placement.logical_to_physical_map.shape[2], placement.logical_to_physical_map.shape[2])
        if ours != theirs or widths[0] != widths[1]:
            text = f"the placement has {theirs} and max_replicas={widths[1]}"
            raise PlacementError(f"{text}; this engine was built with {ours} and {widths[0]}: plan with these")

    def update_weights(self, state: nnx.State[Any, Any] | None, *, version: int, donate: bool = False) -> None:
        """As a ModelRunner does. New weights are placed by `placement`, also after an interrupted change of it."""
        same = state is None or all(new is old for new, old in zip(jax.tree.leaves(state), self._weights, strict=False))
        super().update_weights(state, version=version, donate=donate)
        if not same:
            self._instances = self.placement.physical_to_logical_map.copy()

    def layers(self) -> list[tuple[int, int]]:
        """(group, row) of every MoE layer: the arguments of `move_layer`, in order."""
        return [(group, row) for group, (_, ordinals, _) in enumerate(self._groups) for row in range(len(ordinals))]

    def move_layer(self, group: int, row: int, placement: ExpertPlacement) -> int:
        """Move one layer's experts to `placement` and update its replica maps; returns how many came from another
        device. No step may be in flight: the arrays of experts are donated."""
        layer = self._groups[group][1][row]
        places = placement.physical_to_logical_map[layer], placement.logical_to_physical_map[layer]
        with self.orders.in_order():
            self.orders.send(OrderKind.MOVE_LAYER, {"layer": [group, row]}, places)
            return self.move_layer_to(group, row, *places)

    def move_layer_to(
        self, group: int, row: int, new: Int32[np.ndarray, " I"], replicas: Int32[np.ndarray, "E J"]
    ) -> int:
        """Move one layer's experts to the instances `new`, with the positions of each expert's instances."""
        path, ordinals, names = self._groups[group]
        layer = ordinals[row]
        plan = plan_transfers(self._instances[layer], new, num_devices=self.placement.num_devices)
        leaves = self._named_weights()
        tables = [leaves[f"{path}.{name}"] for name in names]
        self.num_copied += plan.num_copied
        rounds = (np.int32(row), np.int32(plan.num_rounds), plan.sent, plan.received, plan.written)
        moved = self._programs["move", path](tables, *rounds)
        arrays = dict(zip((f"{path}.{name}" for name in names), moved, strict=True))
        maps = np.array(leaves[f"{path}.{REPLICAS}"])
        maps[row] = replicas
        arrays[f"{path}.{REPLICAS}"] = put_global(maps, self._replicated)
        self._replace_weights(arrays)
        self._instances[layer] = new
        return plan.num_copied

    def set_placement(self, placement: ExpertPlacement) -> None:
        """Take a placement as the present one, once all its layers have been moved."""
        maps = placement.physical_to_logical_map, placement.logical_to_physical_map, placement.logical_replica_count
        head = {"num_devices": placement.num_devices, "epoch": placement.epoch}
        self.orders.send(OrderKind.SET_PLACEMENT, head, maps)
        self.placement = placement

    @property
    def placement_epoch(self) -> int:
        """That of `placement`: while its layers are moved, that of the placement before."""
        return self.placement.epoch

    @property
    def expert_bytes(self) -> int:
        """Bytes of one instance, the mean of the layers: what a copy carries. Also while the weights are released."""
        leaves = self._named_weights()
        arrays = [leaves[f"{path}.{name}"] for path, _, names in self._groups for name in names]
        total = sum(array.size * array.dtype.itemsize for array in arrays)
        return total // (self.placement.num_layers * self.placement.num_instances)

    def set_capacity(self, factor: tuple[int, int]) -> None:
        """Bound the instances of all later steps by another factor, a numerator and a denominator. No step may be in
        flight."""
        num_rows = {f"{path}.{CAPACITY}": len(ordinals) for path, ordinals, _ in self._groups}
        assert num_rows.keys() <= self._named_weights().keys(), "an engine whose instances have capacities"
        tables = {name: np.tile(np.array(factor, np.int32), (count, 1)) for name, count in num_rows.items()}
        self.orders.send(OrderKind.SET_CAPACITY, {"factor": list(factor)})
        self._replace_weights({name: put_global(table, self._replicated) for name, table in tables.items()})
        self.factor = factor

    def _named_weights(self) -> dict[str, Any]:
        """The arrays of the weights by dotted path."""
        return {".".join(map(str, path)): leaf.get_raw_value() for path, leaf in nnx.to_flat_state(self.state)}

    def _replace_weights(self, arrays: dict[str, Any]) -> None:
        """Run later steps with these arrays, by dotted path, instead of the present ones."""
        flat = ((".".join(map(str, path)), path, leaf) for path, leaf in nnx.to_flat_state(self.state))
        filled = [(path, leaf.replace(arrays[name]) if name in arrays else leaf) for name, path, leaf in flat]
        self._weights = jax.tree.leaves(nnx.from_flat_state(filled))

    def _jobs(self) -> dict[tuple[object, ...], Callable[[], jax.stages.Lowered]]:
        mesh_specs, placement = self.spec.mesh_specs, self.placement
        assert mesh_specs is not None, "experts are placed on a mesh"
        axis = (DATA_AXIS, AXIS) if mesh_specs.num_ranks > 1 else AXIS
        program = functools.partial(move_experts, per_device=placement.instances_per_device, axis=axis)
        leaves, jobs = self._named_weights(), super()._jobs()
        for path, _, names in self._groups:
            arrays = (leaves[f"{path}.{name}"] for name in names)
            tables = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
            sharded = [PartitionSpec(axis)] * len(names)
            run = jit_sharded(
                program, mesh_specs, in_specs=(sharded, *(REPLICATED,) * 5), out_specs=sharded, donate_argnums=(0,)
            )
            rounds = abstract_transfers(placement.num_instances, placement.num_devices)
            jobs["move", path] = functools.partial(run.lower, tables, *rounds)
        return jobs
