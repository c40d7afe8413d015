"""A model's weights sharded over a mesh: the part of an array on each device, and the transfer to the devices.

The mesh has one axis, "tensor"; with data ranks "data" comes before it. Experts are sharded over both axes, all other
arrays over "tensor", so that every data rank holds them.

Parts of one array are side by side along the axis of its partition, in the order of the devices, as one global
array. Where segments are partitioned separately, its columns are in another order than in the model's own array.
Dims: V devices."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Shaped

from routed_experts.core.errors import MachineError
from routed_experts.models.base.partitioning import AxisPartition, ParallelConfig

AXIS, DATA_AXIS = "tensor", "data"


@dataclasses.dataclass(frozen=True)
class ModelSharding:
    """`parallel.devices` devices and how each array of a model is sharded over them; arrays without a partition are
    replicated."""

    parallel: ParallelConfig
    partitions: Mapping[str, AxisPartition]  # by dotted path
    devices: tuple[Any, ...] = ()  # empty: the first ones of this process
    maps: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict[str, np.ndarray])  # of placed experts

    @staticmethod
    def create(
        partitions: Mapping[str, AxisPartition],
        parallel: ParallelConfig,
        *,
        devices: tuple[Any, ...] = (),
        maps: Mapping[str, np.ndarray] | None = None,
    ) -> "ModelSharding | None":
        """For a model's partitions; None for one device. Raises ConfigError where the model cannot be sharded so
        far; the number of devices is checked when `mesh` is first used."""
        if parallel.devices == 1:
            return None
        parallel.check(partitions)
        return ModelSharding(parallel, partitions, devices, maps or {})

    @cached_property
    def mesh(self) -> Mesh:
        """The first V devices, those of a data rank side by side. Raises MachineError where there are fewer."""
        devices = self.devices or jax.devices()
        if len(devices) < self.parallel.devices:
            kind = devices[0].platform
            remedy = (
                ", or make as many of one CPU: set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={self.parallel.devices}"
                if kind == "cpu"
                else ""
            )
            raise MachineError(
                f"tp_size={self.parallel.devices} is above the {len(devices)} {kind} devices here; lower it{remedy}"
            )
        chosen = np.array(devices[: self.parallel.devices])
        if self.parallel.data == 1:
            return Mesh(chosen, (AXIS,))
        return Mesh(chosen.reshape(self.parallel.data, self.parallel.tensor), (DATA_AXIS, AXIS))

    def spec(self, name: str, ndim: int) -> PartitionSpec:
        """The PartitionSpec of the global array of that name."""
        partition = self.partitions.get(name)
        if partition is None:
            return PartitionSpec()
        axis = partition.axis % ndim
        axes = (DATA_AXIS, AXIS) if partition.over_data and self.parallel.data > 1 else AXIS
        return PartitionSpec(*[axes if index == axis else None for index in range(axis + 1)])

    def sharding(self, name: str, ndim: int) -> NamedSharding:
        """The NamedSharding of that array on the mesh."""
        return NamedSharding(self.mesh, self.spec(name, ndim))

    def local_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one device's part of the model's array."""
        partition = self.partitions.get(name)
        return shape if partition is None else partition.local_shape(shape, self.parallel.parts(partition))

    def global_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the parts of all devices side by side."""
        partition = self.partitions.get(name)
        if partition is None:
            return shape
        part, axis = self.local_shape(name, shape), partition.axis % len(shape)
        return (*part[:axis], part[axis] * self.parallel.parts(partition), *part[axis + 1 :])

    def local_part(self, state: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
        """Shapes of one device's part of a model's arrays."""
        flat = [(path, leaf.replace(self._part_struct(_dotted(path), leaf))) for path, leaf in nnx.to_flat_state(state)]
        return nnx.from_flat_state(flat)

    def rank_bytes(self, state: nnx.State[Any, Any]) -> int:
        """Bytes of one device's part of the arrays that every data rank holds."""
        named = ((_dotted(path), leaf) for path, leaf in nnx.to_flat_state(state))
        whole = ((self.partitions.get(name), name, leaf) for name, leaf in named)
        return sum(
            math.prod(self.local_shape(name, leaf.shape)) * leaf.dtype.itemsize
            for partition, name, leaf in whole
            if partition is None or not partition.over_data
        )

    def device_put(self, state: nnx.State[Any, Any], *, donate: bool = False) -> nnx.State[Any, Any]:
        """Shard a model's arrays over the devices; with `donate` each array is deleted once copied."""
        flat, donated = list[Any](), DonatedBuffers(jax.tree.leaves(state) if donate else ())
        for path, leaf in nnx.to_flat_state(state):
            array = leaf.get_raw_value()
            copied = self.put_array(_dotted(path), array)
            donated.copied(array, copied)
            flat.append((path, leaf.replace(copied)))
        return nnx.from_flat_state(flat)

    def put_array(self, name: str, array: Array | np.ndarray) -> Array:
        """Shard one array over the devices."""
        partition, sharding = self.partitions.get(name), self.sharding(name, array.ndim)
        if partition is None:
            return put_global(np.array(array) if isinstance(array, np.ndarray) else array, sharding)
        count = self.parallel.parts(partition)
        parts = [
            jax.device_put(_take(array, partition, number % count, count), device)
            for number, device in enumerate(self.mesh.devices.flat)
            if device.process_index == jax.process_index()
        ]
        return jax.make_array_from_single_device_arrays(self.global_shape(name, array.shape), sharding, parts)

    def put_maps(self) -> dict[str, Array]:
        """The maps, the same on every device."""
        return {name: put_global(table, self.sharding(name, table.ndim)) for name, table in self.maps.items()}

    def _part_struct(self, name: str, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.local_shape(name, leaf.shape), leaf.dtype)


def put_global(array: Array | np.ndarray, sharding: Sharding | None) -> Array:
    """Put an array that every process holds on the devices of a sharding; None: on the default device. Where the
    devices belong to several processes, each serves its own: jax.device_put would compare the arrays of all, which
    takes milliseconds."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def buffer_pointers(array: Array) -> set[int]:
    """Addresses of an array's buffers on the devices of this process."""
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


class DonatedBuffers:
    """Donated arrays. An array may have several names and is deleted after the copy under the last of them. An array
    that shares memory with its copy is not deleted, nor is a host array."""

    def __init__(self, arrays: Iterable[object]) -> None:
        self._names = Counter(at for array in arrays if isinstance(array, jax.Array) for at in buffer_pointers(array))
        self._served = set[int]()

    def copied(self, array: object, copy: Array) -> None:
        """Record that an array was copied under one of its names; delete a donated array after the last."""
        if not self._names or not isinstance(array, jax.Array):
            return
        own = buffer_pointers(array)
        self._served |= own & buffer_pointers(copy)
        self._names.subtract(own)
        jax.block_until_ready(copy)
        if not own & self._served and all(self._names[at] == 0 for at in own):
            array.delete()


def _take(
    array: Array | np.ndarray, partition: AxisPartition, device: int, devices: int
) -> Shaped[Array, "..."] | np.ndarray:
    """A device's part of a whole array, on that array's device."""
    axis, pieces = partition.axis % array.ndim, partition.pieces(device, devices)
    positions = np.concatenate([np.arange(first, end) for first, end in pieces])
    return (
        np.take(array, positions, axis=axis) if isinstance(array, np.ndarray) else jnp.take(array, positions, axis=axis)
    )


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
