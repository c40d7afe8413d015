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
from routed_experts.layers.gpu.scaled_rows import ScaledRows, scaled_shape

# Measured on an H200 with 128 experts, top-8: of chunks of up to 16384 slots the longest are the fastest for 16384
# tokens, and for 256 tokens a row of 2048 numbers is copied fastest by one warp. For 16384 four and eight
# warps are equal. Numbers of tokens between these were not measured.
_CHUNK = 16_384  # slots that a program ranks at once
_FEW_ROWS = 512  # each copied by one warp
_LANES = 2048  # columns that a program copies
AnyRows = TypeVar("AnyRows", Array, ScaledRows)  # [N, D]


class Tiles(NamedTuple):
    """Which matrix each tile of rows is multiplied by, counted from the first of the layer; `total` tiles exist."""

    expert: Int[Array, " M"]
    total: Int[Array, "1"]


def tile_limit(slots: int, num_experts: int, rows: int) -> int:
    """The most tiles of so many rows that so many slots have."""
    return min(slots, slots // rows + num_experts)


def one_matrix(num_rows: int, tile: int) -> Tiles:
    """Tiles of rows that are all multiplied by the first matrix."""
    count = num_rows // tile
    return Tiles(jnp.zeros((count,), jnp.int32), jnp.full((1,), count, jnp.int32))


def load_experts(
    ids: Any, valid: Any, index: Array, *, slots: int, top_k: int, chunk: int
) -> tuple[Int[Array, " C"], Int[Array, " C"]]:
    """Inside a kernel: the slots of that chunk of C, and the expert of each; 2^30 for slots of rows that are not valid,
    and -1 or 2^30 past the last slot."""
    slot_ids = index * chunk + jnp.arange(chunk)
    is_slot = slot_ids < slots
    expert_ids = plgpu.load(ids.at[slot_ids], mask=is_slot, other=-1)
    is_valid = plgpu.load(valid.at[slot_ids // top_k], mask=is_slot, other=False)
    return slot_ids, jnp.where(is_valid, expert_ids, 2**30)


def _rank_slots(ids: Any, valid: Any, counts: Any, ranks: Any, *, slots: int, top_k: int, chunk: int) -> None:
    """Program e: how many slots chose expert e, and how many before each of them."""
    expert = pl.program_id(0)

    def write(index: Array, offset: Array) -> Array:
        slot_ids, expert_ids = load_experts(ids, valid, index, slots=slots, top_k=top_k, chunk=chunk)
        is_own = expert_ids == expert
        matches = is_own.astype(jnp.int32)
        plgpu.store(ranks.at[slot_ids], offset + jnp.cumsum(matches) - matches, mask=is_own)
        return offset + jnp.sum(matches)

    counts[expert] = lax.fori_loop(0, pl.cdiv(slots, chunk), write, jnp.zeros((), jnp.int32))


def _numbers(rows: Any) -> Any:
    """The numbers of rows, scaled or not."""
    return rows.values if isinstance(rows, ScaledRows) else rows


def _copy_row(
    x: Any,
    valid: Any,
    ids: Any,
    ranks: Any,
    counts: Any,
    copies: Any,
    rows: Any,
    tile_expert: Any,
    num_tiles: Any,
    *,
    top_k: int,
    lanes: int,
    tile: int,
) -> None:
    """Program (n, block of columns): row n, to the row of each of its slots, and the expert of tile n."""
    index, block = pl.program_id(0), pl.program_id(1)
    num_rows, dim, num_experts = *x.shape, counts.shape[0]
    experts = jnp.arange(power_of_two(num_experts))
    counted = plgpu.load(counts.at[experts], mask=experts < num_experts, other=0)
    tiles = (counted + tile - 1) // tile
    ends = jnp.cumsum(tiles)

    @pl.when((block == 0) & (index < tile_expert.shape[0]))
    def _() -> None:
        before = jnp.sum((ends <= index).astype(jnp.int32))
        tile_expert[index] = jnp.minimum(before, num_experts - 1)

        @pl.when(index == 0)
        def _() -> None:
            num_tiles[0] = jnp.sum(tiles)

    token = jnp.minimum(index, num_rows - 1)

    @pl.when(valid[token] & (index < num_rows))
    def _() -> None:
        numbers, copied = _numbers(x), _numbers(copies)
        columns = block * lanes + jnp.arange(lanes)
        real = None if dim % lanes == 0 else columns < dim
        row = plgpu.load(numbers.at[token, columns], mask=real)
        for k in range(top_k):
            slot = token * top_k + k
            first = jnp.sum(jnp.where(experts == ids[slot], (ends - tiles) * tile, 0))
            copy = first + ranks[slot]
            plgpu.store(copied.at[copy, columns], row, mask=real)

            @pl.when(block == 0)
            def _(slot: Array = slot, copy: Array = copy) -> None:
                rows[slot] = copy
                if isinstance(x, ScaledRows):
                    copies.inverse[0, copy] = x.inverse[0, token]


def group_rows(
    x: AnyRows,
    ids: Int[Array, "N K"],
    valid: Bool[Array, " N"],
    num_experts: int,
    tile: int,
    *,
    interpret: bool,
) -> tuple[AnyRows, Int[Array, "N K"], Tiles]:
    """Copy each row to the tiles of its experts, in order of tokens; rows that are not valid are in no tile. Ids of
    valid rows are experts: another one would be written outside of the tiles. Returns
    the rows of all tiles [P, D], the row of each slot, which is not defined for slots of padding, and the tiles."""
    assert not isinstance(x, ScaledRows) or x.inverse.shape[0] == 1, "one power a row is copied"
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
    most = tile_limit(slots, num_experts, tile)
    shape: Any = jax.ShapeDtypeStruct((most * tile, dim), x.dtype)
    copies = scaled_shape(most * tile, dim) if isinstance(x, ScaledRows) else shape
    copied, rows, expert, count = pl.pallas_call(
        functools.partial(_copy_row, top_k=top_k, lanes=lanes, tile=tile),
        (copies, *(jax.ShapeDtypeStruct((size,), jnp.int32) for size in (slots, most, 1))),
        grid=(max(num_rows, most), pl.cdiv(dim, lanes)),
        compiler_params=plgpu.CompilerParams(num_warps=1 if num_rows <= _FEW_ROWS else 4, num_stages=1),
        interpret=interpret,
        name="copy_rows",
    )(x, valid, flat, ranks, counts)
    return copied, rows.reshape(ids.shape), Tiles(expert, count)
