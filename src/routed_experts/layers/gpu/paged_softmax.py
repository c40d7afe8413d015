"""Softmax over the keys of a paged pool, a step of keys at a time: what the GPU's attention kernels share.

Dims: B requests, H query heads, C value dim, S splits, T keys of a step, M rows of a tile."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from routed_experts.layers.attention import MASK_VALUE, PagedBatch
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import first_visible
from routed_experts.layers.gpu.blocks import power_of_two
from routed_experts.layers.gpu.scaled_rows import PART_UNIT, scaled_shape, to_float16
from routed_experts.layers.quantized import ScaledRows

_MOST_WIDTH = 128  # dims of a block of `combine_splits`
DECODE_BLOCKS = 256  # about two of each multiprocessor: keys are split until the grid has so many
SPLIT_KEYS = 128  # fewest keys of a split at the longest context
LOG2E = 1.4426950408889634


State = tuple[Array, Array, Array]  # maximum [M], normaliser [M], weighted values [M C]


def empty_state(rows: int, dim: int, sinks: Array | None = None) -> State:
    """The state before the first key; `sinks` [M] have weight and no value."""
    zeros, mixed = jnp.zeros((rows,), jnp.float32), jnp.zeros((rows, dim), jnp.float32)
    if sinks is None:
        return zeros + MASK_VALUE, zeros, mixed
    return sinks * LOG2E, jnp.where(sinks > MASK_VALUE, 1.0, 0.0), mixed


def pages_of(
    table: Any, first: Array, request: Array, start: Array, end: Array, keys: int, page_size: int
) -> Callable[[Array | int], Array]:
    """The pages [T] of a request's step of keys from `start` on; page `first` from `end` on. A loop loads the pages of
    the step that follows, so that the keys of a step depend on no load of the table in it."""

    def load(step: Array | int) -> Array:
        positions = start + step * keys + jnp.arange(keys)
        return first + plgpu.load(table.at[request, positions // page_size], mask=positions < end, other=0)

    return load


def add_scores(state: State, products: Array, values: Array, mask: Array | None, scale: float | Array) -> State:
    """One step of the online softmax, in powers of two; scores are `products` times `scale`. Where a mask leaves a row
    nothing, what it adds has weight 0 from the row's first key on."""
    top, total, mixed = state
    scores = products * (scale * LOG2E)
    if mask is not None:
        scores = jnp.where(mask, scores, MASK_VALUE)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    shrink, weights = jnp.exp2(top - new_top), jnp.exp2(scores - new_top[:, None])
    mixed = mixed * shrink[:, None] + jnp.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return new_top, total * shrink + jnp.sum(weights, axis=1), mixed


def split_range(visible: Array, length: Array, split: Array, splits: int, keys: int) -> tuple[Array, Array]:
    """The first key of a split of the keys from `visible` to `length`, and the end of its last."""
    size = pl.cdiv(pl.cdiv(length - visible, splits), keys) * keys
    start = visible + split * size
    return start, jnp.minimum(start + size, length)


def store_heads(out: Any, row: Array, heads: Array, lanes: Array, mixed: Float[Array, "... C"], mask: Array) -> None:
    """Inside a kernel: write dims `lanes` of one head, or of `heads` [M], of a row; with scaled rows each head's power,
    too. `mask`: of the numbers."""
    last = lanes if heads.ndim == 0 else lanes[None, :]
    head = heads if heads.ndim == 0 else heads[:, None]
    if not isinstance(out, ScaledRows):
        plgpu.store(out.at[row, head, last], mixed, mask=mask)
        return
    arrays: Any = out.values, out.inverse
    values, inverse = to_float16(mixed)
    plgpu.store(arrays[0].at[row, head * out.part + last], values, mask=mask)
    plgpu.store(arrays[1].at[heads, row], inverse, mask=heads < arrays[1].shape[0])


def _combine_splits(parts: Any, tops: Any, totals: Any, out: Any, *, splits: int, width: int, dtype: Any) -> None:
    """Block (head, request, columns): the splits of one row in their order."""
    head, request = pl.program_id(0), pl.program_id(1)
    dim = parts.shape[3]
    lanes, order = pl.program_id(2) * width + jnp.arange(width), jnp.arange(power_of_two(splits))
    is_split, real = order < splits, lanes < dim
    top = plgpu.load(tops.at[request, order, head], mask=is_split, other=MASK_VALUE)
    total = plgpu.load(totals.at[request, order, head], mask=is_split, other=0.0)
    part = plgpu.load(
        parts.at[request, order[:, None], head, lanes[None, :]], mask=is_split[:, None] & real[None, :], other=0.0
    )
    scale = jnp.exp2(top - jnp.max(top, axis=0))
    mixed = jnp.sum(part * scale[:, None], axis=0) / jnp.maximum(jnp.sum(total * scale, axis=0), 1e-30)
    store_heads(out, request, head, lanes, mixed.astype(dtype), real)


def combine_splits(
    parts: list[Array], queries: jax.ShapeDtypeStruct, splits: int, *, interpret: bool
) -> Float[Array, "B H C"]:
    """Combine the splits of all rows; `parts`: weighted values [B S H C], maxima and normalisers [B S H]."""
    return combine_into(queries, parts, queries, splits, interpret=interpret)


def output_shape(queries: jax.ShapeDtypeStruct, *, scaled: bool) -> Any:
    """That of the values of all heads: [B H C], or `scaled`, as rows of all heads, each of whose heads is scaled."""
    num_rows, heads, dim = queries.shape
    assert not scaled or scales_heads(dim), "a block scales a head"
    return scaled_shape(num_rows, heads * dim, parts=heads) if scaled else queries


def combine_into(out: Any, parts: list[Array], queries: jax.ShapeDtypeStruct, splits: int, *, interpret: bool) -> Any:
    """The same into an `output_shape`."""
    num_rows, heads, dim = queries.shape
    width = min(_MOST_WIDTH, power_of_two(dim))
    return pl.pallas_call(
        functools.partial(_combine_splits, splits=splits, width=width, dtype=queries.dtype),
        out,
        grid=(heads, num_rows, pl.cdiv(dim, width)),
        compiler_params=plgpu.CompilerParams(num_warps=1 if splits <= 8 else 4, num_stages=1),
        interpret=interpret,
        name="combine_splits",
    )(*parts)


def scales_heads(dim: int) -> bool:
    """Whether kernels scale heads of that many dims, for the product that follows."""
    return dim <= _MOST_WIDTH and dim % PART_UNIT == 0


def part_shapes(num_rows: int, splits: int, heads: int, dim: int) -> list[jax.ShapeDtypeStruct]:
    """The shapes of what `combine_splits` combines."""
    return [jax.ShapeDtypeStruct((num_rows, splits, heads, *tail), jnp.float32) for tail in ((dim,), (), ())]


def most_visible(batch: PagedBatch, page_size: int, features: AttentionFeatures) -> int:
    """The most keys that a query attends to."""
    sizes = batch.page_table.shape[1] * page_size, features.window, features.chunk
    return min(size for size in sizes if size)


def choose_splits(num_requests: int, groups: int, most_keys: int, blocks: int = DECODE_BLOCKS) -> int:
    """Splits of a request's keys, so that the grid has about so many blocks; a power of two."""
    splits = 1
    while num_requests * groups * splits * 2 <= blocks and splits * SPLIT_KEYS < most_keys and splits < 64:
        splits *= 2
    return splits


def visible_bounds(first: Array, last: Array, features: AttentionFeatures) -> tuple[Array, Array, Array, Array]:
    """Bounds of the keys that the rows of a tile see, at positions `first` to `last`: the first key that one of them
    sees, the first and the end of the keys that all of them see (none, where the end comes first), and the end of
    all."""
    return first_visible(first, features), first_visible(last, features), first + 1, last + 1


def add_visible_keys(
    state: State,
    bounds: tuple[Array, Array, Array, Array],
    keys: int,
    step: Callable[[bool, Array, tuple[State, Array]], tuple[State, Array]],
    load_pages: Callable[[Array | int], Array],
    *,
    has_first: bool,
) -> State:
    """All steps over a tile's keys, each with its pages. `step` takes whether all rows see its keys; `has_first`:
    there may be keys that only the first rows see."""
    begin, full = (bounds[0] // keys, pl.cdiv(bounds[1], keys)) if has_first else (jnp.int32(0), jnp.int32(0))
    past = pl.cdiv(bounds[3], keys)
    full = jnp.minimum(full, past)
    full_end = jnp.maximum(bounds[2] // keys, full)
    masked, whole = functools.partial(step, False), functools.partial(step, True)
    carry = state, load_pages(begin)
    carry = lax.fori_loop(begin, full, masked, carry) if has_first else carry
    return lax.fori_loop(full_end, past, masked, lax.fori_loop(full, full_end, whole, carry))[0]
