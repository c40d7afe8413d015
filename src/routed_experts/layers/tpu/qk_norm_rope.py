"""From one projected row to rotated queries, and to keys and values in their slots of the pool, as one TPU kernel.

Queries and keys may be normalised, a head at a time or all of them, before or after they are rotated by position: whole
heads or their first dims, in halves or in pairs of neighbours. They are rounded as `rms_norm` and the rotary forms
round. Where heads are gated, each query has its gate behind it, which is left to the caller. A head that is narrower
than the pool's rows is cut out of whole tiles of lanes, and has zeros beside it. Each token's keys and values are
adjacent in VMEM as the pool holds them, and are copied out once a token; padding tokens write nothing. As array code it
is twenty operations a layer. Dims: N tokens, B requests, W pages of a request, L layers, P pages, H query heads, G kv
heads, C head dim, X width of the pool's rows, F frequencies, R layers of the stack, T tokens of a tile."""

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
from routed_experts.layers.rotary import RotarySpec, apply_rotary
from routed_experts.layers.stack_traits import StackTraits

TOKEN_TILE = 64
LANES = 128
VMEM_BYTES = 48 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What is static in one build of the kernel. `angles`: numbers of a row of cosines, twice the frequencies where
    each is there twice; 0 for no positions."""

    heads: int
    groups: int
    head_dim: int
    angles: int
    frequencies: int
    eps: float
    traits: StackTraits

    @property
    def query_heads(self) -> range:
        """Where queries are in the projection, in heads; each has its gate behind it, where heads are gated."""
        return range(0, self.heads * _heads_of_query(self.traits), _heads_of_query(self.traits))

    @property
    def key_heads(self) -> range:
        """Where keys are."""
        return range(self.query_heads.stop, self.query_heads.stop + self.groups)

    @property
    def value_heads(self) -> range:
        """Where values are."""
        return range(self.key_heads.stop, self.key_heads.stop + self.groups)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Refs:
    """The kernel's arrays: scalars, the projection and its norms and angles, the pool in HBM, queries, and scratch."""

    first_page: Any
    query_starts: Any
    positions: Any
    token_rows: Any
    page_table: Any
    qkv: Any  # [T HGGC]
    q_norm: Any  # [R C] or [R HC], or of one number where there is none
    k_norm: Any
    layer: Any  # in the run; in SMEM
    cos: Any  # [T angles]
    sin: Any
    pool_before: Any  # the same memory as `pool`
    queries: Any  # [T H X]
    pool: Any
    key_values: Any  # [T 2G X]
    semaphore: Any


def prepare(
    projected: FusedQKV,
    pool: Float[Array, "LP page 2G X"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "N H X"], Float[Array, "LP page 2G X"]]:
    """Queries, normalised and rotated, and the pool with the new keys and values. Narrow heads whose projection is not
    whole tiles of lanes take array code."""
    assert projected.bias is None, "biases are added before"
    (num_tokens, columns), (_, _, rows, width), traits = projected.qkv.shape, pool.shape, projected.traits
    head_dim = projected.head_dim or width
    norms = [norm for norm in (projected.q_norm, projected.k_norm) if norm is not None]
    is_rare = traits.norm_after_rope and traits.qk_norm == "whole"
    is_cut = head_dim != width and any(size % LANES for size in (columns, width, *_whole_widths(norms, traits)))
    if is_rare or is_cut:
        return prepare_plainly(projected, pool, first_page, batch)
    heads, tile = (columns // head_dim - rows) // _heads_of_query(traits), min(num_tokens, TOKEN_TILE)
    angles = projected.cos.shape[1] if traits.rotary else 0
    form = _Form(
        heads=heads,
        groups=rows // 2,
        head_dim=head_dim,
        angles=angles,
        frequencies=angles // 2 if _is_doubled(projected, head_dim) else angles,
        eps=projected.eps,
        traits=traits,
    )
    norms = [_padded_norm(norm, width, traits) for norm in norms] or [jnp.zeros((1, 1), projected.qkv.dtype)] * 2
    cos, sin = (projected.cos, projected.sin) if angles else (jnp.zeros((num_tokens, 1), jnp.float32),) * 2

    def of_tokens(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((tile, width), lambda index, *_: (index, 0))

    outside = pl.BlockSpec(memory_space=pl.ANY)
    queries, pool = pl.pallas_call(
        functools.partial(_kernel, form=form),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(pl.cdiv(num_tokens, tile),),
            in_specs=[
                of_tokens(columns),
                *[pl.BlockSpec(norm.shape, lambda index, *_: (0, 0)) for norm in norms],
                pl.BlockSpec(memory_space=pltpu.SMEM),
                of_tokens(cos.shape[1]),
                of_tokens(sin.shape[1]),
                outside,
            ],
            out_specs=[pl.BlockSpec((tile, heads, width), lambda index, *_: (index, 0, 0)), outside],
            scratch_shapes=[pltpu.VMEM((tile, rows, width), pool.dtype), pltpu.SemaphoreType.DMA],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((num_tokens, heads, width), projected.qkv.dtype),
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
        *norms,
        jnp.asarray(projected.layer, jnp.int32).reshape(1),
        cos,
        sin,
        pool,
    )
    return queries, pool


def prepare_plainly(
    projected: FusedQKV, pool: Float[Array, "LP page 2G X"], first_page: Int[Array, ""], batch: PagedBatch
) -> tuple[Float[Array, "N H X"], Float[Array, "LP page 2G X"]]:
    """The same as array code: the oracle of the kernel."""
    groups, traits, width = pool.shape[2] // 2, projected.traits, pool.shape[3]
    head_dim = projected.head_dim or width
    mixed = projected.qkv.reshape(projected.qkv.shape[0], -1, head_dim)
    queries, keys, values = jnp.split(mixed, [mixed.shape[1] - 2 * groups, mixed.shape[1] - groups], axis=1)
    queries = queries[:, :: _heads_of_query(traits)]

    def normed(part: Float[Array, "N H C"], norms: Float[Array, "R O"] | None) -> Float[Array, "N H C"]:
        if not traits.qk_norm:
            return part
        scale = jnp.ones(head_dim, part.dtype) if norms is None else norms[projected.layer]
        flat = part.reshape(part.shape[0], -1) if traits.qk_norm == "whole" else part
        return rms_norm(flat, scale, eps=projected.eps, offset=traits.qk_norm_offset).reshape(part.shape)

    def rotated(part: Float[Array, "N H C"]) -> Float[Array, "N H C"]:
        if not traits.rotary:
            return part
        if _is_doubled(projected, head_dim):
            return apply_rotary(part, projected.cos, projected.sin)
        spec = RotarySpec(inverse=(0.0,) * projected.cos.shape[1], interleaved=traits.interleaved)
        return spec.apply(part, (projected.cos, projected.sin))

    def both(part: Float[Array, "N H C"], norms: Float[Array, "R O"] | None) -> Float[Array, "N H C"]:
        return normed(rotated(part), norms) if traits.norm_after_rope else rotated(normed(part, norms))

    queries, keys = both(queries, projected.q_norm), both(keys, projected.k_norm)
    return jnp.pad(queries, ((0, 0), (0, 0), (0, width - head_dim))), write_kv(pool, keys, values, first_page, batch)


def gates_of(projected: FusedQKV, num_heads: int) -> Float[Array, "N H C"]:
    """The gates of a projection whose heads are gated."""
    num_tokens, head_dim = projected.qkv.shape[0], projected.head_dim
    return projected.qkv[:, : 2 * num_heads * head_dim].reshape(num_tokens, num_heads, 2, head_dim)[:, :, 1]


def _heads_of_query(traits: StackTraits) -> int:
    """A query, and its gate."""
    return 2 if traits.gated else 1


def _is_doubled(projected: FusedQKV, head_dim: int) -> bool:
    """Whether each angle is there twice: where whole heads are rotated in halves."""
    return not projected.traits.interleaved and projected.cos.shape[1] == head_dim


def _whole_widths(norms: list[Float[Array, "R O"]], traits: StackTraits) -> list[int]:
    """Widths of norms that are cut into heads."""
    return [norm.shape[1] for norm in norms] if traits.qk_norm == "whole" else []


def _padded_norm(norm: Float[Array, "R O"], width: int, traits: StackTraits) -> Float[Array, "R O"]:
    """The norm of a head, as wide as the pool's rows; that of all heads as it is."""
    return norm if traits.qk_norm == "whole" else jnp.pad(norm, ((0, 0), (0, width - norm.shape[1])))


def _kernel(*refs: Any, form: _Form) -> None:
    """One tile of tokens."""
    arrays = _Refs(**dict(zip((field.name for field in dataclasses.fields(_Refs)), refs, strict=True)))
    angles = _wide_angles(arrays, form)
    for heads, norms in ((form.query_heads, arrays.q_norm), (form.key_heads, arrays.k_norm)):
        scale = _row(norms[...], arrays.layer[0]) if form.traits.qk_norm not in ("", "bare") else None
        parts = _heads_inverse(arrays, form, heads) if form.traits.qk_norm == "whole" else None
        for index, head in enumerate(heads):
            value = _prepared(_head(arrays, head, form), index, scale, parts, angles, form)
            if heads == form.key_heads:
                arrays.key_values[:, 2 * index, :] = value.astype(arrays.key_values.dtype)
            else:
                arrays.queries[:, index, :] = value
    for group, head in enumerate(form.value_heads):
        value = _head(arrays, head, form).astype(arrays.key_values.dtype)
        arrays.key_values[:, 2 * group + 1, :] = value
    _write(arrays)


def _row(norms: Float[Array, "R C"], layer: Int[Array, ""]) -> Float[Array, "1 C"]:
    """One layer's norm: by selection, because no row of packed numbers can be read at an index that is known only at
    run time."""
    rows = lax.broadcasted_iota(jnp.int32, norms.shape, 0)
    picked = jnp.sum(jnp.where(rows == layer, norms.astype(jnp.float32), 0.0), axis=0, keepdims=True)
    return picked.astype(norms.dtype)


def _head(refs: _Refs, index: int, form: _Form) -> Float[Array, "T X"]:
    """One head of the projection."""
    return _cut(refs.qkv, index, form.head_dim, refs.queries.shape[2])


def _cut(source: Any, index: int, size: int, width: int) -> Float[Array, "T X"]:
    """Columns of one head, with zeros beside them up to `width`; only whole tiles of lanes can be cut out."""
    start = index * size
    if size == width:
        return source[:, start : start + size]
    low, high = start // LANES * LANES, -(-(start + size) // LANES) * LANES
    window = source[:, low:high].astype(jnp.float32)
    if start > low:
        window = pltpu.roll(window, high - low - (start - low), axis=1)
    lane = lax.broadcasted_iota(jnp.int32, (window.shape[0], width), 1)
    return jnp.where(lane < size, window[:, :width], 0.0).astype(source.dtype)


def _heads_inverse(refs: _Refs, form: _Form, heads: range) -> Float[Array, "T 1"]:
    """The inverse root of the mean square of some heads."""
    total = jnp.zeros((refs.qkv.shape[0], 1), jnp.float32)
    for head in heads:
        wide = _head(refs, head, form).astype(jnp.float32)
        total = total + jnp.sum(wide * wide, axis=1, keepdims=True)
    return lax.rsqrt(total / (len(heads) * form.head_dim) + form.eps)


def _wide_angles(refs: _Refs, form: _Form) -> tuple[Float[Array, "T X"], Float[Array, "T X"]] | None:
    """Cosines and sines in the lanes that they rotate, 0 elsewhere: by a product with ones and zeros, which is
    exact."""
    width = refs.queries.shape[2]
    if not form.angles:
        return None
    if form.angles == width:
        return refs.cos[...], refs.sin[...]
    angle = lax.broadcasted_iota(jnp.int32, (form.angles, width), 0)
    lane = lax.broadcasted_iota(jnp.int32, (form.angles, width), 1)
    own_angle = lax.div(lane, 2) if form.traits.interleaved else lax.rem(lane, form.angles)
    picks = jnp.where((own_angle == angle) & (lane < 2 * form.frequencies), 1.0, 0.0)
    cos, sin = (
        lax.dot_general(part[...], picks, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)
        for part in (refs.cos, refs.sin)
    )
    return cos, sin


def _prepared(
    part: Float[Array, "T X"],
    index: int,
    scale: Float[Array, "1 O"] | None,
    inverse: Float[Array, "T 1"] | None,
    angles: tuple[Float[Array, "T X"], Float[Array, "T X"]] | None,
    form: _Form,
) -> Float[Array, "T X"]:
    """Norm and rotary of one head, in the order of the layer. `inverse`: of all heads, where they have one norm."""
    traits = form.traits
    if traits.norm_after_rope:
        part = _rotated(part, angles, form)
    if traits.qk_norm:
        wide = part.astype(jnp.float32)
        if inverse is None:
            inverse = lax.rsqrt(jnp.sum(wide * wide, axis=1, keepdims=True) / form.head_dim + form.eps)
        if scale is not None and traits.qk_norm == "whole":
            scale = _cut(scale, index, form.head_dim, part.shape[1])
        if scale is None:
            part = (wide * inverse).astype(part.dtype)
        elif traits.qk_norm_offset:
            part = (wide * inverse * (scale.astype(jnp.float32) + traits.qk_norm_offset)).astype(part.dtype)
        else:
            part = (wide * inverse).astype(part.dtype) * scale
    return part if traits.norm_after_rope else _rotated(part, angles, form)


def _rotated(
    part: Float[Array, "T X"], angles: tuple[Float[Array, "T X"], Float[Array, "T X"]] | None, form: _Form
) -> Float[Array, "T X"]:
    """Rotary of one head."""
    if angles is None:
        return part
    wide, size = part.astype(jnp.float32), form.frequencies
    lane = lax.broadcasted_iota(jnp.int32, wide.shape, 1)
    if form.traits.interleaved:
        shift, is_first = 1, lax.rem(lane, 2) == 0
    else:
        shift, is_first = size, lane < size
    below = pltpu.roll(wide, shift, axis=1)
    above = below if 2 * shift == wide.shape[1] else pltpu.roll(wide, wide.shape[1] - shift, axis=1)
    rotated = wide * angles[0] + jnp.where(is_first, -above, below) * angles[1]
    return (rotated if 2 * size == wide.shape[1] else jnp.where(lane < 2 * size, rotated, wide)).astype(part.dtype)


def _write(refs: _Refs) -> None:
    """Copy each token's keys and values to its slot: all are started, then all are waited for."""
    tile, page_size = refs.key_values.shape[0], refs.pool.shape[1]
    start = pl.program_id(0) * tile
    count = jnp.clip(refs.query_starts[refs.query_starts.shape[0] - 1] - start, 0, tile)

    def copy_token(index: Int[Array, ""], *, wait: bool) -> None:
        position = refs.positions[start + index]
        page = refs.first_page[0] + refs.page_table[refs.token_rows[start + index], lax.div(position, page_size)]
        copy = pltpu.make_async_copy(
            refs.key_values.at[index], refs.pool.at[page, lax.rem(position, page_size)], refs.semaphore
        )
        (copy.wait if wait else copy.start)()

    for wait in (False, True):
        lax.fori_loop(0, count, lambda index, _, wait=wait: copy_token(index, wait=wait), None)
