"""Heads whose numbers are rotated in two halves, for queries, and keys and values in their slots of the pool: the most
common case of qk_norm_rope.py, with fewer loads.

A head is two halves, whose columns are pairs, so that each number is loaded once. A block has several heads, which
share the angles and the slots of its tokens. Rounded as the general kernel rounds. Dims: N tokens, H query heads, C
head dim, h half of it, T rows of a block."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.gpu.blocks import load_or_zero
from routed_experts.layers.gpu.kv_write import TokenSlots
from routed_experts.layers.gpu.prepared_heads import HeadSizes, divide_by_kv_scale

# Up to so many tokens of a step: heads of a block, its tokens, its warps. On an H200 the first two rows are the best of
# 16, or within 7 % of it, for 1, 16, 64 and 256 tokens of 32/4 heads of 128, and the last one is the best of 24 for
# 16,384 tokens of 32/4 heads of 128, 64/8 of 64 and 96/8 of 128.
_BLOCKS = ((32, 1, 2, 1), (2047, 1, 4, 4), (2**31, 2, 16, 4))
Halves = tuple[Float[Array, "T h"], Float[Array, "T h"]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _HalvedHead:
    """Inside a kernel: one head of the projection, for a block of tokens, in the model's dtype. `inside`: the tokens
    that exist [T 1], None: all."""

    arrays: Mapping[str, Any]
    sizes: HeadSizes
    head: Int[Array, ""]
    tokens: Int[Array, " T"]
    columns: tuple[Int[Array, " h"], Int[Array, " h"]]
    inside: Bool[Array, "T 1"] | None
    dim: int

    def load(self) -> Halves:
        """The parts of the projection's sums, added up and rounded, and then their bias."""
        first, second = (self._load(columns) for columns in self.columns)
        return first, second

    def _load(self, columns: Int[Array, " h"]) -> Float[Array, "T h"]:
        qkv, at = self.arrays["qkv"], self.head * self.dim + columns
        parts = [
            load_or_zero(qkv.at[part, self.tokens[:, None], at[None, :]], self.inside) for part in range(qkv.shape[0])
        ]
        total = functools.reduce(jnp.add, parts).astype(self.sizes.dtype)
        if "bias" not in self.arrays:
            return total
        return total + plgpu.load(self.arrays["bias"].at[self.arrays["layer"][0], at])[None, :]

    def prepared(self, name: str, first_head: Array | int, cos_sin: Halves) -> Halves:
        """The head with the norm `name`, whose heads begin at `first_head`, and rotated, in their order."""
        halves = self.load()
        if self.sizes.traits.norm_after_rope:
            return self._normed(self._rotated(halves, cos_sin), name, first_head)
        return self._rotated(self._normed(halves, name, first_head), cos_sin)

    def _rotated(self, halves: Halves, cos_sin: Halves) -> Halves:
        (first, second), (cos, sin), dtype = (half.astype(jnp.float32) for half in halves), cos_sin, self.sizes.dtype
        return (first * cos + second * -sin).astype(dtype), (second * cos + first * sin).astype(dtype)

    def _normed(self, halves: Halves, name: str, first_head: Array | int) -> Halves:
        """Rounded as `rms_norm` rounds."""
        traits, arrays, dtype = self.sizes.traits, self.arrays, self.sizes.dtype
        if not traits.qk_norm:
            return halves
        wide = [half.astype(jnp.float32) for half in halves]
        if traits.qk_norm == "whole":
            mask = None if self.inside is None else self.inside[:, 0]
            inverse = load_or_zero(arrays["inverses"].at[self.tokens, int(name == "k_norm")], mask)[:, None]
        else:
            squares = functools.reduce(jnp.add, [jnp.sum(half * half, axis=1) for half in wide])
            inverse = jax.lax.rsqrt(squares / self.dim + self.sizes.eps)[:, None]

        def scaled(half: Float[Array, "T h"], columns: Int[Array, " h"]) -> Float[Array, "T h"]:
            if traits.qk_norm == "bare":
                return (half * inverse).astype(dtype)
            at = (self.head - first_head) * self.dim + columns if traits.qk_norm == "whole" else columns
            scale = plgpu.load(arrays[name].at[arrays["layer"][0], at])[None, :]
            if traits.qk_norm_offset:
                return (half * inverse * (scale.astype(jnp.float32) + traits.qk_norm_offset)).astype(dtype)
            return (half * inverse).astype(dtype) * scale

        first, second = (scaled(half, columns) for half, columns in zip(wide, self.columns, strict=True))
        return first, second


def prepare_halves(*refs: Any, names: tuple[str, ...], sizes: HeadSizes, num_heads: tuple[int, int]) -> None:
    """Block (heads, tokens): some query heads, or heads of keys, or of values; `num_heads`: of a block of queries, and
    of one of keys or values."""
    arrays, batch, (_, queries, pool) = dict(zip(names, refs, strict=False)), list(refs[-7:-3]), refs[-3:]
    (num_tokens, _, dim), heads, groups = queries.shape, sizes.heads, sizes.groups
    block, tokens = pl.program_id(0), pl.program_id(1) * sizes.rows + jnp.arange(sizes.rows)
    lanes, inside = jnp.arange(dim // 2), None if num_tokens % sizes.rows == 0 else (tokens < num_tokens)[:, None]
    columns = lanes, dim // 2 + lanes
    query_blocks, kv_blocks = heads // num_heads[0], groups // num_heads[1]

    def halved(head: Array) -> _HalvedHead:
        return _HalvedHead(
            arrays=arrays, sizes=sizes, head=head, tokens=tokens, columns=columns, inside=inside, dim=dim
        )

    def load_cos_sin() -> Halves:
        cos, sin = (load_or_zero(arrays[name].at[tokens[:, None], lanes[None, :]], inside) for name in ("cos", "sin"))
        return cos, sin

    def write(first: Array, *, is_value: bool) -> None:
        slots = TokenSlots.of(tokens, pool, arrays["first_page"][0] * sizes.stride, batch)
        cos_sin = None if is_value else load_cos_sin()
        for index in range(num_heads[1]):
            group = first + index
            own = halved(heads + group + int(is_value) * groups)
            halves = own.load() if cos_sin is None else own.prepared("k_norm", heads, cos_sin)
            for half, at in zip(halves, columns, strict=True):
                kv_row = 2 * group + int(is_value)
                slots.store(pool, divide_by_kv_scale(half, kv_row, arrays), kv_row, at, dim)

    @pl.when(block < query_blocks)
    def _() -> None:
        cos_sin = load_cos_sin()
        for index in range(num_heads[0]):
            head = block * num_heads[0] + index
            for half, at in zip(halved(head).prepared("q_norm", 0, cos_sin), columns, strict=True):
                plgpu.store(queries.at[tokens[:, None], head, at[None, :]], half, mask=inside)

    @pl.when((block >= query_blocks) & (block < query_blocks + kv_blocks))
    def _() -> None:
        write((block - query_blocks) * num_heads[1], is_value=False)

    @pl.when(block >= query_blocks + kv_blocks)
    def _() -> None:
        write((block - query_blocks - kv_blocks) * num_heads[1], is_value=True)


def choose_block(num_tokens: int, heads: int, groups: int) -> tuple[tuple[int, int], int, int]:
    """For a step of so many tokens: the heads of a block of queries, and of one of keys or values, which divide their
    numbers; the tokens of a block, and its warps."""
    most, tokens, warps = next(row[1:] for row in _BLOCKS if num_tokens <= row[0])
    return (math.gcd(heads, most), math.gcd(groups, most)), tokens, warps
