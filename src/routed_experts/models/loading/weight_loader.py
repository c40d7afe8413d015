"""Loads weights from a checkpoint to devices, by a table of names.

Host memory stays near `host_bytes` or one row of a tensor, whichever is more; each device gets only its own shard of
an array:

    a shard that fits host_bytes    tensors -> one host array -------------------> device
    a larger shard                  tensors -> stacks of <= host_bytes / 2 ------> written into the donated shard

Letters: J reads of a stack, X axes of a target."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from routed_experts.models.base.weight_format import weight_format
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.loading.checkpoint import Checkpoint
from routed_experts.models.loading.load_plan import ShardRead, TensorRead, plan_reads, shard_boxes
from routed_experts.models.sharding import ModelSharding

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
    MiB, but 4 on CPU, where they are in memory beside the weights."""
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
        host_bytes = (4 if jax.default_backend() == "cpu" else 64) << 20
    loader = _Loader(checkpoint, host_bytes, total, progress)
    loaded: dict[str, jax.Array] = {}
    for target, parts in plans.items():
        is_single = len(shardings[target].device_set) == 1
        filled = [shard for part in parts for shard in loader.fill(part, targets[target].dtype, is_single=is_single)]
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

    def fill(self, part: ShardRead, dtype: np.dtype, *, is_single: bool) -> list[jax.Array]:
        """Fill the part on each of its devices; a whole array of one device in the order of `weight_format`."""
        formats = [_format_or_device(device, part.shape) if is_single else device for device in part.devices]
        size = math.prod(part.shape) * dtype.itemsize
        if size <= self.host_bytes:
            self._reserve(size)
            filled = np.empty(part.shape, dtype)
            for read in part.reads:
                window = tuple(slice(first, first + side) for first, side in zip(read.start, read.shape, strict=True))
                tensor = self._read(read)
                with np.errstate(over="ignore"):  # float32 beyond float16 is inf on a device too
                    filled[window] = (np.swapaxes(tensor, -1, -2) if read.transpose else tensor).reshape(read.shape)
            return [jax.device_put(filled, own_format) for own_format in formats]
        shards = [
            _zeros(part.shape, _transfer_dtype(dtype, device), own_format)
            for device, own_format in zip(part.devices, formats, strict=True)
        ]
        by_shape: dict[tuple[object, ...], list[TensorRead]] = defaultdict(list)
        for read in [chunk for tensor_read in part.reads for chunk in tensor_read.chunks(self.host_bytes // 2)]:
            by_shape[read.shape, read.read_shape, read.transpose, read.dtype].append(read)
        for reads in by_shape.values():
            depth = max(1, min(len(reads), self.host_bytes // 2 // max(1, reads[0].num_bytes)))
            for first in range(0, len(reads), depth):
                shards = self._write(shards, formats, reads[first : first + depth], depth, dtype)
        return [_bitcast_back(shard, dtype, device) for shard, device in zip(shards, part.devices, strict=True)]

    def _write(
        self, shards: list[jax.Array], formats: list[Any], reads: Sequence[TensorRead], depth: int, dtype: np.dtype
    ) -> list[jax.Array]:
        """Send one stack, always of `depth` rows so that it compiles once; rows past the last read are not looked
        at. A stack of more bytes than its target is rounded on the host: half the bytes to move and to swap."""
        self._reserve(depth * reads[0].num_bytes)
        stored = np.dtype(reads[0].dtype)
        stack = np.empty((depth, *reads[0].read_shape), dtype if dtype.itemsize < stored.itemsize else stored)
        starts = np.zeros((depth, len(reads[0].start)), np.int32)
        with np.errstate(over="ignore"):  # float32 beyond float16 is inf on a device too
            for row, read in enumerate(reads):
                stack[row], starts[row] = self._read(read), read.start
        cast: np.dtype | None = dtype
        if stack.dtype == dtype:  # nothing is rounded: the bits are moved
            stack, cast = stack.view(shards[0].dtype), None
        written: list[jax.Array] = []
        for shard, own_format in zip(shards, formats, strict=True):
            layout = reads[0].transpose, reads[0].shape, cast
            write = pieces_writer(own_format) if isinstance(own_format, Format) else _write_pieces
            filled, written_marker = write(shard, stack, starts, np.int32(len(reads)), *layout)
            written.append(filled)
            self.pending_writes.append(written_marker)
        return written

    def _read(self, read: TensorRead) -> np.ndarray:
        tensor = self.checkpoint.read(read.name, read.box)
        self.read_bytes += tensor.nbytes
        if self.progress is not None:
            self.progress(self.read_bytes, self.total_bytes)
        return tensor

    def _reserve(self, size: int) -> None:
        if self.in_flight + size > self.host_bytes:
            jax.block_until_ready(self.pending_writes)
            self.in_flight, self.pending_writes = 0, []
        self.in_flight += size


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
    stack: Shaped[Array, "J ..."],
    starts: Int[Array, "J X"],
    count: Int[Array, ""],
    transpose: bool,
    shape: tuple[int, ...],
    dtype: np.dtype | None = None,
) -> tuple[Shaped[Array, "..."], Int[Array, ""]]:
    def write(row: Int[Array, ""], target: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        read = lax.dynamic_index_in_dim(stack, row, keepdims=False)
        read = (jnp.swapaxes(read, -1, -2) if transpose else read).reshape(shape).astype(dtype or target.dtype)
        read = read if read.dtype == target.dtype else lax.bitcast_convert_type(read, target.dtype)
        return lax.dynamic_update_slice(target, read, list(lax.dynamic_index_in_dim(starts, row, keepdims=False)))

    return lax.fori_loop(0, count, write, target), count + 1


_write_pieces = jax.jit(_pieces_written, donate_argnums=0, static_argnums=(4, 5, 6))


@functools.cache
def pieces_writer(own_format: Format) -> Any:
    """`_write_pieces` into a target in an order that is not the device's own: jitted, its result would not have it."""
    return jax.jit(_pieces_written, donate_argnums=0, static_argnums=(4, 5, 6), out_shardings=(own_format, None))
