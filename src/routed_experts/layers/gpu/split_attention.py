"""Attention of few tokens a request on a GPU, in decode and verify steps: the keys of a request are split over blocks.

A second kernel combines the splits of a request in their order: no result depends on the order in which blocks run. For
a product with codes the values are scaled where they are made, a head at a time. Dims: N tokens, B requests, H query
heads, G kv heads, C head dim, L layers of the pool, S splits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import MASK_VALUE, PagedBatch
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import first_visible, visibility_mask
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
    choose_splits,
    combine_into,
    empty_state,
    most_visible,
    output_shape,
    pages_of,
    part_shapes,
    split_range,
    store_heads,
)
from routed_experts.layers.quantized import ScaledRows

# (requests up to, keys of a step, warps, stages): measured best, or as good as the best, on an H200 with 32 heads of
# 128 dims in 4 groups, for 544 to 4,096 keys a request
DECODE_STEPS = ((1, 32, 4, 3), (64, 64, 2, 3), (2**31, 64, 2, 2))
# (rows of a tile up to, requests up to, keys of a step, warps, stages): those of up to 32 rows measured best on an H200
# with 4 tokens a request
VERIFY_STEPS = ((32, 1, 32, 4, 3), (32, 2**31, 64, 2, 3), (2**31, 2**31, 64, 4, 2))
MIN_ROWS, MAX_VERIFY_ROWS = 16, 128  # of a tile: the narrowest product, and what its registers hold


def _decode(
    first_page: Any,
    queries: Any,
    pool: Any,
    lens: Any,
    table: Any,
    *rest: Any,
    share: int,
    splits: int,
    rows: int,
    keys: int,
    stride: int,
    features: AttentionFeatures,
    has_kv_scales: bool,
) -> None:
    """Block (group, request, split): the split's part of the softmax of all heads of the group."""
    num_outs = 1 if splits == 1 else 3
    extra, outs = SinksAndScales.from_refs(rest[:-num_outs], has_kv_scales=has_kv_scales), rest[-num_outs:]
    group, request, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    dim = pool.shape[3]
    lanes, head = jnp.arange(power_of_two(dim)), jnp.arange(rows)
    mask = (head < share)[:, None] & (lanes < dim)[None, :]
    heads = jnp.where(head < share, group * share + head, queries.shape[1])
    rotated = plgpu.load(queries.at[request, heads[:, None], lanes[None, :]], mask=mask, other=0.0)
    first, scale = first_page[0] * stride, extra.score_scale(features, dim)
    visible = first_visible(jnp.maximum(lens[request] - 1, 0), features)
    start, end = split_range(visible, lens[request], split, splits, keys)

    load_pages = pages_of(table, first, request, start, end, keys, pool.shape[1])

    def step(index: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
        state, pages = carry
        positions = start + index * keys + jnp.arange(keys)
        owned = positions < end
        k, v = load_keys(pool, pages, positions, owned, group, rotated.dtype)
        return add_keys(state, rotated, k, v, owned[None, :], scale), load_pages(index + 1)

    scores = load_sinks(extra.sinks, heads, head < share)
    scores = None if scores is None else jnp.where(split == 0, scores, MASK_VALUE)
    state = empty_state(rows, lanes.shape[0], scores)
    steps = pl.cdiv(jnp.maximum(end - start, 0), keys)
    (top, total, mixed), _ = lax.fori_loop(0, steps, step, (state, load_pages(0)))
    mixed = extra.scale_values(mixed)
    if splits == 1:
        mixed = mixed / jnp.maximum(total, 1e-30)[:, None]
        store_heads(outs[0], request, heads, lanes, mixed.astype(queries.dtype), mask)
        return
    plgpu.store(outs[0].at[request, split, heads[:, None], lanes[None, :]], mixed, mask=mask)
    plgpu.store(outs[1].at[request, split, heads], top, mask=head < share)
    plgpu.store(outs[2].at[request, split, heads], total, mask=head < share)


def decode_attention(
    queries: Float[Array, "B H C"],
    pool: Float[Array, "LP page 2G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    features: AttentionFeatures = PLAIN,
    *,
    sinks: Sinks | None = None,
    splits: int | None = None,
    stride: int = 1,
    scaled: bool = False,
    interpret: bool = False,
) -> Float[Array, "B H C"] | ScaledRows:
    """One query token a request. `sinks`: in a stack; else those of `features`. `scaled`: as rows of all heads."""
    (num_rows, heads, dim), groups = queries.shape, pool.shape[2] // 2
    share, extra = heads // groups, sinks_and_scales(features, sinks)
    splits = splits or choose_splits(num_rows, groups, most_visible(batch, pool.shape[1], features))
    rows = max(16, power_of_two(share))
    keys, warps, stages = next(row[1:] for row in DECODE_STEPS if num_rows <= row[0])
    kernel = functools.partial(
        _decode,
        share=share,
        splits=splits,
        rows=rows,
        keys=keys_of_step(keys, dim, pool.dtype),
        stride=stride,
        **static_features(features),
    )
    out_shape = jax.ShapeDtypeStruct(queries.shape, queries.dtype)
    own = output_shape(out_shape, scaled=scaled)
    outs = pl.pallas_call(
        kernel,
        [own] if splits == 1 else part_shapes(num_rows, splits, heads, dim),
        grid=(groups, num_rows, splits),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="decode_attention",
    )(jnp.asarray(first_page, jnp.int32).reshape(1), queries, pool, batch.seq_lens, batch.page_table, *extra)
    return outs[0] if splits == 1 else combine_into(own, outs, out_shape, splits, interpret=interpret)


def _verify(
    first_page: Any,
    queries: Any,
    pool: Any,
    starts: Any,
    positions: Any,
    table: Any,
    *rest: Any,
    share: int,
    splits: int,
    tile: int,
    keys: int,
    stride: int,
    features: AttentionFeatures,
    has_kv_scales: bool,
) -> None:
    """Block (group, request, split): the split's part of the softmax of all tokens of the request, at most Q, times the
    heads of the group."""
    extra, (parts, tops, totals) = SinksAndScales.from_refs(rest[:-3], has_kv_scales=has_kv_scales), rest[-3:]
    group, request, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    dim, num_tokens, padded = pool.shape[3], queries.shape[0], power_of_two(share)
    token, last = starts[request], starts[request + 1]

    @pl.when(token < last)
    def _() -> None:
        rows, lanes = jnp.arange(tile * padded), jnp.arange(power_of_two(dim))
        tokens, head = token + rows // padded, rows % padded
        is_row = (tokens < last) & (head < share)
        mask = is_row[:, None] & (lanes < dim)[None, :]
        tokens, heads = jnp.where(is_row, tokens, num_tokens), group * share + head
        rotated = plgpu.load(queries.at[tokens[:, None], heads[:, None], lanes[None, :]], mask=mask, other=0.0)
        row_positions = plgpu.load(positions.at[tokens], mask=is_row, other=0)
        visible, length = first_visible(positions[token], features), positions[last - 1] + 1
        start, end = split_range(visible, length, split, splits, keys)
        first, scale = first_page[0] * stride, extra.score_scale(features, dim)
        load_pages = pages_of(table, first, request, start, end, keys, pool.shape[1])

        def step(index: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
            (state, pages), key_positions = carry, start + index * keys + jnp.arange(keys)
            owned = key_positions < end
            seen = visibility_mask(row_positions[:, None], key_positions[None, :], features) & owned[None, :]
            k, v = load_keys(pool, pages, key_positions, owned, group, rotated.dtype)
            return add_keys(state, rotated, k, v, seen, scale), load_pages(index + 1)

        scores = load_sinks(extra.sinks, heads, head < share)
        scores = None if scores is None else jnp.where(split == 0, scores, MASK_VALUE)
        state, steps = empty_state(tile * padded, lanes.shape[0], scores), pl.cdiv(jnp.maximum(end - start, 0), keys)
        (top, total, mixed), _ = lax.fori_loop(0, steps, step, (state, load_pages(0)))
        mixed = extra.scale_values(mixed)
        plgpu.store(parts.at[tokens[:, None], split, heads[:, None], lanes[None, :]], mixed, mask=mask)
        plgpu.store(tops.at[tokens, split, heads], top, mask=is_row)
        plgpu.store(totals.at[tokens, split, heads], total, mask=is_row)


def verify_attention(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page 2G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    features: AttentionFeatures = PLAIN,
    *,
    sinks: Sinks | None = None,
    splits: int | None = None,
    stride: int = 1,
    scaled: bool = False,
    interpret: bool = False,
) -> Float[Array, "N H C"] | ScaledRows:
    """At most `batch.max_queries` tokens a request: the keys of a request are split as in decode, and read once for all
    of its tokens. Rows of padding are not defined. `sinks`: in a stack; else those of `features`. `scaled`: as rows of
    all heads."""
    (num_tokens, heads, dim), groups = queries.shape, pool.shape[2] // 2
    share, num_requests, extra = heads // groups, batch.seq_lens.shape[0], sinks_and_scales(features, sinks)
    splits = splits or choose_splits(num_requests, groups, most_visible(batch, pool.shape[1], features))
    tile = power_of_two(max(batch.max_queries, MIN_ROWS // power_of_two(share)))
    rows = tile * power_of_two(share)
    keys, warps, stages = next(row[2:] for row in VERIFY_STEPS if rows <= row[0] and num_requests <= row[1])
    kernel = functools.partial(
        _verify,
        share=share,
        splits=splits,
        tile=tile,
        keys=keys_of_step(keys, dim, pool.dtype),
        stride=stride,
        **static_features(features),
    )
    parts = pl.pallas_call(
        kernel,
        part_shapes(num_tokens, splits, heads, dim),
        grid=(groups, num_requests, splits),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="verify_attention",
    )(
        jnp.asarray(first_page, jnp.int32).reshape(1),
        queries,
        pool,
        batch.query_starts,
        batch.positions,
        batch.page_table,
        *extra,
    )
    out = jax.ShapeDtypeStruct(queries.shape, queries.dtype)
    return combine_into(output_shape(out, scaled=scaled), parts, out, splits, interpret=interpret)


def fits_verify(batch: PagedBatch, share: int) -> bool:
    """Whether the tokens of a request, times the heads of a group, are one tile."""
    return batch.max_queries > 0 and power_of_two(batch.max_queries) * power_of_two(share) <= MAX_VERIFY_ROWS
