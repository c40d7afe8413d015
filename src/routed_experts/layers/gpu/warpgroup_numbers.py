"""Tiles of rows times matrices of 16-bit numbers, by warpgroups: rows are the left operand, 64 of a tile's 128 in each
warpgroup. Sums are in float32 and in order of the inputs, and results are rounded where the Triton kernels of moe.py
round: the bits are theirs, but for a tanh gelu, where one number in 4,000 differed on an H100. Weights of the whole
stack are read in place, as there.

Dims: R matrices of the stack, I inputs, O outputs, M tiles, P rows of all tiles."""

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
from routed_experts.layers.quantized import QuantizedWeight, Weight

NUMBER_TILE = CONSUMERS * SIDE  # rows of a tile
STEP = 64  # inputs: 128 bytes, the widest swizzle
_BYTES = 2  # of a number
_COLUMNS = (256, 192, 128, 64)  # of a block, of both halves together; the sums of more fill the registers
# Tiles of a group, where a matrix has at least so many bytes, and two tiles or more on average. Without groups, blocks
# of a large matrix leave the L2 cache between two tiles, and are read again. TFLOP/s on an H100, 16384 tokens in
# bfloat16, without and with groups: Mixtral-8x7B gate and up (235 MB) 509 and 688, down (117 MB) 548 and 709;
# GLM-4.5-Air (23 and 12 MB) 628 and 673, 587 and 605. Smaller matrices lost 1 %, and with one tile each 5 %. Groups of
# 8 and 32 were not faster, nor were clusters of two programs that share matrices.
_GROUP_TILES = 16
_GROUP_BYTES = 10 * 2**20


def _schedule(inputs: int, outputs: int, *, halves: int, stride: int, num_programs: int, expert_rows: int) -> Schedule:
    """Blocks as wide as there are registers for, of widths that divide the outputs, and as many stages as fit. On an
    H200, with 16384 tokens and 128 experts of 2048 x 768, top-8, blocks of 256 columns of `down` were faster than those
    of 128; those of 192 were 5 % faster still, but do not divide 2048."""
    columns = next(size for size in _COLUMNS if size * halves <= _COLUMNS[0] and outputs % size == 0)
    step_bytes, result_bytes = (NUMBER_TILE + halves * columns) * STEP * _BYTES, NUMBER_TILE * columns * _BYTES
    stages = (SHARED_BYTES - result_bytes) // step_bytes
    is_large = inputs * halves * outputs * _BYTES >= _GROUP_BYTES
    return Schedule(
        outputs=outputs,
        columns=columns,
        steps=inputs // STEP,
        step_inputs=STEP,
        stages=min(stages, inputs // STEP),
        halves=halves,
        stride=stride,
        num_programs=num_programs,
        group=_GROUP_TILES if is_large and expert_rows >= 2 * NUMBER_TILE else 1,
    )


class _Refs(NamedTuple):
    """Arrays of the product; rings of blocks of rows and of matrices, and the results of each warpgroup."""

    rows: Any
    matrices: Any
    first: Any
    tile_expert: Any
    num_tiles: Any
    out: Any
    row_ring: Any
    matrix_ring: Any
    results: Any
    filled: Any
    emptied: Any


def _kernel(*arrays: Any, schedule: Schedule, activation: str | None) -> None:
    refs = _Refs(*arrays)
    num_tiles, dtype = refs.num_tiles[0], refs.out.dtype

    def copy(tile: Array, column: Array, inner: Array, stage: Array) -> None:
        matrix, filled = refs.first[0] * schedule.stride + refs.tile_expert[tile], refs.filled.at[stage]
        inputs = pl.ds(inner * STEP, STEP)
        own_rows = refs.rows.at[pl.ds(tile * NUMBER_TILE, NUMBER_TILE), inputs]
        plgpu.copy_gmem_to_smem(own_rows, refs.row_ring.at[stage], filled)
        for half in range(schedule.halves):
            columns = pl.ds(half * schedule.outputs + column, schedule.columns)
            plgpu.copy_gmem_to_smem(refs.matrices.at[matrix, inputs, columns], refs.matrix_ring.at[stage, half], filled)

    def multiply(warpgroup: Array, tile: Array, column: Array, step: Array) -> None:
        def add_up(*sums: Any) -> tuple[Array, ...]:
            return _add_up(refs, sums, warpgroup, step, schedule)

        accumulators: list[Any] = [accumulator(schedule.columns) for _ in range(schedule.halves)]
        sums = [rounded(half_sums, dtype) for half_sums in pl.run_scoped(add_up, *accumulators)]
        result = sums[0] if activation is None else activate(sums[0], sums[1], activation, dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the results of the block before have been read
        refs.results[warpgroup] = result.astype(dtype)
        plgpu.commit_smem()
        block = pl.ds(tile * NUMBER_TILE + warpgroup * SIDE, SIDE), pl.ds(column, schedule.columns)
        plgpu.copy_smem_to_gmem(refs.results.at[warpgroup], refs.out.at[block])

    split_work(
        lambda: copy_blocks(schedule, num_tiles, refs.emptied, copy),
        lambda warpgroup: multiply_blocks(schedule, num_tiles, functools.partial(multiply, warpgroup)),
    )


def _add_up(
    refs: _Refs, sums: tuple[Any, ...], warpgroup: Array, first_step: Array, schedule: Schedule
) -> tuple[Array, ...]:
    """The sums of a block. A step's products run while the next step is waited for."""

    def add(inner: Array, step: Array) -> Array:
        stage = schedule.stage(step)
        plgpu.barrier_wait(refs.filled.at[stage])
        own_rows = refs.row_ring.at[stage, pl.ds(warpgroup * SIDE, SIDE)]
        for half, half_sums in enumerate(sums):
            plgpu.wgmma(half_sums, own_rows, refs.matrix_ring.at[stage, half])
        plgpu.wgmma_wait(schedule.halves)  # the products of the step before have ended

        @pl.when(inner > 0)
        def _() -> None:
            plgpu.barrier_arrive(refs.emptied.at[schedule.stage(step - 1)])

        return step + 1

    end = lax.fori_loop(0, schedule.steps, add, first_step)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(refs.emptied.at[schedule.stage(end - 1)])
    return tuple(half_sums[...] for half_sums in sums)


def suits_number_products(matrices: Weight, dtype: Any) -> TypeGuard[Array]:
    """Whether they are matrices that `multiply_numbers` reads for rows of `dtype`: of its 16-bit numbers, with sides of
    whole steps."""
    if isinstance(matrices, QuantizedWeight) or dtype not in (jnp.bfloat16, jnp.float16):
        return False
    return matrices.dtype == dtype and all(side % STEP == 0 for side in matrices.shape[1:])


def multiply_numbers(
    rows: Float[Array, "P I"],
    matrices: Float[Array, "R I O"],
    first: Int[Array, "1"],
    tiles: Tiles,
    activation: str | None,
    warpgroups: Warpgroups,
    *,
    expert_rows: int,
    stride: int = 1,
) -> Float[Array, "P O"]:
    """Rows of each tile times the matrix of its expert; with an activation the activated halves, [P, O / 2].
    `expert_rows`: of an expert, on average."""
    (num_rows, inputs), dtype, halves = rows.shape, rows.dtype, 1 if activation is None else 2
    schedule = _schedule(
        inputs,
        matrices.shape[2] // halves,
        halves=halves,
        stride=stride,
        num_programs=warpgroups.num_programs,
        expert_rows=expert_rows,
    )
    return launch(
        functools.partial(_kernel, schedule=schedule, activation=activation),
        [rows, matrices, first, tiles.expert, tiles.total],
        name="numbers" if activation is None else "activated_numbers",
        out=jax.ShapeDtypeStruct((num_rows, schedule.outputs), dtype),
        rings=[
            plgpu.SMEM((schedule.stages, NUMBER_TILE, STEP), dtype),
            plgpu.SMEM((schedule.stages, halves, STEP, schedule.columns), dtype),
            plgpu.SMEM((CONSUMERS, SIDE, schedule.columns), dtype),
        ],
        copies=1 + halves,
        schedule=schedule,
        warpgroups=warpgroups,
    )
