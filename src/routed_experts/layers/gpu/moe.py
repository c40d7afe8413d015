"""Experts on a GPU: one kernel gathers rows and computes SiLU(gate) * up, one multiplies by `down`; K slots are
summed afterwards.

Expert weights of the whole stack are read in place: expert e of the layer is row first_expert + e of the arrays.
Slots (n*K + k) are sorted by expert in order of n, so no result depends on the order in which blocks run; there are
no atomics. Each block finds its expert from the counts alone: `counts[e]` slots are in `order` from the sum of the
counts before them. With few slots nothing is sorted: each slot is a tile of its own. Weights pass once through the
chip at small N, where they are all the traffic. Dims: N tokens, K experts per token, E experts of a layer, R layers
of the stack, D hidden, F expert width, T rows of a tile."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.gpu.blocks import both, load_or_zero, power_of_two, scaled_step
from routed_experts.layers.moe import ExpertCall, combine


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Block sizes of one product: T rows, `out` columns, steps of `inner`; warps and stages of the Triton compiler."""

    rows: int
    out: int
    inner: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoeTiles:
    """What both products use up to `slots` slots. `sorted_slots` False: a slot is a tile."""

    slots: int
    gate_up: Tile
    down: Tile
    sorted_slots: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """What a product is compiled for."""

    tile: Tile
    num_experts: int
    top_k: int
    sorted_slots: bool
    stride: int


def _tile(rows: int, out: int, inner: int, warps: int, stages: int) -> Tile:
    return Tile(rows=rows, out=out, inner=inner, warps=warps, stages=stages)


# Measured best on an H200 at 128 experts of 2048 x 768, top-8, for 1, 16, 64, 256, 2048 and 16384 tokens.
TILES = (
    MoeTiles(slots=16, gate_up=_tile(16, 64, 128, 4, 4), down=_tile(16, 64, 64, 4, 6), sorted_slots=False),
    MoeTiles(slots=1024, gate_up=_tile(16, 128, 64, 4, 3), down=_tile(16, 256, 64, 4, 3)),
    MoeTiles(slots=4096, gate_up=_tile(32, 128, 64, 4, 3), down=_tile(32, 256, 64, 4, 3)),
    MoeTiles(slots=2**31, gate_up=_tile(128, 128, 64, 8, 3), down=_tile(128, 256, 64, 8, 3)),
)


def _list_slots(ids: Any, valid: Any, counts: Any, order: Any, *, slots: int, top_k: int, chunk: int) -> None:
    """Program e: how many slots chose expert e, and which, behind those of all lower experts."""
    expert = pl.program_id(0)

    def chosen(index: Array) -> tuple[Array, Array]:
        places = index * chunk + jnp.arange(chunk)
        there = places < slots
        expert_ids = plgpu.load(ids.at[places], mask=there, other=-1)
        is_valid = plgpu.load(valid.at[places // top_k], mask=there, other=False)
        return places, jnp.where(is_valid, expert_ids, 2**30)

    def count(index: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        _, expert_ids = chosen(index)
        there = expert_ids >= 0
        below, own = sums
        return below + jnp.sum((there & (expert_ids < expert)).astype(jnp.int32)), own + jnp.sum(
            (expert_ids == expert).astype(jnp.int32)
        )

    steps = -(-slots // chunk)
    zero = jnp.zeros((), jnp.int32)
    start, total = lax.fori_loop(0, steps, count, (zero, zero))
    counts[expert] = total

    def write(index: Array, place: Array) -> Array:
        places, expert_ids = chosen(index)
        own = (expert_ids == expert).astype(jnp.int32)
        at = place + jnp.cumsum(own) - own
        plgpu.store(order.at[jnp.where(own > 0, at, slots)], places, mask=own > 0)
        return place + jnp.sum(own)

    lax.fori_loop(0, steps, write, start)


def sort_slots(
    ids: Int[Array, "N K"], valid: Bool[Array, " N"], *, num_experts: int, interpret: bool
) -> tuple[Int[Array, " E"], Int[Array, " NK"]]:
    """Count the slots of each expert and list them, expert by expert; slots of padding rows are left out."""
    slots = ids.size
    chunk = min(power_of_two(slots), 4096)
    kernel = functools.partial(_list_slots, slots=slots, top_k=ids.shape[1], chunk=chunk)
    shapes = (jax.ShapeDtypeStruct((num_experts,), jnp.int32), jax.ShapeDtypeStruct((slots,), jnp.int32))
    call = pl.pallas_call(
        kernel,
        shapes,
        grid=(num_experts,),
        compiler_params=plgpu.CompilerParams(num_warps=8 if chunk >= 2048 else 4, num_stages=1),
        interpret=interpret,
        name="sort_slots",
    )
    counts, order = call(ids.reshape(-1), valid)
    return counts, order


def _find_tile(counts: Any, rows: int, num_experts: int) -> tuple[Array, Array, Array]:
    """(expert, position of the first row, end of the expert's rows) of this block's tile; expert E where there is no
    such tile."""
    tile = pl.program_id(1)
    experts = jnp.arange(power_of_two(num_experts))
    counted = plgpu.load(counts.at[experts], mask=experts < num_experts, other=0)
    tiles = (counted + rows - 1) // rows
    tile_ends, ends = jnp.cumsum(tiles), jnp.cumsum(counted)
    expert = jnp.sum((tile_ends <= tile).astype(jnp.int32))
    mine = experts == expert
    first = jnp.sum(jnp.where(mine, tile_ends - tiles, 0))
    start, end = jnp.sum(jnp.where(mine, ends - counted, 0)), jnp.sum(jnp.where(mine, ends, 0))
    return jnp.where(expert >= power_of_two(num_experts), num_experts, expert), start + (tile - first) * rows, end


def _with_tile(refs: tuple[Any, ...], static: KernelConfig, body: Callable[[Array, Array, Array], None]) -> None:
    """Run `body(expert, slots, mask)` for the block's tile, if there is one."""
    first, valid, ids, counts, order = refs
    tile = static.tile
    if not static.sorted_slots:
        slot = pl.program_id(1)
        rows = jnp.arange(tile.rows)
        expert = ids[slot]

        @pl.when(valid[slot // static.top_k])
        def _() -> None:
            body(first[0] * static.stride + expert, jnp.where(rows == 0, slot, ids.shape[0]), rows == 0)

        return
    expert, start, end = _find_tile(counts, tile.rows, static.num_experts)

    @pl.when(expert < static.num_experts)
    def _() -> None:
        places = start + jnp.arange(tile.rows)
        mask = places < end
        body(first[0] * static.stride + expert, plgpu.load(order.at[places], mask=mask, other=order.shape[0]), mask)


def _gate_up(*refs: Any, static: KernelConfig) -> None:
    """SiLU(gate) * up of the block's rows and columns, written under the slot."""
    x, weights, out = refs[-3:]
    tile, inner_size, width = static.tile, weights.shape[1], weights.shape[2] // 2
    columns = pl.program_id(0) * tile.out + jnp.arange(tile.out)
    inside = None if width % tile.out == 0 else (columns < width)[None, :]

    def body(expert: Array, slots: Array, mask: Array) -> None:
        rows, there = slots // static.top_k, mask[:, None]

        def step(index: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            depth = index * tile.inner + jnp.arange(tile.inner)
            deep = None if inner_size % tile.inner == 0 else depth < inner_size
            taken = load_or_zero(
                x.at[rows[:, None], depth[None, :]], both(there, None if deep is None else deep[None, :])
            )
            mask = both(None if deep is None else deep[:, None], inside)
            gate = load_or_zero(weights.at[expert, depth[:, None], columns[None, :]], mask)
            up = load_or_zero(weights.at[expert, depth[:, None], width + columns[None, :]], mask)
            return sums[0] + jnp.dot(taken, gate, preferred_element_type=jnp.float32), sums[1] + jnp.dot(
                taken, up, preferred_element_type=jnp.float32
            )

        zeros = jnp.zeros((tile.rows, tile.out), jnp.float32)
        gate, up = lax.fori_loop(0, pl.cdiv(inner_size, tile.inner), step, (zeros, zeros))
        gate, up = gate.astype(out.dtype).astype(jnp.float32), up.astype(out.dtype).astype(jnp.float32)
        hidden = (gate / (1.0 + jnp.exp(-gate))).astype(out.dtype).astype(jnp.float32) * up
        plgpu.store(out.at[slots[:, None], columns[None, :]], hidden.astype(out.dtype), mask=both(there, inside))

    _with_tile(refs[:5], static, body)


def _down(*refs: Any, static: KernelConfig) -> None:
    """The second product of the block's rows and columns, written under the slot."""
    hidden, weights, out = refs[-3:]
    tile, inner_size, width = static.tile, weights.shape[1], weights.shape[2]
    columns = pl.program_id(0) * tile.out + jnp.arange(tile.out)
    inside = None if width % tile.out == 0 else (columns < width)[None, :]

    def body(expert: Array, slots: Array, mask: Array) -> None:
        there = mask[:, None]

        def step(index: Array, total: Array) -> Array:
            depth = index * tile.inner + jnp.arange(tile.inner)
            deep = None if inner_size % tile.inner == 0 else depth < inner_size
            taken = load_or_zero(
                hidden.at[slots[:, None], depth[None, :]], both(there, None if deep is None else deep[None, :])
            )
            matrix = load_or_zero(
                weights.at[expert, depth[:, None], columns[None, :]],
                both(None if deep is None else deep[:, None], inside),
            )
            return total + jnp.dot(taken, matrix, preferred_element_type=jnp.float32)

        total = lax.fori_loop(0, pl.cdiv(inner_size, tile.inner), step, jnp.zeros((tile.rows, tile.out), jnp.float32))
        plgpu.store(out.at[slots[:, None], columns[None, :]], total.astype(out.dtype), mask=both(there, inside))

    _with_tile(refs[:5], static, body)


def choose_tiles(slots: int, table: tuple[MoeTiles, ...] = TILES) -> MoeTiles:
    """The row of the table for this many slots."""
    return next(row for row in table if slots <= row.slots)


def slot_outputs(call: ExpertCall, tiles: MoeTiles, *, stride: int = 1, interpret: bool) -> Float[Array, "NK D"]:
    """Each slot's expert applied to its row; slots of padding rows are not written. `first_expert` counts in steps of
    `stride`: a product of two scalars is a launch where a kernel does not make it."""
    (num_rows, top_k), dim, width = call.ids.shape, call.x.shape[1], call.down.shape[1]
    slots, flat = num_rows * top_k, call.ids.reshape(-1)
    valid = call.valid
    if tiles.sorted_slots:
        counts, order = sort_slots(call.ids, call.valid, num_experts=call.num_experts, interpret=interpret)
    else:
        counts, order = flat, flat  # not read
    first = call.first_expert.reshape(1)

    def product(kernel: Callable[..., None], name: str, tile: Tile, x: Array, weights: Array, columns: int) -> Array:
        num_tiles = min(slots, slots // tile.rows + call.num_experts) if tiles.sorted_slots else slots
        tile = dataclasses.replace(tile, inner=scaled_step(tile.inner, x.dtype))
        static = KernelConfig(
            tile=tile, num_experts=call.num_experts, top_k=top_k, sorted_slots=tiles.sorted_slots, stride=stride
        )
        return pl.pallas_call(
            functools.partial(kernel, static=static),
            jax.ShapeDtypeStruct((slots, columns), x.dtype),
            grid=(pl.cdiv(columns, tile.out), num_tiles),
            compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
            interpret=interpret,
            name=name,
        )(first, valid, flat, counts, order, x, weights)

    hidden = product(_gate_up, "experts_gate_up", tiles.gate_up, call.x, call.gate_up, width)
    return product(_down, "experts_down", tiles.down, hidden, call.down, dim)


def gpu_experts(call: ExpertCall, *, interpret: bool = False) -> Float[Array, "N D"]:
    """The whole expert computation of a layer."""
    num_rows, top_k = call.ids.shape
    outputs = slot_outputs(call, choose_tiles(call.ids.size), interpret=interpret)
    return combine(outputs.reshape(num_rows, top_k, -1), call.weights, call.valid)
