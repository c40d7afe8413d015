"""Attention over a paged pool of keys and values, and over whole sequences. `reference` is the oracle of every other
backend.

The pool of all layers is one array [L*P, page, 2G, C] that is carried through the layers and updated in place; row
2g holds the keys of head g and row 2g+1 its values. New keys and values are written first, then attention reads all
from the pool. Padding tokens write to page 0 of the layer, which no request owns. Masked slots may hold NaN (from
bad weights or half-precision overflow). A weight of 0 does not hide that, so values that are masked or not finite
are set to 0. Dims: N tokens, B requests, L layers, P pages, W pages of a request, H query heads, G kv heads, C head
dim, S tokens of a sequence, T keys of a block, Q rows of a query tile."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.delta_rule import DeltaInputs, DeltaState
from routed_experts.layers.kv_format import KV_CODES, KVScales, from_stored, to_stored
from routed_experts.layers.quantized import E4M3, ScaledRows, Weight
from routed_experts.layers.stack_traits import PLAIN_TRAITS, StackTraits

MASK_VALUE = -1e30  # masks a score; finite, because inf - inf is NaN
QUERY_TILE = 16
KEY_BLOCK = 128
DECODE_BLOCK = 64  # of every request at once: the gathered keys and values should stay in cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedBatch:
    """Positions and pages of a step's tokens. Tokens of one request are neighbours, in order of position.

    `decode`: token n is the only token of request n; `max_queries`: the most tokens of a request, 0 where any number
    is possible; hints that a backend may ignore."""

    positions: Int[Array, " N"]
    token_rows: Int[Array, " N"]  # request of each token
    valid: Bool[Array, " N"]
    query_starts: Int[Array, " B1"]  # first token of each request, and the end of the last
    seq_lens: Int[Array, " B"]  # keys of each request after this step, 0 for padding
    page_table: Int[Array, "B W"]
    decode: bool = dataclasses.field(metadata={"static": True})
    max_queries: int = dataclasses.field(default=0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedQKV:
    """Queries, keys and values as projected (or S parts of the sums, in float32, to which `bias` is added), with the
    arrays of all layers of the run and the rotary angles. The first 2F dims of a head are rotated; for whole heads the
    angles may stand twice, and a layer without positions has none (F = 0). `head_dim`: C, where a pool's rows may be
    wider; 0: their width. `is_biased`: whether `qkv` has a bias in it. `dtype`: of queries, where `qkv` are parts of
    sums; None: that of `qkv`. `kv_scales`: of the pool's codes, for kernels that take them. `next_matrices`: those that
    the values are multiplied by; from them a kernel knows whether to scale them, as rows of all heads; None: it does
    not. A kernel whose `fused_features` are empty gets angles twice and head norms, and nothing that is None here."""

    qkv: Float[Array, "N HGGC"] | Float[Array, "S N HGGC"]
    q_norm: Float[Array, "R C"] | Float[Array, "R HC"] | None
    k_norm: Float[Array, "R C"] | Float[Array, "R GC"] | None
    layer: Int[Array, ""]  # in the run
    cos: Float[Array, "N C"] | Float[Array, "N F"]
    sin: Float[Array, "N C"] | Float[Array, "N F"]
    eps: float = dataclasses.field(metadata={"static": True})
    bias: Float[Array, "R HGGC"] | None = None
    sinks: Float[Array, "R H"] | None = None
    head_dim: int = dataclasses.field(default=0, metadata={"static": True})
    is_biased: bool = dataclasses.field(default=False, metadata={"static": True})
    traits: StackTraits = dataclasses.field(default=PLAIN_TRAITS, metadata={"static": True})
    dtype: jnp.dtype | None = dataclasses.field(default=None, metadata={"static": True})
    kv_scales: KVScales | None = None
    next_matrices: Weight | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentQKV:
    """Latent attention as projected: queries with their rotary dims last, compressed rows of rank R with theirs, the
    norm of a row, and the matrix that expands it into keys and values of all heads. `scale`: of the scores."""

    queries: Float[Array, "N H KP"]
    compressed: Float[Array, "N RP"]
    norm: Float[Array, " R"]
    up: Float[Array, "R HKV"]
    angles: tuple[Float[Array, "N F"], Float[Array, "N F"]]
    interleaved: bool
    scale: float
    eps: float
    stacked_up: Float[Array, "L R HKV"] | None = None  # that of all layers, for kernels that read it in place
    layer: Int[Array, ""] | None = None  # in the stack


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend:
    """A kernel that attends to the pool: (queries [N H C], pool, first page of the layer, batch) -> [N H C]. Where
    there are such kernels beside it:

    `fused` also does norms, rotation and the write to the pool: (projected, pool, layer, batch, pages of a layer) ->
    (mixed values, pool); beside plain layers it takes those with `fused_features`, in the words of
    `GroupedAttention.stack_needs`. `run_with_features` takes AttentionFeatures, too. `write` writes new keys and values
    as `write_kv` does, or latent rows (no values): (pool, keys, values, first page, batch) -> pool. `latent` runs
    latent attention between its projections: (projected, pool, layer, batch, pages of a layer) -> (values, pool).
    `recur` runs `delta_ragged` on states in place: (inputs, states [L, S, ...], layer, slot of each request, requests
    that start anew, query starts) -> (what was read, states).

    `batch_invariant`: in programs of one shape, a token's bits depend on its own sequence alone, however that is cut
    into steps; deterministic mode takes no other. `kv_formats`: the codes that all of them write and read in place of
    keys and values (not of latent rows), in the words of CODE_DTYPES; the pool is then as in kv_format.py.
    `takes_kv_scales`, `fused_takes_kv_scales`: `run_with_features`, and `fused`, apply the KVScales that they are
    given; else PagedAttend applies them around `run` and `run_with_features`, and `fused` is left out."""

    name: str
    run: Callable[
        [Float[Array, "N H C"], Float[Array, "LP page 2G C"], Int[Array, ""], PagedBatch], Float[Array, "N H C"]
    ]
    fused: (
        Callable[
            [FusedQKV, Float[Array, "LP page 2G C"], Int[Array, ""], PagedBatch, int],
            tuple[Float[Array, "N H C"] | ScaledRows, Float[Array, "LP page 2G C"]],
        ]
        | None
    ) = None
    fused_features: frozenset[str] = frozenset()
    run_with_features: Callable[..., Float[Array, "N H V"]] | None = None
    write: (
        Callable[
            [
                Float[Array, "LP page 2G C"],
                Float[Array, "N G C"],
                Float[Array, "N G C"] | None,
                Int[Array, ""],
                PagedBatch,
            ],
            Float[Array, "LP page 2G C"],
        ]
        | None
    ) = None
    latent: (
        Callable[
            [LatentQKV, Float[Array, "LP page 1 C"], Int[Array, ""], PagedBatch, int],
            tuple[Float[Array, "N H V"], Float[Array, "LP page 1 C"]],
        ]
        | None
    ) = None
    recur: (
        Callable[
            [DeltaInputs, DeltaState, Int[Array, ""], Int[Array, " B"], Bool[Array, " B"], Int[Array, " B1"]],
            tuple[Float[Array, "N H V"], DeltaState],
        ]
        | None
    ) = None
    batch_invariant: bool = False
    kv_formats: frozenset[str] = frozenset()
    takes_kv_scales: bool = False
    fused_takes_kv_scales: bool = False

    def for_kv_scales(self) -> "AttentionBackend":
        """The same backend for a pool of codes with scales."""
        return self if self.fused_takes_kv_scales else dataclasses.replace(self, fused=None)

    def with_features_run(self, run: Callable[..., Float[Array, "N H V"]] | None) -> "AttentionBackend":
        """The same backend with a default for attention with features, unless it has its own."""
        return self if self.run_with_features is not None else dataclasses.replace(self, run_with_features=run)


def write_kv(
    pool: Float[Array, "LP page 2G C"],
    keys: Float[Array, "N G C"],
    values: Float[Array, "N G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
) -> Float[Array, "LP page 2G C"]:
    """Write each token's keys and values at its position's slot; padding goes to page 0 of the layer."""
    page_size = pool.shape[1]
    page = jnp.where(batch.valid, batch.page_table[batch.token_rows, batch.positions // page_size], 0)
    both = jnp.stack([keys, values], axis=2).reshape(keys.shape[0], -1, keys.shape[-1])  # [N, 2G, C]
    both = jnp.pad(both, ((0, 0), (0, 0), (0, pool.shape[3] - both.shape[2])))  # on TPU a pool is as wide as its lanes
    return pool.at[first_page + page, batch.positions % page_size].set(to_stored(both, pool.dtype))


def attend_all(
    queries: Float[Array, "N H C"],
    keys: Float[Array, "N T G C"],
    values: Float[Array, "N T G C"],
    mask: Bool[Array, "N T"],
) -> Float[Array, "N H C"]:
    """Softmax attention of each row over its own keys, in float32. Values that are not seen may be NaN."""
    num_rows, heads, head_dim = queries.shape
    groups = keys.shape[2]
    wide = queries.astype(jnp.float32).reshape(num_rows, groups, heads // groups, head_dim)
    scores = jnp.einsum("ngrc,ntgc->ngrt", wide, keys.astype(jnp.float32)) * head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASK_VALUE), axis=-1)
    values = jnp.where(mask[:, :, None, None], values.astype(jnp.float32), 0.0)
    return jnp.einsum("ngrt,ntgc->ngrc", weights, values).reshape(queries.shape).astype(queries.dtype)


def mask_nonfinite(
    values: Float[Array, "... T C"], mask: Bool[Array, "... S T"]
) -> tuple[Float[Array, "... T C"], Bool[Array, "... S"]]:
    """Values with 0 in place of nonfinite numbers, and the rows that attend to some of those. Those rows must become
    NaN and no others, although a product of all rows with all values multiplies them by weights of 0."""
    finite = jnp.isfinite(values)
    broken = ~jnp.all(finite, axis=-1)
    return jnp.where(finite, values, 0.0), jnp.any(mask & broken[..., None, :], axis=-1)


def gather_pages(
    pool: Float[Array, "LP page 2G C"], pages: Int[Array, "B W"], head_dim: int | None = None
) -> tuple[Float[Array, "B T G C"], Float[Array, "B T G C"]]:
    """Return the keys and values of the listed pages, page after page; of a pool that is wider than the heads,
    `head_dim` numbers; codes as their numbers."""
    # As rows of C: else, with fewer than 4 kv heads, the TPU compiler transposes the whole pool in every layer before
    # it gathers.
    both = jnp.take(pool.reshape(pool.shape[0], -1, pool.shape[3]), pages, axis=0)
    both = both.reshape(pages.shape[0], -1, pool.shape[2] // 2, 2, pool.shape[3])[..., :head_dim]
    both = from_stored(both, jnp.float32) if pool.dtype == KV_CODES else both
    return both[..., 0, :], both[..., 1, :]


def reference_attention(
    queries: Float[Array, "N H C"], pool: Float[Array, "LP page 2G C"], first_page: Int[Array, ""], batch: PagedBatch
) -> Float[Array, "N H C"]:
    """Gather every page of each token's request, at full width: no row's result depends on another row."""
    keys, values = gather_pages(pool, first_page + batch.page_table[batch.token_rows], queries.shape[2])
    mask = jnp.arange(keys.shape[1]) <= batch.positions[:, None]
    return attend_all(queries, keys, values, mask)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnlineSoftmax:
    """Online softmax (Milakov and Gimelshein 2018): maximum, normaliser and weighted values of the keys seen so far."""

    row_max: Float[Array, "..."]
    row_sum: Float[Array, "..."]
    acc: Float[Array, "... C"]

    @staticmethod
    def empty(shape: tuple[int, ...], head_dim: int) -> "OnlineSoftmax":
        """The initial state."""
        zeros = jnp.zeros(shape, jnp.float32)
        return OnlineSoftmax(zeros + MASK_VALUE, zeros, jnp.zeros((*shape, head_dim), jnp.float32))

    def add(
        self,
        scores: Float[Array, "... T"],
        values: Float[Array, "... T C"],
        has_nonfinite: Bool[Array, "..."] | None = None,
    ) -> "OnlineSoftmax":
        """Add one block of keys; batch axes of `values` are all axes of `scores` but its last two.
        `has_nonfinite` rows end as NaN."""
        row_max = jnp.maximum(self.row_max, jnp.max(scores, axis=-1))
        shrink, weights = jnp.exp(self.row_max - row_max), jnp.exp(scores - row_max[..., None])
        acc = self.acc * shrink[..., None] + weights @ values
        row_sum = self.row_sum * shrink + jnp.sum(weights, axis=-1)
        return OnlineSoftmax(
            row_max, row_sum if has_nonfinite is None else jnp.where(has_nonfinite, jnp.nan, row_sum), acc
        )

    def result(self) -> Float[Array, "... C"]:
        """The attention output; rows without visible keys are 0."""
        return self.acc / jnp.maximum(self.row_sum, 1e-30)[..., None]


def paged_attention(
    queries: Float[Array, "N H C"], pool: Float[Array, "LP page 2G C"], first_page: Int[Array, ""], batch: PagedBatch
) -> Float[Array, "N H C"]:
    """Walk over blocks of pages with an online softmax; work grows with real tokens, not with padding."""
    return (_decode_attention if batch.decode else _ragged_attention)(queries, pool, first_page, batch)


def _block_pages(block: int, page_size: int, width: int) -> int:
    return max(1, min(width, block // page_size))


def _decode_attention(
    queries: Float[Array, "B H C"], pool: Float[Array, "LP page 2G C"], first_page: Int[Array, ""], batch: PagedBatch
) -> Float[Array, "B H C"]:
    """All requests side by side, one block of keys after another up to the longest."""
    (num_rows, heads, head_dim), groups, page_size = queries.shape, pool.shape[2] // 2, pool.shape[1]
    pages = _block_pages(DECODE_BLOCK, page_size, batch.page_table.shape[1])
    block = pages * page_size
    table = jnp.pad(batch.page_table, ((0, 0), (0, -batch.page_table.shape[1] % pages)))
    wide = queries.astype(jnp.float32).reshape(num_rows, groups, heads // groups, head_dim) * head_dim**-0.5

    def add_block(index: Int[Array, ""], state: OnlineSoftmax) -> OnlineSoftmax:
        listed = first_page + lax.dynamic_slice_in_dim(table, index * pages, pages, axis=1)
        keys, values = (x.astype(jnp.float32) for x in gather_pages(pool, listed, head_dim))  # [B, T, G, C]
        scores = jnp.einsum("bgrc,btgc->btgr", wide, keys)
        mask = index * block + jnp.arange(block) < batch.seq_lens[:, None]
        scores, values = (jnp.where(mask[:, :, None, None], *pair) for pair in ((scores, MASK_VALUE), (values, 0.0)))
        row_max = jnp.maximum(state.row_max, jnp.max(scores, axis=1))
        shrink, weights = jnp.exp(state.row_max - row_max), jnp.exp(scores - row_max[:, None])
        mixed = jnp.sum(weights[..., None] * values[:, :, :, None], axis=1)  # a sum over T reads the values in place
        return OnlineSoftmax(
            row_max, state.row_sum * shrink + jnp.sum(weights, axis=1), state.acc * shrink[..., None] + mixed
        )

    blocks = (jnp.max(batch.seq_lens) + block - 1) // block
    state = lax.fori_loop(0, blocks, add_block, OnlineSoftmax.empty((num_rows, groups, heads // groups), head_dim))
    return state.result().reshape(queries.shape).astype(queries.dtype)


def _ragged_attention(
    queries: Float[Array, "N H C"], pool: Float[Array, "LP page 2G C"], first_page: Int[Array, ""], batch: PagedBatch
) -> Float[Array, "N H C"]:
    """Tiles of Q query rows, each of one request, in order; a tile's rows past its request are overwritten by the next
    tile."""
    (num_tokens, heads, head_dim), groups, page_size = queries.shape, pool.shape[2] // 2, pool.shape[1]
    tile, pages = min(QUERY_TILE, num_tokens), _block_pages(KEY_BLOCK, page_size, batch.page_table.shape[1])
    block, share = pages * page_size, heads // groups
    table = jnp.pad(batch.page_table, ((0, 0), (0, -batch.page_table.shape[1] % pages)))
    wide = jnp.pad(queries.astype(jnp.float32) * head_dim**-0.5, ((0, tile), (0, 0), (0, 0)))
    positions = jnp.pad(batch.positions, (0, tile))
    lengths = batch.query_starts[1:] - batch.query_starts[:-1]
    tile_ends = jnp.cumsum((lengths + tile - 1) // tile)

    def run_tile(index: Int[Array, ""], outputs: Float[Array, "NQ H C"]) -> Float[Array, "NQ H C"]:
        row = jnp.searchsorted(tile_ends, index, side="right", method="compare_all").astype(jnp.int32)
        first_tile = tile_ends[row] - (lengths[row] + tile - 1) // tile
        start = batch.query_starts[row] + (index - first_tile) * tile
        end = jnp.minimum(start + tile, batch.query_starts[row + 1])
        rows = lax.dynamic_slice_in_dim(wide, start, tile).reshape(tile, groups, share, head_dim)
        rows = jnp.transpose(rows, (1, 0, 2, 3)).reshape(groups, tile * share, head_dim)
        at = lax.dynamic_slice_in_dim(positions, start, tile)

        def add_block(index: Int[Array, ""], state: OnlineSoftmax) -> OnlineSoftmax:
            listed = lax.dynamic_slice(table, (row, index * pages), (1, pages))
            keys, values = gather_pages(pool, first_page + listed, head_dim)
            keys, values = (jnp.swapaxes(x[0], 0, 1).astype(jnp.float32) for x in (keys, values))  # [G, T, C]
            key_positions = index * block + jnp.arange(block)
            mask = jnp.repeat(key_positions <= at[:, None], share, axis=0)
            values, has_nonfinite = mask_nonfinite(values, mask)
            scores = jnp.einsum("gqc,gtc->gqt", rows, keys)
            return state.add(jnp.where(mask, scores, MASK_VALUE), values, has_nonfinite)

        blocks = (positions[end - 1] + block) // block
        state = lax.fori_loop(0, blocks, add_block, OnlineSoftmax.empty((groups, tile * share), head_dim))
        mixed = state.result().reshape(groups, tile, share, head_dim)
        mixed = jnp.transpose(mixed, (1, 0, 2, 3)).reshape(tile, heads, head_dim)
        return lax.dynamic_update_slice_in_dim(outputs, mixed, start, axis=0)

    outputs = lax.fori_loop(0, tile_ends[-1], run_tile, jnp.zeros_like(wide))
    return outputs[:num_tokens].astype(queries.dtype)


def causal_attention(
    queries: Float[Array, "B S H C"],
    keys: Float[Array, "B S G C"],
    values: Float[Array, "B S G C"],
    segment_ids: Int[Array, "B S"] | None,
) -> Float[Array, "B S H C"]:
    """Whole sequences, each token over itself and what came before it in its segment. Differentiable; for training."""
    (batch, length, heads, head_dim), groups = queries.shape, keys.shape[2]
    mask = jnp.tril(jnp.ones((length, length), bool))[None]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    wide = queries.astype(jnp.float32).reshape(batch, length, groups, heads // groups, head_dim)
    scores = jnp.einsum("bsgrc,btgc->bgrst", wide, keys.astype(jnp.float32)) * head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASK_VALUE), axis=-1)
    usable, has_nonfinite = mask_nonfinite(
        jnp.swapaxes(values.astype(jnp.float32), 1, 2), mask[:, None]
    )  # [B, G, T, C], [B, G, S]
    mixed = jnp.einsum("bgrst,bgtc->bsgrc", weights, usable)
    mixed = jnp.where(jnp.swapaxes(has_nonfinite, 1, 2)[..., None, None], jnp.nan, mixed)
    return mixed.reshape(queries.shape).astype(queries.dtype)


ATTENTION_BACKENDS: Mapping[str, AttentionBackend] = MappingProxyType(
    {
        "reference": AttentionBackend(
            name="reference", run=reference_attention, batch_invariant=True, kv_formats=frozenset({E4M3})
        ),
        "paged": AttentionBackend(name="paged", run=paged_attention, kv_formats=frozenset({E4M3})),
    }
)
