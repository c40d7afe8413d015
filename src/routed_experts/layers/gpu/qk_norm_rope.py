"""From one projected row to rotated queries, and to keys and values in their slots of the pool, as one kernel.

Queries and keys may be normalised, a head at a time or all of them, and rotated by position: whole heads or their
first dims, in halves or in pairs of neighbours. A norm of each head may come after that. All is rounded as `rms_norm`
and `apply_rotary` round; the pool is written in place. Padding tokens write nothing. Whole heads in halves have a
kernel of their own (halved_heads.py). Dims: N tokens, B requests, L
layers, P pages, H query heads, G kv heads, C head dim, F frequencies, R layers of the stack, T rows of a block."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import FusedQKV, PagedBatch
from routed_experts.layers.gpu.blocks import power_of_two
from routed_experts.layers.gpu.halved_heads import choose_block, prepare_halves
from routed_experts.layers.gpu.kv_write import TokenSlots, batch_arrays, scale_arrays
from routed_experts.layers.gpu.prepared_heads import HeadSizes, divide_by_kv_scale
from routed_experts.layers.gpu.rotary import rotate

FEATURES = frozenset(
    {
        *("no q/k norm", "a q/k norm of all heads", "a q/k norm without a scale", "an offset q/k norm"),
        "a norm after rotary positions",
        *("no rotary positions", "partial rotary positions", "interleaved rotary positions"),
    }
)
"""What `prepare` does beside head norms and rotary positions of whole heads, in the words of `stack_needs`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """Inside the kernel: a head of the projection, for a block of tokens. `inside`: the tokens that exist [T 1]."""

    arrays: Mapping[str, Any]
    sizes: HeadSizes
    head: Array
    tokens: Array
    lanes: Array
    inside: Array
    dim: int

    def load(self, columns: Array) -> Float[Array, "T C"]:
        """Columns of the head: the parts of the projection's sums, added up and rounded, and then its bias."""
        real, at, qkv = (self.lanes < self.dim)[None, :], self.head * self.dim + columns[None, :], self.arrays["qkv"]
        parts = [
            plgpu.load(qkv.at[split, self.tokens[:, None], at], mask=self.inside & real, other=0.0)
            for split in range(qkv.shape[0])
        ]
        total = functools.reduce(jnp.add, parts).astype(self.sizes.dtype)
        if "bias" not in self.arrays:
            return total
        return total + plgpu.load(self.arrays["bias"].at[self.arrays["layer"][0], at], mask=real, other=0.0)

    def prepared(self, name: str, first_head: Array | int) -> Float[Array, "T C"]:
        """The head with the norm `name`, whose heads begin at `first_head`, and positions, in their order."""
        traits, part = self.sizes.traits, self.load(self.lanes)
        if traits.norm_after_rope:
            value = self._rotated(part.astype(jnp.float32), lambda columns: self.load(columns).astype(jnp.float32))
            value = value.astype(self.sizes.dtype)
            return self._normed(value, self._inverse(name, value), name, first_head, self.lanes).astype(
                self.sizes.dtype
            )
        inverse = self._inverse(name, part)
        value = self._normed(part, inverse, name, first_head, self.lanes)
        load = lambda columns: self._normed(self.load(columns), inverse, name, first_head, columns)  # noqa: E731
        return self._rotated(value, load).astype(self.sizes.dtype)

    def _inverse(self, name: str, value: Array) -> Array | None:
        """The inverse root of the mean square that the norm divides by."""
        if not self.sizes.traits.qk_norm:
            return None
        if self.sizes.traits.qk_norm == "whole":
            at = self.tokens, int(name == "k_norm")
            return plgpu.load(self.arrays["inverses"].at[at], mask=self.inside[:, 0], other=0.0)[:, None]
        wide = value.astype(jnp.float32)
        return jax.lax.rsqrt(jnp.sum(wide * wide, axis=1) / self.dim + self.sizes.eps)[:, None]

    def _normed(
        self, value: Array, inverse: Array | None, name: str, first_head: Array | int, columns: Array
    ) -> Float[Array, "T C"]:
        """These columns by their norm, rounded as `rms_norm` rounds; float32."""
        wide, traits = value.astype(jnp.float32), self.sizes.traits
        if inverse is None:
            return wide
        if traits.qk_norm == "bare":
            return (wide * inverse).astype(self.sizes.dtype).astype(jnp.float32)
        at = (self.head - first_head) * self.dim + columns if traits.qk_norm == "whole" else columns
        norm, layer = self.arrays[name], self.arrays["layer"][0]
        scale = plgpu.load(norm.at[layer, at], mask=self.lanes < self.dim, other=0.0)[None, :]
        if traits.qk_norm_offset:
            scaled = wide * inverse * (scale.astype(jnp.float32) + traits.qk_norm_offset)
            return scaled.astype(self.sizes.dtype).astype(jnp.float32)
        return ((wide * inverse).astype(self.sizes.dtype) * scale).astype(jnp.float32)

    def _rotated(self, value: Array, load: Callable[[Array], Array]) -> Float[Array, "T C"]:
        """The columns by the angles of the tokens; `load` gives those of their pairs. Float32."""
        if not self.sizes.frequencies:
            return value
        angles = self.arrays["cos"], self.arrays["sin"]
        frequencies, interleaved = self.sizes.frequencies, self.sizes.traits.interleaved
        return rotate(value, load, angles, self.tokens, self.inside, frequencies, interleaved=interleaved)


def _qk_norm_rope(*refs: Any, names: tuple[str, ...], sizes: HeadSizes) -> None:
    """Block (head, tokens): a query head, or a head of keys or values."""
    arrays, batch, (_, queries, pool) = dict(zip(names, refs, strict=False)), list(refs[-7:-3]), refs[-3:]
    (num_tokens, _, dim), heads, groups = queries.shape, sizes.heads, sizes.groups
    head, tokens = pl.program_id(0), pl.program_id(1) * sizes.rows + jnp.arange(sizes.rows)
    lanes, inside = jnp.arange(power_of_two(dim)), (tokens < num_tokens)[:, None]
    own = _Head(
        arrays=arrays,
        sizes=sizes,
        head=head,
        tokens=tokens,
        lanes=lanes,
        inside=inside,
        dim=dim,
    )

    def write(value: Array, row: Array) -> None:
        slots = TokenSlots.of(tokens, pool, arrays["first_page"][0] * sizes.stride, batch)
        slots.store(pool, divide_by_kv_scale(value, row, arrays), row, lanes, dim)

    @pl.when(head < heads)
    def _() -> None:
        rows_inside = jnp.where(tokens < num_tokens, tokens, num_tokens)
        at = rows_inside[:, None], head, lanes[None, :]
        plgpu.store(queries.at[at], own.prepared("q_norm", 0), mask=inside & (lanes < dim)[None, :])

    @pl.when((head >= heads) & (head < heads + groups))
    def _() -> None:
        write(own.prepared("k_norm", heads), 2 * (head - heads))

    @pl.when(head >= heads + groups)
    def _() -> None:
        write(own.load(lanes), 2 * (head - heads - groups) + 1)


def _inverses(projected: FusedQKV, qkv: Float[Array, "S N O"], dtype: Any, bounds: list[int]) -> Float[Array, "N 2"]:
    """The inverse root of the mean square of all queries, and of all keys."""
    rows = jnp.sum(qkv, axis=0).astype(dtype)
    rows = rows if projected.bias is None else rows + projected.bias[projected.layer]
    parts = jnp.split(rows.astype(jnp.float32), bounds, axis=1)[:2]
    means = jnp.stack([jnp.mean(part * part, axis=1) for part in parts], axis=1)
    return jax.lax.rsqrt(means + projected.eps)


def _inputs(
    projected: FusedQKV, qkv: Float[Array, "S N O"], first_page: Array, dtype: Any, bounds: list[int], num_angles: int
) -> Mapping[str, Array]:
    """The kernel's arrays by name; those that a layer does not have are left out."""
    traits = projected.traits
    scalars = {"layer": projected.layer, "first_page": first_page}
    arrays = {name: jnp.asarray(value, jnp.int32).reshape(1) for name, value in scalars.items()} | {"qkv": qkv}
    if projected.bias is not None:
        arrays["bias"] = projected.bias
    if projected.kv_scales is not None:
        arrays |= zip(("kv_scales", "kv_layer"), scale_arrays(projected.kv_scales), strict=True)
    assert not (traits.norm_after_rope and traits.qk_norm == "whole"), "a norm of all heads comes before positions"
    if traits.qk_norm in ("head", "whole"):
        assert projected.q_norm is not None and projected.k_norm is not None, traits
        arrays |= {"q_norm": projected.q_norm, "k_norm": projected.k_norm}
    if traits.qk_norm == "whole":
        arrays["inverses"] = _inverses(projected, qkv, dtype, bounds)
    return arrays | {"cos": projected.cos, "sin": projected.sin} if num_angles else arrays


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
    groups, dim, traits = pool.shape[2] // 2, pool.shape[3], projected.traits
    qkv = projected.qkv.reshape(-1, *projected.qkv.shape[-2:])  # [S, N, HGGC]
    num_tokens, heads = qkv.shape[1], qkv.shape[2] // dim - 2 * groups
    angles = min(projected.cos.shape[1], dim // 2) if traits.rotary else 0
    is_halved = 2 * angles == dim == power_of_two(dim) and not traits.interleaved
    num_heads, rows, warps = (1, 1), 1 if num_tokens <= 64 else 4, 1
    if is_halved:
        num_heads, rows, warps = choose_block(num_tokens, heads, groups)
    dtype = projected.dtype or projected.qkv.dtype
    sizes = HeadSizes(
        heads=heads,
        groups=groups,
        frequencies=angles,
        rows=rows,
        stride=stride,
        eps=projected.eps,
        traits=traits,
        dtype=dtype,
    )
    inputs = _inputs(projected, qkv, first_page, dtype, [heads * dim, (heads + groups) * dim], angles)
    arrays = [*inputs.values(), *batch_arrays(batch), pool]
    kernel = functools.partial(_qk_norm_rope, names=tuple(inputs), sizes=sizes)
    if is_halved:
        kernel = functools.partial(prepare_halves, names=tuple(inputs), sizes=sizes, num_heads=num_heads)
    blocks = heads // num_heads[0] + 2 * groups // num_heads[1]
    queries, pool = pl.pallas_call(
        kernel,
        (jax.ShapeDtypeStruct((num_tokens, heads, dim), dtype), jax.ShapeDtypeStruct(pool.shape, pool.dtype)),
        grid=(blocks, pl.cdiv(num_tokens, rows)),
        input_output_aliases={len(arrays) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="prepare",
    )(*arrays)
    return queries, pool
