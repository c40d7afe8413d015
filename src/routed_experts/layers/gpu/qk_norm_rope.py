"""From one projected row to rotated queries, and to keys and values in their slots of the pool, as one kernel.

Queries and keys are normalised a head at a time and rotated by position (half-split rotary form), rounded as
`rms_norm` and `apply_rotary` round; the pool is written in place. Padding tokens write nothing. Dims: N tokens, B
requests, L layers, P pages, H query heads, G kv heads, C head dim, R layers of the stack, T rows of a block."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import FusedQKV, PagedBatch
from routed_experts.layers.gpu.blocks import power_of_two


def _norm_and_rotate(
    part: Array, partner: Array, scale: Array, partner_scale: Array, angles: tuple[Array, Array], eps: float, dim: int
) -> Array:
    """Norm and rotary of one head; `partner` holds each column's other half."""
    dtype = part.dtype
    wide, other = part.astype(jnp.float32), partner.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.sum(wide * wide, axis=1) / dim + eps)[:, None]
    wide = ((wide * inverse).astype(dtype) * scale[None, :]).astype(jnp.float32)
    other = ((other * inverse).astype(dtype) * partner_scale[None, :]).astype(jnp.float32)
    return (wide * angles[0] + other * angles[1]).astype(dtype)


def _qk_norm_rope(*refs: Any, heads: int, groups: int, eps: float, rows: int, page_size: int, stride: int) -> None:
    layer, first_page, qkv, q_norm, k_norm, cos, sin, positions, token_rows, valid, table, _, queries, pool = refs
    num_tokens, dim = queries.shape[0], queries.shape[2]
    block, head = pl.program_id(1), pl.program_id(0)
    tokens, lanes = block * rows + jnp.arange(rows), jnp.arange(power_of_two(dim))
    inside, real = (tokens < num_tokens)[:, None], (lanes < dim)[None, :]
    half = dim // 2
    partners = jnp.where(lanes < half, lanes + half, lanes - half)
    partners = jnp.where(lanes < dim, partners, 0)

    def projected(columns: Array) -> Array:
        at = tokens[:, None], head * dim + columns[None, :]
        parts = [plgpu.load(qkv.at[(split, *at)], mask=inside & real, other=0.0) for split in range(qkv.shape[0])]
        return functools.reduce(jnp.add, parts).astype(queries.dtype)

    part = projected(lanes)

    def rotated(norm: Any) -> Array:
        partner = projected(partners)
        scales = [plgpu.load(norm.at[layer[0], index], mask=lanes < dim, other=0.0) for index in (lanes, partners)]
        cosines = plgpu.load(cos.at[tokens[:, None], lanes[None, :]], mask=inside & real, other=0.0)
        sines = plgpu.load(sin.at[tokens[:, None], lanes[None, :]], mask=inside & real, other=0.0)
        sines = jnp.where((lanes < half)[None, :], -sines, sines)
        return _norm_and_rotate(part, partner, scales[0], scales[1], (cosines, sines), eps, dim)

    def write(value: Array, row: Array) -> None:
        is_valid = plgpu.load(valid.at[tokens], mask=tokens < num_tokens, other=False)
        at = plgpu.load(positions.at[tokens], mask=is_valid, other=0)
        request = plgpu.load(token_rows.at[tokens], mask=is_valid, other=0)
        page = plgpu.load(table.at[request, at // page_size], mask=is_valid, other=0)
        page = jnp.where(is_valid, first_page[0] * stride + page, pool.shape[0])
        plgpu.store(
            pool.at[page[:, None], (at % page_size)[:, None], row, lanes[None, :]], value, mask=is_valid[:, None] & real
        )

    @pl.when(head < heads)
    def _() -> None:
        there = jnp.where(tokens < num_tokens, tokens, num_tokens)
        plgpu.store(queries.at[there[:, None], head, lanes[None, :]], rotated(q_norm), mask=inside & real)

    @pl.when((head >= heads) & (head < heads + groups))
    def _() -> None:
        write(rotated(k_norm), 2 * (head - heads))

    @pl.when(head >= heads + groups)
    def _() -> None:
        write(part, 2 * (head - heads - groups) + 1)


def prepare(
    projected: FusedQKV,
    pool: Float[Array, "LP page 2G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    *,
    stride: int = 1,
    interpret: bool = False,
) -> tuple[Float[Array, "N H C"], Float[Array, "LP page 2G C"]]:
    """Queries, normalised and rotated, and the pool with the new keys and values. `first_page` counts in steps of
    `stride`."""
    groups, dim = pool.shape[2] // 2, pool.shape[3]
    qkv = projected.qkv.reshape(-1, *projected.qkv.shape[-2:])  # [S, N, HGGC]
    num_tokens, heads = qkv.shape[1], qkv.shape[2] // dim - 2 * groups
    rows = 1 if num_tokens <= 64 else 16
    kernel = functools.partial(
        _qk_norm_rope, heads=heads, groups=groups, eps=projected.eps, rows=rows, page_size=pool.shape[1], stride=stride
    )
    scalars = [jnp.asarray(value, jnp.int32).reshape(1) for value in (projected.layer, first_page)]
    arrays = [qkv, projected.q_norm, projected.k_norm, projected.cos, projected.sin]
    places = [batch.positions, batch.token_rows, batch.valid, batch.page_table]
    queries = jax.ShapeDtypeStruct((num_tokens, heads, dim), projected.q_norm.dtype)
    queries, pool = pl.pallas_call(
        kernel,
        (queries, jax.ShapeDtypeStruct(pool.shape, pool.dtype)),
        grid=(heads + 2 * groups, pl.cdiv(num_tokens, rows)),
        input_output_aliases={11: 1},
        compiler_params=plgpu.CompilerParams(num_warps=1 if rows == 1 else 4, num_stages=1),
        interpret=interpret,
        name="prepare",
    )(*scalars, *arrays, *places, pool)
    return queries, pool
