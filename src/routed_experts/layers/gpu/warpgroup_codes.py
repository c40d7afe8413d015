"""Tiles of rows times matrices of e4m3 codes, by warpgroups: codes are the left operand, 64 outputs in each warpgroup,
which decodes them in its registers, and rows, as scaled float16, are the right one.

The sum of a group of 128 inputs is float32, and so is the scale that it is multiplied by; outputs share scales in spans
of 128, so that one number scales a warpgroup's product. A step reads two groups, of gate and of up or of neighbouring
inputs, whose products run at one time.

Dims: R matrices of the stack, I inputs, O outputs, M tiles, T rows of a tile, P rows of all tiles."""

import functools
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.gpu.activations import activate
from routed_experts.layers.gpu.blocks import rounded
from routed_experts.layers.gpu.expert_rows import Tiles
from routed_experts.layers.gpu.scaled_rows import ScaledRows
from routed_experts.layers.gpu.warpgroups import (
    CONSUMERS,
    SHARED_BYTES,
    SIDE,
    Schedule,
    Warpgroups,
    accumulator,
    copy_blocks,
    launch,
    multiply_blocks,
    split_work,
)
from routed_experts.layers.quantized import E4M3, QuantizedWeight, Weight

# Rows of a tile; fewer up to so many rows of an expert on average. Measured best on an H200 with 128 experts of 2048 x
# 768, top-8: 32 for 256 tokens (16 rows an expert), 64 for 1024 and 4096 (64 and 256 rows).
CODE_TILE = 64
_FEW_ROWS, _FEW_TILE = 24, 32
GROUP = 128  # inputs, and outputs of a span
_COLUMNS = CONSUMERS * SIDE  # of a block, of each half
_MOST_STAGES = 8
_ALIGNED = 32  # numbers of float32 in 128 bytes, to which the destination of a copy is aligned


def _schedule(
    inputs: int, outputs: int, halves: int, *, tile: int, result_bytes: int, stride: int, num_programs: int
) -> Schedule:
    """Steps of two groups of inputs where there is one half and an even number of groups, else of one; as many stages
    as fit. `result_bytes`: of a number."""
    groups = 2 if halves == 1 and inputs % (2 * GROUP) == 0 else 1
    depth = groups * GROUP
    step_bytes = depth * (halves * _COLUMNS + tile * 2) + max(tile, _ALIGNED) * 4
    stages = (SHARED_BYTES - tile * _COLUMNS * result_bytes) // step_bytes
    return Schedule(
        outputs=outputs,
        columns=_COLUMNS,
        steps=inputs // depth,
        step_inputs=depth,
        stages=min(stages, _MOST_STAGES, inputs // depth),
        halves=halves,
        stride=stride,
        num_programs=num_programs,
    )


class _Refs(NamedTuple):
    """Arrays of the product; rings of blocks of rows, of what their sums are multiplied by and of codes, and the
    results of each warpgroup."""

    rows: Any
    inverse: Any
    codes: Any
    scales: Any
    first: Any
    tile_expert: Any
    num_tiles: Any
    out: Any
    row_ring: Any
    inverse_ring: Any
    code_ring: Any
    results: Any
    filled: Any
    emptied: Any


class _Products(NamedTuple):
    """The operations that JAX's interpreter of Mosaic GPU kernels has not: products with a left operand in registers
    and transposed stores. Interpreted, they are plain code. `tile`: T."""

    tile: int
    is_interpreted: bool

    def zeros(self) -> Float[Array, "64 T"]:
        """Sums."""
        zeros = jnp.zeros((SIDE, self.tile), jnp.float32)
        return zeros if self.is_interpreted else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)

    def multiply(self, codes: list[Float[Array, "64 I"]], rows: list[Any]) -> tuple[Float[Array, "64 T"], ...]:
        """Each block of codes times a block of rows, [T, I] of a ring."""
        if self.is_interpreted:
            pairs = zip(codes, rows, strict=True)
            return tuple(jnp.dot(left, right[...].T, preferred_element_type=jnp.float32) for left, right in pairs)

        def run(*sums: Any) -> tuple[Array, ...]:
            for own_sums, own_codes, own_rows in zip(sums, codes, rows, strict=True):
                plgpu.wgmma(own_sums, own_codes, own_rows.T)
            plgpu.wgmma_wait(0)
            return tuple(own_sums[...] for own_sums in sums)

        return pl.run_scoped(run, *(accumulator(self.tile) for _ in codes))

    def of_rows(self, numbers: Float[Array, " T"]) -> Float[Array, " T"]:
        """A number of each row, where its sums are."""
        return numbers if self.is_interpreted else plgpu.layout_cast(numbers, plgpu.Layout.WGMMA.reduce(0))

    def store(self, results: Any, warpgroup: Array, numbers: Float[Array, "64 T"]) -> None:
        """Write them as rows, [T, 64]."""
        if self.is_interpreted:
            results[warpgroup] = numbers.T
        else:
            results.at[warpgroup].T[...] = plgpu.layout_cast(numbers, plgpu.Layout.WGMMA_TRANSPOSED)


def _kernel(*arrays: Any, schedule: Schedule, activation: str | None, products: _Products) -> None:
    refs, tile_rows, depth = _Refs(*arrays), products.tile, schedule.step_inputs
    num_tiles, dtype, halves = refs.num_tiles[0], refs.out.dtype, schedule.halves

    def copy(tile: Array, column: Array, inner: Array, stage: Array) -> None:
        matrix, filled = refs.first[0] * schedule.stride + refs.tile_expert[tile], refs.filled.at[stage]
        inputs, own_rows = pl.ds(inner * depth, depth), pl.ds(tile * tile_rows, tile_rows)
        for half in range(halves):
            columns = pl.ds(half * schedule.outputs + column, _COLUMNS)
            plgpu.copy_gmem_to_smem(refs.codes.at[matrix, columns, inputs], refs.code_ring.at[stage, half], filled)
        plgpu.copy_gmem_to_smem(refs.rows.at[own_rows, inputs], refs.row_ring.at[stage], filled)
        inverse = refs.inverse_ring.at[stage, pl.ds(0, tile_rows)]
        plgpu.copy_gmem_to_smem(refs.inverse.at[own_rows], inverse, filled)

    def multiply(warpgroup: Array, tile: Array, column: Array, step: Array) -> None:
        sums, inverse = _add_up(refs, (warpgroup, tile, column), step, schedule, products)
        factors = lax.broadcast_in_dim(inverse, (SIDE, tile_rows), (1,))
        numbers = [rounded(half_sums * factors, dtype) for half_sums in sums]
        result = numbers[0] if activation is None else activate(numbers[0], numbers[1], activation, dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the results of the block before have been read
        products.store(refs.results, warpgroup, result.astype(dtype))
        plgpu.commit_smem()
        block = pl.ds(tile * tile_rows, tile_rows), pl.ds(column + warpgroup * SIDE, SIDE)
        plgpu.copy_smem_to_gmem(refs.results.at[warpgroup], refs.out.at[block])

    split_work(
        lambda: copy_blocks(schedule, num_tiles, refs.emptied, copy),
        lambda warpgroup: multiply_blocks(schedule, num_tiles, functools.partial(multiply, warpgroup)),
    )


def _add_up(
    refs: _Refs, block: tuple[Array, Array, Array], first_step: Array, schedule: Schedule, products: _Products
) -> tuple[tuple[Float[Array, "64 T"], ...], Float[Array, " T"]]:
    """The sums of a block (warpgroup, tile, first column), and what they are multiplied by. Scales are loaded a step
    ahead."""
    (warpgroup, tile, column), groups = block, schedule.step_inputs // GROUP
    matrix = refs.first[0] * schedule.stride + refs.tile_expert[tile]
    parts = [(half, group) for half in range(schedule.halves) for group in range(groups)]
    spans = [lax.div(half * schedule.outputs + column, jnp.int32(GROUP)) for half in range(schedule.halves)]

    def load_scales(inner: Array) -> tuple[Array, ...]:
        return tuple(refs.scales[matrix, inner * groups + group, spans[half]] for half, group in parts)

    def add(inner: Array, carry: tuple[Array, tuple[Array, ...], tuple[Array, ...], Array]) -> tuple[Any, ...]:
        (step, sums, scales, _), own = carry, pl.ds(warpgroup * SIDE, SIDE)
        following, stage = load_scales(jnp.minimum(inner + 1, schedule.steps - 1)), schedule.stage(step)
        plgpu.barrier_wait(refs.filled.at[stage])
        inputs = [pl.ds(group * GROUP, GROUP) for group in range(groups)]
        codes = [refs.code_ring[stage, half, own, inputs[group]].astype(jnp.float16) for half, group in parts]
        made = products.multiply(codes, [refs.row_ring.at[stage, :, inputs[group]] for _, group in parts])
        added = list(sums)
        for (half, _), product, scale in zip(parts, made, scales, strict=True):
            added[half] = added[half] + product * scale
        inverse = products.of_rows(refs.inverse_ring[stage, pl.ds(0, products.tile)])
        plgpu.barrier_arrive(refs.emptied.at[stage])
        return step + 1, tuple(added), following, inverse

    nothing = (products.zeros(),) * schedule.halves
    inverse = products.of_rows(jnp.zeros((products.tile,), jnp.float32))
    start = first_step, nothing, load_scales(jnp.int32(0)), inverse
    _, sums, _, inverse = lax.fori_loop(0, schedule.steps, add, start)
    return sums, inverse


def tile_of_codes(rows: int) -> int:
    """Rows of a tile, for so many rows of a matrix."""
    return _FEW_TILE if rows <= _FEW_ROWS else CODE_TILE


def has_code_blocks(matrices: Weight) -> TypeGuard[QuantizedWeight]:
    """Whether they are codes that `multiply_codes` reads: e4m3, with a scale for each 128 x 128."""
    if not isinstance(matrices, QuantizedWeight):
        return False
    (_, inputs, outputs), is_read = matrices.shape, matrices.format == E4M3 and matrices.outputs_first
    return is_read and matrices.group == matrices.span == GROUP and inputs % GROUP == 0 and outputs % GROUP == 0


def multiply_codes(
    rows: ScaledRows,
    matrices: QuantizedWeight,
    first: Int[Array, "1"],
    tiles: Tiles,
    activation: str | None,
    dtype: Any,
    warpgroups: Warpgroups,
    *,
    stride: int = 1,
) -> Float[Array, "P O"]:
    """Rows of each tile times the matrix of its expert, in `dtype`; with an activation the activated halves,
    [P, O / 2]."""
    assert rows.inverse.shape[1] == 1, "a row has one power"
    (num_rows, inputs), halves = rows.shape, 1 if activation is None else 2
    tile = num_rows // tiles.expert.shape[0]
    schedule = _schedule(
        inputs,
        matrices.shape[2] // halves,
        halves,
        tile=tile,
        result_bytes=jnp.dtype(dtype).itemsize,
        stride=stride,
        num_programs=warpgroups.num_programs,
    )
    products = _Products(tile=tile, is_interpreted=warpgroups.interpret is not False)
    return launch(
        functools.partial(_kernel, schedule=schedule, activation=activation, products=products),
        [rows.values, rows.inverse.reshape(-1), matrices.codes, matrices.scales, first, tiles.expert, tiles.total],
        name="codes" if activation is None else "activated_codes",
        out=jax.ShapeDtypeStruct((num_rows, schedule.outputs), dtype),
        rings=[
            plgpu.SMEM((schedule.stages, tile, schedule.step_inputs), rows.values.dtype),
            plgpu.SMEM((schedule.stages, max(tile, _ALIGNED)), jnp.float32),
            plgpu.SMEM((schedule.stages, halves, _COLUMNS, schedule.step_inputs), matrices.codes.dtype),
            plgpu.SMEM((CONSUMERS, tile, SIDE), dtype),
        ],
        copies=2 + halves,
        schedule=schedule,
        warpgroups=warpgroups,
    )
