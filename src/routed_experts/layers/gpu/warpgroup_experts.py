"""Experts of many rows on a Hopper GPU: tiles of one expert's rows, multiplied by warpgroups (Pallas' Mosaic GPU).

A program stays on its multiprocessor and computes every B-th block of the product. One warpgroup has the copy engine
bring blocks of rows and of the expert's matrix into rings in shared memory, also those of the next tile; two others
multiply them, 64 rows each, and store. Both products read and write the rows of `expert_rows`, so no copy has a mask.
Sums are in float32 and in order of the inputs, and results are rounded where the Triton kernels of moe.py round: the
bits are theirs. Weights of the whole stack are read in place, as there.

Dims: N tokens, K experts per token, R matrices of the stack, D hidden, F expert width, I inputs, O outputs, M tiles,
P rows of all tiles, B programs."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.gpu.activations import activate
from routed_experts.layers.gpu.blocks import rounded
from routed_experts.layers.gpu.expert_rows import ExpertRows, group_rows
from routed_experts.layers.moe import ExpertCall, combine
from routed_experts.layers.quantized import QuantizedWeight

HOPPER = "9.0"  # the compute capability that has these instructions; later ones have others
TILE_ROWS = 128
FEWEST_ROWS = 64  # of an expert, on average; with fewer, the Triton kernels are as fast
_WARPGROUP_ROWS = 64
_INNER = 64  # inputs of a step: 128 bytes, the widest pattern of the copy engine
_MULTIPLIERS = TILE_ROWS // _WARPGROUP_ROWS  # warpgroups that multiply
_COPIER = _MULTIPLIERS  # the warpgroup that copies
_COLUMNS = (256, 192, 128, 64)  # of a block, of both halves together; the sums of more fill the registers
_SHARED_BYTES = 226 * 1024  # of a multiprocessor's shared memory; the rest is for barriers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Warpgroups:
    """The GPU that multiplies by warpgroups: `num_programs`, one a multiprocessor. `interpret`: as in `pallas_call`;
    JAX's interpreter of Mosaic GPU kernels, in tests."""

    num_programs: int
    interpret: Any = False


def find_warpgroups() -> Warpgroups | None:
    """Those of this process's GPUs, if all are Hopper GPUs."""
    devices = [device for device in jax.local_devices() if device.platform == "gpu"]
    if not devices or any(device.compute_capability != HOPPER for device in devices):
        return None
    return Warpgroups(num_programs=min(device.core_count for device in devices))


def suits_warpgroups(call: ExpertCall) -> bool:
    """Whether these kernels compute the call, and faster than the Triton kernels do: many rows an expert, matrices of
    16-bit numbers, no biases, sides of whole steps."""
    if isinstance(call.gate_up, QuantizedWeight) or isinstance(call.down, QuantizedWeight):
        return False
    sides = (call.x.shape[1], call.down.shape[1])
    return (
        call.ids.size >= FEWEST_ROWS * call.num_experts
        and call.gate_up_bias is None
        and call.x.dtype in (jnp.bfloat16, jnp.float16)
        and call.gate_up.dtype == call.down.dtype == call.x.dtype
        and all(side % _INNER == 0 for side in sides)
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """What a product is compiled for. `activation`: gate and up are the halves of the matrix, and the result of both is
    activated; None: the matrix is whole."""

    outputs: int
    steps: int  # along the inputs
    num_programs: int
    activation: str | None
    dtype: Any

    @property
    def halves(self) -> int:
        """Blocks of the matrix that a step reads."""
        return 1 if self.activation is None else 2

    @property
    def columns(self) -> int:
        """Outputs of a block: as many as there are registers for, of those that divide all. Measured best on an H200
        for 16384 tokens of 128 experts of 2048 x 768, top-8."""
        return next(size for size in _COLUMNS if size * self.halves <= _COLUMNS[0] and self.outputs % size == 0)

    @property
    def stages(self) -> int:
        """Steps in the rings: what fits."""
        size = jnp.dtype(self.dtype).itemsize
        step = (TILE_ROWS + self.halves * self.columns) * _INNER * size
        return min(self.steps, (_SHARED_BYTES - TILE_ROWS * self.columns * size) // step)

    @property
    def column_blocks(self) -> int:
        """Blocks of columns of a tile."""
        return self.outputs // self.columns

    def blocks_of(self, num_tiles: Array) -> Array:
        """Blocks of the product that this program computes."""
        rest = num_tiles * self.column_blocks - lax.axis_index("program")
        return lax.div(rest + self.num_programs - 1, jnp.int32(self.num_programs))

    def place(self, index: Array) -> tuple[Array, Array]:
        """(tile, first column) of that block of this program. Programs work on the same experts at one time."""
        block = lax.axis_index("program") + index * self.num_programs
        tile = lax.div(block, jnp.int32(self.column_blocks))
        return tile, (block - tile * self.column_blocks) * self.columns

    def stage(self, step: Array) -> Array:
        """Where in the ring a step is, of all steps of the program."""
        return lax.rem(step, jnp.int32(self.stages))


class _Refs(NamedTuple):
    """Arrays of the product, and what is in shared memory: rings of blocks of rows and of matrices, the results of each
    warpgroup, and barriers of each place in the rings."""

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


def _accumulator(rows: int, columns: int) -> Any:
    """Sums of a warpgroup in its registers."""
    return plgpu.ACC((rows, columns))  # pyright: ignore[reportPrivateImportUsage]


def _copy_blocks(refs: _Refs, product: _Product) -> None:
    """Bring the blocks of all steps into the rings, as far ahead as there is room."""

    def copy_block(index: Array, step: Array) -> Array:
        tile, column = product.place(index)
        matrix, own_rows = refs.first[0] + refs.tile_expert[tile], pl.ds(tile * TILE_ROWS, TILE_ROWS)

        def copy(inner: Array, step: Array) -> Array:
            stage, inputs = product.stage(step), pl.ds(inner * _INNER, _INNER)
            filled = refs.filled.at[stage]

            @pl.when(step >= product.stages)
            def _() -> None:
                plgpu.barrier_wait(refs.emptied.at[stage])

            plgpu.copy_gmem_to_smem(refs.rows.at[own_rows, inputs], refs.row_ring.at[stage], filled)
            for half in range(product.halves):
                columns = pl.ds(half * product.outputs + column, product.columns)
                block = refs.matrices.at[matrix, inputs, columns]
                plgpu.copy_gmem_to_smem(block, refs.matrix_ring.at[stage, half], filled)
            return step + 1

        return lax.fori_loop(0, product.steps, copy, step)

    def wait(step: Array, carry: None) -> None:
        plgpu.barrier_wait(refs.emptied.at[product.stage(step)])

    end = lax.fori_loop(0, product.blocks_of(refs.num_tiles[0]), copy_block, jnp.int32(0))
    lax.fori_loop(jnp.maximum(end - product.stages, 0), end, wait, None)  # barriers end with no arrival left


def _multiply_blocks(refs: _Refs, product: _Product, warpgroup: Array) -> None:
    """Multiply this warpgroup's rows of each block, and store them while the next one is multiplied."""
    in_tile = warpgroup * _WARPGROUP_ROWS

    def multiply_block(index: Array, step: Array) -> Array:
        tile, column = product.place(index)

        def multiply(*sums: Any) -> tuple[Array, ...]:
            def add(inner: Array, step: Array) -> Array:
                stage = product.stage(step)
                plgpu.barrier_wait(refs.filled.at[stage])
                own_rows = refs.row_ring.at[stage, pl.ds(in_tile, _WARPGROUP_ROWS)]
                for half, half_sums in enumerate(sums):
                    plgpu.wgmma(half_sums, own_rows, refs.matrix_ring.at[stage, half])
                plgpu.wgmma_wait(product.halves)  # the products of the step before have ended

                @pl.when(inner > 0)
                def _() -> None:
                    plgpu.barrier_arrive(refs.emptied.at[product.stage(step - 1)])

                return step + 1

            end = lax.fori_loop(0, product.steps, add, step)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(refs.emptied.at[product.stage(end - 1)])
            return tuple(half_sums[...] for half_sums in sums)

        accumulators: list[Any] = [_accumulator(_WARPGROUP_ROWS, product.columns) for _ in range(product.halves)]
        sums = [rounded(half_sums, product.dtype) for half_sums in pl.run_scoped(multiply, *accumulators)]
        result = (
            sums[0] if product.activation is None else activate(sums[0], sums[1], product.activation, product.dtype)
        )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the results of the block before have been read
        refs.results[warpgroup] = result.astype(product.dtype)
        plgpu.commit_smem()
        out_rows = pl.ds(tile * TILE_ROWS + in_tile, _WARPGROUP_ROWS)
        plgpu.copy_smem_to_gmem(refs.results.at[warpgroup], refs.out.at[out_rows, pl.ds(column, product.columns)])
        return step + product.steps

    lax.fori_loop(0, product.blocks_of(refs.num_tiles[0]), multiply_block, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _kernel(*arrays: Any, product: _Product) -> None:
    refs, warpgroup = _Refs(*arrays), lax.axis_index("warpgroup")

    @pl.when(warpgroup == _COPIER)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _copy_blocks(refs, product)

    @pl.when(warpgroup != _COPIER)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        _multiply_blocks(refs, product, warpgroup)


def _multiply(
    rows: Float[Array, "P I"],
    matrices: Float[Array, "R I O"],
    first: Int[Array, "1"],
    tiles: ExpertRows,
    activation: str | None,
    warpgroups: Warpgroups,
) -> Float[Array, "P O"]:
    """Rows of each tile times the matrix of its expert; with an activation the activated halves, [P, O / 2]."""
    num_rows, inputs = rows.shape
    product = _Product(
        outputs=matrices.shape[2] // (1 if activation is None else 2),
        steps=inputs // _INNER,
        num_programs=warpgroups.num_programs,
        activation=activation,
        dtype=rows.dtype,
    )
    call = plgpu.kernel(
        functools.partial(_kernel, product=product),
        out_type=jax.ShapeDtypeStruct((num_rows, product.outputs), rows.dtype),
        scratch_types=[
            plgpu.SMEM((product.stages, TILE_ROWS, _INNER), rows.dtype),
            plgpu.SMEM((product.stages, product.halves, _INNER, product.columns), rows.dtype),
            plgpu.SMEM((_MULTIPLIERS, _WARPGROUP_ROWS, product.columns), rows.dtype),
            plgpu.Barrier(num_arrivals=1 + product.halves, num_barriers=product.stages),
            plgpu.Barrier(num_arrivals=_MULTIPLIERS, num_barriers=product.stages),
        ],
        grid=(product.num_programs,),
        grid_names=("program",),
        num_threads=_MULTIPLIERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=warpgroups.interpret,
        kernel_name="experts_down" if activation is None else "experts_gate_up",
    )
    return call(rows, matrices, first, tiles.tile_expert, tiles.num_tiles)


def warpgroup_experts(call: ExpertCall, warpgroups: Warpgroups, *, interpret: bool = False) -> Float[Array, "N D"]:
    """The whole expert computation of a layer, of a call that these kernels take."""
    tiles = group_rows(call.x, call.ids, call.valid, num_experts=call.num_experts, tile=TILE_ROWS, interpret=interpret)
    first = call.first_expert.reshape(1)
    assert not isinstance(call.gate_up, QuantizedWeight) and not isinstance(call.down, QuantizedWeight), "see `suits_warpgroups`"
    hidden = _multiply(tiles.values, call.gate_up, first, tiles, call.activation, warpgroups)
    outputs = _multiply(hidden, call.down, first, tiles, None, warpgroups)
    return combine(jnp.take(outputs, tiles.rows, axis=0, mode="clip"), call.weights, call.valid)
