"""Attention to the paged pool on a GPU: decode and verify split each request's keys over blocks, extend walks tiles of
query rows. Keys outside of a window or chunk are not read.

Query heads that share a kv head are the rows of one tile, so keys and values are read once for all of them. A second
kernel combines the splits of a request in their order: no result depends on the order in which blocks run. For a
product with codes the values of decode and verify are scaled where they are made, a head at a time. Slots
that a request does not own may hold NaN: their scores become MASK_VALUE and their values 0. Where codes have scales,
that of keys multiplies the scores and that of values the sums, float32. Dims: N tokens, B requests, H query heads, G kv
heads, C head dim, L layers of the pool, R layers of the stack, S splits, T keys of a step, Q query tokens of a tile, M
rows of a tile (a token and a head each)."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import MASK_VALUE, AttentionBackend, FusedQKV, PagedBatch
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import first_visible, visibility_mask
from routed_experts.layers.gpu.blocks import power_of_two, scaled_step
from routed_experts.layers.gpu.capability import converts_e4m3
from routed_experts.layers.gpu.delta_rule import gpu_delta
from routed_experts.layers.gpu.kv_write import gpu_write, scale_arrays
from routed_experts.layers.gpu.latent import gpu_latent, latent_attention
from routed_experts.layers.gpu.moe import takes_scaled_rows
from routed_experts.layers.gpu.paged_softmax import (
    State,
    add_scores,
    add_visible_keys,
    choose_splits,
    combine_scaled,
    combine_splits,
    empty_state,
    most_visible,
    pages_of,
    part_shapes,
    scales_heads,
    split_range,
    store_heads,
    visible_bounds,
)
from routed_experts.layers.gpu.qk_norm_rope import FEATURES, prepare
from routed_experts.layers.gpu.ragged import find_tile, most_tiles
from routed_experts.layers.gpu.scaled_rows import scaled_shape
from routed_experts.layers.gpu.warpgroup_attention import suits_warpgroup_attention, warpgroup_attention
from routed_experts.layers.gpu.warpgroups import Warpgroups
from routed_experts.layers.kv_format import KV_CODES, from_stored
from routed_experts.layers.quantized import E4M3, ScaledRows

# (head dims up to, rows of a tile, keys of a step, warps, stages): measured best on an H200 at 16 prompts of 1,024
EXTEND_STEPS = ((64, 128, 64, 8, 3), (128, 64, 32, 4, 2), (256, 128, 64, 8, 2), (2**31, 64, 32, 8, 2))
# (requests up to, keys of a step, warps, stages): measured best, or as good as the best, on an H200 with 32 heads of
# 128 dims in 4 groups, for 544 to 4,096 keys a request
DECODE_STEPS = ((1, 32, 4, 3), (64, 64, 2, 3), (2**31, 64, 2, 2))
# (rows of a tile up to, requests up to, keys of a step, warps, stages): those of up to 32 rows measured best on an H200
# with 4 tokens a request
VERIFY_STEPS = ((32, 1, 32, 4, 3), (32, 2**31, 64, 2, 3), (2**31, 2**31, 64, 4, 2))
MIN_ROWS, MAX_VERIFY_ROWS = 16, 128  # of a tile: the narrowest product, and what its registers hold
WIDE_KEYS = 32  # at most, of heads of more than 256 dims: shared memory holds the keys and values of all stages
Sinks = tuple[Float[Array, "R H"], Int[Array, ""]]  # of all layers of the stack, and the layer
PLAIN = AttentionFeatures()


def keys_of_step(keys: int, dim: int, dtype: Any) -> int:
    """Keys of a step, for keys and values of `dtype`. Codes become numbers of two bytes in shared memory, so the step
    of heads of more than 128 dims is not longer for them."""
    keys = min(keys, WIDE_KEYS) if dim > 256 else keys
    return keys if dtype == KV_CODES and dim > 128 else scaled_step(keys, dtype)


def _add_keys(state: State, rows: Array, keys: Array, values: Array, mask: Array | None, scale: float | Array) -> State:
    return add_scores(state, jnp.dot(rows, keys.T, preferred_element_type=jnp.float32), values, mask, scale)


def _load_keys(
    pool: Any, pages: Array, positions: Array, owned: Array | None, group: Array, dtype: Any
) -> tuple[Array, Array]:
    """Keys and values [T C] of the positions in their pages; zeros where not `owned`, unless it is None. Codes become
    numbers of `dtype`, that of queries."""
    page_size, dim = pool.shape[1], pool.shape[3]
    lanes = jnp.arange(power_of_two(dim))
    real = None if lanes.shape[0] == dim else (lanes < dim)[None, :]
    mask = real if owned is None else owned[:, None] if real is None else owned[:, None] & real
    other = None if mask is None else jnp.zeros((), pool.dtype)
    slots = pages[:, None], (positions % page_size)[:, None]
    rows = (2 * group, 2 * group + 1)
    keys, values = (plgpu.load(pool.at[(*slots, row, lanes[None, :])], mask=mask, other=other) for row in rows)
    if pool.dtype != KV_CODES:
        return keys, values
    return from_stored(keys, dtype), from_stored(values, dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class _SinksAndScales:
    """Inside a kernel: references to the arrays of `_sinks_and_scales`."""

    sinks: list[Any]
    kv_scales: list[Any]

    @staticmethod
    def of(refs: Sequence[Any], *, scaled: bool) -> "_SinksAndScales":
        split = len(refs) - 2 * scaled
        return _SinksAndScales(list(refs[:split]), list(refs[split:]))

    def score_scale(self, features: AttentionFeatures, dim: int) -> float | Array:
        """What products of queries and keys are multiplied by."""
        scale = features.scale or dim**-0.5
        return self._scale(0) * scale if self.kv_scales else scale

    def scaled(self, mixed: Array) -> Array:
        """Sums of values, float32, times the scale of values."""
        return mixed * self._scale(1) if self.kv_scales else mixed

    def _scale(self, column: int) -> Array:
        values, layer = self.kv_scales
        return values[layer[0], column]


def load_sinks(sinks: list[Any], heads: Array, mask: Array) -> Array | None:
    """Inside a kernel: the heads' sinks, float32; `sinks`: references to those of the stack and to the layer, or
    none."""
    if not sinks:
        return None
    values, layer = sinks
    return plgpu.load(values.at[layer[0], heads], mask=mask, other=0.0).astype(jnp.float32)


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
    scaled: bool,
) -> None:
    """Block (group, request, split): the split's part of the softmax of all heads of the group."""
    num_outs = 1 if splits == 1 else 3
    extra, outs = _SinksAndScales.of(rest[:-num_outs], scaled=scaled), rest[-num_outs:]
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
        k, v = _load_keys(pool, pages, positions, owned, group, rotated.dtype)
        return _add_keys(state, rotated, k, v, owned[None, :], scale), load_pages(index + 1)

    scores = load_sinks(extra.sinks, heads, head < share)
    scores = None if scores is None else jnp.where(split == 0, scores, MASK_VALUE)
    state = empty_state(rows, lanes.shape[0], scores)
    steps = pl.cdiv(jnp.maximum(end - start, 0), keys)
    (top, total, mixed), _ = lax.fori_loop(0, steps, step, (state, load_pages(0)))
    mixed = extra.scaled(mixed)
    if splits == 1:
        mixed = mixed / jnp.maximum(total, 1e-30)[:, None]
        store_heads(outs[0], request, heads, lanes, mixed.astype(queries.dtype), mask)
        return
    plgpu.store(outs[0].at[request, split, heads[:, None], lanes[None, :]], mixed, mask=mask)
    plgpu.store(outs[1].at[request, split, heads], top, mask=head < share)
    plgpu.store(outs[2].at[request, split, heads], total, mask=head < share)


def _sinks_and_scales(features: AttentionFeatures, sinks: Sinks | None) -> list[Array]:
    """The kernels' inputs for the sinks of a layer, whether they are its own or in a stack, and for the scales of a
    pool of codes; two arrays each, or none."""
    arrays: list[Array] = []
    if sinks is not None or features.sinks is not None:
        values, layer = sinks or (features.sinks, 0)
        assert values is not None
        arrays += [values.reshape(-1, values.shape[-1]), jnp.asarray(layer, jnp.int32).reshape(1)]
    return arrays if features.kv_scales is None else [*arrays, *scale_arrays(features.kv_scales)]


def _own_sinks(features: AttentionFeatures, sinks: Sinks | None) -> Float[Array, " H"] | None:
    """The sinks of a layer, whether they are its own or in a stack."""
    return features.sinks if sinks is None else sinks[0][sinks[1]]


def _static(features: AttentionFeatures) -> dict[str, Any]:
    """The features of a kernel that are no arrays."""
    plain = dataclasses.replace(features, sinks=None, kv_scales=None)
    return {"features": plain, "scaled": features.kv_scales is not None}


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
    share, extra = heads // groups, _sinks_and_scales(features, sinks)
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
        **_static(features),
    )
    out_shape = jax.ShapeDtypeStruct(queries.shape, queries.dtype)
    direct = scaled_shape(num_rows, heads * dim, parts=heads) if scaled else out_shape
    outs = pl.pallas_call(
        kernel,
        [direct] if splits == 1 else part_shapes(num_rows, splits, heads, dim),
        grid=(groups, num_rows, splits),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="decode_attention",
    )(jnp.asarray(first_page, jnp.int32).reshape(1), queries, pool, batch.seq_lens, batch.page_table, *extra)
    if splits == 1:
        return outs[0]
    return (combine_scaled if scaled else combine_splits)(outs, out_shape, splits, interpret=interpret)


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
    scaled: bool,
) -> None:
    """Block (group, tile): Q tokens of one request times the heads of the group."""
    extra, out = _SinksAndScales.of(rest[:-1], scaled=scaled), rest[-1]
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
            k, v = _load_keys(pool, pages, key_positions, owned, group, rotated.dtype)
            return _add_keys(state, rotated, k, v, mask, scale), load_pages(number + 1)

        bounds = visible_bounds(positions[start], positions[last - 1], features)
        own = load_sinks(extra.sinks, group * share + head, head < share)
        load_pages = pages_of(table, first, request, jnp.int32(0), bounds[-1], keys, pool.shape[1])
        state = empty_state(tile * padded, lanes.shape[0], own)
        has_first = bool(features.window or features.chunk)
        _, total, mixed = add_visible_keys(state, bounds, keys, step, load_pages, has_first=has_first)
        mixed = extra.scaled(mixed) / jnp.maximum(total, 1e-30)[:, None]
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
    share, extra = heads // groups, _sinks_and_scales(features, sinks)
    rows, keys, warps, stages = next(row[1:] for row in EXTEND_STEPS if dim <= row[0])
    tile = max(1, rows // power_of_two(share))
    kernel = functools.partial(
        _extend,
        share=share,
        tile=tile,
        keys=keys_of_step(keys, dim, pool.dtype),
        stride=stride,
        **_static(features),
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
    scaled: bool,
) -> None:
    """Block (group, request, split): the split's part of the softmax of all tokens of the request, at most Q, times the
    heads of the group."""
    extra, (parts, tops, totals) = _SinksAndScales.of(rest[:-3], scaled=scaled), rest[-3:]
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
            k, v = _load_keys(pool, pages, key_positions, owned, group, rotated.dtype)
            return _add_keys(state, rotated, k, v, seen, scale), load_pages(index + 1)

        scores = load_sinks(extra.sinks, heads, head < share)
        scores = None if scores is None else jnp.where(split == 0, scores, MASK_VALUE)
        state, steps = empty_state(tile * padded, lanes.shape[0], scores), pl.cdiv(jnp.maximum(end - start, 0), keys)
        (top, total, mixed), _ = lax.fori_loop(0, steps, step, (state, load_pages(0)))
        mixed = extra.scaled(mixed)
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
    share, num_requests, extra = heads // groups, batch.seq_lens.shape[0], _sinks_and_scales(features, sinks)
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
        **_static(features),
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
    return (combine_scaled if scaled else combine_splits)(parts, out, splits, interpret=interpret)


def _fits_verify(batch: PagedBatch, share: int) -> bool:
    """Whether the tokens of a request, times the heads of a group, are one tile."""
    return batch.max_queries > 0 and power_of_two(batch.max_queries) * power_of_two(share) <= MAX_VERIFY_ROWS


def gpu_attention(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page 2G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    features: AttentionFeatures = PLAIN,
    *,
    sinks: Sinks | None = None,
    stride: int = 1,
    warpgroups: Warpgroups | None = None,
    interpret: bool = False,
) -> Float[Array, "N H C"]:
    """Attention of a step's tokens to the pool. `warpgroups`: those of a Hopper GPU, which compute prompts that suit
    them."""
    mixed = _attend(
        queries,
        pool,
        first_page,
        batch,
        features,
        sinks=sinks,
        stride=stride,
        warpgroups=warpgroups,
        scaled=False,
        interpret=interpret,
    )
    assert not isinstance(mixed, ScaledRows), "scaled only where that is asked for"
    return mixed


def _attend(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page 2G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    features: AttentionFeatures,
    *,
    sinks: Sinks | None,
    stride: int,
    warpgroups: Warpgroups | None,
    scaled: bool,
    interpret: bool,
) -> Float[Array, "N H C"] | ScaledRows:
    """The same. `scaled`: decode and verify return rows of all heads."""
    if features.latent:
        return latent_attention(queries, pool, first_page, batch, features, stride=stride, interpret=interpret)
    share = queries.shape[1] // (pool.shape[2] // 2)
    is_extend = not batch.decode and not _fits_verify(batch, share)
    if is_extend and warpgroups is not None and warpgroups.can_mask and suits_warpgroup_attention(queries, pool, batch):
        return warpgroup_attention(
            queries, pool, first_page, batch, features, warpgroups, sinks=_own_sinks(features, sinks), stride=stride
        )
    options: Any = {"sinks": sinks, "stride": stride, "interpret": interpret}
    if is_extend:
        return extend_attention(queries, pool, first_page, batch, features, **options)
    attend = decode_attention if batch.decode else verify_attention
    return attend(queries, pool, first_page, batch, features, scaled=scaled, **options)


def fused_attention(
    projected: FusedQKV,
    pool: Float[Array, "LP page 2G C"],
    layer: Int[Array, ""],
    batch: PagedBatch,
    num_pages: int,
    *,
    warpgroups: Warpgroups | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "N H C"] | ScaledRows, Float[Array, "LP page 2G C"]]:
    """Prepare, write and attend."""
    queries, pool = prepare(projected, pool, layer, batch, stride=num_pages, interpret=interpret)
    traits, sinks = projected.traits, None if projected.sinks is None else (projected.sinks, projected.layer)
    scales = projected.kv_scales
    features = AttentionFeatures(window=traits.window, chunk=traits.chunk, scale=traits.scale, kv_scales=scales)
    num_tokens, _, dim = queries.shape
    mixed = _attend(
        queries,
        pool,
        layer,
        batch,
        features,
        sinks=sinks,
        stride=num_pages,
        warpgroups=warpgroups,
        scaled=scales_heads(dim) and takes_scaled_rows(num_tokens, queries.dtype, projected.next_matrices),
        interpret=interpret,
    )
    return mixed, pool


def gpu_attention_backend(*, interpret: bool, warpgroups: Warpgroups | None = None) -> AttentionBackend:
    """The backend; `interpret` runs it on any device, slowly, for tests. `warpgroups`: those of a Hopper GPU."""
    run = functools.partial(gpu_attention, warpgroups=warpgroups, interpret=interpret)
    return AttentionBackend(
        name="gpu",
        run=run,
        fused=functools.partial(fused_attention, warpgroups=warpgroups, interpret=interpret),
        fused_features=FEATURES | {"a sliding window", "chunks", "sinks", "its own scale"},
        run_with_features=run,
        write=functools.partial(gpu_write, interpret=interpret),
        latent=functools.partial(gpu_latent, interpret=interpret),
        recur=functools.partial(gpu_delta, interpret=interpret),
        kv_formats=frozenset({E4M3} if interpret or converts_e4m3() else ()),
        takes_kv_scales=True,
        fused_takes_kv_scales=True,
    )
