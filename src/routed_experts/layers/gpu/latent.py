"""Multi-head latent attention on a GPU (DeepSeek-V2, section 2.1.2, "absorbed"): queries are mapped into the space of
the cached rows, attend to the paged pool, and what they read is mapped to values.

A row is key and value of all heads, so a tile of heads is the rows of a tile, and the row is read once for all of
them. Decode splits a request's rows over blocks, extend walks tiles of tokens and heads. Dims: N tokens, B requests,
L layers, P pages, H heads, R rank of a row, F frequencies of its 2F rotary dims, A = R + 2F, K key dim without them, V
value dim, S splits, T keys of a step, M rows of a tile (a token and a head each)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import LatentQKV, PagedBatch
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import first_visible, visibility_mask
from routed_experts.layers.gpu.blocks import NARROWEST_PRODUCT, power_of_two, product_width, scaled_step
from routed_experts.layers.gpu.kv_write import TokenSlots, batch_arrays
from routed_experts.layers.gpu.paged_softmax import (
    State,
    add_scores,
    add_visible_keys,
    choose_splits,
    combine_splits,
    empty_state,
    most_visible,
    pages_of,
    part_shapes,
    split_range,
    visible_bounds,
)
from routed_experts.layers.gpu.ragged import find_tile, most_tiles
from routed_experts.layers.gpu.rotary import rotate

HEAD_TILE = 64  # rows of a tile, at most, of two bytes a number: 64 rows of 512 sums are half of a block's registers
KEYS, STAGES = 64, 2
LATENT_BLOCKS = 160  # about one of each multiprocessor, whose shared memory it fills
PRODUCT_TILE = 64  # tokens, and columns, of the products before and after attention


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Constants of the kernels."""

    heads: int
    rank: int
    rotary: int  # 2F
    key_dim: int
    value_dim: int
    interleaved: bool = False
    eps: float = 0.0
    rows: int = 1  # tokens of a block
    stride: int = 1


def _rotate(
    load: Callable[[Array], Array], angles: tuple[Any, Any], tokens: Array, mask: Array, sizes: _Sizes
) -> Array:
    """The rotary dims of some rows; `load` gives their columns, float32."""
    value = load(jnp.arange(product_width(sizes.rotary)))
    return rotate(value, load, angles, tokens, mask, sizes.rotary // 2, interleaved=sizes.interleaved)


def _prepare(
    layer: Any,
    first_page: Any,
    queries: Any,
    compressed: Any,
    norm: Any,
    up: Any,
    cos: Any,
    sin: Any,
    *rest: Any,
    sizes: _Sizes,
) -> None:
    """Block (head, tokens, columns): the part of the head's absorbed query; past the last head, the rows of a share of
    the tokens."""
    batch, (_, out, pool) = list(rest[:4]), rest[4:]
    head, block, column_block = (pl.program_id(axis) for axis in range(3))
    tokens = block * sizes.rows + jnp.arange(sizes.rows)
    num_tokens, dtype = queries.shape[0], queries.dtype
    inside, share = (tokens < num_tokens)[:, None], power_of_two(pl.cdiv(sizes.rows, pl.cdiv(sizes.rank, PRODUCT_TILE)))
    rotary_lanes, is_first = jnp.arange(product_width(sizes.rotary)), column_block == 0
    is_rotary = inside & (rotary_lanes < sizes.rotary)[None, :]

    @pl.when(head < sizes.heads)
    def _() -> None:
        depth, columns = (
            jnp.arange(product_width(sizes.key_dim)),
            column_block * PRODUCT_TILE + jnp.arange(PRODUCT_TILE),
        )
        deep, real = depth < sizes.key_dim, columns < sizes.rank
        query = plgpu.load(queries.at[tokens[:, None], head, depth[None, :]], mask=inside & deep[None, :], other=0.0)
        at = head * (sizes.key_dim + sizes.value_dim) + depth
        matrix = plgpu.load(
            up.at[layer[0], columns[:, None], at[None, :]], mask=real[:, None] & deep[None, :], other=0.0
        )
        absorbed = jnp.dot(query, matrix.T, preferred_element_type=jnp.float32).astype(dtype)
        plgpu.store(out.at[tokens[:, None], head, columns[None, :]], absorbed, mask=inside & real[None, :])

    @pl.when((head < sizes.heads) & is_first)
    def _() -> None:
        def load(lanes: Array) -> Array:
            index = tokens[:, None], head, sizes.key_dim + lanes[None, :]
            return plgpu.load(queries.at[index], mask=is_rotary, other=0.0).astype(jnp.float32)

        rotated = _rotate(load, (cos, sin), tokens, inside, sizes).astype(dtype)
        plgpu.store(out.at[tokens[:, None], head, sizes.rank + rotary_lanes[None, :]], rotated, mask=is_rotary)

    @pl.when(head == sizes.heads)
    def _() -> None:
        columns, part = jnp.arange(product_width(sizes.rank)), column_block * share + jnp.arange(share)
        tokens = jnp.where(part < sizes.rows, block * sizes.rows + part, num_tokens)
        inside, real = (tokens < num_tokens)[:, None], (columns < sizes.rank)[None, :]
        row = plgpu.load(compressed.at[tokens[:, None], columns[None, :]], mask=inside & real, other=0.0)
        wide = row.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.sum(wide * wide, axis=1) / sizes.rank + sizes.eps)[:, None]
        scale = plgpu.load(norm.at[columns], mask=columns < sizes.rank, other=0.0)[None, :]
        slots = TokenSlots.of(tokens, pool, first_page[0] * sizes.stride, batch)
        slots.store(pool, (wide * inverse).astype(dtype) * scale, 0, columns, sizes.rank)

        def load(lanes: Array) -> Array:
            index, mask = (tokens[:, None], sizes.rank + lanes[None, :]), inside & (lanes < sizes.rotary)[None, :]
            return plgpu.load(compressed.at[index], mask=mask, other=0.0).astype(jnp.float32)

        rotated = _rotate(load, (cos, sin), tokens, inside, sizes).astype(dtype)
        slots.store(pool, rotated, 0, sizes.rank + rotary_lanes, sizes.rank + sizes.rotary)


def _load_queries(queries: Any, tokens: Array, heads: Array, mask: Array, rank: int) -> tuple[Array, Array]:
    """The tile's queries of the row [M R], and of its rotary dims [M 2F]."""
    width = queries.shape[2]

    def part(start: int, size: int) -> Array:
        lanes = jnp.arange(product_width(size))
        index = tokens[:, None], heads[:, None], start + lanes[None, :]
        return plgpu.load(queries.at[index], mask=mask[:, None] & (lanes < size)[None, :], other=0.0)

    return part(0, rank), part(rank, width - rank)


def _add_rows(
    state: State,
    queries: tuple[Array, Array],
    pool: Any,
    pages: Array,
    positions: Array,
    owned: Array | None,
    mask: Array | None,
    features: AttentionFeatures,
) -> State:
    """One step over T rows of a request; those that are not `owned` are not read."""
    page_size, rank = pool.shape[1], features.latent

    def part(start: int, size: int) -> Array:
        lanes = jnp.arange(product_width(size))
        real = None if lanes.shape[0] == size else (lanes < size)[None, :]
        held = real if owned is None else owned[:, None] if real is None else owned[:, None] & real
        index = pages[:, None], (positions % page_size)[:, None], 0, start + lanes[None, :]
        return plgpu.load(pool.at[index], mask=held, other=None if held is None else 0.0)

    rows, rotary = part(0, rank), part(rank, pool.shape[3] - rank)
    scores = jnp.dot(queries[0], rows.T, preferred_element_type=jnp.float32)
    scores += jnp.dot(queries[1], rotary.T, preferred_element_type=jnp.float32)
    return add_scores(state, scores, rows, mask, features.scale)


def _decode(
    first_page: Any,
    queries: Any,
    pool: Any,
    lens: Any,
    table: Any,
    *outs: Any,
    splits: int,
    tile: int,
    keys: int,
    stride: int,
    features: AttentionFeatures,
) -> None:
    """Block (heads, request, split)."""
    request, split = pl.program_id(1), pl.program_id(2)
    heads, lanes = pl.program_id(0) * tile + jnp.arange(tile), jnp.arange(product_width(features.latent))
    is_head = heads < queries.shape[1]
    mask = is_head[:, None] & (lanes < features.latent)[None, :]
    rotated = _load_queries(queries, jnp.full(tile, request), heads, is_head, features.latent)
    first = first_page[0] * stride
    visible = first_visible(jnp.maximum(lens[request] - 1, 0), features)
    start, end = split_range(visible, lens[request], split, splits, keys)

    load_pages = pages_of(table, first, request, start, end, keys, pool.shape[1])

    def step(index: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
        (state, pages), positions = carry, start + index * keys + jnp.arange(keys)
        owned = positions < end
        state = _add_rows(state, rotated, pool, pages, positions, owned, owned[None, :], features)
        return state, load_pages(index + 1)

    steps = pl.cdiv(jnp.maximum(end - start, 0), keys)
    (top, total, mixed), _ = lax.fori_loop(0, steps, step, (empty_state(tile, lanes.shape[0]), load_pages(0)))
    heads = jnp.where(is_head, heads, queries.shape[1])
    if splits == 1:
        mixed = mixed / jnp.maximum(total, 1e-30)[:, None]
        plgpu.store(outs[0].at[request, heads[:, None], lanes[None, :]], mixed.astype(outs[0].dtype), mask=mask)
        return
    plgpu.store(outs[0].at[request, split, heads[:, None], lanes[None, :]], mixed, mask=mask)
    plgpu.store(outs[1].at[request, split, heads], top, mask=is_head)
    plgpu.store(outs[2].at[request, split, heads], total, mask=is_head)


def _extend(
    first_page: Any,
    queries: Any,
    pool: Any,
    starts: Any,
    positions: Any,
    table: Any,
    out: Any,
    *,
    heads: int,
    tile: int,
    keys: int,
    stride: int,
    features: AttentionFeatures,
) -> None:
    """Block (heads, tile of tokens)."""
    num_tokens, num_heads, num_requests = *queries.shape[:2], table.shape[0]
    head_tile, index = pl.program_id(0), pl.program_id(1)
    request, start, last = find_tile(starts, index, num_requests, tile)

    @pl.when(request < num_requests)
    def _() -> None:
        rows, lanes = jnp.arange(tile * heads), jnp.arange(product_width(features.latent))
        tokens, head = start + rows // heads, head_tile * heads + rows % heads
        is_row, first = (tokens < last) & (head < num_heads), first_page[0] * stride
        rotated = _load_queries(queries, tokens, head, is_row, features.latent)
        row_positions = plgpu.load(positions.at[tokens], mask=is_row, other=0)

        def step(seen_by_all: bool, number: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
            (state, pages), key_positions, owned, mask = carry, number * keys + jnp.arange(keys), None, None
            if not seen_by_all:
                owned = key_positions < bounds[-1]
                mask = visibility_mask(row_positions[:, None], key_positions[None, :], features)
            state = _add_rows(state, rotated, pool, pages, key_positions, owned, mask, features)
            return state, load_pages(number + 1)

        bounds = visible_bounds(positions[start], positions[last - 1], features)
        load_pages = pages_of(table, first, request, jnp.int32(0), bounds[-1], keys, pool.shape[1])
        state = empty_state(tile * heads, lanes.shape[0])
        _, total, mixed = add_visible_keys(state, bounds, keys, step, load_pages, has_first=False)
        mixed = mixed / jnp.maximum(total, 1e-30)[:, None]
        indices = jnp.where(is_row, tokens, num_tokens)[:, None], head[:, None], lanes[None, :]
        plgpu.store(out.at[indices], mixed.astype(out.dtype), mask=is_row[:, None] & (lanes < features.latent)[None, :])


def latent_attention(
    queries: Float[Array, "N H A"],
    pool: Float[Array, "LP page 1 A"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    features: AttentionFeatures,
    *,
    splits: int | None = None,
    stride: int = 1,
    interpret: bool = False,
) -> Float[Array, "N H R"]:
    """Rows of the pool, mixed by absorbed queries. `features`: R and the scale."""
    (num_tokens, heads, width), rank = queries.shape, features.latent
    assert not (features.window or features.chunk or features.sinks is not None), "latent rows have no other features"
    features = features if features.scale else dataclasses.replace(features, scale=width**-0.5)
    most, keys = scaled_step(HEAD_TILE, pool.dtype), scaled_step(KEYS, pool.dtype)
    tile = min(most, product_width(heads))
    first = jnp.asarray(first_page, jnp.int32).reshape(1)
    out = jax.ShapeDtypeStruct((num_tokens, heads, rank), queries.dtype)
    params = plgpu.CompilerParams(num_warps=4 if tile == NARROWEST_PRODUCT else 8, num_stages=STAGES)
    if not batch.decode:
        tokens = max(1, most // tile)
        return pl.pallas_call(
            functools.partial(_extend, heads=tile, tile=tokens, keys=keys, stride=stride, features=features),
            out,
            grid=(pl.cdiv(heads, tile), most_tiles(num_tokens, batch.seq_lens.shape[0], tokens)),
            compiler_params=dataclasses.replace(params, num_warps=8),
            interpret=interpret,
            name="latent_extend",
        )(first, queries, pool, batch.query_starts, batch.positions, batch.page_table)
    tiles = pl.cdiv(heads, tile)
    splits = splits or choose_splits(num_tokens, tiles, most_visible(batch, pool.shape[1], features), LATENT_BLOCKS)
    outs = pl.pallas_call(
        functools.partial(_decode, splits=splits, tile=tile, keys=keys, stride=stride, features=features),
        [out] if splits == 1 else part_shapes(num_tokens, splits, heads, rank),
        grid=(tiles, num_tokens, splits),
        compiler_params=params,
        interpret=interpret,
        name="latent_decode",
    )(first, queries, pool, batch.seq_lens, batch.page_table)
    return outs[0] if splits == 1 else combine_splits(outs, out, splits, interpret=interpret)


def _expand(layer: Any, mixed: Any, up: Any, out: Any, *, sizes: _Sizes) -> None:
    """Block (head, tokens, columns): values of the head."""
    head, tokens = pl.program_id(0), pl.program_id(1) * sizes.rows + jnp.arange(sizes.rows)
    columns = pl.program_id(2) * PRODUCT_TILE + jnp.arange(PRODUCT_TILE)
    inside, real = (tokens < mixed.shape[0])[:, None], (columns < sizes.value_dim)[None, :]
    at = head * (sizes.key_dim + sizes.value_dim) + sizes.key_dim + columns

    def step(index: Array, total: Array) -> Array:
        depth = index * PRODUCT_TILE + jnp.arange(PRODUCT_TILE)
        deep = depth < sizes.rank
        rows = plgpu.load(mixed.at[tokens[:, None], head, depth[None, :]], mask=inside & deep[None, :], other=0.0)
        matrix = plgpu.load(up.at[layer[0], depth[:, None], at[None, :]], mask=deep[:, None] & real, other=0.0)
        return total + jnp.dot(rows, matrix, preferred_element_type=jnp.float32)

    steps, total = pl.cdiv(sizes.rank, PRODUCT_TILE), jnp.zeros((sizes.rows, PRODUCT_TILE), jnp.float32)
    total = lax.fori_loop(0, steps, step, total)
    plgpu.store(out.at[tokens[:, None], head, columns[None, :]], total.astype(out.dtype), mask=inside & real)


def gpu_latent(
    projected: LatentQKV,
    pool: Float[Array, "LP page 1 A"],
    layer: Int[Array, ""],
    batch: PagedBatch,
    num_pages: int,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "N H V"], Float[Array, "LP page 1 A"]]:
    """From the projections to values, and the pool with the new rows."""
    queries, (num_tokens, heads, _), rank = projected.queries, projected.queries.shape, projected.norm.shape[0]
    up, up_layer = projected.up[None], jnp.zeros((), jnp.int32)
    if projected.stacked_up is not None and projected.layer is not None:
        up, up_layer = projected.stacked_up, projected.layer
    rotary = projected.compressed.shape[1] - rank
    key_dim = queries.shape[2] - rotary
    sizes = _Sizes(
        heads=heads,
        rank=rank,
        rotary=rotary,
        key_dim=key_dim,
        value_dim=up.shape[2] // heads - key_dim,
        interleaved=projected.interleaved,
        eps=projected.eps,
        rows=min(PRODUCT_TILE, product_width(num_tokens)),
        stride=num_pages,
    )
    scalars = [jnp.asarray(value, jnp.int32).reshape(1) for value in (up_layer, layer)]
    blocks, params = pl.cdiv(num_tokens, sizes.rows), plgpu.CompilerParams(num_warps=4, num_stages=2)
    arrays = [*scalars, queries, projected.compressed, projected.norm, up, *projected.angles, *batch_arrays(batch)]
    absorbed, pool = pl.pallas_call(
        functools.partial(_prepare, sizes=sizes),
        (
            jax.ShapeDtypeStruct((num_tokens, heads, rank + rotary), queries.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ),
        grid=(heads + 1, blocks, pl.cdiv(rank, PRODUCT_TILE)),
        input_output_aliases={len(arrays): 1},
        compiler_params=params,
        interpret=interpret,
        name="latent_prepare",
    )(*arrays, pool)
    features = AttentionFeatures(latent=rank, scale=projected.scale)
    mixed = latent_attention(absorbed, pool, layer, batch, features, stride=num_pages, interpret=interpret)
    values = pl.pallas_call(
        functools.partial(_expand, sizes=sizes),
        jax.ShapeDtypeStruct((num_tokens, heads, sizes.value_dim), queries.dtype),
        grid=(heads, blocks, pl.cdiv(sizes.value_dim, PRODUCT_TILE)),
        compiler_params=params,
        interpret=interpret,
        name="latent_values",
    )(scalars[0], mixed, up)
    return values, pool
