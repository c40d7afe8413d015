"""Plans the reads of a target: its sources, intersected with the part that each device holds.

sources      tensors of a checkpoint, each a box of the target
boxes        what a device holds of the target; several where the target is partitioned by segments
reads        their intersections: a box of a tensor, and an offset in the device's shard"""

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from routed_experts.core.errors import CheckpointError
from routed_experts.models.base.sharding import ModelSharding
from routed_experts.models.base.weight_source import WeightSource


@dataclass(frozen=True, slots=True)
class TensorRead:
    """The part of one tensor that falls into one part of a target."""

    name: str
    dtype: str
    box: tuple[slice, ...]  # of the tensor, as in the checkpoint
    start: tuple[int, ...]  # in the part
    shape: tuple[int, ...]  # there
    transpose: bool

    @property
    def read_shape(self) -> tuple[int, ...]:
        return tuple(side.stop - side.start for side in self.box)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def chunks(self, most_bytes: int) -> "list[TensorRead]":
        """The read, or if it is larger than `most_bytes`, blocks of the rows of its tensor's first axis."""
        first, rows = self.box[0].start, self.box[0].stop - self.box[0].start
        depth = max(1, rows * most_bytes // max(1, self.num_bytes))
        if depth >= rows:
            return [self]
        axis = len(self.shape) - (
            1 if self.transpose and len(self.box) == 2 else len(self.box)
        )  # of that axis in the part
        chunks: list[TensorRead] = []
        for low in range(0, rows, depth):
            high = min(low + depth, rows)
            start, shape = list(self.start), list(self.shape)
            start[axis], shape[axis] = start[axis] + low, high - low
            box = (slice(first + low, first + high), *self.box[1:])
            chunks.append(replace(self, box=box, start=tuple(start), shape=tuple(shape)))
        return chunks


@dataclass(frozen=True, slots=True)
class ShardRead:
    """The part of one target on some devices: all of it, or one shard."""

    shape: tuple[int, ...]
    devices: tuple[Any, ...]
    reads: tuple[TensorRead, ...]


_Bounds = tuple[tuple[int, int], ...]  # [first, end) along each axis of a target


@dataclass(frozen=True, slots=True)
class ShardBoxes:
    """Boxes of a target that are side by side along `axis` in the part that the devices hold; one box unless
    segments are partitioned separately."""

    axis: int
    bounds: tuple[_Bounds, ...]
    devices: tuple[Any, ...]

    def offsets(self) -> list[tuple[int, _Bounds]]:
        """Each box and its offset in the part, in their order along the target's axis."""
        sizes = (bounds[self.axis][1] - bounds[self.axis][0] for bounds in self.bounds)
        offsets = zip(itertools.accumulate(sizes, initial=0), self.bounds, strict=False)
        return sorted(offsets, key=lambda offset: offset[1][self.axis])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        sides = [end - first for first, end in self.bounds[0]]
        sides[self.axis] = sum(bounds[self.axis][1] - bounds[self.axis][0] for bounds in self.bounds)
        return tuple(sides)


def shard_boxes(
    target: str, struct: jax.ShapeDtypeStruct, sharding: Sharding, shards: ModelSharding | None
) -> list[ShardBoxes]:
    """Return the boxes of a target on the devices of this host."""
    holders: dict[tuple[_Bounds, ...], list[Any]] = defaultdict(list)
    partition = None if shards is None else shards.partitions.get(target)
    if shards is None or partition is None:
        for device, index in sharding.addressable_devices_indices_map(struct.shape).items():
            sides = zip(index or (), struct.shape, strict=True)
            holders[(tuple(side.indices(size)[:2] for side, size in sides),)].append(device)
        return [ShardBoxes(0, bounds, tuple(devices)) for bounds, devices in holders.items()]
    axis, full_bounds = partition.axis % len(struct.shape), [(0, size) for size in struct.shape]
    count = shards.parallel.parts(partition)
    for number, device in enumerate(shards.mesh.devices.flat):
        if device.process_index == jax.process_index():
            slices = partition.pieces(number % count, count)
            holders[tuple((*full_bounds[:axis], piece, *full_bounds[axis + 1 :]) for piece in slices)].append(device)
    return [ShardBoxes(axis, bounds, tuple(devices)) for bounds, devices in holders.items()]


def plan_reads(
    sources: Sequence[WeightSource],
    headers: Mapping[str, tuple[tuple[int, ...], str]],
    struct: jax.ShapeDtypeStruct,
    boxes: Sequence[ShardBoxes],
) -> list[ShardRead]:
    """Plan the reads of one target's sources for the parts on this host's devices."""
    covered = sum(math.prod(source.shape) for source in sources)
    if covered != math.prod(struct.shape):
        raise CheckpointError(
            f"{len(sources)} tensors hold {covered} of the {math.prod(struct.shape)} values of {sources[0].target}; "
            "expected all of them or, where they are optional, none; copy the checkpoint again"
        )
    parts: list[ShardRead] = []
    for part_boxes in boxes:
        offsets = part_boxes.offsets()
        ends = [bounds[part_boxes.axis][1] for _, bounds in offsets]  # in order: a source meets few of many boxes
        reads: list[TensorRead] = []
        for source in sources:
            start, extent = source.start, source.placed_shape
            for offset, bounds in offsets[bisect.bisect_right(ends, start[part_boxes.axis]) :]:
                if bounds[part_boxes.axis][0] >= start[part_boxes.axis] + extent[part_boxes.axis]:
                    break
                read = _cut(source, headers[source.name][1], bounds, (part_boxes.axis, offset))
                reads += [] if read is None else [read]
        parts.append(ShardRead(part_boxes.shape, part_boxes.devices, tuple(reads)))
    return parts


def _cut(source: WeightSource, dtype: str, bounds: _Bounds, at: tuple[int, int]) -> TensorRead | None:
    """Return the read of one box, which starts at (axis, offset) of its part."""
    start, extent = source.start, source.placed_shape
    assert len(extent) == len(bounds), (source, bounds)
    low = [max(first, bound_start) for first, (bound_start, _) in zip(start, bounds, strict=True)]
    high = [min(first + size, end) for first, size, (_, end) in zip(start, extent, bounds, strict=True)]
    if any(first >= stop for first, stop in zip(low, high, strict=True)):
        return None
    box = [
        slice(first - bound_start, stop - bound_start)
        for first, stop, bound_start in zip(low, high, start, strict=True)
    ][len(source.index) :]
    if source.transpose:
        box[-2:] = box[-1], box[-2]
    starts = [first - bound_start for first, (bound_start, _) in zip(low, bounds, strict=True)]
    starts[at[0]] += at[1]
    shape = tuple(stop - first for first, stop in zip(low, high, strict=True))
    return TensorRead(source.name, dtype, tuple(box), tuple(starts), shape, source.transpose)
