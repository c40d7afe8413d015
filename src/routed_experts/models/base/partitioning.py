"""How arrays of weights are sharded: along one axis, in parts of equal size.

Segments that are side by side along the axis are partitioned separately, so that a device's part of q|k|v is its own
q|k|v: a part is the device's slices of all segments, one after another. Dims: V devices."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from routed_experts.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Segment:
    """`size` indices along an axis that hold `units` indivisible things, called `what` in errors. `repeated`: with
    fewer units than devices, several devices hold each unit."""

    size: int
    units: int
    what: str
    repeated: bool = False

    def fits(self, devices: int) -> bool:
        """Whether it can be sharded over so many devices."""
        return self.units % devices == 0 or (self.repeated and devices % self.units == 0)

    def piece(self, device: int, devices: int) -> tuple[int, int]:
        """The device's range [first, end) in the segment."""
        parts = min(devices, self.units)
        size, index = self.size // parts, device * parts // devices
        return index * size, (index + 1) * size


@dataclass(frozen=True, slots=True)
class AxisPartition:
    """Segments that cover an axis, which is counted from the last one (-1) or is the first one (0). `over_data`:
    sharded over the devices of all data ranks; otherwise every rank has all of it."""

    axis: int
    segments: tuple[Segment, ...]
    over_data: bool = False

    def pieces(self, device: int, devices: int) -> tuple[tuple[int, int], ...]:
        """The device's ranges [first, end) along the axis, in order."""
        starts = itertools.accumulate((segment.size for segment in self.segments), initial=0)
        pieces = (segment.piece(device, devices) for segment in self.segments)
        return tuple((start + first, start + end) for start, (first, end) in zip(starts, pieces, strict=False))

    def local_shape(self, shape: tuple[int, ...], devices: int) -> tuple[int, ...]:
        """Shape of one device's part of an array of `shape`."""
        axis = self.axis % len(shape)
        return (*shape[:axis], sum(end - first for first, end in self.pieces(0, devices)), *shape[axis + 1 :])


def column_parallel(*segments: Segment) -> AxisPartition:
    """A partition of the last axis: outputs of a matrix."""
    return AxisPartition(-1, segments)


def row_parallel(size: int, units: int, what: str) -> AxisPartition:
    """A partition of the last axis but one: inputs of a matrix."""
    return AxisPartition(-2, (Segment(size, units, what),))


def expert_parallel(experts: int, layers: int) -> AxisPartition:
    """A partition of the first axis of [R*E, ...]: some experts of each layer."""
    return AxisPartition(0, (Segment(experts, experts, "experts"),) * layers, over_data=True)


def embedding_partition(hidden: int, *, tied: bool) -> dict[str, AxisPartition]:
    """Embeddings and head, partitioned along the hidden axis, which is divisible where a vocabulary is not."""
    stream = Segment(hidden, hidden, "columns of the stream")
    return {"embed": column_parallel(stream)} | ({} if tied else {"head": AxisPartition(-2, (stream,))})


@dataclass(frozen=True, slots=True)
class IndexedPartition(AxisPartition):
    """A partition of the first axis that lists each device's indices, in any order; an index may be on several
    devices."""

    indices: tuple[tuple[int, ...], ...] = ()  # by device

    def pieces(self, device: int, devices: int) -> tuple[tuple[int, int], ...]:
        """One by one."""
        return tuple((index, index + 1) for index in self.indices[device])


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Number of devices that a model is sharded over. `data`: data ranks among which they are divided. Experts are
    sharded over all devices, everything else over those of a rank. `expert_parallel`: experts are sharded, not the
    width of each. `instances`: expert instances of each layer, with at most `replicas` of one expert; 0: one each.
    `bounded`: instances have capacities."""

    devices: int
    expert_parallel: bool = False
    instances: int = 0
    replicas: int = 0
    bounded: bool = False
    data: int = 1

    @property
    def tensor(self) -> int:
        """Devices of one data rank."""
        return self.devices // self.data

    def parts(self, partition: AxisPartition) -> int:
        """How many parts an array with this partition has."""
        return self.devices if partition.over_data else self.tensor

    def check(self, partitions: Mapping[str, AxisPartition]) -> None:
        """Raise ConfigError unless every array can be sharded over the devices; the error lists valid sizes."""
        parts = {self.parts(partition) for partition in partitions.values()}
        wrong = sorted(
            f"{segment.units} {segment.what}"
            for count in parts
            for segment in _segments(partition for partition in partitions.values() if self.parts(partition) == count)
            if not segment.fits(count)
        )
        if wrong:
            works = ", ".join(map(str, tensor_parallel_sizes(partitions, data=self.data)))
            sizes = f"tp_size={self.devices}" if self.data == 1 else f"tp_size={self.devices} of dp_size={self.data}"
            raise ConfigError(
                f"{sizes} does not divide {', '.join(wrong)}; values that work for this model: {works or 'none'}"
            )


def tensor_parallel_sizes(partitions: Mapping[str, AxisPartition], *, data: int = 1) -> tuple[int, ...]:
    """Every number of devices that a model with these partitions can be sharded over, with so many data ranks."""
    over_data, others = (
        _segments(partition for partition in partitions.values() if partition.over_data == is_over)
        for is_over in (True, False)
    )
    bounds = [segment.units for segment in over_data if not segment.repeated]
    bounds += [segment.units * data for segment in others if not segment.repeated]
    sizes = range(data, min(bounds, default=data) + 1, data)
    return tuple(
        size
        for size in sizes
        if all(segment.fits(size) for segment in over_data) and all(segment.fits(size // data) for segment in others)
    )


def _segments(partitions: Iterable[AxisPartition]) -> frozenset[Segment]:
    return frozenset(itertools.chain.from_iterable(partition.segments for partition in partitions))
