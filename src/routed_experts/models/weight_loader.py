"""Weights from a checkpoint to devices, by a table of names. Knows no architecture and no file format.

Host memory stays near `host_bytes` or one row of a tensor, whichever is more; each device gets only its own part of a sharded array:

    a part that fits host_bytes     tensors -> one host array -------------------> device
    a larger part                   tensors -> stacks of <= host_bytes / 2 ------> written in place into the donated part

Letters: J pieces of a stack, X axes of a target."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, Int, Shaped

from routed_experts.core.errors import CheckpointError
from routed_experts.models.checkpoint import Checkpoint, WeightSource


def load(
    checkpoint: Checkpoint,
    sources: Iterable[WeightSource],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    *,
    sharding: Sharding | None = None,
    progress: Callable[[int, int], None] | None = None,
    host_bytes: int | None = None,
) -> dict[str, jax.Array]:
    """Fill every target from its sources, cast to the target's dtype; `check` comes first.

    A target stands where its own `sharding` says, else where the argument says, else on the first device. Targets whose
    sources are all optional and absent are left out. `progress(done, total)` counts bytes read. `host_bytes` in flight: by default 64
    MiB, but 4 on CPU, where they stand beside the weights themselves."""
    headers = checkpoint.names()
    grouped: dict[str, list[WeightSource]] = defaultdict(list)
    for source in sources:
        if source.name in headers or not source.optional:
            grouped[source.target].append(source)
    default = sharding or SingleDeviceSharding(jax.local_devices()[0])
    places = {target: targets[target].sharding or default for target in grouped}
    plans = {target: _plan(group, headers, targets[target], places[target]) for target, group in grouped.items()}
    total = sum(piece.num_bytes for parts in plans.values() for part in parts for piece in part.pieces)
    if host_bytes is None:
        host_bytes = (4 if jax.default_backend() == "cpu" else 64) << 20
    loader = _Loader(checkpoint, host_bytes, total, progress)
    loaded: dict[str, jax.Array] = {}
    for target, parts in plans.items():
        shards = [shard for part in parts for shard in loader.fill(part, targets[target].dtype)]
        loaded[target] = jax.make_array_from_single_device_arrays(targets[target].shape, places[target], shards)
    return loaded


@dataclass(frozen=True, slots=True)
class _Piece:
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

    def slabs(self, most_bytes: int) -> "list[_Piece]":
        """The piece, or if it is larger than `most_bytes`, blocks of the rows of its tensor's first axis."""
        first, rows = self.box[0].start, self.box[0].stop - self.box[0].start
        depth = max(1, rows * most_bytes // max(1, self.num_bytes))
        if depth >= rows:
            return [self]
        axis = len(self.shape) - (1 if self.transpose and len(self.box) == 2 else len(self.box))  # where that axis stands in the part
        slabs: list[_Piece] = []
        for low in range(0, rows, depth):
            high = min(low + depth, rows)
            start, shape = list(self.start), list(self.shape)
            start[axis], shape[axis] = start[axis] + low, high - low
            box = (slice(first + low, first + high), *self.box[1:])
            slabs.append(replace(self, box=box, start=tuple(start), shape=tuple(shape)))
        return slabs


@dataclass(frozen=True, slots=True)
class _Part:
    """What the given devices hold of one target: all of it, or one shard."""

    shape: tuple[int, ...]
    devices: tuple[Any, ...]
    pieces: tuple[_Piece, ...]


def _plan(
    sources: Sequence[WeightSource],
    headers: Mapping[str, tuple[tuple[int, ...], str]],
    struct: jax.ShapeDtypeStruct,
    sharding: Sharding,
) -> list[_Part]:
    """Cut the sources of one target along the parts that this host's devices hold of it."""
    covered = sum(math.prod(source.shape) for source in sources)
    if covered != math.prod(struct.shape):
        raise CheckpointError(f"{len(sources)} tensors hold {covered} of the {math.prod(struct.shape)} values of {sources[0].target}; "
                              "wanted all of them or, where they are optional, none; copy the checkpoint again")  # fmt: skip
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(struct.shape).items():
        sides = zip(index or (), struct.shape, strict=True)
        holders[tuple(side.indices(size)[:2] for side, size in sides)].append(device)
    parts: list[_Part] = []
    for bounds, devices in holders.items():
        pieces = (_cut(source, headers[source.name][1], bounds) for source in sources)
        parts.append(_Part(tuple(stop - first for first, stop in bounds), tuple(devices), tuple(piece for piece in pieces if piece)))
    return parts


def _cut(source: WeightSource, dtype: str, bounds: Sequence[tuple[int, int]]) -> _Piece | None:
    placed = source.placed_shape
    assert len(placed) == len(bounds), (source, bounds)
    start = [*source.index, *[0] * len(source.shape)]
    if source.offset:
        start[-1] += source.offset
    if source.first:
        assert not source.index, source
        start[0] += source.first
    low = [max(first, begin) for first, (begin, _) in zip(start, bounds, strict=True)]
    high = [min(first + size, end) for first, size, (_, end) in zip(start, placed, bounds, strict=True)]
    if any(first >= stop for first, stop in zip(low, high, strict=True)):
        return None
    box = [slice(first - begin, stop - begin) for first, stop, begin in zip(low, high, start, strict=True)][len(source.index) :]
    if source.transpose:
        box[-2:] = box[-1], box[-2]
    begins = tuple(first - begin for first, (begin, _) in zip(low, bounds, strict=True))
    shape = tuple(stop - first for first, stop in zip(low, high, strict=True))
    return _Piece(source.name, dtype, tuple(box), begins, shape, source.transpose)


@dataclass(slots=True)
class _Loader:
    """Fills parts. The `receipts` of stacks in flight are ready once the stacks are written and their host copies free."""

    checkpoint: Checkpoint
    host_bytes: int
    total_bytes: int
    progress: Callable[[int, int], None] | None
    read_bytes: int = 0
    in_flight: int = 0
    receipts: list[jax.Array] = field(default_factory=list)

    def fill(self, part: _Part, dtype: np.dtype) -> list[jax.Array]:
        """Fill the part on each of its devices."""
        size = math.prod(part.shape) * dtype.itemsize
        if size <= self.host_bytes:
            self._reserve(size)
            whole = np.empty(part.shape, dtype)
            for piece in part.pieces:
                window = tuple(slice(first, first + side) for first, side in zip(piece.start, piece.shape, strict=True))
                tensor = self._read(piece)
                with np.errstate(over="ignore"):  # float32 beyond float16 is inf on a device too
                    whole[window] = (np.swapaxes(tensor, -1, -2) if piece.transpose else tensor).reshape(piece.shape)
            return [jax.device_put(whole, device) for device in part.devices]
        shards = [jnp.zeros(part.shape, _carrier(dtype, device), device=device) for device in part.devices]
        alike: dict[tuple[object, ...], list[_Piece]] = defaultdict(list)
        for piece in [slab for whole in part.pieces for slab in whole.slabs(self.host_bytes // 2)]:
            alike[piece.shape, piece.read_shape, piece.transpose, piece.dtype].append(piece)
        for pieces in alike.values():
            depth = max(1, min(len(pieces), self.host_bytes // 2 // max(1, pieces[0].num_bytes)))
            for first in range(0, len(pieces), depth):
                shards = self._write(shards, pieces[first : first + depth], depth, dtype)
        return [_carried(shard, dtype, device) for shard, device in zip(shards, part.devices, strict=True)]

    def _write(self, shards: list[jax.Array], pieces: Sequence[_Piece], depth: int, dtype: np.dtype) -> list[jax.Array]:
        """Send one stack, always of `depth` rows so that it compiles once; rows past the last piece are not looked at."""
        self._reserve(depth * pieces[0].num_bytes)
        stack = np.empty((depth, *pieces[0].read_shape), pieces[0].dtype)
        starts = np.zeros((depth, len(pieces[0].start)), np.int32)
        for row, piece in enumerate(pieces):
            stack[row], starts[row] = self._read(piece), piece.start
        written: list[jax.Array] = []
        for shard in shards:
            place = pieces[0].transpose, pieces[0].shape, dtype
            filled, receipt = _write_pieces(shard, stack, starts, np.int32(len(pieces)), *place)
            written.append(filled)
            self.receipts.append(receipt)
        return written

    def _read(self, piece: _Piece) -> np.ndarray:
        tensor = self.checkpoint.read(piece.name, piece.box)
        self.read_bytes += tensor.nbytes
        if self.progress is not None:
            self.progress(self.read_bytes, self.total_bytes)
        return tensor

    def _reserve(self, size: int) -> None:
        if self.in_flight + size > self.host_bytes:
            jax.block_until_ready(self.receipts)
            self.in_flight, self.receipts = 0, []
        self.in_flight += size


def _carrier(dtype: np.dtype, device: Any) -> np.dtype:
    """The dtype that a large part is filled in: its own, but the bits of half precision on CPU. There XLA would turn the whole part
    into float32 and back for each stack."""
    return np.dtype(np.uint16) if device.platform == "cpu" and dtype.itemsize == 2 else dtype


def _carried(shard: jax.Array, dtype: np.dtype, device: Any) -> jax.Array:
    """What the carrier holds, without a copy."""
    if shard.dtype == dtype:
        return shard
    return jax.device_put(np.asarray(shard).view(dtype), device, may_alias=True)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(4, 5, 6))
def _write_pieces(
    target: Shaped[Array, "..."],
    stack: Shaped[Array, "J ..."],
    starts: Int[Array, "J X"],
    count: Int[Array, ""],
    transpose: bool,
    shape: tuple[int, ...],
    dtype: np.dtype | None = None,
) -> tuple[Shaped[Array, "..."], Int[Array, ""]]:
    def write(row: Int[Array, ""], target: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        piece = lax.dynamic_index_in_dim(stack, row, keepdims=False)
        piece = (jnp.swapaxes(piece, -1, -2) if transpose else piece).reshape(shape).astype(dtype or target.dtype)
        piece = piece if piece.dtype == target.dtype else lax.bitcast_convert_type(piece, target.dtype)
        return lax.dynamic_update_slice(target, piece, list(lax.dynamic_index_in_dim(starts, row, keepdims=False)))

    return lax.fori_loop(0, count, write, target), count + 1
