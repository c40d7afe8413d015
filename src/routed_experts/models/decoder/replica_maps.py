"""Experts placed on devices by an ExpertPlacement: which rows of its arrays each device holds, and the maps that a
step reads. Instance i of a layer is on device i // (I / V). Dims: M MoE layers, R layers of a stack, E experts, I
instances, J replica positions, V devices."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Int32

from routed_experts.core.placement import ExpertPlacement
from routed_experts.models.base.partitioning import AxisPartition, IndexedPartition
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.decoder.layer_params import ParamKind

REPLICAS, CAPACITY = (
    "replicas",
    "capacity",
)  # names among a run's arrays: its maps [R, E, J], and its capacity factors [R, 2]


def moe_groups(config: FamilyConfig) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """For every group of MoE layers: its dotted path, the record's column of each layer, and its arrays of
    experts."""
    spec = config.capture_spec
    for number, run in enumerate(config.blocks):
        for kind, layer in enumerate(run.pattern):
            if spec is not None and isinstance(layer.feed, Sparse):
                layers = (run.first + repeat * len(run.pattern) + kind for repeat in range(run.repeats))
                names = tuple(weight.name for weight in layer.weights(config) if weight.kind is ParamKind.EXPERTS)
                yield f"blocks.{number}.{kind}", tuple(spec.layer_ids.index(index) for index in layers), names


def placed_partitions(
    config: FamilyConfig, partitions: Mapping[str, AxisPartition], placement: ExpertPlacement
) -> dict[str, AxisPartition]:
    """The same partitions, with the experts on the devices of the placement."""
    partitions_by_path, physical_to_logical, own = (
        dict(partitions),
        placement.physical_to_logical_map,
        placement.instances_per_device,
    )
    for path, columns, names in moe_groups(config):
        rows = np.arange(len(columns))[:, None] * placement.num_experts + physical_to_logical[list(columns)]  # [R, I]
        by_device = (rows[:, device * own : (device + 1) * own].reshape(-1) for device in range(placement.num_devices))
        partition = IndexedPartition(0, (), over_data=True, indices=tuple(tuple(rows.tolist()) for rows in by_device))
        partitions_by_path |= {f"{path}.{name}": partition for name in names}
    return partitions_by_path


def replica_maps(config: FamilyConfig, placement: ExpertPlacement) -> dict[str, Int32[np.ndarray, "R E J"]]:
    """The instances of every expert, by the path that they have among a model's arrays."""
    logical_to_physical = placement.logical_to_physical_map
    return {f"{path}.{REPLICAS}": logical_to_physical[list(columns)] for path, columns, _ in moe_groups(config)}


def capacity_maps(config: FamilyConfig, factor: tuple[int, int]) -> dict[str, Int32[np.ndarray, "R 2"]]:
    """The capacity factor, numerator and denominator, of every layer, by the same paths."""
    return {
        f"{path}.{CAPACITY}": np.tile(np.array(factor, np.int32), (len(columns), 1))
        for path, columns, _ in moe_groups(config)
    }


def with_replica_maps(state: nnx.State[Any, Any], maps: Mapping[str, Any]) -> nnx.State[Any, Any]:
    """A model's arrays, with the maps added next to the experts."""
    paths = (
        ([int(part) if part.isdigit() else part for part in name.split(".")], value) for name, value in maps.items()
    )
    added = [(tuple(path), nnx.Variable(value)) for path, value in paths]
    return nnx.from_flat_state([*nnx.to_flat_state(state), *added])
