"""Attention to the paged pool on a GPU: decode splits each request's keys over blocks, extend walks tiles of query
rows.

Query heads that share a kv head are the rows of one tile, so keys and values are read once for all of them. A second
kernel combines the splits of a request in their order: no result depends on the order in which blocks run. Slots
that a request does not own may hold NaN: their scores become MASK_VALUE and their values 0. Dims: N tokens, B
requests, H query heads, G kv heads, C head dim, S splits, T keys of a step, Q query tokens of a tile, M rows of a
tile (a token and a head each)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import MASK_VALUE, AttentionBackend, FusedQKV, PagedBatch
from routed_experts.layers.gpu.blocks import power_of_two, scaled_step
from routed_experts.layers.gpu.qk_norm_rope import prepare

DECODE_BLOCKS = 512  # about four of each multiprocessor: splits are made until there are so many
SPLIT_KEYS = 128  # a split has so many keys at the longest context
EXTEND_ROWS, EXTEND_KEYS, EXTEND_WARPS, EXTEND_STAGES = 128, 64, 8, 3
# (requests up to, keys of a step, warps, stages): measured best on an H200 at 32/4 heads of 128
DECODE_STEPS = ((8, 32, 4, 3), (32, 64, 4, 3), (128, 128, 4, 2), (2**31, 64, 2, 2))
_LOG2E = 1.4426950408889634

State = tuple[Array, Array, Array]  # maximum [M], normaliser [M], weighted values [M C]


def _empty(rows: int, dim: int) -> State:
    zeros = jnp.zeros((rows,), jnp.float32)
    return zeros + MASK_VALUE, zeros, jnp.zeros((rows, dim), jnp.float32)


def _add_keys(state: State, rows: Array, keys: Array, values: Array, mask: Array | None, scale: float) -> State:
    """One step of the online softmax, in powers of two."""
    top, total, mixed = state
    scores = jnp.dot(rows, keys.T, preferred_element_type=jnp.float32) * (scale * _LOG2E)
    if mask is not None:
        scores = jnp.where(mask, scores, MASK_VALUE)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    shrink, weights = jnp.exp2(top - new_top), jnp.exp2(scores - new_top[:, None])
    mixed = mixed * shrink[:, None] + jnp.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return new_top, total * shrink + jnp.sum(weights, axis=1), mixed


def _load_keys(
    pool: Any, table: Any, first: Array, request: Array, places: Array, end: Array | None, group: Array
) -> tuple[Array, Array]:
    """Keys and values [T C] of the positions in a request's sequence; zeros from `end` on, if it is given."""
    page_size, dim = pool.shape[1], pool.shape[3]
    lanes = jnp.arange(power_of_two(dim))
    real = None if lanes.shape[0] == dim else (lanes < dim)[None, :]
    owned = None if end is None else places < end
    page = plgpu.load(table.at[request, places // page_size], mask=owned, other=None if owned is None else 0)
    mask = real if owned is None else owned[:, None] if real is None else owned[:, None] & real
    other = None if mask is None else 0.0
    at = (first + page)[:, None], (places % page_size)[:, None]
    keys = plgpu.load(pool.at[(*at, 2 * group, lanes[None, :])], mask=mask, other=other)
    return keys, plgpu.load(pool.at[(*at, 2 * group + 1, lanes[None, :])], mask=mask, other=other)


def _decode(
    first_page: Any,
    queries: Any,
    pool: Any,
    lens: Any,
    table: Any,
    *outs: Any,
    share: int,
    splits: int,
    rows: int,
    keys: int,
    stride: int,
) -> None:
    """Block (group, request, split): the split's part of the softmax of all heads of the group."""
    group, request, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    dim = pool.shape[3]
    lanes, head = jnp.arange(power_of_two(dim)), jnp.arange(rows)
    mine = (head < share)[:, None] & (lanes < dim)[None, :]
    heads = jnp.where(head < share, group * share + head, queries.shape[1])
    rotated = plgpu.load(queries.at[request, heads[:, None], lanes[None, :]], mask=mine, other=0.0)
    length, first = lens[request], first_page[0] * stride
    size = pl.cdiv(pl.cdiv(length, splits), keys) * keys
    start = split * size
    end = jnp.minimum(start + size, length)

    def step(index: Array, state: State) -> State:
        places = start + index * keys + jnp.arange(keys)
        k, v = _load_keys(pool, table, first, request, places, end, group)
        return _add_keys(state, rotated, k, v, (places < end)[None, :], dim**-0.5)

    top, total, mixed = lax.fori_loop(0, pl.cdiv(jnp.maximum(end - start, 0), keys), step, _empty(rows, lanes.shape[0]))
    if splits == 1:
        mixed = mixed / jnp.maximum(total, 1e-30)[:, None]
        plgpu.store(outs[0].at[request, heads[:, None], lanes[None, :]], mixed.astype(outs[0].dtype), mask=mine)
        return
    plgpu.store(outs[0].at[request, split, heads[:, None], lanes[None, :]], mixed, mask=mine)
    plgpu.store(outs[1].at[request, split, heads], top, mask=head < share)
    plgpu.store(outs[2].at[request, split, heads], total, mask=head < share)


def _combine_splits(parts: Any, tops: Any, totals: Any, out: Any, *, splits: int) -> None:
    """Block (head, request): the splits of one row in their order."""
    head, request = pl.program_id(0), pl.program_id(1)
    dim = out.shape[2]
    lanes, order = jnp.arange(power_of_two(dim)), jnp.arange(power_of_two(splits))
    there, real = order < splits, lanes < dim
    top = plgpu.load(tops.at[request, order, head], mask=there, other=MASK_VALUE)
    total = plgpu.load(totals.at[request, order, head], mask=there, other=0.0)
    part = plgpu.load(
        parts.at[request, order[:, None], head, lanes[None, :]], mask=there[:, None] & real[None, :], other=0.0
    )
    scale = jnp.exp2(top - jnp.max(top, axis=0))
    mixed = jnp.sum(part * scale[:, None], axis=0) / jnp.maximum(jnp.sum(total * scale, axis=0), 1e-30)
    plgpu.store(out.at[request, head, lanes], mixed.astype(out.dtype), mask=real)


def choose_splits(num_requests: int, groups: int, most_keys: int) -> int:
    """Splits of a request's keys, so that every multiprocessor has work; a power of two."""
    splits = 1
    while num_requests * groups * splits * 2 <= DECODE_BLOCKS and splits * SPLIT_KEYS < most_keys and splits < 64:
        splits *= 2
    return splits


def decode_attention(
    queries: Float[Array, "B H C"],
    pool: Float[Array, "LP page 2G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    *,
    splits: int | None = None,
    stride: int = 1,
    interpret: bool = False,
) -> Float[Array, "B H C"]:
    """One query token a request."""
    (num_rows, heads, dim), groups = queries.shape, pool.shape[2] // 2
    share = heads // groups
    splits = splits or choose_splits(num_rows, groups, batch.page_table.shape[1] * pool.shape[1])
    rows = max(16, power_of_two(share))
    keys, warps, stages = next(row[1:] for row in DECODE_STEPS if num_rows <= row[0])
    kernel = functools.partial(
        _decode, share=share, splits=splits, rows=rows, keys=scaled_step(keys, pool.dtype), stride=stride
    )
    whole = jax.ShapeDtypeStruct(queries.shape, queries.dtype)
    part = [jax.ShapeDtypeStruct((num_rows, splits, heads, *tail), jnp.float32) for tail in ((dim,), (), ())]
    outs = pl.pallas_call(
        kernel,
        [whole] if splits == 1 else part,
        grid=(groups, num_rows, splits),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="decode_attention",
    )(jnp.asarray(first_page, jnp.int32).reshape(1), queries, pool, batch.seq_lens, batch.page_table)
    if splits == 1:
        return outs[0]
    return pl.pallas_call(
        functools.partial(_combine_splits, splits=splits),
        whole,
        grid=(heads, num_rows),
        compiler_params=plgpu.CompilerParams(num_warps=1 if splits <= 8 else 4, num_stages=1),
        interpret=interpret,
        name="join_splits",
    )(*outs)


def _extend(
    first_page: Any,
    queries: Any,
    pool: Any,
    starts: Any,
    positions: Any,
    table: Any,
    out: Any,
    *,
    share: int,
    tile: int,
    keys: int,
    stride: int,
) -> None:
    """Block (group, tile): Q tokens of one request times the heads of the group."""
    group, index = pl.program_id(0), pl.program_id(1)
    dim, num_tokens, num_requests = pool.shape[3], queries.shape[0], table.shape[0]
    padded = power_of_two(share)
    requests = jnp.arange(power_of_two(num_requests))
    begin = plgpu.load(starts.at[requests], mask=requests < num_requests, other=0)
    stop = plgpu.load(starts.at[requests + 1], mask=requests < num_requests, other=0)
    tiles = (stop - begin + tile - 1) // tile
    ends = jnp.cumsum(tiles)
    request = jnp.sum((ends <= index).astype(jnp.int32))
    mine = requests == request
    start = jnp.sum(jnp.where(mine, begin + (index - ends + tiles) * tile, 0))
    last = jnp.minimum(start + tile, jnp.sum(jnp.where(mine, stop, 0)))
    first = first_page[0] * stride

    @pl.when(request < num_requests)
    def _() -> None:
        rows, lanes = jnp.arange(tile * padded), jnp.arange(power_of_two(dim))
        tokens, head = start + rows // padded, rows % padded
        there = (tokens < last) & (head < share)
        mask = there[:, None] & (lanes < dim)[None, :]
        at = jnp.where(there, tokens, num_tokens)[:, None], (group * share + head)[:, None], lanes[None, :]
        rotated = plgpu.load(queries.at[at], mask=mask, other=0.0)
        place = plgpu.load(positions.at[tokens], mask=there, other=0)

        def step(owned: bool, number: Array, state: State) -> State:
            places = number * keys + jnp.arange(keys)
            k, v = _load_keys(pool, table, first, request, places, None if owned else end, group)
            return _add_keys(state, rotated, k, v, None if owned else places[None, :] <= place[:, None], dim**-0.5)

        end = positions[last - 1] + 1
        whole = (positions[start] + 1) // keys  # steps whose keys every row of the tile sees
        state = lax.fori_loop(0, whole, functools.partial(step, True), _empty(tile * padded, lanes.shape[0]))
        _, total, mixed = lax.fori_loop(whole, pl.cdiv(end, keys), functools.partial(step, False), state)
        mixed = mixed / jnp.maximum(total, 1e-30)[:, None]
        plgpu.store(out.at[at], mixed.astype(out.dtype), mask=mask)


def extend_attention(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page 2G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    *,
    stride: int = 1,
    interpret: bool = False,
) -> Float[Array, "N H C"]:
    """Any number of query tokens a request. Rows of padding are not written."""
    (num_tokens, heads, _), groups = queries.shape, pool.shape[2] // 2
    share = heads // groups
    tile = max(1, EXTEND_ROWS // power_of_two(share))
    num_requests = batch.seq_lens.shape[0]
    kernel = functools.partial(
        _extend, share=share, tile=tile, keys=scaled_step(EXTEND_KEYS, pool.dtype), stride=stride
    )
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        grid=(groups, min(num_tokens, num_tokens // tile + num_requests)),
        compiler_params=plgpu.CompilerParams(num_warps=EXTEND_WARPS, num_stages=EXTEND_STAGES),
        interpret=interpret,
        name="extend_attention",
    )(
        jnp.asarray(first_page, jnp.int32).reshape(1),
        queries,
        pool,
        batch.query_starts,
        batch.positions,
        batch.page_table,
    )


def gpu_attention(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page 2G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    *,
    stride: int = 1,
    interpret: bool = False,
) -> Float[Array, "N H C"]:
    """Attention of a step's tokens to the pool."""
    attend = decode_attention if batch.decode else extend_attention
    return attend(queries, pool, first_page, batch, stride=stride, interpret=interpret)


def fused_attention(
    projected: FusedQKV,
    pool: Float[Array, "LP page 2G C"],
    layer: Int[Array, ""],
    batch: PagedBatch,
    num_pages: int,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "N H C"], Float[Array, "LP page 2G C"]]:
    """Prepare, write and attend."""
    queries, pool = prepare(projected, pool, layer, batch, stride=num_pages, interpret=interpret)
    return gpu_attention(queries, pool, layer, batch, stride=num_pages, interpret=interpret), pool


def gpu_attention_backend(*, interpret: bool) -> AttentionBackend:
    """The backend; `interpret` runs it on any device, slowly, for tests."""
    run, fused = (
        functools.partial(gpu_attention, interpret=interpret),
        functools.partial(fused_attention, interpret=interpret),
    )
    return AttentionBackend(name="gpu", run=run, fused=fused)


GPU_ATTENTION = gpu_attention_backend(interpret=False)
