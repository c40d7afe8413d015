"""Projections on a GPU for few rows: reads a layer's matrix where it stands. Knows nothing of what it projects.

With few rows the matrix is all the traffic, and slicing it first would pass it through memory three times; with many rows the
library's product wins and the slice does not count.
Dims: N tokens, R layers of the run, D inputs, O outputs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.gpu.blocks import both, load_or_zero, power_of_two
from routed_experts.layers.linear import LinearBackend, reference_linear


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearTile:
    """Blocks of `rows` by `out`, in steps of `inner`; warps and stages of the Triton compiler."""

    rows: int
    out: int
    inner: int
    warps: int
    stages: int


LARGEST = 512  # rows; above it the library's product
WIDE = 32_768  # columns; such a matrix (the head) is not sliced and has blocks enough


def choose_tile(num_rows: int, outputs: int) -> LinearTile:
    """Narrow blocks, so that every multiprocessor reads."""
    if num_rows <= 16:
        out = 16 if outputs <= 2304 else 32 if outputs < WIDE else 64
        return LinearTile(rows=16, out=out, inner=256 if out < 64 else 128, warps=4, stages=4)
    if num_rows <= 64:
        return LinearTile(rows=power_of_two(num_rows), out=32, inner=128, warps=4, stages=4)
    return LinearTile(rows=64, out=64, inner=64, warps=4, stages=4)


def _product(x: Any, weights: Any, layer: Any, out: Any, *, tile: LinearTile) -> None:
    num_rows, inner_size, outputs = x.shape[0], weights.shape[1], weights.shape[2]
    rows, columns = pl.program_id(1) * tile.rows + jnp.arange(tile.rows), pl.program_id(0) * tile.out + jnp.arange(tile.out)
    there = None if num_rows % tile.rows == 0 else (rows < num_rows)[:, None]
    inside = None if outputs % tile.out == 0 else (columns < outputs)[None, :]
    place = layer[0]

    def step(index: Array, total: Array) -> Array:
        depth = index * tile.inner + jnp.arange(tile.inner)
        deep = None if inner_size % tile.inner == 0 else depth < inner_size
        taken = load_or_zero(x.at[rows[:, None], depth[None, :]], both(there, None if deep is None else deep[None, :]))
        matrix = load_or_zero(weights.at[place, depth[:, None], columns[None, :]], both(None if deep is None else deep[:, None], inside))
        return total + jnp.dot(taken, matrix, preferred_element_type=jnp.float32)

    total = lax.fori_loop(0, pl.cdiv(inner_size, tile.inner), step, jnp.zeros((tile.rows, tile.out), jnp.float32))
    plgpu.store(out.at[rows[:, None], columns[None, :]], total.astype(out.dtype), mask=both(there, inside))


def linear_in_place(
    x: Float[Array, "N D"],
    weights: Float[Array, "R D O"],
    layer: Int[Array, ""] | int,
    dtype: Any,
    *,
    tile: LinearTile | None = None,
    interpret: bool = False,
) -> Float[Array, "N O"]:
    """x times the layer's matrix."""
    num_rows, outputs = x.shape[0], weights.shape[2]
    if tile is None:
        if num_rows > LARGEST or weights.shape[0] == 1:
            return reference_linear(x, weights, layer, dtype)
        tile = choose_tile(num_rows, outputs)
    return pl.pallas_call(
        functools.partial(_product, tile=tile),
        jax.ShapeDtypeStruct((num_rows, outputs), dtype),
        grid=(pl.cdiv(outputs, tile.out), pl.cdiv(num_rows, tile.rows)),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="linear",
    )(x, weights, jnp.asarray(layer, jnp.int32).reshape(1))


GPU_LINEAR = LinearBackend(name="gpu", run=linear_in_place, layered=True)
