"""Ragged paged attention as one TPU kernel: prefill chunks and decode tokens of a step, over the pool in place.

Pages are fetched by their number, so a layer is an offset to the page table and the pool of all layers goes in whole. A
grid step is a tile of Q tokens; in it, one request after another is a segment, and walks over its keys in blocks of T
with an online softmax. Two blocks are in VMEM: while one is multiplied the next is copied, across segments and
tiles too. A request of one token runs alone, so that decode multiplies no row for nothing. JAX's own ragged paged
attention (jax.experimental.pallas.ops.tpu) has the same pool and no form that runs on a CPU, where ours is tested; it
multiplies a tile's rows for every decode token.

    pool row of a token, bfloat16:  k0 v0 k1 v1 ...   a 32-bit word holds a lane of (k, v): a strided load takes a head

Masked slots may hold NaN: scores are selected, and values past a segment's last key are set to 0. Rows of no request
yield 0. Dims: N tokens, B requests, W pages of a request, H query heads, G kv heads, S heads of a group, C head dim, L
layers, P pages, T keys of a block, Q tokens of a tile, R rows of a product (tokens times S)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.core.errors import ConfigError
from routed_experts.layers.attention import MASK_VALUE, PagedBatch

KEY_BLOCK = 512
QUERY_ROWS = 512  # rows of a product in a prefill tile: tokens times heads of a group
DECODE_TILE = 8
LANES = 128
VMEM_BYTES = 48 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What is static in one build of the kernel. `decode`: every request has one token."""

    tile: int
    block_pages: int
    scale: float
    decode: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Refs:
    """The kernel's arrays. Scalars: first page of the layer, and a PagedBatch; then VMEM, the pool in HBM, and
    scratch."""

    first_page: Any
    seq_lens: Any
    query_starts: Any
    token_rows: Any
    page_table: Any
    queries: Any  # [Q H C]
    pool: Any
    out: Any  # [Q H C]
    blocks: Any  # [2 pages page 2G C]
    arrived: Any  # a semaphore for each of the two
    top: Any  # [G R 128]: maximum of the scores seen so far
    total: Any  # [G R 128]: normaliser
    mixed: Any  # [G R C]
    turn: Any  # which of the two blocks is next

    @property
    def heads_of_group(self) -> int:
        """S."""
        return self.queries.shape[1] // self.mixed.shape[0]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """Tokens of one request in one tile, [start, end), and the position of the last."""

    request: Any
    start: Any
    end: Any
    last: Any

    @staticmethod
    def at(refs: _Refs, start: Int[Array, ""], tile: int) -> "_Segment":
        """The segment that begins with token `start`."""
        request = refs.token_rows[start]
        stop = refs.query_starts[request + 1]
        end = jnp.minimum(stop, (lax.div(start, tile) + 1) * tile)
        return _Segment(request=request, start=start, end=end, last=refs.seq_lens[request] - 1 - (stop - end))


def ragged_attention(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page 2G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    *,
    key_block: int = KEY_BLOCK,
    query_rows: int = QUERY_ROWS,
    interpret: Any = False,
) -> Float[Array, "N H C"]:
    """Attend to the pages of each token's request. A pool wider than the heads holds zeros beside them."""
    if pool.dtype not in (jnp.float32, jnp.bfloat16):
        raise ConfigError(
            f"a KV pool of {pool.dtype} cannot be read by attention_backend='tpu'; load the model in bfloat16 or "
            "float32"
        )
    (num_tokens, heads, head_dim), (_, page_size, rows, lanes) = queries.shape, pool.shape
    groups, width = rows // 2, batch.page_table.shape[1]
    share = heads // groups
    tile = min(num_tokens, DECODE_TILE if batch.decode else max(DECODE_TILE, query_rows // share))
    pages = max(1, min(width, key_block // page_size))
    form = _Form(tile=tile, block_pages=pages, scale=head_dim**-0.5, decode=batch.decode)
    products = share if batch.decode else tile * share
    tokens = pl.BlockSpec((tile, heads, lanes), lambda index, *_: (index, 0, 0))
    state = [pltpu.VMEM((groups, products, LANES), jnp.float32)] * 2
    out = pl.pallas_call(
        functools.partial(_kernel, form=form),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(pl.cdiv(num_tokens, tile),),
            in_specs=[tokens, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=tokens,
            scratch_shapes=[
                pltpu.VMEM((2, pages, page_size, rows, lanes), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                *state,
                pltpu.VMEM((groups, products, lanes), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((num_tokens, heads, lanes), queries.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="ragged_attention",
    )(
        first_page.reshape(1),
        batch.seq_lens,
        batch.query_starts,
        batch.token_rows,
        batch.page_table,
        jnp.pad(queries, ((0, 0), (0, 0), (0, lanes - head_dim))),
        pool,
    )
    return out[..., :head_dim]


def _kernel(*refs: Any, form: _Form) -> None:
    """One tile of tokens: every segment in it, in order."""
    arrays = _Refs(**dict(zip((field.name for field in dataclasses.fields(_Refs)), refs, strict=True)))
    total = arrays.query_starts[arrays.query_starts.shape[0] - 1]
    index = pl.program_id(0)
    arrays.out[...] = jnp.zeros_like(arrays.out)

    @pl.when((index == 0) & (total > 0))
    def _() -> None:
        arrays.turn[0] = 0
        _fetch(arrays, _Segment.at(arrays, jnp.int32(0), form.tile), jnp.int32(0), jnp.int32(0), form)

    def run_segment(start: Int[Array, ""]) -> Int[Array, ""]:
        segment = _Segment.at(arrays, start, form.tile)
        if form.decode:
            _attend_one(arrays, segment, total, form)
            return segment.end
        alone = segment.end - segment.start == 1

        @pl.when(alone)
        def _() -> None:
            _attend_one(arrays, segment, total, form)

        @pl.when(jnp.logical_not(alone))
        def _() -> None:
            _attend_tile(arrays, segment, total, form)

        return segment.end

    stop = jnp.minimum((index + 1) * form.tile, total)
    lax.while_loop(lambda start: start < stop, run_segment, index * form.tile)


def _attend_one(refs: _Refs, segment: _Segment, total: Int[Array, ""], form: _Form) -> None:
    """A segment of one token: S rows a kv head."""
    place, share = lax.rem(segment.start, form.tile), refs.heads_of_group
    queries = refs.queries[place].astype(jnp.float32)

    def rows(group: int) -> Float[Array, "R C"]:
        return queries[group * share : (group + 1) * share]

    _walk(refs, segment, total, form, rows, segment.last)
    groups = range(refs.mixed.shape[0])
    out = [refs.mixed[group, :share] / _lanes(refs.total[group, :share], refs.mixed.shape[2]) for group in groups]
    refs.out[place] = jnp.concatenate(out, axis=0).astype(refs.out.dtype)


def _attend_tile(refs: _Refs, segment: _Segment, total: Int[Array, ""], form: _Form) -> None:
    """A segment of several tokens: the whole tile is multiplied, and the segment's rows are merged."""
    share, lanes = refs.heads_of_group, refs.mixed.shape[2]
    first = lax.rem(segment.start, form.tile)
    end = first + segment.end - segment.start

    def rows(group: int) -> Float[Array, "R C"]:
        part = refs.queries[:, group * share : (group + 1) * share, :].astype(jnp.float32)
        return part.reshape(form.tile * share, lanes)

    token = lax.div(lax.broadcasted_iota(jnp.int32, (form.tile * share, 1), 0), share)
    _walk(refs, segment, total, form, rows, segment.last - (end - 1) + token)
    place = lax.broadcasted_iota(jnp.int32, (form.tile, share, lanes), 0)
    for group in range(refs.mixed.shape[0]):
        heads = slice(group * share, (group + 1) * share)
        mixed = (refs.mixed[group] / _lanes(refs.total[group], lanes)).reshape(form.tile, share, lanes)
        merged = jnp.where((place >= first) & (place < end), mixed, refs.out[:, heads, :].astype(jnp.float32))
        refs.out[:, heads, :] = merged.astype(refs.out.dtype)


def _walk(refs: _Refs, segment: _Segment, total: Int[Array, ""], form: _Form, rows: Any, positions: Any) -> None:
    """Walk over a segment's keys, each row seeing those up to its own position; leaves the state of the softmax in
    scratch."""
    block_keys = form.block_pages * refs.pool.shape[1]
    num_blocks = lax.div(segment.last, block_keys) + 1
    groups = refs.mixed.shape[0]
    queries = [rows(group) for group in range(groups)]
    size = queries[0].shape[0]
    for group in range(groups):
        refs.top[group, :size] = jnp.full((size, LANES), MASK_VALUE, jnp.float32)
        refs.total[group, :size] = jnp.zeros((size, LANES), jnp.float32)
        refs.mixed[group, :size] = jnp.zeros((size, refs.mixed.shape[2]), jnp.float32)

    def add_block(block: Int[Array, ""], _: None) -> None:
        slot = refs.turn[0]

        @pl.when(block + 1 < num_blocks)
        def _() -> None:
            _fetch(refs, segment, block + 1, 1 - slot, form)

        @pl.when((block + 1 == num_blocks) & (segment.end < total))
        def _() -> None:
            _fetch(refs, _Segment.at(refs, segment.end, form.tile), jnp.int32(0), 1 - slot, form)

        _fetch(refs, segment, block, slot, form, wait=True)
        first = block * block_keys
        there = first + lax.broadcasted_iota(jnp.int32, (block_keys, 1), 0) <= segment.last
        mask = first + lax.broadcasted_iota(jnp.int32, (size, block_keys), 1) <= positions
        for group in range(groups):
            keys, values = _head(refs, slot, group)
            _add(refs, group, (queries[group] * form.scale).astype(keys.dtype), keys, jnp.where(there, values, 0), mask)
        refs.turn[0] = 1 - slot

    lax.fori_loop(0, num_blocks, add_block, None)


def _fetch(
    refs: _Refs, segment: _Segment, block: Int[Array, ""], slot: Int[Array, ""], form: _Form, *, wait: bool = False
) -> None:
    """Start, or wait for, the pages of a block that hold keys of the segment."""
    first = block * form.block_pages
    there = lax.div(segment.last, refs.pool.shape[1]) + 1 - first

    def one(index: Int[Array, ""], _: None) -> None:
        number = refs.first_page[0] + refs.page_table[segment.request, first + index]
        copy = pltpu.make_async_copy(refs.pool.at[number], refs.blocks.at[slot, index], refs.arrived.at[slot])
        (copy.wait if wait else copy.start)()

    lax.fori_loop(0, jnp.minimum(there, form.block_pages), one, None)


def _head(refs: _Refs, slot: Int[Array, ""], group: int) -> tuple[Float[Array, "T C"], Float[Array, "T C"]]:
    """Keys and values of one kv head in a block."""
    _, pages, page_size, rows, lanes = refs.blocks.shape
    keys = pages * page_size
    both = refs.blocks.at[slot].reshape(keys * rows, lanes)
    if refs.blocks.dtype == jnp.float32:
        return both[pl.ds(2 * group, keys, stride=rows), :], both[pl.ds(2 * group + 1, keys, stride=rows), :]
    words = both.bitcast(jnp.uint32)[pl.ds(group, keys, stride=rows // 2), :]
    halves = words << 16, words & jnp.uint32(0xFFFF0000)
    low, high = (pltpu.bitcast(half, jnp.float32).astype(jnp.bfloat16) for half in halves)
    return low, high


def _add(
    refs: _Refs,
    group: int,
    queries: Float[Array, "R C"],
    keys: Float[Array, "T C"],
    values: Float[Array, "T C"],
    mask: Bool[Array, "R T"],
) -> None:
    """Take one block of one kv head into the running softmax (Milakov and Gimelshein 2018)."""
    size, lanes = queries.shape
    scores = lax.dot_general(queries, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores, MASK_VALUE)
    before = refs.top[group, :size]
    top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    shrink, weights = jnp.exp(before - top), jnp.exp(scores - top[:, :1])
    refs.top[group, :size] = top
    refs.total[group, :size] = refs.total[group, :size] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    added = jnp.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    refs.mixed[group, :size] = refs.mixed[group, :size] * _lanes(shrink, lanes) + added


def _lanes(columns: Float[Array, "R 128"], lanes: int) -> Float[Array, "R C"]:
    """The same number in every lane, at another width."""
    return columns if lanes == LANES else jnp.broadcast_to(columns[:, :1], (columns.shape[0], lanes))
