"""Rows of tokens in tiles of T rows, each of one expert: the input of products by warpgroups on a GPU.

Expert e has the next ceil(counts[e] / T) tiles; the last of them ends with rows that are not defined. A row is read
once and written K times. A slot's rank in its expert depends on the slots before it alone, so there are no atomics.
Dims: N tokens, K experts per token, E experts of a layer, D hidden, M tiles, P = M * T rows of all tiles."""

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Int

from routed_experts.layers.gpu.blocks import power_of_two
from routed_experts.layers.gpu.scaled_rows import ScaledRows

_CHUNK = 4096  # slots that a program ranks at once
_LANES = 2048  # columns that a program copies
AnyRows = TypeVar("AnyRows", Array, ScaledRows)  # [N, D]


class ExpertRows(NamedTuple):
    """`rows`: the row of each slot; not defined for slots of padding. `tile_expert`: the expert of each tile, of which
    the first `num_tiles` exist."""

    rows: Int[Array, "N K"]
    tile_expert: Int[Array, " M"]
    num_tiles: Int[Array, "1"]


def _rank_slots(ids: Any, valid: Any, counts: Any, ranks: Any, *, slots: int, top_k: int, chunk: int) -> None:
    """Program e: how many slots chose expert e, and how many before each of them."""
    expert = pl.program_id(0)

    def write(index: Array, offset: Array) -> Array:
        slot_ids = index * chunk + jnp.arange(chunk)
        is_slot = slot_ids < slots
        is_own = plgpu.load(ids.at[slot_ids], mask=is_slot, other=-1) == expert
        is_own &= plgpu.load(valid.at[slot_ids // top_k], mask=is_slot, other=False)
        matches = is_own.astype(jnp.int32)
        plgpu.store(ranks.at[slot_ids], offset + jnp.cumsum(matches) - matches, mask=is_own)
        return offset + jnp.sum(matches)

    counts[expert] = lax.fori_loop(0, pl.cdiv(slots, chunk), write, jnp.zeros((), jnp.int32))


def _numbers(rows: Any) -> Any:
    """The numbers of rows, scaled or not."""
    return rows.values if isinstance(rows, ScaledRows) else rows


def _copy_row(
    x: Any, valid: Any, ids: Any, ranks: Any, starts: Any, copies: Any, rows: Any, *, top_k: int, lanes: int
) -> None:
    """Program (n, block of columns): row n, to the row of each of its slots."""
    token, block = pl.program_id(0), pl.program_id(1)
    numbers, copied = _numbers(x), _numbers(copies)
    columns, dim = block * lanes + jnp.arange(lanes), x.shape[1]
    real = None if dim % lanes == 0 else columns < dim

    @pl.when(valid[token])
    def _() -> None:
        row = plgpu.load(numbers.at[token, columns], mask=real)
        for k in range(top_k):
            slot = token * top_k + k
            place = starts[ids[slot]] + ranks[slot]
            plgpu.store(copied.at[place, columns], row, mask=real)

            @pl.when(block == 0)
            def _(slot: Array = slot, place: Array = place) -> None:
                rows[slot] = place
                if isinstance(x, ScaledRows):
                    copies.inverse[place] = x.inverse[token]


def group_rows(
    x: AnyRows,
    ids: Int[Array, "N K"],
    valid: Bool[Array, " N"],
    num_experts: int,
    tile: int,
    *,
    interpret: bool,
) -> tuple[AnyRows, ExpertRows]:
    """Copy each row to the tiles of its experts, in order of tokens; rows that are not valid are in no tile. Returns
    the rows of all tiles, [P, D], and where they are."""
    (num_rows, top_k), dim = ids.shape, x.shape[1]
    slots, flat = num_rows * top_k, ids.reshape(-1)
    chunk, lanes = min(power_of_two(slots), _CHUNK), min(power_of_two(dim), _LANES)
    counts, ranks = pl.pallas_call(
        functools.partial(_rank_slots, slots=slots, top_k=top_k, chunk=chunk),
        (jax.ShapeDtypeStruct((num_experts,), jnp.int32), jax.ShapeDtypeStruct((slots,), jnp.int32)),
        grid=(num_experts,),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="rank_slots",
    )(flat, valid)
    tiles = (counts + tile - 1) // tile
    ends = jnp.cumsum(tiles)
    most = min(slots, slots // tile + num_experts)
    index = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    copies = jax.tree.map(lambda own: jax.ShapeDtypeStruct((most * tile, *own.shape[1:]), own.dtype), x)
    copied, rows = pl.pallas_call(
        functools.partial(_copy_row, top_k=top_k, lanes=lanes),
        (copies, jax.ShapeDtypeStruct((slots,), jnp.int32)),
        grid=(num_rows, pl.cdiv(dim, lanes)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="copy_rows",
    )(x, valid, flat, ranks, (ends - tiles) * tile)
    return copied, ExpertRows(rows.reshape(ids.shape), jnp.minimum(expert, num_experts - 1), ends[-1:])
