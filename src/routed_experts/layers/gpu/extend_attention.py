"""Attention of any number of tokens a request on a GPU: tiles of query rows walk over the keys of their request. Dims:
N tokens, B requests, H query heads, G kv heads, C head dim, L layers of the pool, Q query tokens of a tile, M rows of a
tile (a token and a head each)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import PagedBatch
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import visibility_mask
from routed_experts.layers.gpu.blocks import power_of_two
from routed_experts.layers.gpu.paged_keys import (
    PLAIN,
    Sinks,
    SinksAndScales,
    add_keys,
    keys_of_step,
    load_keys,
    load_sinks,
    sinks_and_scales,
    static_features,
)
from routed_experts.layers.gpu.paged_softmax import (
    State,
    add_visible_keys,
    empty_state,
    pages_of,
    visible_bounds,
)
from routed_experts.layers.gpu.ragged import find_tile, most_tiles

# (head dims up to, rows of a tile, keys of a step, warps, stages): measured best on an H200 at 16 prompts of 1,024
EXTEND_STEPS = ((64, 128, 64, 8, 3), (128, 64, 32, 4, 2), (256, 128, 64, 8, 2), (2**31, 64, 32, 8, 2))


def _extend(
    first_page: Any,
    queries: Any,
    pool: Any,
    starts: Any,
    positions: Any,
    table: Any,
    *rest: Any,
    share: int,
    tile: int,
    keys: int,
    stride: int,
    features: AttentionFeatures,
    has_kv_scales: bool,
) -> None:
    """Block (group, tile): Q tokens of one request times the heads of the group."""
    extra, out = SinksAndScales.from_refs(rest[:-1], has_kv_scales=has_kv_scales), rest[-1]
    group, index = pl.program_id(0), pl.program_id(1)
    dim, num_tokens, num_requests = pool.shape[3], queries.shape[0], table.shape[0]
    padded = power_of_two(share)
    request, start, last = find_tile(starts, index, num_requests, tile)
    first, scale = first_page[0] * stride, extra.score_scale(features, dim)

    @pl.when(request < num_requests)
    def _() -> None:
        rows, lanes = jnp.arange(tile * padded), jnp.arange(power_of_two(dim))
        tokens, head = start + rows // padded, rows % padded
        row_mask = (tokens < last) & (head < share)
        mask = row_mask[:, None] & (lanes < dim)[None, :]
        indices = jnp.where(row_mask, tokens, num_tokens)[:, None], (group * share + head)[:, None], lanes[None, :]
        rotated = plgpu.load(queries.at[indices], mask=mask, other=0.0)
        row_positions = plgpu.load(positions.at[tokens], mask=row_mask, other=0)

        def step(seen_by_all: bool, number: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
            (state, pages), key_positions, owned, mask = carry, number * keys + jnp.arange(keys), None, None
            if not seen_by_all:
                owned = (key_positions >= bounds[0]) & (key_positions < bounds[-1])
                mask = visibility_mask(row_positions[:, None], key_positions[None, :], features)
            k, v = load_keys(pool, pages, key_positions, owned, group, rotated.dtype)
            return add_keys(state, rotated, k, v, mask, scale), load_pages(number + 1)

        bounds = visible_bounds(positions[start], positions[last - 1], features)
        own = load_sinks(extra.sinks, group * share + head, head < share)
        load_pages = pages_of(table, first, request, jnp.int32(0), bounds[-1], keys, pool.shape[1])
        state = empty_state(tile * padded, lanes.shape[0], own)
        has_first = bool(features.window or features.chunk)
        _, total, mixed = add_visible_keys(state, bounds, keys, step, load_pages, has_first=has_first)
        mixed = extra.scale_values(mixed) / jnp.maximum(total, 1e-30)[:, None]
        plgpu.store(out.at[indices], mixed.astype(out.dtype), mask=mask)


def extend_attention(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page 2G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    features: AttentionFeatures = PLAIN,
    *,
    sinks: Sinks | None = None,
    stride: int = 1,
    interpret: bool = False,
) -> Float[Array, "N H C"]:
    """Any number of query tokens a request. Rows of padding are not written. `sinks`: in a stack; else those of
    `features`."""
    (num_tokens, heads, dim), groups = queries.shape, pool.shape[2] // 2
    share, extra = heads // groups, sinks_and_scales(features, sinks)
    rows, keys, warps, stages = next(row[1:] for row in EXTEND_STEPS if dim <= row[0])
    tile = max(1, rows // power_of_two(share))
    kernel = functools.partial(
        _extend,
        share=share,
        tile=tile,
        keys=keys_of_step(keys, dim, pool.dtype),
        stride=stride,
        **static_features(features),
    )
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        grid=(groups, most_tiles(num_tokens, batch.seq_lens.shape[0], tile)),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="extend_attention",
    )(
        jnp.asarray(first_page, jnp.int32).reshape(1),
        queries,
        pool,
        batch.query_starts,
        batch.positions,
        batch.page_table,
        *extra,
    )
