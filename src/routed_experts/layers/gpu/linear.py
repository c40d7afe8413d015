"""Projections on a GPU: for few rows, and on a Hopper GPU for many, a layer's matrix is read in place.

With few rows the matrix is all the traffic, and slicing it first would pass it through memory three times. With more
rows the library's product is faster, and with many, on a Hopper GPU, one by warpgroups, which needs no slice either.
The library has no product of codes: from 64 rows on, warpgroups multiply those of a Hopper GPU. Dims: N tokens, R
layers of the stack, D inputs, O outputs, S parts of a sum."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.gpu.blocks import combine_masks, power_of_two, scaled_step
from routed_experts.layers.gpu.code_plans import GROUP, plan_matrix
from routed_experts.layers.gpu.expert_rows import one_matrix
from routed_experts.layers.gpu.operands import Inputs, check_weights, is_packed
from routed_experts.layers.gpu.scaled_rows import Rows, ScaledRows, rows_for_codes
from routed_experts.layers.gpu.sums import FEWEST_ROWS, part_unit, sum_products
from routed_experts.layers.gpu.warpgroup_codes import has_code_blocks, multiply_codes
from routed_experts.layers.gpu.warpgroup_numbers import NUMBER_TILE, multiply_numbers, suits_number_products
from routed_experts.layers.gpu.warpgroups import Warpgroups
from routed_experts.layers.linear import reference_linear
from routed_experts.layers.quantized import QuantizedWeight, Weight


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearTile:
    """Blocks of `rows` by `out`, sums cut into `splits` parts and made in steps of `inner`; warps and stages of the
    Triton compiler. `scaled`: whether rows become float16 first where the matrix is codes. Up to 4 rows are multiplied
    by codes without the tensor cores; they are scaled in any case, step by step, and a step may be all inputs."""

    rows: int
    out: int
    inner: int
    warps: int
    stages: int
    splits: int = 1
    scaled: bool = False


LARGEST = 512  # rows; above it the library's product
# Rows from which on warpgroups multiply codes. Chosen on an H200 for matrices of 2048 x 5120 and 4096 x 2048: with 16
# and 32 rows they were slower, and with 64 faster (scripts that are not committed).
FEWEST_CODE_ROWS = 64
# Rows from which on warpgroups multiply numbers, with no slice of the stack. Chosen on an H200 for bfloat16 matrices of
# 2048 x 5120, 4096 x 2048, 4096 x 14336, 2880 x 5120 and 2048 x 576: with 1024 rows the library was faster for some.
FEWEST_NUMBER_ROWS = 2048
NARROW = 512  # columns, e.g. of a router
BLOCKS = 80  # fewer leave multiprocessors without work


def choose_tile(num_rows: int, inner: int, outputs: int) -> LinearTile:
    """Narrow blocks and short sums, so that every multiprocessor has all of its share in flight. Measured best on an
    H200 for 2048 x 5120, 4096 x 2048 and 2048 x 128."""
    rows = min(max(16, power_of_two(num_rows)), 64)
    if outputs <= NARROW:
        splits = _splits(inner, inner // (128 if num_rows <= 64 else 256))
        return LinearTile(rows=rows, out=32, inner=64 if num_rows > 64 else 128, warps=4, stages=3, splits=splits)
    if num_rows <= 64:
        return LinearTile(rows=rows, out=64, inner=64, warps=4, stages=4, splits=_splits(inner, inner // 512))
    blocks = pl.cdiv(outputs, 128) * pl.cdiv(num_rows, 128)
    splits = _splits(inner, next((count for count in (1, 2, 4) if blocks * count >= BLOCKS), 8))
    return LinearTile(rows=128, out=128, inner=64, warps=8 if splits == 1 else 4, stages=4, splits=splits)


def choose_codes_tile(num_rows: int, inner: int, outputs: int, unit: int, *, packed: bool = False) -> LinearTile:
    """The same for codes that warpgroups do not multiply, whose parts have a multiple of `unit` inputs; `packed` are
    those of 4 bits. Measured best, or as good as the best, with matrices of 2048 x 5120 and 4096 x 2048: of e4m3 on an
    H200 with 1, 8, 16, 32, 64, 128 and 256 rows and on an H100 with 1024 and 4096, and of int4 on an H200 with 1, 16,
    64 and 256 rows."""
    if num_rows == 1:
        out, step, warps = (8, 2048, 8) if packed else (4, 1024, 2)
        splits = _splits(inner, max(1, inner // 2048), unit)
        return LinearTile(rows=1, out=out, inner=step, warps=warps, stages=1, splits=splits)
    rows = min(max(16 if packed else FEWEST_ROWS, power_of_two(num_rows)), 128)
    step, warps, stages = (64 if packed else 128, 4, 3) if rows > 16 else (128, 2, 4)
    if rows <= 64:
        splits = _splits(inner, inner // 512, unit)
    else:
        blocks = pl.cdiv(outputs, 128) * pl.cdiv(num_rows, rows)
        splits = _splits(inner, next((count for count in (1, 2, 4) if blocks * count >= BLOCKS), 8), unit)
    return LinearTile(rows=rows, out=64, inner=step, warps=warps, stages=stages, splits=splits, scaled=True)


def tile_for(num_rows: int, weights: Weight) -> LinearTile:
    """The tile for a matrix of this stack."""
    _, inner, outputs = weights.shape
    if isinstance(weights, QuantizedWeight):
        return choose_codes_tile(num_rows, inner, outputs, part_unit(weights), packed=is_packed(weights))
    return choose_tile(num_rows, inner, outputs)


def _splits(inner: int, limit: int, unit: int = 1) -> int:
    """The largest number of parts of one length, a multiple of `unit`, that is not above `limit`, 16 at most."""
    return next((count for count in (16, 8, 4, 2) if count <= limit and inner % (count * unit) == 0), 1)


def _product(x: Any, weights: Any, layer: Any, out: Any, *, tile: LinearTile, interpret: bool) -> None:
    """Block (columns, rows, split): the split's part of the sums, in float32 unless it is all of them."""
    num_rows, inner_size, outputs = x.shape[0], weights.shape[1] // tile.splits, weights.shape[2]
    rows, columns = (
        pl.program_id(1) * tile.rows + jnp.arange(tile.rows),
        pl.program_id(0) * tile.out + jnp.arange(tile.out),
    )
    split = pl.program_id(2)
    row_mask = None if num_rows % tile.rows == 0 else (rows < num_rows)[:, None]
    column_mask = None if outputs % tile.out == 0 else (columns < outputs)[None, :]
    inputs = Inputs(length=inner_size, size=tile.inner, part=None if tile.splits == 1 else split)
    (total,) = sum_products(
        x,
        weights,
        layer[0],
        rows,
        row_mask,
        (columns,),
        column_mask,
        inputs=inputs,
        interpret=interpret,
    )
    plgpu.store(
        out.at[split, rows[:, None], columns[None, :]],
        total.astype(out.dtype),
        mask=combine_masks(row_mask, column_mask),
    )


def partial_sums(
    x: Rows,
    weights: Weight,
    layer: Int[Array, ""] | int,
    *,
    tile: LinearTile | None = None,
    dtype: Any = jnp.float32,
    warpgroups: Warpgroups | None = None,
    interpret: bool = False,
) -> Float[Array, "S N O"]:
    """x [N, D] times the layer's matrix, as S parts that the next kernel adds up as it reads them: float32, and
    `dtype` where there is one. Many rows times codes by warpgroups, where the GPU has them and the matrix suits."""
    num_rows, outputs = x.shape[0], weights.shape[2]
    check_weights(weights)
    if warpgroups is not None and tile is None and has_code_blocks(weights) and _suits_code_product(x):
        return _code_product(x, weights, layer, dtype, warpgroups, interpret=interpret)
    tile = tile or tile_for(num_rows, weights)
    dtype = dtype if tile.splits == 1 else jnp.float32
    is_coded = isinstance(weights, QuantizedWeight)
    assert is_coded or not isinstance(x, ScaledRows), "numbers are multiplied by rows as they are"
    tile = dataclasses.replace(tile, inner=scaled_step(tile.inner, x.dtype if is_coded else weights.dtype))
    if is_coded:
        assert tile.splits == 1 or weights.shape[1] % (tile.splits * part_unit(weights)) == 0, (tile, weights.shape)
    is_scaled = is_coded and tile.scaled and tile.rows >= FEWEST_ROWS
    rows = rows_for_codes(x, interpret=interpret) if is_scaled else x
    return pl.pallas_call(
        functools.partial(_product, tile=tile, interpret=interpret),
        jax.ShapeDtypeStruct((tile.splits, num_rows, outputs), dtype),
        grid=(pl.cdiv(outputs, tile.out), pl.cdiv(num_rows, tile.rows), tile.splits),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="linear",
    )(rows, weights, jnp.asarray(layer, jnp.int32).reshape(1))


def _suits_code_product(x: Rows) -> bool:
    """Whether warpgroups multiply these rows by codes in blocks, and faster than the Triton kernel does."""
    num_rows = x.shape[0]
    if num_rows < FEWEST_CODE_ROWS or num_rows % 8:
        return False
    if isinstance(x, ScaledRows):
        return x.inverse.shape[0] == 1 or x.part == GROUP
    return x.dtype == jnp.bfloat16


def _code_product(
    x: Rows,
    weights: QuantizedWeight,
    layer: Int[Array, ""] | int,
    dtype: Any,
    warpgroups: Warpgroups,
    *,
    interpret: bool,
) -> Float[Array, "S N O"]:
    """The product by warpgroups, of rows that suit, as `partial_sums` returns it."""
    num_rows, (_, inputs, outputs) = x.shape[0], weights.shape
    plan = plan_matrix(num_rows, inputs, outputs, warpgroups.num_programs)
    rows, first = rows_for_codes(x, interpret=interpret), jnp.asarray(layer, jnp.int32).reshape(1)
    assert isinstance(rows, ScaledRows), "see `_suits_code_product`"
    dtype = dtype if plan.splits == 1 else jnp.float32
    return multiply_codes(rows, weights, first, None, None, dtype, warpgroups, plan=plan).reshape(
        plan.splits, num_rows, outputs
    )


def _number_product(
    x: Float[Array, "N D"], weights: Weight, layer: Int[Array, ""] | int, dtype: Any, warpgroups: Warpgroups
) -> Float[Array, "N O"] | None:
    """The product of many rows by warpgroups; None of few, and of rows and matrices that the kernel does not take."""
    num_rows, first = x.shape[0], jnp.asarray(layer, jnp.int32).reshape(1)
    if (
        not suits_number_products(weights, x.dtype)
        or dtype != x.dtype
        or num_rows < FEWEST_NUMBER_ROWS
        or num_rows % NUMBER_TILE
    ):
        return None
    tiles = one_matrix(num_rows, NUMBER_TILE)
    return multiply_numbers(x, weights, first, tiles, None, warpgroups, expert_rows=num_rows)


def linear_in_place(
    x: Float[Array, "N D"],
    weights: Weight,
    layer: Int[Array, ""] | int,
    dtype: Any,
    *,
    tile: LinearTile | None = None,
    warpgroups: Warpgroups | None = None,
    interpret: bool = False,
) -> Float[Array, "N O"]:
    """x times the layer's matrix; many rows by warpgroups, where the GPU has them and the matrix suits."""
    num_rows = x.shape[0]
    if warpgroups is not None:
        product = _number_product(x, weights, layer, dtype, warpgroups)
        if product is not None:
            return product
    if tile is None and not isinstance(weights, QuantizedWeight) and (num_rows > LARGEST or weights.shape[0] == 1):
        return reference_linear(x, weights, layer, dtype)
    parts = partial_sums(x, weights, layer, tile=tile, dtype=dtype, warpgroups=warpgroups, interpret=interpret)
    return parts[0] if parts.shape[0] == 1 else jnp.sum(parts, axis=0).astype(dtype)
