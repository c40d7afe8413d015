"""The residual stream on a GPU: add a layer's output, in parts or in slots, and normalise the sum, as one kernel; for a
single row the product that follows is part of it. Where the norm is multiplied by codes that take scaled rows, the same
kernel makes them, of the numbers of the norm as they are stored: bitwise those of `scale_rows`.

Rounded as the plain code rounds: the addend is one array of the model's dtype, so are its bias, its scale and the sum,
and `rms_norm` reads that. Dims: N tokens, D hidden, S parts of a sum, K experts per token, R layers of the stack."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from routed_experts.layers.gpu.activations import sigmoid
from routed_experts.layers.gpu.blocks import combine_masks, load_or_zero, power_of_two, rounded
from routed_experts.layers.gpu.expert_tiles import takes_scaled_rows
from routed_experts.layers.gpu.linear import LinearTile, choose_tile, partial_sums
from routed_experts.layers.gpu.scaled_rows import scale_rows, scaled_shape, to_float16
from routed_experts.layers.kernels import NormedRows, SlotOutputs, StreamNorm
from routed_experts.layers.quantized import Weight

_COLUMNS = 64  # of a block of `add_parts_and_multiply`: 32, 16 and 128 were slower for a 2048 x 128 router on an H200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """The constants of a StreamNorm."""

    eps: float
    offset: float
    residual_scale: float


def _warps(dim: int) -> int:
    """Warps of a block that has a whole row. The best of 5 on an H200, or within 6 % of it, for rows of 1024, 2048,
    2880, 4096 and 7168 numbers, with 1 and 64 rows."""
    lanes = power_of_two(dim)
    return 16 if lanes > 4096 else max(4, lanes // 128)


def _lanes(dim: int) -> tuple[Array, Array | None]:
    """Columns of a row, and which of them exist; None if all do."""
    lanes = jnp.arange(power_of_two(dim))
    return lanes, None if lanes.shape[0] == dim else lanes < dim


def _added(
    old: Float[Array, " D"], addend: Float[Array, " D"], dtype: Any, residual_scale: float
) -> Float[Array, " D"]:
    """A row plus its addend, as arrays of `dtype` would hold each."""
    addend = rounded(addend, dtype)
    if residual_scale != 1.0:
        addend = rounded(addend * float(np.asarray(residual_scale, dtype)), dtype)
    return rounded(old + addend, dtype)


def _inverse(total: Float[Array, " D"], dim: int, eps: float) -> Float[Array, ""]:
    """One over the root of the mean square; the lanes past `dim` are 0."""
    return jax.lax.rsqrt(jnp.sum(total * total, axis=0) / dim + eps)


def _scaled(
    total: Float[Array, " D"], inverse: Float[Array, ""], scale: Float[Array, " D"], dtype: Any, offset: float
) -> Float[Array, " D"]:
    """The norm of a row, which the store rounds."""
    return total * inverse * (scale + offset) if offset else rounded(total * inverse, dtype) * scale


def _finish(refs: tuple[Any, ...], addend: Callable[[Array, Array | None], Array], static: _Norm) -> None:
    """Load a row, add, normalise, store. All loads are issued before the first result is used."""
    x, scales, layer, stream, normed = refs
    row, dim = pl.program_id(0), x.shape[1]
    lanes, real = _lanes(dim)
    scale = load_or_zero(scales.at[layer[0], lanes], real).astype(jnp.float32)
    old = load_or_zero(x.at[row, lanes], real).astype(jnp.float32)
    total = _added(old, addend(lanes, real), x.dtype, static.residual_scale)
    norm = _scaled(total, _inverse(total, dim, static.eps), scale, x.dtype, static.offset).astype(x.dtype)
    plgpu.store(stream.at[row, lanes], total.astype(x.dtype), mask=real)
    plgpu.store(normed.plain.at[row, lanes], norm, mask=real)
    if normed.scaled is not None:
        values, inverse = to_float16(norm)
        plgpu.store(normed.scaled.values.at[row, lanes], values, mask=real)
        normed.scaled.inverse[0, row] = inverse


def _of_parts(*refs: Any, static: _Norm) -> None:
    """Kernel of `add_parts`, a block for each row. Order of `refs`: x, scales, layer, parts, biases if the layer has
    some; outputs: stream, normed."""
    x, scales, layer, parts, *biases, stream, normed = refs
    row = pl.program_id(0)

    def addend(lanes: Array, real: Array | None) -> Array:
        return _sum_parts(parts, biases, layer, row, lanes, real, x.dtype)

    _finish((x, scales, layer, stream, normed), addend, static)


def _sum_parts(
    parts: Any, biases: list[Any], layer: Any, row: Any, lanes: Array, real: Array | None, dtype: Any
) -> Float[Array, " D"]:
    """The sum of a row's parts, in their order, and its bias."""
    loaded = [load_or_zero(parts.at[part, row, lanes], real) for part in range(parts.shape[0])]
    total = functools.reduce(jnp.add, loaded).astype(jnp.float32)
    for own in biases:
        total = rounded(total, dtype) + load_or_zero(own.at[layer[0], lanes], real).astype(jnp.float32)
    return total


def _row_and_product(*refs: Any, tile: LinearTile, static: _Norm) -> None:
    """Block (columns, split) of one row: every block adds and sums up the whole row, which is what the one block of
    `add_parts` would do before it, and then multiplies its part of the norm. The blocks of the first columns store."""
    x, scales, layer, parts, *biases, matrices, stream, normed, out = refs
    dim, outputs, inner_size = x.shape[1], matrices.shape[2], matrices.shape[1] // tile.splits
    layer_id, split, stores, dtype = layer[0], pl.program_id(1), pl.program_id(0) == 0, x.dtype

    def total(lanes: Array, real: Array | None) -> Array:
        old = load_or_zero(x.at[0, lanes], real).astype(jnp.float32)
        addend = _sum_parts(parts, biases, layer, 0, lanes, real, dtype)
        return _added(old, addend, dtype, static.residual_scale)

    inverse = _inverse(total(*_lanes(dim)), dim, static.eps)
    columns = pl.program_id(0) * tile.out + jnp.arange(tile.out)
    real = None if outputs % tile.out == 0 else (columns < outputs)[None, :]

    def step(index: Array, sums: Array) -> Array:
        offset = index * tile.inner + jnp.arange(tile.inner)
        deep, depth = None if inner_size % tile.inner == 0 else offset < inner_size, split * inner_size + offset
        scale = load_or_zero(scales.at[layer_id, depth], deep).astype(jnp.float32)
        added = total(depth, deep)
        norm = _scaled(added, inverse, scale, dtype, static.offset).astype(dtype)
        matrix = load_or_zero(
            matrices.at[layer_id, depth[:, None], columns[None, :]],
            combine_masks(None if deep is None else deep[:, None], real),
        )

        @pl.when(stores)
        def _() -> None:
            plgpu.store(stream.at[0, depth], added.astype(dtype), mask=deep)
            plgpu.store(normed.at[0, depth], norm, mask=deep)

        return sums + jnp.sum(norm.astype(jnp.float32)[:, None] * matrix.astype(jnp.float32), axis=0)

    sums = jax.lax.fori_loop(0, pl.cdiv(inner_size, tile.inner), step, jnp.zeros((tile.out,), jnp.float32))
    plgpu.store(out.at[split, 0, columns], sums, mask=None if real is None else columns < outputs)


def _of_slots(*refs: Any, shared: bool, gated: bool, moved: bool, static: _Norm) -> None:
    """Kernel of `add_slots`, a block for each row. Order of `refs`: x, scales, layer, slots, weights, valid; `gated`:
    inputs and gates of the shared experts; `moved`: the row of each slot; outputs: stream, normed."""
    x, scales, layer, slots, weights, valid, *more, stream, normed = refs
    row, (num_rows, top_k) = pl.program_id(0), weights.shape

    def addend(lanes: Array, real: Array | None) -> Array:
        slot_of = (lambda k: jnp.where(valid[row], more[0][row, k], 0)) if moved else (lambda k: row * top_k + k)
        loaded = [load_or_zero(slots.at[slot_of(k), lanes], real).astype(jnp.float32) for k in range(top_k)]
        total = functools.reduce(jnp.add, [part * weights[row, k] for k, part in enumerate(loaded)])
        total = jnp.where(valid[row], total, 0.0)  # slots of padding rows were never written
        if not shared:
            return total
        own = load_or_zero(slots.at[num_rows * top_k + row, lanes], real).astype(jnp.float32)
        if gated:
            inputs, gates = more
            factors = load_or_zero(gates.at[layer[0], lanes, 0], real).astype(jnp.float32)
            logit = jnp.sum(load_or_zero(inputs.at[row, lanes], real).astype(jnp.float32) * factors, axis=0)
            own = rounded(rounded(sigmoid(rounded(logit, x.dtype)), x.dtype) * own, x.dtype)
        return rounded(total, x.dtype) + own

    _finish((x, scales, layer, stream, normed), addend, static)


def _call(
    kernel: Callable[..., None], name: str, x: Float[Array, "N D"], norm: StreamNorm, *args: Array, interpret: bool
) -> tuple[Float[Array, "N D"], NormedRows]:
    """Launch a kernel on x, the scales and layer of the norm, and `args`; returns the new stream and its norm."""
    num_rows, dim = x.shape
    shape: Any = jax.ShapeDtypeStruct(x.shape, x.dtype)
    is_scaled = takes_scaled_rows(num_rows, x.dtype, norm.next_matrices, norm.experts)
    static = _Norm(eps=norm.eps, offset=norm.offset, residual_scale=norm.residual_scale)
    stream, normed = pl.pallas_call(
        functools.partial(kernel, static=static),
        (shape, NormedRows(shape, scaled_shape(num_rows, dim) if is_scaled else None)),
        grid=(num_rows,),
        compiler_params=plgpu.CompilerParams(num_warps=_warps(dim), num_stages=1),
        interpret=interpret,
        name=name,
    )(x, norm.scales, norm.layer.reshape(1), *args)
    return stream, normed


def normed_rows(normed: Float[Array, "N D"], next_matrices: Weight | None, *, interpret: bool = False) -> NormedRows:
    """Normed rows, and where the matrices take them so the same rows scaled, by a launch."""
    is_scaled = takes_scaled_rows(normed.shape[0], normed.dtype, next_matrices)
    return NormedRows(normed, scale_rows(normed, interpret=interpret) if is_scaled else None)


def add_parts(
    x: Float[Array, "N D"],
    parts: Float[Array, "S N D"],
    biases: Float[Array, "R D"] | None,
    norm: StreamNorm,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "N D"], NormedRows]:
    """x plus the sum of the parts and the layer's bias, and its norm."""
    args = [array for array in (parts, biases) if array is not None]
    return _call(_of_parts, "add_parts", x, norm, *args, interpret=interpret)


def add_slots(
    x: Float[Array, "N D"], outputs: SlotOutputs, norm: StreamNorm, *, interpret: bool = False
) -> tuple[Float[Array, "N D"], NormedRows]:
    """x plus the weighted slots in executed order and the shared experts' output, and its norm; to rows of padding no
    slot is added. A gate's product is made here, where a block has the whole row."""
    args, gate = [outputs.slots, outputs.weights, outputs.valid], outputs.shared and outputs.shared.gate
    if gate is not None:
        args += [outputs.inputs, gate]
    if outputs.slot_rows is not None:
        assert outputs.shared is None, "rows of slots are those of routed experts alone"
        args.append(outputs.slot_rows)
    features = dict(shared=outputs.shared is not None, gated=gate is not None, moved=outputs.slot_rows is not None)
    kernel = functools.partial(_of_slots, **features)
    return _call(kernel, "add_slots", x, norm, *args, interpret=interpret)


def add_parts_and_multiply(
    x: Float[Array, "N D"],
    parts: Float[Array, "S N D"],
    biases: Float[Array, "R D"] | None,
    norm: StreamNorm,
    matrices: Float[Array, "R D O"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "N D"], NormedRows, Float[Array, "P N O"]]:
    """As `add_parts`, and the norm times the layer's matrix in P parts; for one row as one kernel."""
    (num_rows, dim), outputs = x.shape, matrices.shape[2]
    if num_rows > 1:
        x, normed = add_parts(x, parts, biases, norm, interpret=interpret)
        return x, normed, partial_sums(normed.plain, matrices, norm.layer, interpret=interpret)
    tile = dataclasses.replace(choose_tile(1, dim, outputs), out=_COLUMNS)
    row = jax.ShapeDtypeStruct(x.shape, x.dtype)
    args = [array for array in (parts, biases) if array is not None]
    static = _Norm(eps=norm.eps, offset=norm.offset, residual_scale=norm.residual_scale)
    stream, normed, sums = pl.pallas_call(
        functools.partial(_row_and_product, tile=tile, static=static),
        (row, row, jax.ShapeDtypeStruct((tile.splits, 1, outputs), jnp.float32)),
        grid=(pl.cdiv(outputs, tile.out), tile.splits),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="add_parts_and_multiply",
    )(x, norm.scales, norm.layer.reshape(1), *args, matrices)
    return stream, NormedRows(normed), sums
