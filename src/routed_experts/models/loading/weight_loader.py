"""Loads weights from a checkpoint to devices, by a table of names.

Host memory stays near `host_bytes` or one row of a tensor, whichever is more; each device gets only its own shard of
an array:

    a shard that fits host_bytes    tensors -> one host array -------------------> device
    a larger shard                  tensors -> stacks of <= host_bytes / 2 ------> written into the donated shard
    of quantised tensors            codes, scales -> stacks, of half as many numbers -> multiplied, and written

One program writes all stacks of a shape into a target, and multiplies codes of one format (quantized_part.py), so the
number of programs does not depend on that of layers or experts. Targets are allocated by a thread of their own: on a
CPU the first touch of memory takes time. Letters: J reads of a stack, X axes of a target."""

import functools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.experimental.layout import Format
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, Int, Shaped

from routed_experts.models.base.sharding import ModelSharding
from routed_experts.models.base.weight_format import weight_format
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.loading.checkpoint import Checkpoint
from routed_experts.models.loading.load_plan import ShardRead, TensorRead, plan_reads, shard_boxes
from routed_experts.models.loading.quantized_part import QuantizedPart

M = TypeVar("M", bound=nnx.Module)


def load(
    checkpoint: Checkpoint,
    sources: Iterable[WeightSource],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    *,
    sharding: Sharding | None = None,
    shards: ModelSharding | None = None,
    progress: Callable[[int, int], None] | None = None,
    host_bytes: int | None = None,
) -> dict[str, jax.Array]:
    """Fill every target from its sources, cast to the target's dtype; `check` comes first.

    A target is placed by its own `sharding`, else by the argument, else on the first device; in the order of
    `weight_format`. With `shards` it is sharded, and the result is the global array. Targets whose sources are all
    optional and absent are left out. `progress(done, total)` counts bytes read. `host_bytes` in flight: by default 64
    MiB, but 8 on CPU, where they are in memory beside the weights."""
    headers = checkpoint.names()
    grouped: dict[str, list[WeightSource]] = defaultdict(list)
    for source in sources:
        if source.name in headers or not source.optional:
            grouped[source.target].append(source)
    default = sharding or SingleDeviceSharding(jax.local_devices()[0])
    shardings = {target: targets[target].sharding or default for target in grouped}
    if shards is not None:
        shardings = {target: shards.sharding(target, len(targets[target].shape)) for target in grouped}
    plans = {
        target: plan_reads(
            group, headers, targets[target], shard_boxes(target, targets[target], shardings[target], shards)
        )
        for target, group in grouped.items()
    }
    total = sum(read.num_bytes for parts in plans.values() for part in parts for read in part.reads)
    if host_bytes is None:
        host_bytes = (8 if jax.default_backend() == "cpu" else 64) << 20
    loader = _Loader(checkpoint, host_bytes, total, progress)
    shards_of: dict[str, list[jax.Array]] = defaultdict(list)
    fills = [
        _Fill.create(target, part, targets[target].dtype, is_single=len(shardings[target].device_set) == 1)
        for target, parts in plans.items()
        for part in parts
    ]
    allocator = ThreadPoolExecutor(1, thread_name_prefix="allocate")
    try:
        allocations = deque(allocator.submit(fill.allocate, host_bytes) for fill in fills)
        for fill in fills:
            shards_of[fill.target] += loader.fill(fill, allocations.popleft().result())
    finally:
        allocator.shutdown(cancel_futures=True)
    loaded: dict[str, jax.Array] = {}
    for target, filled in shards_of.items():
        shape = targets[target].shape if shards is None else shards.global_shape(target, targets[target].shape)
        loaded[target] = jax.make_array_from_single_device_arrays(shape, shardings[target], filled)
    return loaded


def load_module(
    build: Callable[[], M],
    parts: Iterable[tuple[Checkpoint, Iterable[WeightSource]]],
    *,
    progress: Callable[[int, int], None] | None = None,
    device_for: Callable[[str], Any] = lambda target: None,
    shards: ModelSharding | None = None,
) -> M:
    """Load the module that `build` describes from the checkpoints that hold its tensors; `build` itself is only traced.
    `device_for` maps the dotted name of an array to its device; None: the default one."""
    graphdef, state = nnx.split(nnx.eval_shape(build))
    flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    shardings = {name: None if (device := device_for(name)) is None else SingleDeviceSharding(device) for name in flat}
    targets = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name]) for name, leaf in flat.items()
    }
    arrays: dict[str, jax.Array] = {}
    for checkpoint, sources in parts:
        arrays |= load(checkpoint, sources, targets, progress=progress, shards=shards)
    filled = [(path, leaf.replace(arrays[".".join(map(str, path))])) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


@dataclass(slots=True)
class _Loader:
    """Fills parts. The `pending_writes` of stacks in flight are ready once the stacks are written and their host copies
    free."""

    checkpoint: Checkpoint
    host_bytes: int
    total_bytes: int
    progress: Callable[[int, int], None] | None
    read_bytes: int = 0
    in_flight: int = 0
    pending_writes: list[jax.Array] = field(default_factory=list)

    def fill(self, target: "_Fill", shards: list[jax.Array]) -> list[jax.Array]:
        """Fill the zeros of a part on each of its devices; without them, build the part on the host."""
        part, dtype = target.part, target.dtype
        if not shards:
            self._reserve(target.num_bytes)
            filled = np.empty(part.shape, dtype)
            for read in part.reads:
                window = tuple(slice(first, first + side) for first, side in zip(read.start, read.shape, strict=True))
                tensor = self._read(read)
                with np.errstate(over="ignore"):  # float32 beyond float16 is inf on a device too
                    filled[window] = (np.swapaxes(tensor, -1, -2) if read.transpose else tensor).reshape(read.shape)
            return [jax.device_put(filled, own_format) for own_format in target.formats]
        by_shape: dict[tuple[object, ...], list[TensorRead]] = defaultdict(list)
        for read in [chunk for tensor_read in part.reads for chunk in tensor_read.chunks(self.host_bytes // 2)]:
            by_shape[read.shape, read.read_shape, read.transpose, read.dtype].append(read)
        for reads in by_shape.values():
            for stack in self._stacks(reads, dtype):
                shards = self._write(shards, target.formats, stack, dtype)
        return [_bitcast_back(shard, dtype, device) for shard, device in zip(shards, part.devices, strict=True)]

    def _stacks(self, reads: Sequence[TensorRead], dtype: np.dtype) -> "Iterator[_Stack]":
        """The reads of one shape in stacks, always of so many rows that it compiles once. Numbers of more bytes than
        their target's are rounded on the host: half the bytes to move and to swap."""
        depth = max(1, min(len(reads), self.host_bytes // 2 // max(1, reads[0].num_bytes)))
        stack: _Stack | None = None
        for read in reads:
            part = self._read_part(read)
            if stack is not None and not stack.takes(part):
                yield stack
                stack = None
            if stack is None:
                self._reserve(depth * sum(array.nbytes for array in jax.tree.leaves(part)))
                stack = _Stack.create(part, read, depth, dtype)
            stack.add(part, read)
        if stack is not None:
            yield stack

    def _write(self, shards: list[jax.Array], formats: list[Any], stack: "_Stack", dtype: np.dtype) -> list[jax.Array]:
        """Send one stack; rows past the last read are not looked at."""
        rows, cast = stack.rows, None if stack.dtype == dtype else dtype
        if isinstance(rows, np.ndarray) and cast is None:  # nothing is rounded: the bits are moved
            rows = rows.view(shards[0].dtype)
        written: list[jax.Array] = []
        for shard, own_format in zip(shards, formats, strict=True):
            transpose, sent = stack.transpose, rows
            if transpose and not isinstance(own_format, Format) and own_format.platform == "cpu":
                # XLA's loops swap axes of bytes and of half precision at a fifth of the speed of a copy
                transpose, sent = False, jax.device_put(_swapped(rows), own_format)
            layout = transpose, stack.shape, cast
            write = pieces_writer(own_format) if isinstance(own_format, Format) else _write_pieces
            filled, written_marker = write(shard, sent, stack.starts, np.int32(stack.count), *layout)
            written.append(filled)
            self.pending_writes.append(written_marker)
        return written

    def _read_part(self, read: TensorRead) -> np.ndarray | QuantizedPart:
        """Codes and scales, if a device computes the same numbers from them as the host."""
        part = self.checkpoint.read_part(read.name, read.box)
        if part is None or not part.is_normal:
            return self._read(read)
        self._count(read)
        return part

    def _read(self, read: TensorRead) -> np.ndarray:
        tensor = self.checkpoint.read(read.name, read.box)
        self._count(read)
        return tensor

    def _count(self, read: TensorRead) -> None:
        self.read_bytes += read.num_bytes
        if self.progress is not None:
            self.progress(self.read_bytes, self.total_bytes)

    def _reserve(self, size: int) -> None:
        if self.in_flight + size > self.host_bytes:
            jax.block_until_ready(self.pending_writes)
            self.in_flight, self.pending_writes = 0, []
        self.in_flight += size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fill:
    """A part of a target and the devices that hold it; a whole array of one device in the order of `weight_format`."""

    target: str
    part: ShardRead
    dtype: np.dtype
    formats: list[Any]

    @staticmethod
    def create(target: str, part: ShardRead, dtype: np.dtype, *, is_single: bool) -> "_Fill":
        formats = [_format_or_device(device, part.shape) if is_single else device for device in part.devices]
        return _Fill(target=target, part=part, dtype=dtype, formats=formats)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.part.shape) * self.dtype.itemsize

    def allocate(self, host_bytes: int) -> list[jax.Array]:
        """Zeros on each device, in the dtype that they are filled in; none for a part that fits `host_bytes`."""
        if self.num_bytes <= host_bytes:
            return []
        return [
            _zeros(self.part.shape, _transfer_dtype(self.dtype, device), own_format)
            for device, own_format in zip(self.part.devices, self.formats, strict=True)
        ]


@dataclass(slots=True, kw_only=True)
class _Stack:
    """Reads of one kind on the host, a row of each array for each; the first `count` rows are filled."""

    rows: Shaped[np.ndarray, "J ..."] | QuantizedPart
    starts: Int[np.ndarray, "J X"]
    shape: tuple[int, ...]  # of a read in its target
    transpose: bool
    count: int = 0

    @staticmethod
    def create(part: np.ndarray | QuantizedPart, read: TensorRead, depth: int, dtype: np.dtype) -> "_Stack":
        """An empty one for reads like this."""

        def empty(array: np.ndarray) -> np.ndarray:
            is_rounded = isinstance(part, np.ndarray) and dtype.itemsize < array.dtype.itemsize
            return np.empty((depth, *array.shape), dtype if is_rounded else array.dtype)

        starts = np.zeros((depth, len(read.start)), np.int32)
        return _Stack(rows=jax.tree.map(empty, part), starts=starts, shape=read.shape, transpose=read.transpose)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the numbers."""
        return self.rows.dtype if isinstance(self.rows, np.ndarray) else np.dtype(np.float32)

    def takes(self, part: np.ndarray | QuantizedPart) -> bool:
        """Whether a row is left, and has the arrays of this read; of codes and scales their dtypes too. Plain numbers
        of a stack have one dtype, that of the reads, and may be rounded."""
        rows, structure = jax.tree.flatten(self.rows)
        arrays, own_structure = jax.tree.flatten(part)
        if self.count == len(self.starts) or structure != own_structure:
            return False
        is_plain = isinstance(part, np.ndarray)
        return all(
            row.shape[1:] == array.shape and (is_plain or row.dtype == array.dtype)
            for row, array in zip(rows, arrays, strict=True)
        )

    def add(self, part: np.ndarray | QuantizedPart, read: TensorRead) -> None:
        """Copy the read to the next row."""
        with np.errstate(over="ignore"):  # float32 beyond float16 is inf on a device too
            for row, array in zip(jax.tree.leaves(self.rows), jax.tree.leaves(part), strict=True):
                row[self.count] = array
        self.starts[self.count] = read.start
        self.count += 1


def _swapped(rows: Shaped[np.ndarray, "J ..."] | QuantizedPart) -> Shaped[np.ndarray, "J ..."] | QuantizedPart:
    """Views of the rows with their last two axes swapped."""
    return rows.swapaxes(-1, -2) if isinstance(rows, np.ndarray) else rows.swapped()


def _format_or_device(device: Any, shape: tuple[int, ...]) -> Any:
    """The device, or its format in an order that is not its own."""
    own_format = weight_format(SingleDeviceSharding(device), shape)
    return own_format if isinstance(own_format, Format) else device


def _zeros(shape: tuple[int, ...], dtype: np.dtype, own_format: Any) -> jax.Array:
    if not isinstance(own_format, Format):
        return jnp.zeros(shape, dtype, device=own_format)
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=own_format)()


def _transfer_dtype(dtype: np.dtype, device: Any) -> np.dtype:
    """The dtype that a large part is filled in: its own, but the bits of half precision and of codes on CPU. There XLA
    would turn the whole part into float32 and back for each stack."""
    bits = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}
    return bits.get(dtype.itemsize, dtype) if device.platform == "cpu" else dtype


def _bitcast_back(shard: jax.Array, dtype: np.dtype, device: Any) -> jax.Array:
    """The shard in its own dtype, without a copy."""
    if shard.dtype == dtype:
        return shard
    return jax.device_put(np.asarray(shard).view(dtype), device, may_alias=True)


def _pieces_written(
    target: Shaped[Array, "..."],
    stack: Shaped[Array, "J ..."] | QuantizedPart,
    starts: Int[Array, "J X"],
    count: Int[Array, ""],
    transpose: bool,
    shape: tuple[int, ...],
    dtype: np.dtype | None = None,
) -> tuple[Shaped[Array, "..."], Int[Array, ""]]:
    def write(row: Int[Array, ""], target: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        part = jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, row, keepdims=False), stack)
        read = part.numbers() if isinstance(part, QuantizedPart) else part
        read = (jnp.swapaxes(read, -1, -2) if transpose else read).reshape(shape).astype(dtype or target.dtype)
        read = read if read.dtype == target.dtype else lax.bitcast_convert_type(read, target.dtype)
        return lax.dynamic_update_slice(target, read, list(lax.dynamic_index_in_dim(starts, row, keepdims=False)))

    return lax.fori_loop(0, count, write, target), count + 1


_write_pieces = jax.jit(_pieces_written, donate_argnums=0, static_argnums=(4, 5, 6))


@functools.cache
def pieces_writer(own_format: Format) -> Any:
    """`_write_pieces` into a target in an order that is not the device's own: jitted, its result would not have it."""
    return jax.jit(_pieces_written, donate_argnums=0, static_argnums=(4, 5, 6), out_shardings=(own_format, None))
