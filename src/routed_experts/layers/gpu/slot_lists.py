"""The list of slots by expert, and the tiles of rows that it is cut into, by one kernel; there are no atomics. Dims: N
tokens, K experts per token, E experts of a layer, T rows of a tile, M tiles."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Int

from routed_experts.layers.gpu.blocks import power_of_two
from routed_experts.layers.gpu.expert_rows import load_experts, tile_limit

_TILES_AT_ONCE = 32  # that a program writes


def _list_slots(
    ids: Any,
    valid: Any,
    order: Any,
    *tables: Any,
    slots: int,
    num_experts: int,
    top_k: int,
    chunk: int,
    rows: list[int],
) -> None:
    """Program e: the slots that chose expert e, behind those of all lower experts, and its tiles."""
    expert = pl.program_id(0)

    chosen = functools.partial(load_experts, ids, valid, slots=slots, top_k=top_k, chunk=chunk)

    def count(index: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        _, expert_ids = chosen(index)
        is_slot = expert_ids >= 0
        below, matches = sums
        return below + jnp.sum((is_slot & (expert_ids < expert)).astype(jnp.int32)), matches + jnp.sum(
            (expert_ids == expert).astype(jnp.int32)
        )

    steps = -(-slots // chunk)
    zero = jnp.zeros((), jnp.int32)
    start, total = lax.fori_loop(0, steps, count, (zero, zero))
    for table, tile_rows in zip(tables, rows, strict=True):
        _list_tiles(table, expert, start, total, slots=slots, num_experts=num_experts, rows=tile_rows)

    def write(index: Array, offset: Array) -> Array:
        slot_ids, expert_ids = chosen(index)
        matches = (expert_ids == expert).astype(jnp.int32)
        positions = offset + jnp.cumsum(matches) - matches
        plgpu.store(order.at[jnp.where(matches > 0, positions, slots)], slot_ids, mask=matches > 0)
        return offset + jnp.sum(matches)

    lax.fori_loop(0, steps, write, start)


def _list_tiles(
    table: Any, expert: Array, start: Array, total: Array, *, slots: int, num_experts: int, rows: int
) -> None:
    """The tiles of an expert whose slots are `total` from `start` on. They need no counts of other experts: first tiles
    are so far apart that there is room for the tiles of any counts. Tiles in between have no rows, nor has the rest
    behind the last expert."""
    most = table.shape[0]
    if most == slots:
        first, following = start, start + total
    else:
        first, following = start // rows + expert, (start + total) // rows + expert + 1
    following = jnp.where(expert == num_experts - 1, most, following)

    def write(index: Array, carry: None) -> None:
        tile = first + index * _TILES_AT_ONCE + jnp.arange(_TILES_AT_ONCE)
        position, is_own = start + (tile - first) * rows, tile < following
        for column, numbers in enumerate((expert, position, jnp.maximum(start + total, position))):
            plgpu.store(table.at[tile, column], jnp.broadcast_to(numbers, tile.shape), mask=is_own)

    lax.fori_loop(0, pl.cdiv(following - first, _TILES_AT_ONCE), write, None)


def sort_slots(
    ids: Int[Array, "N K"], valid: Bool[Array, " N"], *, num_experts: int, rows: list[int], interpret: bool
) -> tuple[Int[Array, " NK"], list[Int[Array, "M 3"]]]:
    """The slots expert by expert, without those of padding rows and of ids that are no expert; the rest of the list is
    not defined. And the tiles of each of some sizes: the expert, where its first slot is in that list, and where the
    expert's last one ends, which is the same place for a tile without rows."""
    slots = ids.size
    chunk = min(power_of_two(slots), 4096)
    sizes = dict(slots=slots, num_experts=num_experts, top_k=ids.shape[1], chunk=chunk, rows=rows)
    kernel = functools.partial(_list_slots, **sizes)
    tables = [jax.ShapeDtypeStruct((tile_limit(slots, num_experts, own), 3), jnp.int32) for own in rows]
    shapes = (jax.ShapeDtypeStruct((slots,), jnp.int32), *tables)
    call = pl.pallas_call(
        kernel,
        shapes,
        grid=(num_experts,),
        compiler_params=plgpu.CompilerParams(num_warps=8 if chunk >= 2048 else 4, num_stages=1),
        interpret=interpret,
        name="sort_slots",
    )
    order, *listed = call(ids.reshape(-1), valid)
    return order, listed
