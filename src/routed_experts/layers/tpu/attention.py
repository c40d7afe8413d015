"""Ragged paged attention as one TPU kernel: prefill chunks and decode tokens of a step, over the pool in place.

Pages are fetched by their number, so a layer is an offset to the page table and the pool of all layers goes in whole. A
grid step is a tile of Q tokens; in it, one request after another is a segment, and walks over its keys in blocks of T
with an online softmax. Two blocks are in VMEM: while one is multiplied the next is copied, across segments and
tiles too. A request of one token runs alone, so that decode multiplies no row for nothing. JAX's own ragged paged
attention (jax.experimental.pallas.ops.tpu) has the same pool and no form that runs on a CPU, where ours is tested; it
multiplies a tile's rows for every decode token.

    pool row of a token, bfloat16:  k0 v0 k1 v1 ...   a 32-bit word holds a lane of (k, v): a strided load takes a head

A window or a chunk moves the first key of a walk: blocks and pages before it are not fetched. A sink is the first
score of its head's softmax, and has no value (GPT-OSS).

A latent pool has one row a token, which is key and, in its first numbers, value of all heads (latent_attention.py).

Masked slots may hold NaN: scores are selected, and values outside of a segment's keys are set to 0. Rows of no request
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
from routed_experts.layers.attention_features import AttentionFeatures

KEY_BLOCK = 512
QUERY_ROWS = 512  # rows of a product in a prefill tile: tokens times heads of a group
DECODE_TILE = 8
LANES = 128
SUBLANES = 8
VMEM_BYTES = 48 << 20
PLAIN = AttentionFeatures()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What is static in one build of the kernel. `decode`: every request has one token."""

    tile: int
    block_pages: int
    scale: float
    decode: bool
    window: int
    chunk: int
    has_sinks: bool

    def first_visible(self, position: Int[Array, "..."]) -> Int[Array, "..."]:
        """The first key that a token at `position` sees."""
        first = jnp.maximum(position - self.window + 1, 0) if self.window else jnp.zeros_like(position)
        if not self.chunk:
            return first
        return jnp.maximum(first, lax.div(jnp.maximum(position, 0), self.chunk) * self.chunk)


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
    sinks: Any  # [G S 128], or of one number where there are none
    pool: Any
    out: Any  # [Q H C]
    blocks: Any  # [2 slabs pages page 2G 128]: C in slabs of 128, as strided loads have them
    arrived: Any  # a semaphore for each of the two
    top: Any  # [G R 128]: maximum of the scores seen so far
    total: Any  # [G R 128]: normaliser
    mixed: Any  # [G R C]
    next_block: Any  # which of the two blocks is next

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
    first_key: Any  # that any of its tokens sees

    @staticmethod
    def starting_at(refs: _Refs, start: Int[Array, ""], form: _Form) -> "_Segment":
        """The segment that begins with token `start`."""
        request = refs.token_rows[start]
        stop = refs.query_starts[request + 1]
        end = jnp.minimum(stop, (lax.div(start, form.tile) + 1) * form.tile)
        last = refs.seq_lens[request] - 1 - (stop - end)
        first_key = form.first_visible(last - (end - 1 - start))
        return _Segment(request=request, start=start, end=end, last=last, first_key=first_key)

    def first_block(self, refs: _Refs, form: _Form) -> Int[Array, ""]:
        """The block of the first key."""
        return lax.div(self.first_key, form.block_pages * refs.pool.shape[1])


def ragged_attention(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page 2G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    features: AttentionFeatures = PLAIN,
    *,
    key_block: int = KEY_BLOCK,
    query_rows: int = QUERY_ROWS,
    interpret: Any = False,
) -> Float[Array, "N H C"]:
    """Attend to the pages of each token's request. A pool wider than the heads holds zeros beside them. `features`:
    windows, chunks, sinks, a scale and latent rows."""
    if pool.dtype not in (jnp.float32, jnp.bfloat16):
        raise ConfigError(
            f"a KV pool of {pool.dtype} cannot be read by attention_backend='tpu'; load the model in bfloat16 or "
            "float32"
        )
    (num_tokens, heads, head_dim), (_, page_size, rows, lanes) = queries.shape, pool.shape
    groups, width = (1 if features.latent else rows // 2), batch.page_table.shape[1]
    values = features.latent or lanes
    share = heads // groups
    tile = min(
        num_tokens, DECODE_TILE if batch.decode else max(DECODE_TILE, query_rows // share // SUBLANES * SUBLANES)
    )
    seen = min(features.window or key_block, features.chunk or key_block)
    pages = max(1, min(width, min(key_block, -(-seen // LANES) * LANES) // page_size))
    form = _Form(
        tile=tile,
        block_pages=pages,
        scale=features.scale or head_dim**-0.5,
        decode=batch.decode,
        window=features.window,
        chunk=features.chunk,
        has_sinks=features.sinks is not None,
    )
    sinks = jnp.zeros((1, 1)) if features.sinks is None else features.sinks.reshape(groups, share)
    sinks = jnp.broadcast_to(sinks.astype(jnp.float32)[..., None], (*sinks.shape, LANES))
    slab = LANES if lanes % LANES == 0 else lanes
    products = share if batch.decode else tile * share

    def of_tokens(lanes: int) -> pl.BlockSpec:
        return pl.BlockSpec((tile, heads, lanes), lambda index, *_: (index, 0, 0))

    block = (pages, page_size, lanes) if features.latent else (pages, page_size, rows, slab)
    state = [pltpu.VMEM((groups, products, LANES), jnp.float32)] * 2
    out = pl.pallas_call(
        functools.partial(_kernel, form=form),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(pl.cdiv(num_tokens, tile),),
            in_specs=[
                of_tokens(lanes),
                pl.BlockSpec(sinks.shape, lambda index, *_: (0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=of_tokens(values),
            scratch_shapes=[
                pltpu.VMEM((2, 1 if features.latent else lanes // slab, *block), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                *state,
                pltpu.VMEM((groups, products, values), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((num_tokens, heads, values), queries.dtype),
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
        sinks,
        pool.reshape(-1, page_size, lanes) if features.latent else pool,
    )
    return out if features.latent else out[..., :head_dim]


def _kernel(*refs: Any, form: _Form) -> None:
    """One tile of tokens: every segment in it, in order."""
    arrays = _Refs(**dict(zip((field.name for field in dataclasses.fields(_Refs)), refs, strict=True)))
    total = arrays.query_starts[arrays.query_starts.shape[0] - 1]
    index = pl.program_id(0)
    arrays.out[...] = jnp.zeros_like(arrays.out)

    @pl.when((index == 0) & (total > 0))
    def _() -> None:
        arrays.next_block[0] = 0
        segment = _Segment.starting_at(arrays, jnp.int32(0), form)
        _fetch(arrays, segment, segment.first_block(arrays, form), jnp.int32(0), form)

    def run_segment(start: Int[Array, ""]) -> Int[Array, ""]:
        segment = _Segment.starting_at(arrays, start, form)
        if form.decode:
            _attend_one(arrays, segment, total, form)
            return segment.end
        is_one_token = segment.end - segment.start == 1

        @pl.when(is_one_token)
        def _() -> None:
            _attend_one(arrays, segment, total, form)

        @pl.when(jnp.logical_not(is_one_token))
        def _() -> None:
            _attend_tile(arrays, segment, total, form)

        return segment.end

    stop = jnp.minimum((index + 1) * form.tile, total)
    lax.while_loop(lambda start: start < stop, run_segment, index * form.tile)


def _attend_one(refs: _Refs, segment: _Segment, total: Int[Array, ""], form: _Form) -> None:
    """A segment of one token: S rows a kv head."""
    row, share = lax.rem(segment.start, form.tile), refs.heads_of_group
    queries = refs.queries[row].astype(jnp.float32)

    def rows(group: int) -> Float[Array, "R C"]:
        return queries[group * share : (group + 1) * share]

    _walk(refs, segment, total, form, rows, segment.last)
    groups = range(refs.mixed.shape[0])
    out = [refs.mixed[group, :share] / _lanes(refs.total[group, :share], refs.mixed.shape[2]) for group in groups]
    refs.out[row] = jnp.concatenate(out, axis=0).astype(refs.out.dtype)


def _attend_tile(refs: _Refs, segment: _Segment, total: Int[Array, ""], form: _Form) -> None:
    """A segment of several tokens: the whole tile is multiplied, and the segment's rows are merged."""
    share, lanes = refs.heads_of_group, refs.mixed.shape[2]
    first = lax.rem(segment.start, form.tile)
    end = first + segment.end - segment.start

    def rows(group: int) -> Float[Array, "R C"]:
        part = refs.queries[:, group * share : (group + 1) * share, :].astype(jnp.float32)
        return part.reshape(form.tile * share, part.shape[2])

    token = lax.div(lax.broadcasted_iota(jnp.int32, (form.tile * share, 1), 0), share)
    _walk(refs, segment, total, form, rows, segment.last - (end - 1) + token)
    rows_of_tile = lax.broadcasted_iota(jnp.int32, (form.tile, share, lanes), 0)
    for group in range(refs.mixed.shape[0]):
        heads = slice(group * share, (group + 1) * share)
        mixed = (refs.mixed[group] / _lanes(refs.total[group], lanes)).reshape(form.tile, share, lanes)
        merged = jnp.where(
            (rows_of_tile >= first) & (rows_of_tile < end), mixed, refs.out[:, heads, :].astype(jnp.float32)
        )
        refs.out[:, heads, :] = merged.astype(refs.out.dtype)


def _walk(refs: _Refs, segment: _Segment, total: Int[Array, ""], form: _Form, rows: Any, positions: Any) -> None:
    """Walk over a segment's keys, each row seeing those up to its own position, from the first that is visible to it;
    leaves the state of the softmax in scratch."""
    block_keys = form.block_pages * refs.pool.shape[1]
    num_blocks = lax.div(segment.last, block_keys) + 1
    groups = refs.mixed.shape[0]
    queries = [rows(group) for group in range(groups)]
    size = queries[0].shape[0]
    for group in range(groups):
        if form.has_sinks:
            sinks = jnp.broadcast_to(refs.sinks[group][None], (size // refs.heads_of_group, *refs.sinks.shape[1:]))
            refs.top[group, :size] = sinks.reshape(size, LANES)
            refs.total[group, :size] = jnp.ones((size, LANES), jnp.float32)
        else:
            refs.top[group, :size] = jnp.full((size, LANES), MASK_VALUE, jnp.float32)
            refs.total[group, :size] = jnp.zeros((size, LANES), jnp.float32)
        refs.mixed[group, :size] = jnp.zeros((size, refs.mixed.shape[2]), jnp.float32)

    def add_block(block: Int[Array, ""], _: None) -> None:
        slot = refs.next_block[0]

        @pl.when(block + 1 < num_blocks)
        def _() -> None:
            _fetch(refs, segment, block + 1, 1 - slot, form)

        @pl.when((block + 1 == num_blocks) & (segment.end < total))
        def _() -> None:
            following = _Segment.starting_at(refs, segment.end, form)
            _fetch(refs, following, following.first_block(refs, form), 1 - slot, form)

        _fetch(refs, segment, block, slot, form, wait=True)
        first = block * block_keys
        places = first + lax.broadcasted_iota(jnp.int32, (block_keys, 1), 0)
        is_key = (places >= segment.first_key) & (places <= segment.last)
        key_positions = first + lax.broadcasted_iota(jnp.int32, (size, block_keys), 1)
        mask = key_positions <= positions
        if form.window or form.chunk:
            mask = mask & (key_positions >= form.first_visible(positions))
        for group in range(groups):
            keys, values = _head(refs, slot, group)
            _add(
                refs, group, (queries[group] * form.scale).astype(keys.dtype), keys, jnp.where(is_key, values, 0), mask
            )
        refs.next_block[0] = 1 - slot

    lax.fori_loop(segment.first_block(refs, form), num_blocks, add_block, None)


def _fetch(
    refs: _Refs, segment: _Segment, block: Int[Array, ""], slot: Int[Array, ""], form: _Form, *, wait: bool = False
) -> None:
    """Start, or wait for, the pages of a block that hold keys of the segment."""
    first, page_size, width = block * form.block_pages, refs.pool.shape[1], refs.blocks.shape[-1]
    before = jnp.maximum(lax.div(segment.first_key, page_size) - first, 0)
    num_pages = lax.div(segment.last, page_size) + 1 - first

    def copy_page(index: Int[Array, ""], _: None) -> None:
        page = refs.first_page[0] + refs.page_table[segment.request, first + index]
        for slab in range(refs.blocks.shape[1]):
            is_latent = len(refs.pool.shape) == 3
            source = refs.pool.at[page] if is_latent else refs.pool.at[page, :, :, pl.ds(slab * width, width)]
            copy = pltpu.make_async_copy(source, refs.blocks.at[slot, slab, index], refs.arrived.at[slot])
            (copy.wait if wait else copy.start)()

    lax.fori_loop(before, jnp.minimum(num_pages, form.block_pages), copy_page, None)


def _head(refs: _Refs, slot: Int[Array, ""], group: int) -> tuple[Float[Array, "T C"], Float[Array, "T C"]]:
    """Keys and values of one kv head in a block, or latent rows, which are both."""
    if len(refs.pool.shape) == 3:
        _, _, pages, page_size, lanes = refs.blocks.shape
        keys = refs.blocks[slot, 0].reshape(pages * page_size, lanes)
        return keys, keys[:, : refs.mixed.shape[2]]
    slabs = [_slab(refs, slot, slab, group) for slab in range(refs.blocks.shape[1])]
    if len(slabs) == 1:
        return slabs[0]
    keys, values = (jnp.concatenate(parts, axis=1) for parts in zip(*slabs, strict=True))
    return keys, values


def _slab(refs: _Refs, slot: Int[Array, ""], slab: int, group: int) -> tuple[Float[Array, "T C"], Float[Array, "T C"]]:
    """128 numbers of each key and value of one kv head."""
    _, _, pages, page_size, rows, lanes = refs.blocks.shape
    keys = pages * page_size
    key_values = refs.blocks.at[slot, slab].reshape(keys * rows, lanes)
    if refs.blocks.dtype == jnp.float32:
        return key_values[pl.ds(2 * group, keys, stride=rows), :], key_values[
            pl.ds(2 * group + 1, keys, stride=rows), :
        ]
    words = key_values.bitcast(jnp.uint32)[pl.ds(group, keys, stride=rows // 2), :]
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
    size, lanes = queries.shape[0], values.shape[1]
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
