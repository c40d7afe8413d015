"""Tiles of rows times matrices of e4m3 codes, by warpgroups: codes are the left operand, 64 outputs in each warpgroup,
which decodes them in its registers, and rows, as scaled float16, are the right one.

The sum of a group of 128 inputs is float32, and so is the scale that it is multiplied by; outputs share scales in spans
of 128, so that one number scales a warpgroup's product. While a product runs, the codes of the next one are decoded, of
the next step too: a warpgroup waits for the longer of the two.

Dims: R matrices of the stack, I inputs, O outputs, M tiles, T rows of a tile, P rows of all tiles, J parts of a row, S
parts of a sum."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.gpu.activations import activate
from routed_experts.layers.gpu.blocks import rounded
from routed_experts.layers.gpu.code_plans import COLUMNS, GROUP, CodesPlan
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

_MOST_STAGES = 8
_ALIGNED = 32  # numbers of float32 in 128 bytes, to which the destination of a copy is aligned


def _schedule(
    inputs: int, outputs: int, plan: CodesPlan, *, activated: bool, result_bytes: int, stride: int, num_programs: int
) -> Schedule:
    """As many stages as fit. `outputs`: of the result; `result_bytes`: of a number."""
    depth = plan.groups * GROUP
    steps = inputs // (plan.splits * depth)
    assert steps * plan.splits * depth == inputs, (inputs, plan)
    columns = COLUMNS if activated else plan.sets * COLUMNS
    step_bytes = depth * (plan.sets * COLUMNS + plan.tile * 2) + plan.groups * _aligned(plan.tile) * 4
    stages = min((SHARED_BYTES - plan.tile * columns * result_bytes) // step_bytes, _MOST_STAGES, steps)
    assert outputs % columns == 0, (outputs, plan)
    assert stages >= min(steps, 2), f"a stage is emptied once the next one is filled: {plan}"
    return Schedule(
        outputs=outputs,
        columns=columns,
        steps=steps,
        step_inputs=depth,
        stages=stages,
        halves=2 if activated else 1,
        stride=stride,
        num_programs=num_programs,
    )


def _aligned(count: int) -> int:
    """Numbers of float32 that a copy of `count` takes."""
    return -(-count // _ALIGNED) * _ALIGNED


class _Refs(NamedTuple):
    """Arrays of the product, `tiles` those of Tiles, or none; rings of blocks of rows, of what their sums are
    multiplied by and of codes, and the results of each warpgroup."""

    rows: Any
    inverse: Any
    codes: Any
    scales: Any
    first: Any
    tiles: list[Any]
    out: Any
    row_ring: Any
    inverse_ring: Any
    code_ring: Any
    results: Any
    filled: Any
    emptied: Any

    @staticmethod
    def from_arguments(arrays: tuple[Any, ...]) -> "_Refs":
        """Those of a kernel's arguments."""
        rows, inverse, codes, scales, first, *tiles = arrays[:-7]
        out, *rings = arrays[-7:]
        return _Refs(rows, inverse, codes, scales, first, tiles, out, *rings)


class _Operations(NamedTuple):
    """What JAX's interpreter of Mosaic GPU kernels has not: products with a left operand in registers and transposed
    stores. Interpreted, they are plain code. `tile`: T."""

    tile: int
    is_interpreted: bool

    def zeros(self) -> Float[Array, "64 T"]:
        """Sums."""
        zeros = jnp.zeros((SIDE, self.tile), jnp.float32)
        return zeros if self.is_interpreted else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)

    def multiply(
        self, codes: Float[Array, "64 I"], rows: Any, meanwhile: Callable[[], Array]
    ) -> tuple[Float[Array, "64 T"], Array]:
        """A block of codes times a block of rows, [T, I] of a ring, and what `meanwhile` returns, which runs beside the
        product."""
        if self.is_interpreted:
            return jnp.dot(codes, rows[...].T, preferred_element_type=jnp.float32), meanwhile()

        def run(sums: Any) -> tuple[Array, Array]:
            plgpu.wgmma(sums, codes, rows.T)
            other = meanwhile()
            return plgpu.wgmma_accumulator_load(sums, wait_n=0), other

        return pl.run_scoped(run, accumulator(self.tile))

    def by_row(self, numbers: Float[Array, " T"]) -> Float[Array, "64 T"]:
        """A number of each row, beside all of its sums."""
        own = numbers if self.is_interpreted else plgpu.layout_cast(numbers, plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(own, (SIDE, self.tile), (1,))

    def store(self, results: Any, warpgroup: Array, numbers: Float[Array, "64 T"]) -> None:
        """Write them as rows, [T, 64]."""
        if self.is_interpreted:
            results[warpgroup] = numbers.T
        else:
            results.at[warpgroup].T[...] = plgpu.layout_cast(numbers, plgpu.Layout.WGMMA_TRANSPOSED)


class _BlockIndex(NamedTuple):
    """Where a block is: the matrix of the stack, the first row, the part of the sum and the first column."""

    matrix: Array
    row: Array
    split: Array
    column: Array


@dataclasses.dataclass(frozen=True, slots=True)
class _Block:
    """Inside a kernel: how a program computes its blocks."""

    refs: _Refs
    schedule: Schedule
    plan: CodesPlan
    operations: _Operations
    activation: str | None

    @property
    def in_parts(self) -> bool:
        """Whether rows have parts, a group each, with powers of their own."""
        return self.refs.inverse.shape[0] > 1

    def locate(self, tile: Array, column: Array) -> _BlockIndex:
        """Return the index of a tile's block. The tiles of one matrix come once for each part of the sum, and the last
        of them ends with the last row: rows that are in two tiles are computed, and written, twice."""
        num_rows, rows = self.refs.rows.shape[0], self.plan.tile
        matrix = self.refs.first[0] * self.schedule.stride
        if self.refs.tiles:
            return _BlockIndex(matrix + self.refs.tiles[0][tile], tile * rows, jnp.int32(0), column)
        split = lax.div(tile, jnp.int32(-(-num_rows // rows)))
        own = tile - split * -(-num_rows // rows)
        return _BlockIndex(matrix, jnp.minimum(own * rows, num_rows - rows), split, column)

    def num_tiles(self) -> Array:
        """Return how many tiles the product has."""
        if self.refs.tiles:
            return self.refs.tiles[1][0]
        return jnp.int32(-(-self.refs.rows.shape[0] // self.plan.tile) * self.plan.splits)

    def columns(self, number: int, at: _BlockIndex) -> Array:
        """The first column of that set."""
        return at.column + number * (COLUMNS if self.activation is None else self.schedule.outputs)

    def copy(self, tile: Array, column: Array, inner: Array, stage: Array) -> None:
        """Start the copies of a step."""
        refs, at, filled = self.refs, self.locate(tile, column), self.refs.filled.at[stage]
        step = at.split * self.schedule.steps + inner
        inputs, rows = pl.ds(step * self.schedule.step_inputs, self.schedule.step_inputs), pl.ds(at.row, self.plan.tile)
        for number in range(self.plan.sets):
            block = refs.codes.at[at.matrix, pl.ds(self.columns(number, at), COLUMNS), inputs]
            plgpu.copy_gmem_to_smem(block, refs.code_ring.at[stage, number], filled)
        plgpu.copy_gmem_to_smem(refs.rows.at[rows, inputs], refs.row_ring.at[stage], filled)
        for number in range(refs.inverse_ring.shape[1]):
            part = step * self.plan.groups + number if self.in_parts else 0
            inverse = refs.inverse_ring.at[stage, number, pl.ds(0, self.plan.tile)]
            plgpu.copy_gmem_to_smem(refs.inverse.at[part, rows], inverse, filled)

    def multiply(self, warpgroup: Array, tile: Array, column: Array, step: Array) -> None:
        """Compute a block, from that step on."""
        refs, at, dtype = self.refs, self.locate(tile, column), self.refs.out.dtype
        numbers = [rounded(own, dtype) for own in self._sums(warpgroup, at, step)]
        if self.activation is not None:
            numbers = [activate(numbers[0], numbers[1], self.activation, dtype)]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the results of the block before have been read
        for number, own in enumerate(numbers):
            self.operations.store(refs.results.at[number], warpgroup, own.astype(dtype))
        plgpu.commit_smem()
        rows = pl.ds(at.split * refs.rows.shape[0] + at.row, self.plan.tile)
        for number in range(len(numbers)):
            columns = pl.ds(at.column + number * COLUMNS + warpgroup * SIDE, SIDE)
            plgpu.copy_smem_to_gmem(refs.results.at[number, warpgroup], refs.out.at[rows, columns])

    def _decode(self, warpgroup: Array, stage: Array, number: int, group: int) -> Float[Array, "64 I"]:
        """The codes of a set and a group of inputs."""
        columns, inputs = pl.ds(warpgroup * SIDE, SIDE), pl.ds(group * GROUP, GROUP)
        return self.refs.code_ring[stage, number, columns, inputs].astype(jnp.float16)

    def _sums(self, warpgroup: Array, at: _BlockIndex, first_step: Array) -> list[Float[Array, "64 T"]]:
        """The sums of each set, for rows as they were before they were scaled. Scales are loaded a step ahead."""
        refs, schedule, plan, steps = self.refs, self.schedule, self.plan, self.schedule.steps
        products = [(number, group) for number in range(plan.sets) for group in range(plan.groups)]
        spans = [lax.div(self.columns(number, at), jnp.int32(GROUP)) for number in range(plan.sets)]

        def load_scales(inner: Array) -> tuple[Array, ...]:
            first = (at.split * steps + jnp.minimum(inner, steps - 1)) * plan.groups
            return tuple(refs.scales[at.matrix, first + group, spans[number]] for number, group in products)

        def first_codes(step: Array) -> Float[Array, "64 I"]:
            plgpu.barrier_wait(refs.filled.at[schedule.stage(step)])
            return self._decode(warpgroup, schedule.stage(step), *products[0])

        def add(inner: Array, carry: tuple[Any, ...], *, is_last: bool = False) -> tuple[Any, ...]:
            step, sums, scales, codes = carry
            following, stage, added = load_scales(inner + 1), schedule.stage(step), list(sums)
            later: list[Callable[[], Array]] = [
                functools.partial(self._decode, warpgroup, stage, *own) for own in products[1:]
            ]
            later.append((lambda: codes) if is_last else functools.partial(first_codes, step + 1))
            for (number, group), scale, decode in zip(products, scales, later, strict=True):
                rows = refs.row_ring.at[stage, :, pl.ds(group * GROUP, GROUP)]
                product, codes = self.operations.multiply(codes, rows, decode)
                added[number] = added[number] + product * (self._inverse(stage, group) * scale)
            if not is_last:
                plgpu.barrier_arrive(refs.emptied.at[stage])
            return step + 1, tuple(added), following, codes

        nothing = (self.operations.zeros(),) * plan.sets
        carry = first_step, nothing, load_scales(jnp.int32(0)), first_codes(first_step)
        carry = lax.fori_loop(0, steps - 1, add, carry)
        _, sums, *_ = add(jnp.int32(steps - 1), carry, is_last=True)
        stage = schedule.stage(carry[0])
        if not self.in_parts:
            factors = self.operations.by_row(refs.inverse_ring[stage, 0, pl.ds(0, plan.tile)])
            sums = tuple(own * factors for own in sums)
        plgpu.barrier_arrive(refs.emptied.at[stage])
        return list(sums)

    def _inverse(self, stage: Array, group: int) -> Any:
        """What the sums of a group are multiplied by: 1 where a row has one power."""
        if not self.in_parts:
            return 1.0
        return self.operations.by_row(self.refs.inverse_ring[stage, group, pl.ds(0, self.plan.tile)])


def _kernel(*arrays: Any, schedule: Schedule, plan: CodesPlan, activation: str | None, operations: _Operations) -> None:
    block = _Block(_Refs.from_arguments(arrays), schedule, plan, operations, activation)
    num_tiles = block.num_tiles()
    split_work(
        lambda: copy_blocks(schedule, num_tiles, block.refs.emptied, block.copy),
        lambda warpgroup: multiply_blocks(schedule, num_tiles, functools.partial(block.multiply, warpgroup)),
    )


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
    tiles: Tiles | None,
    activation: str | None,
    dtype: Any,
    warpgroups: Warpgroups,
    *,
    plan: CodesPlan,
    stride: int = 1,
) -> Float[Array, "SP O"]:
    """Rows of each tile times the matrix of its expert, in `dtype`; with an activation the activated halves,
    [P, O / 2]. Without `tiles`, all rows times the first matrix, in the parts of the sum that the plan has, [S*P, O]:
    P is at least a tile, and a multiple of 8. Rows have one power, or one for each group of inputs."""
    (num_rows, inputs), halves = rows.shape, 1 if activation is None else 2
    in_parts = rows.inverse.shape[0] > 1
    assert not in_parts or rows.part == GROUP, "a part is a group of inputs"
    assert (plan.splits == 1) if tiles is not None else num_rows >= plan.tile and num_rows % 8 == 0, (num_rows, plan)
    assert tiles is None or num_rows == tiles.expert.shape[0] * plan.tile, "tiles are those of the plan"
    assert activation is None or plan.sets == 2, "gate and up"
    schedule = _schedule(
        inputs,
        matrices.shape[2] // halves,
        plan,
        activated=activation is not None,
        result_bytes=jnp.dtype(dtype).itemsize,
        stride=stride,
        num_programs=warpgroups.num_programs,
    )
    operations = _Operations(tile=plan.tile, is_interpreted=warpgroups.interpret is not False)
    num_inverse = plan.groups if in_parts else 1
    return launch(
        functools.partial(_kernel, schedule=schedule, plan=plan, activation=activation, operations=operations),
        [rows.values, rows.inverse, matrices.codes, matrices.scales, first, *(tiles or ())],
        name="codes" if activation is None else "activated_codes",
        out=jax.ShapeDtypeStruct((plan.splits * num_rows, schedule.outputs), dtype),
        rings=[
            plgpu.SMEM((schedule.stages, plan.tile, schedule.step_inputs), rows.values.dtype),
            plgpu.SMEM((schedule.stages, num_inverse, _aligned(plan.tile)), jnp.float32),
            plgpu.SMEM((schedule.stages, plan.sets, COLUMNS, schedule.step_inputs), matrices.codes.dtype),
            plgpu.SMEM((schedule.columns // COLUMNS, CONSUMERS, plan.tile, SIDE), dtype),
        ],
        copies=1 + plan.sets + num_inverse,
        schedule=schedule,
        warpgroups=warpgroups,
    )
