"""Attention of prompts to the paged pool by the warpgroups of a Hopper GPU (Pallas' Mosaic GPU).

A program stays on its multiprocessor and computes blocks: a tile of query tokens of one request, and the heads of
some rows. One warpgroup, the producer, starts the copies (TMA) of queries, and of keys and values by their pages, into
rings in shared memory, also for the next block. Two others, the consumers, have 64 rows of the block each and add up
softmax over the same keys. Scores of a step of keys are multiplied while the values of the step before are, and
softmax of a step runs beside the latter product (FlashAttention-3, section 3.2).

Rows are tokens times the heads of a group where these are 8, 16, 32 or 64 (QueryRows); else tokens of one head, and the
consumers have two heads of one group, or two runs of tokens. Slots that a request does not own may hold
NaN: their scores become -inf, and their values 0. Dims: N tokens, B requests, H query heads, G kv heads, C head dim, L
layers of the pool, T tiles."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import MASK_VALUE, PagedBatch
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import first_visible
from routed_experts.layers.gpu.paged_softmax import LOG2E, visible_bounds
from routed_experts.layers.gpu.query_tiles import ALIGNED, QueryRows, find_query_rows, find_query_tiles
from routed_experts.layers.gpu.warpgroup_operations import (
    CompiledOperations,
    InterpretedOperations,
    Operations,
    Views,
)
from routed_experts.layers.gpu.warpgroups import CONSUMERS, SHARED_BYTES, SIDE, Warpgroups, split_work

_SWIZZLED = 64  # numbers of a swizzled row, 128 bytes
_BYTES = 2  # of a number
_QUERY_SLOTS = 2  # blocks whose queries are in shared memory
_MOST_DIM = 128  # of a head; queries, results and two steps of longer ones do not fit into shared memory
# Keys of a step, and of one where rows see a window. Measured on an H100 in rows of one head, 16 prompts of 1,024: with
# 64 / 8 heads of 64 and a window of 128, steps of 64 took 0.78 of the time of steps of 128; with 32 / 4 heads of 128
# and no window, both took the same.
_KEYS, _WINDOW_KEYS = 128, 64
_MOST_STAGES = 8
# Tokens of a step, for each request that its batch has room for, from which on rows of one head suit. Measured on an
# H100 with 64 requests of one token beside a prompt, 32 / 4 heads: 0.82 of the Triton kernel's time at 63 tokens a
# request and contexts of 2,048, and twice its time at 31 and 8,000.
_FEWEST_TOKENS = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What a kernel is compiled for. `keys`: of a step; `stages`: steps in the rings; `page`: slots of a page;
    `stride`: pages that the number of the first counts in."""

    rows: QueryRows
    share: int
    num_heads: int
    dim: int
    keys: int
    stages: int
    page: int
    stride: int
    features: AttentionFeatures
    num_programs: int

    @property
    def copy_keys(self) -> int:
        """Keys of one copy: of one page."""
        return min(self.page, self.keys)

    @property
    def num_blocks(self) -> int:
        """Blocks of a tile."""
        return self.num_heads // self.rows.block_heads

    @property
    def scale(self) -> float:
        """Factor of scores whose softmax is of powers of two."""
        return (self.features.scale or self.dim**-0.5) * LOG2E


class _Refs(NamedTuple):
    """Arrays; rings of queries, keys and values; results of each warpgroup, swizzled and not, in one memory."""

    queries: Any
    pool: Any
    first_page: Any
    tiles: Any
    num_tiles: Any
    table: Any
    sinks: Any
    out: Any
    query_ring: Views
    key_ring: Any
    value_ring: Any
    swizzled_results: Views
    plain_results: Views
    queries_filled: Any
    queries_emptied: Any
    keys_filled: Any
    keys_emptied: Any
    values_filled: Any
    values_emptied: Any
    scores: Any = None  # of each warpgroup, where kernels are interpreted
    sums: Any = None


class _Block(NamedTuple):
    """A block of a program. `slot`: of its queries; `request` to `position`: as in QueryTiles; `number`: of the block
    in its tile; `length`: keys of the request. Steps are counted from the request's first key: `first_step` to
    `end_step` have keys that some row sees, `unmasked_from` to `unmasked_to` those that all rows see."""

    slot: Array
    request: Array
    token: Array
    begin: Array
    end: Array
    position: Array
    number: Array
    length: Array
    first_step: Array
    unmasked_from: Array
    unmasked_to: Array
    end_step: Array


def _num_blocks(refs: _Refs, plan: _Plan) -> Array:
    """Blocks that this program computes."""
    rest = refs.num_tiles[0] * plan.num_blocks - lax.axis_index("program")
    return lax.div(rest + plan.num_programs - 1, jnp.int32(plan.num_programs))


def _find_block(refs: _Refs, plan: _Plan, index: Array) -> _Block:
    """That block of this program. Programs work on the same keys at one time."""
    block = lax.axis_index("program") + index * plan.num_programs
    tile = lax.div(block, jnp.int32(plan.num_blocks))
    request, token, begin, end, position = (refs.tiles[tile, column] for column in range(5))
    last = position + jnp.minimum(end - token, plan.rows.tile) - 1
    bounds, keys = visible_bounds(position, last, plan.features), jnp.int32(plan.keys)
    first_step, end_step = lax.div(bounds[0], keys), lax.div(bounds[3] + plan.keys - 1, keys)
    unmasked_from = jnp.clip(lax.div(bounds[1] + plan.keys - 1, keys), first_step, end_step)
    unmasked_to = jnp.clip(lax.div(jnp.maximum(bounds[2], 0), keys), unmasked_from, end_step)
    return _Block(
        slot=lax.rem(index, jnp.int32(_QUERY_SLOTS)),
        request=request,
        token=pl.multiple_of(token, plan.rows.aligned),
        begin=begin,
        end=end,
        position=position,
        number=block - tile * plan.num_blocks,
        length=position + end - token,
        first_step=first_step,
        unmasked_from=unmasked_from,
        unmasked_to=unmasked_to,
        end_step=end_step,
    )


def _first_head(plan: _Plan, block: _Block, warpgroup: Array | int) -> Array:
    """The first head of a warpgroup's rows."""
    head = block.number * plan.rows.block_heads
    return head if plan.rows.apart else head + warpgroup


def _own_start(plan: _Plan, block: _Block, warpgroup: Array | int) -> tuple[Array, Array]:
    """The first token of a warpgroup's rows, and its position."""
    ahead = warpgroup * plan.rows.tokens if plan.rows.apart else 0
    return block.token + ahead, block.position + ahead


def _stage(plan: _Plan, step: Array) -> Array:
    """The stage of the rings that a step has, of all steps of the program."""
    return lax.rem(step, jnp.int32(plan.stages))


def _slices(plan: _Plan, token: Array, head: Array, tokens: int) -> tuple[Any, ...]:
    """Where so many tokens of a warpgroup's queries or results are in their array."""
    if plan.rows.heads == 1:
        return pl.ds(token, tokens), pl.ds(head * plan.dim, plan.dim)
    return pl.ds(token, tokens), pl.ds(head, plan.rows.heads)


def _produce(refs: _Refs, plan: _Plan) -> None:
    """Start the copies of all blocks, as far ahead as there is room."""
    first, page = refs.first_page[0] * plan.stride, jnp.int32(plan.page)

    def copy_queries(block: _Block) -> None:
        for warpgroup in range(CONSUMERS):
            token, head = _own_start(plan, block, warpgroup)[0], _first_head(plan, block, warpgroup)
            source = refs.queries.at[_slices(plan, token, head, plan.rows.tokens)]
            plgpu.copy_gmem_to_smem(
                source, refs.query_ring.copy.at[block.slot, warpgroup], refs.queries_filled.at[block.slot]
            )

    def copy_block(index: Array, step: Array) -> Array:
        block = _find_block(refs, plan, index)
        group = lax.div(_first_head(plan, block, 0), jnp.int32(plan.share))

        @pl.when(index >= _QUERY_SLOTS)
        def _() -> None:
            plgpu.barrier_wait(refs.queries_emptied.at[block.slot])

        copy_queries(block)

        def copy_step(number: Array, step: Array) -> Array:
            stage, slots = _stage(plan, step), []
            for copy in range(plan.keys // plan.copy_keys):
                key = number * plan.keys + copy * plan.copy_keys
                key = jnp.where(key < block.length, key, number * plan.keys)  # others are not the request's
                index = lax.div(key, page)
                slots.append((first + refs.table[block.request, index]) * plan.page + key - index * plan.page)
            for row, ring, filled, emptied in (
                (2 * group, refs.key_ring, refs.keys_filled, refs.keys_emptied),
                (2 * group + 1, refs.value_ring, refs.values_filled, refs.values_emptied),
            ):

                @pl.when(step >= plan.stages)
                def _(emptied: Any = emptied) -> None:
                    plgpu.barrier_wait(emptied.at[stage])

                for copy, slot in enumerate(slots):
                    source = refs.pool.at[pl.ds(slot, plan.copy_keys), pl.ds(row * plan.dim, plan.dim)]
                    target = ring.at[stage, pl.ds(copy * plan.copy_keys, plan.copy_keys)]
                    plgpu.copy_gmem_to_smem(source, target, filled.at[stage])
            return step + 1

        return lax.fori_loop(block.first_step, block.end_step, copy_step, step)

    def wait_stage(step: Array, carry: None) -> None:
        plgpu.barrier_wait(refs.keys_emptied.at[_stage(plan, step)])
        plgpu.barrier_wait(refs.values_emptied.at[_stage(plan, step)])

    def wait_slot(index: Array, carry: None) -> None:
        plgpu.barrier_wait(refs.queries_emptied.at[lax.rem(index, jnp.int32(_QUERY_SLOTS))])

    num_blocks = _num_blocks(refs, plan)
    end = lax.fori_loop(0, num_blocks, copy_block, jnp.int32(0))
    lax.fori_loop(jnp.maximum(end - plan.stages, 0), end, wait_stage, None)  # barriers end with no arrival left
    lax.fori_loop(jnp.maximum(num_blocks - _QUERY_SLOTS, 0), num_blocks, wait_slot, None)


class _Softmax(NamedTuple):
    """Softmax of a warpgroup's rows after a step of keys: maximum, normaliser, and weights of the step's values, in
    float32 or in the model's dtype."""

    top: Float[Array, "64"]
    total: Float[Array, "64"]
    weights: Float[Array, "64 keys"]


def _attend(refs: _Refs, plan: _Plan, warpgroup: Array) -> None:
    """Compute this warpgroup's rows of all blocks."""
    operations: Operations = CompiledOperations()
    if refs.sums is not None:
        operations = InterpretedOperations(refs.scores.at[warpgroup], refs.sums.at[warpgroup])

    def attend_block(index: Array, step: Array) -> Array:
        block = _find_block(refs, plan, index)
        plgpu.barrier_wait(refs.queries_filled.at[block.slot])

        def run(sums: Any) -> Array:
            return _mix_values(refs, plan, operations, block, warpgroup, step, sums)

        mixed = operations.run_with_sums(run, plan.dim)
        _store(refs, plan, operations, block, warpgroup, mixed)
        return step + block.end_step - block.first_step

    lax.fori_loop(0, _num_blocks(refs, plan), attend_block, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _mix_values(
    refs: _Refs, plan: _Plan, operations: Operations, block: _Block, warpgroup: Array, first: Array, sums: Any
) -> Float[Array, "64 C"]:
    """Values mixed by softmax, of one warpgroup's rows. `first`: the step of the rings that the block starts with."""
    shape, dtype = (SIDE, plan.keys), refs.out.dtype
    queries = Views(*(view.at[block.slot, warpgroup] for view in refs.query_ring))
    position = _own_start(plan, block, warpgroup)[1]

    def iota(shape: tuple[int, int], dimension: int) -> Array:
        return operations.place_scores(lax.broadcasted_iota(jnp.int32, shape, dimension))

    def start_scores(scores: Any, step: Array) -> None:
        plgpu.barrier_wait(refs.keys_filled.at[_stage(plan, step)])
        operations.start_scores(scores, queries, refs.key_ring.at[_stage(plan, step)])

    def add_scores(top: Array, total: Array, number: Array, scores: Array, *, masked: bool) -> tuple[_Softmax, Array]:
        """Softmax after that step of keys, and what sums before it are multiplied by."""
        visible, mask = scores, None
        if masked:
            query = position + lax.div(iota(shape, 0), jnp.int32(plan.rows.heads))
            key = number * plan.keys + iota(shape, 1)
            mask = key <= query
            if plan.features.window or plan.features.chunk:
                mask = mask & (key >= first_visible(query, plan.features))
            visible = jnp.where(mask, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(visible, axis=1) * plan.scale)
        exponents = scores * plan.scale - lax.broadcast_in_dim(new_top, shape, (0,))
        if mask is not None:  # after the difference, whose bits so are those of a step without a mask
            exponents = jnp.where(mask, exponents, -jnp.inf)
        weights = jnp.exp2(exponents)
        shrink = jnp.exp2(top - new_top)
        return _Softmax(new_top, total * shrink + jnp.sum(weights, axis=1), weights), shrink

    def rounded(softmax: _Softmax) -> _Softmax:
        return softmax._replace(weights=softmax.weights.astype(dtype))

    def first_step(scores: Any) -> _Softmax:
        start_scores(scores, first)
        products = operations.load(scores, running=0)
        plgpu.barrier_arrive(refs.keys_emptied.at[_stage(plan, first)])
        start = _start(refs, plan, operations, block, warpgroup)
        return rounded(add_scores(*start, block.first_step, products, masked=True)[0])

    def next_step(number: Array, carry: tuple[Array, _Softmax], *, masked: bool) -> tuple[Array, _Softmax]:
        step, softmax = carry

        def run(scores: Any) -> _Softmax:
            start_scores(scores, step + 1)
            plgpu.barrier_wait(refs.values_filled.at[_stage(plan, step)])
            operations.start_mix(sums, softmax.weights, refs.value_ring.at[_stage(plan, step)])
            products = operations.load(scores, running=1)
            plgpu.barrier_arrive(refs.keys_emptied.at[_stage(plan, step + 1)])
            following, shrink = add_scores(softmax.top, softmax.total, number, products, masked=masked)
            mixed = operations.load(sums, running=0)
            plgpu.barrier_arrive(refs.values_emptied.at[_stage(plan, step)])
            sums[...] = mixed * lax.broadcast_in_dim(shrink, mixed.shape, (0,))
            return rounded(following)  # not before the product ends that reads these registers

        return step + 1, operations.run_with_scores(run, plan.keys)

    masked, unmasked = (functools.partial(next_step, masked=masked) for masked in (True, False))
    second = block.first_step + 1
    carry = first, operations.run_with_scores(first_step, plan.keys)
    if plan.features.window or plan.features.chunk:
        carry = lax.fori_loop(second, block.unmasked_from, masked, carry)
    unmasked_from = jnp.maximum(block.unmasked_from, second)
    unmasked_to = jnp.maximum(block.unmasked_to, unmasked_from)
    last, softmax = lax.fori_loop(
        unmasked_to, block.end_step, masked, lax.fori_loop(unmasked_from, unmasked_to, unmasked, carry)
    )
    plgpu.barrier_arrive(refs.queries_emptied.at[block.slot])
    values = refs.value_ring.at[_stage(plan, last)]
    plgpu.barrier_wait(refs.values_filled.at[_stage(plan, last)])
    _clear_unowned(plan, block, values, iota)
    operations.start_mix(sums, softmax.weights, values)
    mixed = operations.load(sums, running=0)
    plgpu.barrier_arrive(refs.values_emptied.at[_stage(plan, last)])
    return mixed * lax.broadcast_in_dim(1.0 / jnp.maximum(softmax.total, 1e-30), mixed.shape, (0,))


def _start(
    refs: _Refs, plan: _Plan, operations: Operations, block: _Block, warpgroup: Array
) -> tuple[Float[Array, "64"], Float[Array, "64"]]:
    """Maximum and normaliser before the first key: a sink has weight and no value."""
    nothing = operations.place_rows(jnp.zeros((SIDE,), jnp.float32))
    if refs.sinks is None:
        return nothing + MASK_VALUE, nothing
    head = operations.place_rows(lax.broadcasted_iota(jnp.int32, (SIDE,), 0)) % plan.rows.heads
    sinks = nothing
    for index in range(plan.rows.heads):
        sinks = jnp.where(head == index, refs.sinks[_first_head(plan, block, warpgroup) + index], sinks)
    top = jnp.maximum(sinks * LOG2E, MASK_VALUE)  # finite: of a row without visible keys, weights would be NaN
    return top, jnp.where(sinks > MASK_VALUE, nothing + 1.0, nothing)


def _clear_unowned(plan: _Plan, block: _Block, values: Any, iota: Any) -> None:
    """Clear the values of the block's last step whose slots share a page with the request's, and are not its own. Both
    consumers write the same numbers."""
    start = (block.end_step - 1) * plan.keys
    has_unowned = lax.rem(block.length, jnp.int32(plan.copy_keys)) != 0

    @pl.when((start + plan.keys > block.length) & has_unowned)
    def _() -> None:
        for part in range(plan.keys // SIDE):
            rows = pl.ds(part * SIDE, SIDE)
            key = start + part * SIDE + iota((SIDE, plan.dim), 0)
            values[rows] = jnp.where(key < block.length, values[rows], jnp.zeros((), values.dtype))
        plgpu.commit_smem()


def _store(
    refs: _Refs,
    plan: _Plan,
    operations: Operations,
    block: _Block,
    warpgroup: Array,
    mixed: Float[Array, "64 C"],
) -> None:
    """Store the rows of the request's tokens."""
    swizzled, plain = refs.swizzled_results, refs.plain_results
    token, head = _own_start(plan, block, warpgroup)[0], _first_head(plan, block, warpgroup)
    result, tokens = mixed.astype(refs.out.dtype), plan.rows.tokens
    low, high = jnp.maximum(block.begin - token, 0), jnp.minimum(block.end - token, tokens)
    count = high - low
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the results of the block before have been read

    @pl.when(count == tokens)
    def _() -> None:
        operations.store(swizzled, warpgroup, result)
        plgpu.copy_smem_to_gmem(swizzled.copy.at[warpgroup], refs.out.at[_slices(plan, token, head, tokens)])

    @pl.when((count > 0) & (count < tokens))
    def _() -> None:
        operations.store(plain, warpgroup, result)
        size = tokens
        while size := size // 2:  # each size once at most

            @pl.when(lax.bitwise_and(count, jnp.int32(size)) != 0)
            def _(size: int = size) -> None:
                first = low + lax.bitwise_and(count, jnp.int32(-2 * size))
                own = plain.copy.at[warpgroup, pl.ds(first, size)]
                plgpu.copy_smem_to_gmem(own, refs.out.at[_slices(plan, token + first, head, size)])


def _kernel(
    queries: Any,
    pool: Any,
    first_page: Any,
    tiles: Any,
    num_tiles: Any,
    table: Any,
    *rest: Any,
    plan: _Plan,
    has_sinks: bool,
) -> None:
    sinks, rest = (rest[0], rest[1:]) if has_sinks else (None, rest)
    out, query_ring, key_ring, value_ring, results, *barriers_and_scratch = rest
    refs = _Refs(
        *(queries, pool, first_page, tiles, num_tiles, table, sinks, out),
        *(Views(*query_ring), key_ring, value_ring, Views(*results[:2]), Views(*results[2:])),
        *barriers_and_scratch,
    )
    split_work(lambda: _produce(refs, plan), functools.partial(_attend, refs, plan))


def suits_warpgroup_attention(
    queries: Float[Array, "N H C"], pool: Float[Array, "LP page 2G C"], batch: PagedBatch
) -> bool:
    """Whether this kernel computes a step of prompts: heads of 64 or 128 numbers of 16 bits, those of the pool too, and
    pages of 8 slots or a larger power of two. Where rows are tokens of one head, the step needs 64 tokens for each
    request that the batch has room for: one token of a request takes as long as 64."""
    (num_tokens, _, dim), page, share = queries.shape, pool.shape[1], queries.shape[1] // (pool.shape[2] // 2)
    is_long = find_query_rows(share).heads > 1 or num_tokens >= _FEWEST_TOKENS * batch.seq_lens.shape[0]
    return (
        queries.dtype in (jnp.bfloat16, jnp.float16)
        and pool.dtype == queries.dtype
        and dim % _SWIZZLED == 0
        and dim <= _MOST_DIM
        and page >= ALIGNED
        and page & (page - 1) == 0
        and num_tokens % ALIGNED == 0
        and is_long
    )


def warpgroup_attention(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page 2G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    features: AttentionFeatures,
    warpgroups: Warpgroups,
    *,
    sinks: Float[Array, " H"] | None = None,
    stride: int = 1,
) -> Float[Array, "N H C"]:
    """Any number of query tokens a request, of a step that suits. Rows of padding are not written."""
    (num_tokens, heads, dim), (_, page, width, _) = queries.shape, pool.shape
    share, dtype = heads // (width // 2), queries.dtype
    is_interpreted = warpgroups.interpret is not False
    rows, keys = find_query_rows(share), _WINDOW_KEYS if features.window else _KEYS
    tiles = find_query_tiles(batch, rows.tile, rows.aligned)
    fixed = (_QUERY_SLOTS + 1) * CONSUMERS * SIDE * dim * _BYTES
    plan = _Plan(
        rows=rows,
        share=share,
        num_heads=heads,
        dim=dim,
        keys=keys,
        stages=min((SHARED_BYTES - fixed) // (2 * keys * dim * _BYTES), _MOST_STAGES),
        page=page,
        stride=stride,
        features=dataclasses.replace(features, sinks=None, kv_scales=None),
        num_programs=warpgroups.num_programs,
    )
    shape = (num_tokens, heads * dim) if rows.heads == 1 else queries.shape
    row_shape = (SIDE, dim) if rows.heads == 1 else (rows.tokens, rows.heads, dim)
    arrays = [queries.reshape(shape), pool.reshape(-1, width * dim), jnp.asarray(first_page, jnp.int32).reshape(1)]
    arrays += [tiles.columns, tiles.total, batch.page_table]
    arrays += [] if sinks is None else [sinks.astype(jnp.float32)]

    def swizzled(*sizes: int) -> Any:
        transforms = plgpu.TilingTransform((ALIGNED, _SWIZZLED)), plgpu.SwizzleTransform(_SWIZZLED * _BYTES)
        return plgpu.SMEM(sizes, dtype, transforms=() if is_interpreted else transforms)

    def views(*refs: Any) -> Any:
        return refs if is_interpreted else plgpu.RefUnion(*refs)

    def barriers(arrivals: int, count: int) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)

    ring, emptied = swizzled(plan.stages, keys, dim), barriers(CONSUMERS, plan.stages)
    filled = barriers(keys // plan.copy_keys, plan.stages)
    sides = [(SIDE, dim), row_shape]
    results = [make(CONSUMERS, *side) for make in (swizzled, lambda *sizes: plgpu.SMEM(sizes, dtype)) for side in sides]
    sums = [plgpu.SMEM((CONSUMERS, SIDE, columns), jnp.float32) for columns in (keys, dim)]
    out = plgpu.kernel(
        functools.partial(_kernel, plan=plan, has_sinks=sinks is not None),
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        scratch_types=[
            views(*(swizzled(_QUERY_SLOTS, CONSUMERS, *side) for side in sides)),
            ring,
            ring,
            views(*results),
            barriers(CONSUMERS, _QUERY_SLOTS),
            barriers(CONSUMERS, _QUERY_SLOTS),
            *(filled, emptied),
            *(filled, emptied),
            *(sums if is_interpreted else ()),
        ],
        grid=(warpgroups.num_programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=warpgroups.interpret,
        kernel_name="warpgroup_attention",
    )(*arrays)
    return out.reshape(queries.shape)
