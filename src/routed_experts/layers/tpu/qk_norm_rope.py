"""From one projected row to rotated queries, and to keys and values in their slots of the pool, as one TPU kernel.

Queries and keys are normalised a head at a time and rotated by position (half-split rotary form), rounded as
`rms_norm` and `apply_rotary` round. Each token's keys and values are adjacent in VMEM as the pool holds them,
and are copied out once a token; padding tokens write nothing. As array code it is twenty operations a layer. Dims: N
tokens, B requests, W pages of a request, L layers, P pages, H query heads, G kv heads, C head dim, R layers of the
stack, T tokens of a tile."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import FusedQKV, PagedBatch, write_kv
from routed_experts.layers.norm import rms_norm
from routed_experts.layers.rotary import apply_rotary

TOKEN_TILE = 64
VMEM_BYTES = 48 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Refs:
    """The kernel's arrays: scalars, the projection and its norms and angles, the pool in HBM, queries, and scratch."""

    first_page: Any
    query_starts: Any
    positions: Any
    token_rows: Any
    page_table: Any
    qkv: Any  # [T HGGC]
    q_norm: Any  # [R C]
    k_norm: Any
    layer: Any  # in the run; in SMEM
    cos: Any  # [T C]
    sin: Any
    pool_before: Any  # the same memory as `pool`
    queries: Any  # [T H C]
    pool: Any
    both: Any  # [T 2G C]
    written: Any


def prepare(
    projected: FusedQKV,
    pool: Float[Array, "LP page 2G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "N H C"], Float[Array, "LP page 2G C"]]:
    """Queries, normalised and rotated, and the pool with the new keys and values. Heads narrower than the pool's rows,
    which cannot be cut out of the projection as whole lanes, take array code."""
    if projected.cos.shape[1] != pool.shape[3]:
        return prepare_plainly(projected, pool, first_page, batch)
    (num_tokens, columns), (_, _, rows, head_dim) = projected.qkv.shape, pool.shape
    heads, tile = columns // head_dim - rows, min(num_tokens, TOKEN_TILE)
    num_layers = projected.q_norm.shape[0]

    def of_tokens(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((tile, width), lambda index, *_: (index, 0))

    norms = pl.BlockSpec((num_layers, head_dim), lambda index, *_: (0, 0))
    outside = pl.BlockSpec(memory_space=pl.ANY)
    queries, pool = pl.pallas_call(
        functools.partial(_kernel, eps=projected.eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(pl.cdiv(num_tokens, tile),),
            in_specs=[
                of_tokens(columns),
                norms,
                norms,
                pl.BlockSpec(memory_space=pltpu.SMEM),
                of_tokens(head_dim),
                of_tokens(head_dim),
                outside,
            ],
            out_specs=[pl.BlockSpec((tile, heads, head_dim), lambda index, *_: (index, 0, 0)), outside],
            scratch_shapes=[pltpu.VMEM((tile, rows, head_dim), pool.dtype), pltpu.SemaphoreType.DMA],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((num_tokens, heads, head_dim), projected.qkv.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={11: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="prepare",
    )(
        first_page.reshape(1),
        batch.query_starts,
        batch.positions,
        batch.token_rows,
        batch.page_table,
        projected.qkv,
        projected.q_norm,
        projected.k_norm,
        jnp.asarray(projected.layer, jnp.int32).reshape(1),
        projected.cos,
        projected.sin,
        pool,
    )
    return queries, pool


def prepare_plainly(
    projected: FusedQKV, pool: Float[Array, "LP page 2G C"], first_page: Int[Array, ""], batch: PagedBatch
) -> tuple[Float[Array, "N H C"], Float[Array, "LP page 2G C"]]:
    """The same as array code: the oracle of the kernel."""
    groups, (cos, sin) = pool.shape[2] // 2, (projected.cos, projected.sin)
    mixed = projected.qkv.reshape(projected.qkv.shape[0], -1, cos.shape[1])
    queries, keys, values = jnp.split(mixed, [mixed.shape[1] - 2 * groups, mixed.shape[1] - groups], axis=1)
    scales = (
        lax.dynamic_index_in_dim(norms, projected.layer, keepdims=False)
        for norms in (projected.q_norm, projected.k_norm)
    )
    parts = zip((queries, keys), scales, strict=True)
    queries, keys = (apply_rotary(rms_norm(part, scale, eps=projected.eps), cos, sin) for part, scale in parts)
    return queries, write_kv(pool, keys, values, first_page, batch)


def _kernel(*refs: Any, eps: float) -> None:
    """One tile of tokens."""
    arrays = _Refs(**dict(zip((field.name for field in dataclasses.fields(_Refs)), refs, strict=True)))
    heads, groups = arrays.queries.shape[1], arrays.both.shape[1] // 2
    scales = [_row(norms[...], arrays.layer[0]) for norms in (arrays.q_norm, arrays.k_norm)]
    for head in range(heads):
        arrays.queries[:, head, :] = _turned(arrays, head, scales[0], eps)
    for group in range(groups):
        arrays.both[:, 2 * group, :] = _turned(arrays, heads + group, scales[1], eps).astype(arrays.both.dtype)
        arrays.both[:, 2 * group + 1, :] = _head(arrays, heads + groups + group).astype(arrays.both.dtype)
    _write(arrays)


def _row(norms: Float[Array, "R C"], layer: Int[Array, ""]) -> Float[Array, "1 C"]:
    """One layer's norm: by selection, because no row of packed numbers can be read from a place that is not known
    beforehand."""
    rows = lax.broadcasted_iota(jnp.int32, norms.shape, 0)
    picked = jnp.sum(jnp.where(rows == layer, norms.astype(jnp.float32), 0.0), axis=0, keepdims=True)
    return picked.astype(norms.dtype)


def _head(refs: _Refs, index: int) -> Float[Array, "T C"]:
    head_dim = refs.cos.shape[1]
    return refs.qkv[:, index * head_dim : (index + 1) * head_dim]


def _turned(refs: _Refs, index: int, scale: Float[Array, "1 C"], eps: float) -> Float[Array, "T C"]:
    """Norm and rotary of one head."""
    part = _head(refs, index)
    wide = part.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + eps)
    wide = ((wide * inverse).astype(part.dtype) * scale).astype(jnp.float32)
    half = wide.shape[1] // 2
    low = lax.broadcasted_iota(jnp.int32, wide.shape, 1) < half
    swapped = pltpu.roll(wide, half, axis=1)  # the other half of each pair
    return (wide * refs.cos[...] + jnp.where(low, -swapped, swapped) * refs.sin[...]).astype(part.dtype)


def _write(refs: _Refs) -> None:
    """Copy each token's keys and values to its slot: all are started, then all are waited for."""
    tile, page_size = refs.both.shape[0], refs.pool.shape[1]
    start = pl.program_id(0) * tile
    count = jnp.clip(refs.query_starts[refs.query_starts.shape[0] - 1] - start, 0, tile)

    def one(index: Int[Array, ""], *, wait: bool) -> None:
        position = refs.positions[start + index]
        page = refs.first_page[0] + refs.page_table[refs.token_rows[start + index], lax.div(position, page_size)]
        copy = pltpu.make_async_copy(
            refs.both.at[index], refs.pool.at[page, lax.rem(position, page_size)], refs.written
        )
        (copy.wait if wait else copy.start)()

    for wait in (False, True):
        lax.fori_loop(0, count, lambda index, _, wait=wait: one(index, wait=wait), None)
