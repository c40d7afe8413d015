"""Attention with features: windows, chunks, sinks, another scale, and latent attention, whose one row a token is key
and value at once (DeepSeek-V2, section 2.1).

A latent pool is [L*P, page, 1, C]: the C numbers of a token are its key, the first V of them its value, for all
heads. Every other pool is that of layers/attention.py. A sink is one extra score a head that takes weight and has no
value (GPT-OSS). Dims: N tokens, B requests, L layers, P pages, W pages of a request, H query heads, G kv heads, C
key dim, V value dim, S tokens of a sequence, T keys of a block, Q rows of a query tile."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.attention import ATTENTION_BACKENDS as PLAIN_BACKENDS
from routed_experts.layers.attention import (
    DECODE_BLOCK,
    KEY_BLOCK,
    MASK_VALUE,
    QUERY_TILE,
    AttentionBackend,
    OnlineSoftmax,
    PagedBatch,
    gather_pages,
    mask_nonfinite,
)
from routed_experts.layers.attention_features import AttentionFeatures


def write_latent(
    pool: Float[Array, "LP page 1 C"], rows: Float[Array, "N 1 C"], first_page: Int[Array, ""], batch: PagedBatch
) -> Float[Array, "LP page 1 C"]:
    """Write each token's row at its position's slot; padding goes to page 0 of the layer."""
    page_size = pool.shape[1]
    page = jnp.where(batch.valid, batch.page_table[batch.token_rows, batch.positions // page_size], 0)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, pool.shape[3] - rows.shape[2])))  # on TPU a pool is wider
    return pool.at[first_page + page, batch.positions % page_size].set(rows.astype(pool.dtype))


def visibility_mask(
    at: Int[Array, "..."], key_positions: Int[Array, "..."], features: AttentionFeatures
) -> Bool[Array, "..."]:
    """Whether a token at position `at` attends to the one at `places`; the two are broadcast."""
    mask = key_positions <= at
    if features.window:
        mask = mask & (key_positions > at - features.window)
    return mask & (key_positions // features.chunk == at // features.chunk) if features.chunk else mask


def first_visible(at: Int[Array, "..."], features: AttentionFeatures) -> Int[Array, "..."]:
    """The first position that a token at `at` attends to."""
    first = jnp.maximum(at - features.window + 1, 0) if features.window else jnp.zeros_like(at)
    return jnp.maximum(first, at // features.chunk * features.chunk) if features.chunk else first


def read_pages(
    pool: Float[Array, "LP page X C"], pages: Int[Array, "B W"], features: AttentionFeatures, head_dim: int
) -> tuple[Float[Array, "B T G C"], Float[Array, "B T G V"]]:
    """Keys and values of the listed pages, page after page, in float32."""
    if features.latent:
        keys = jnp.take(pool, pages, axis=0).reshape(pages.shape[0], -1, 1, pool.shape[3])
        keys = keys[..., :head_dim].astype(jnp.float32)
        return keys, keys[..., : features.latent]
    keys, values = gather_pages(pool, pages, head_dim)
    return keys.astype(jnp.float32), values.astype(jnp.float32)


def reference_variant(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page X C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    features: AttentionFeatures,
) -> Float[Array, "N H V"]:
    """Gather every page of each token's request, at full width: no row's result depends on another row."""
    keys, values = read_pages(pool, first_page + batch.page_table[batch.token_rows], features, queries.shape[2])
    mask = visibility_mask(batch.positions[:, None], jnp.arange(keys.shape[1]), features)
    values = jnp.where(mask[:, :, None, None], values, 0.0)
    groups = keys.shape[2]
    wide = _scaled(queries, features).reshape(queries.shape[0], groups, -1, queries.shape[2])
    scores = jnp.where(mask[:, None, None], jnp.einsum("ngrc,ntgc->ngrt", wide, keys), MASK_VALUE)
    state = _start(scores.shape[:-1], values.shape[-1], _by_group(features, groups))
    mixed = jnp.einsum("ngrt,ntgv->ngrv", *_weights_and(values, scores, state))
    return mixed.reshape(*queries.shape[:2], -1).astype(queries.dtype)


def paged_variant(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page X C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    features: AttentionFeatures,
) -> Float[Array, "N H V"]:
    """Walk over blocks of pages with an online softmax; blocks before the window are not read."""
    return (_decode if batch.decode else _ragged)(queries, pool, first_page, batch, features)


def causal_variant(
    queries: Float[Array, "B S H C"],
    keys: Float[Array, "B S G C"],
    values: Float[Array, "B S G V"] | None,
    segment_ids: Int[Array, "B S"] | None,
    features: AttentionFeatures,
    *,
    positions: Int[Array, "B S"] | None = None,
) -> Float[Array, "B S H V"]:
    """Whole sequences, each token over its visible keys; `values` None: latent. `positions` of tokens in their
    sequences, by which chunks are cut; None: the columns. Differentiable; for training."""
    (num_rows, length, heads, width), groups = queries.shape, keys.shape[2]
    values = keys[..., : features.latent] if values is None else values
    columns = jnp.arange(length)
    mask = visibility_mask(columns[:, None], columns, dataclasses.replace(features, chunk=0))[None]
    if features.chunk:
        chunks = (columns[None] if positions is None else positions) // features.chunk
        mask = mask & (chunks[:, :, None] == chunks[:, None, :])
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    wide = _scaled(queries, features).reshape(num_rows, length, groups, heads // groups, width)
    scores = jnp.einsum("bsgrc,btgc->bsgrt", wide, keys.astype(jnp.float32))
    scores = jnp.where(mask[:, :, None, None], scores, MASK_VALUE)
    state = _start(scores.shape[:-1], values.shape[-1], _by_group(features, groups))
    usable, has_nonfinite = mask_nonfinite(
        jnp.swapaxes(values.astype(jnp.float32), 1, 2), mask[:, None]
    )  # [B, G, T, V], [B, G, S]
    weights, usable = _weights_and(usable, scores, state)
    mixed = jnp.einsum("bsgrt,bgtv->bsgrv", weights, usable)
    mixed = jnp.where(jnp.swapaxes(has_nonfinite, 1, 2)[..., None, None], jnp.nan, mixed)
    return mixed.reshape(num_rows, length, heads, -1).astype(queries.dtype)


def _decode(
    queries: Float[Array, "B H C"],
    pool: Float[Array, "LP page X C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    features: AttentionFeatures,
) -> Float[Array, "B H V"]:
    """All requests side by side, one block of keys after another up to the longest."""
    pages, table = _blocked_page_table(DECODE_BLOCK, pool, batch)
    block, groups = pages * pool.shape[1], _groups(pool, features)
    wide = _scaled(queries, features).reshape(queries.shape[0], groups, -1, queries.shape[2])

    def add_block(index: Int[Array, ""], state: OnlineSoftmax) -> OnlineSoftmax:
        listed = first_page + lax.dynamic_slice_in_dim(table, index * pages, pages, axis=1)
        keys, values = read_pages(pool, listed, features, queries.shape[2])
        key_positions = index * block + jnp.arange(block)
        mask = visibility_mask(batch.seq_lens[:, None] - 1, key_positions, features)
        scores = jnp.where(mask[:, None, None], jnp.einsum("bgrc,btgc->bgrt", wide, keys), MASK_VALUE)
        values = jnp.where(mask[:, :, None, None], values, 0.0)
        return state.add(scores, jnp.swapaxes(values, 1, 2))

    last = jnp.max(batch.seq_lens)
    first = jnp.min(jnp.where(batch.seq_lens > 0, first_visible(batch.seq_lens - 1, features), last))
    state = _start((*wide.shape[:-1],), features.latent or queries.shape[2], _by_group(features, groups))
    state = lax.fori_loop(first // block, (last + block - 1) // block, add_block, state)
    return state.result().reshape(*queries.shape[:2], -1).astype(queries.dtype)


def _ragged(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page X C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    features: AttentionFeatures,
) -> Float[Array, "N H V"]:
    """Tiles of Q query rows, each of one request, in order; a tile's rows past its request are overwritten by the next
    tile."""
    (num_tokens, heads, width), groups = queries.shape, _groups(pool, features)
    tile, share, value_dim = min(QUERY_TILE, num_tokens), heads // groups, features.latent or width
    pages, table = _blocked_page_table(KEY_BLOCK, pool, batch)
    block = pages * pool.shape[1]
    wide = jnp.pad(_scaled(queries, features), ((0, tile), (0, 0), (0, 0)))
    positions = jnp.pad(batch.positions, (0, tile))
    lengths = batch.query_starts[1:] - batch.query_starts[:-1]
    tile_ends = jnp.cumsum((lengths + tile - 1) // tile)
    sinks = _by_group(features, groups)

    def run_tile(index: Int[Array, ""], outputs: Float[Array, "NQ H V"]) -> Float[Array, "NQ H V"]:
        row = jnp.searchsorted(tile_ends, index, side="right", method="compare_all").astype(jnp.int32)
        first_tile = tile_ends[row] - (lengths[row] + tile - 1) // tile
        start = batch.query_starts[row] + (index - first_tile) * tile
        end = jnp.minimum(start + tile, batch.query_starts[row + 1])
        rows = lax.dynamic_slice_in_dim(wide, start, tile).reshape(tile, groups, share, width)
        rows = jnp.transpose(rows, (1, 2, 0, 3))  # [G, H / G, Q, C]
        at = lax.dynamic_slice_in_dim(positions, start, tile)

        def add_block(index: Int[Array, ""], state: OnlineSoftmax) -> OnlineSoftmax:
            listed = lax.dynamic_slice(table, (row, index * pages), (1, pages))
            both = read_pages(pool, first_page + listed, features, queries.shape[2])
            keys, values = (jnp.swapaxes(part[0], 0, 1) for part in both)  # [G, T, C]
            key_positions = index * block + jnp.arange(block)
            mask = visibility_mask(at[:, None], key_positions, features)
            values, has_nonfinite = mask_nonfinite(values[:, None], mask)  # [G, 1, T, V], [G, 1, Q]
            scores = jnp.where(mask, jnp.einsum("grqc,gtc->grqt", rows, keys), MASK_VALUE)
            return state.add(scores, values, has_nonfinite)

        state = _start((groups, share, tile), value_dim, None if sinks is None else sinks[..., None])
        first, past = first_visible(at[0], features) // block, (positions[end - 1] + block) // block
        state = lax.fori_loop(first, past, add_block, state)
        mixed = jnp.transpose(state.result(), (2, 0, 1, 3)).reshape(tile, heads, value_dim)
        return lax.dynamic_update_slice_in_dim(outputs, mixed, start, axis=0)

    outputs = lax.fori_loop(0, tile_ends[-1], run_tile, jnp.zeros((num_tokens + tile, heads, value_dim), jnp.float32))
    return outputs[:num_tokens].astype(queries.dtype)


def _groups(pool: Float[Array, "LP page X C"], features: AttentionFeatures) -> int:
    return 1 if features.latent else pool.shape[2] // 2


def _blocked_page_table(
    size: int, pool: Float[Array, "LP page X C"], batch: PagedBatch
) -> tuple[int, Int[Array, "B W"]]:
    """Pages of a block of about `size` keys, and the page table padded to whole blocks."""
    width = batch.page_table.shape[1]
    pages = max(1, min(width, size // pool.shape[1]))
    return pages, jnp.pad(batch.page_table, ((0, 0), (0, -width % pages)))


def _scaled(queries: Float[Array, "... C"], features: AttentionFeatures) -> Float[Array, "... C"]:
    return queries.astype(jnp.float32) * (features.scale or queries.shape[-1] ** -0.5)


def _by_group(features: AttentionFeatures, groups: int) -> Float[Array, "G R"] | None:
    return None if features.sinks is None else features.sinks.astype(jnp.float32).reshape(groups, -1)


def _start(shape: tuple[int, ...], value_dim: int, sinks: Float[Array, "..."] | None) -> OnlineSoftmax:
    """The initial state with the sinks, which have weight and no value."""
    empty = OnlineSoftmax.empty(shape, value_dim)
    if sinks is None:
        return empty
    return dataclasses.replace(empty, row_max=jnp.broadcast_to(sinks, shape), row_sum=jnp.ones(shape, jnp.float32))


def _weights_and(
    values: Float[Array, "..."], scores: Float[Array, "... T"], state: OnlineSoftmax
) -> tuple[Float[Array, "... T"], Float[Array, "..."]]:
    """Weights of all keys at once, next to those of `state`."""
    row_max = lax.stop_gradient(jnp.maximum(state.row_max, jnp.max(scores, axis=-1)))
    weights = jnp.exp(scores - row_max[..., None])
    row_sum = state.row_sum * jnp.exp(state.row_max - row_max) + jnp.sum(weights, axis=-1)
    return weights / row_sum[..., None], values


_WITH_FEATURES = MappingProxyType({"reference": reference_variant, "paged": paged_variant})
ATTENTION_BACKENDS: Mapping[str, AttentionBackend] = MappingProxyType(
    {name: backend.with_features_run(_WITH_FEATURES.get(name)) for name, backend in PLAIN_BACKENDS.items()}
)
