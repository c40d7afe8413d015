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
from jaxtyping import Array, Float

from routed_experts.layers.gpu.blocks import load_or_zero
from routed_experts.layers.gpu.kv_write import TokenSlots
from routed_experts.layers.stack_traits import StackTraits

_MOST_HEADS = 2  # of a block
PROMPT_BLOCK = 16, 4  # tokens of a block in prompts, and its warps
# Both measured best of 24 on an H200: 16,384 tokens of 32/4 heads of 128, 64/8 of 64 and 96/8 of 128.
Halves = tuple[Float[Array, "T h"], Float[Array, "T h"]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """Constants of a kernel. `frequencies` 0: no positions; `rows`: tokens of a block; `dtype`: of the model."""

    heads: int
    groups: int
    frequencies: int
    rows: int
    stride: int
    eps: float
    traits: StackTraits
    dtype: Any


def divided(value: Array, row: Array | int, arrays: Mapping[str, Any]) -> Array:
    """Keys or values by the scale of row `row` of a slot, where the pool is codes with scales."""
    if "kv_scales" not in arrays:
        return value
    return value.astype(jnp.float32) / arrays["kv_scales"][arrays["kv_layer"][0], row % 2]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _HalvedRow:
    """Inside a kernel: one head of the projection, for a block of tokens, in the model's dtype. `inside`: the tokens
    that exist [T 1], None: all."""

    arrays: Mapping[str, Any]
    sizes: HeadSizes
    head: Array
    tokens: Array
    columns: tuple[Array, Array]
    inside: Array | None
    dim: int

    def load(self) -> Halves:
        """The parts of the projection's sums, added up and rounded, and then their bias."""
        first, second = (self._load(columns) for columns in self.columns)
        return first, second

    def _load(self, columns: Array) -> Array:
        qkv, at = self.arrays["qkv"], self.head * self.dim + columns
        parts = [
            load_or_zero(qkv.at[part, self.tokens[:, None], at[None, :]], self.inside) for part in range(qkv.shape[0])
        ]
        total = functools.reduce(jnp.add, parts).astype(self.sizes.dtype)
        if "bias" not in self.arrays:
            return total
        return total + plgpu.load(self.arrays["bias"].at[self.arrays["layer"][0], at])[None, :]

    def prepared(self, name: str, first_head: Array | int, turn: Halves) -> Halves:
        """The head with the norm `name`, whose heads begin at `first_head`, and turned, in their order."""
        halves = self.load()
        if self.sizes.traits.norm_after_rope:
            return self._normed(self._turned(halves, turn), name, first_head)
        return self._turned(self._normed(halves, name, first_head), turn)

    def _turned(self, halves: Halves, turn: Halves) -> Halves:
        (first, second), (cos, sin), dtype = (half.astype(jnp.float32) for half in halves), turn, self.sizes.dtype
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

        def scaled(half: Array, columns: Array) -> Array:
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

    def row(head: Array) -> _HalvedRow:
        return _HalvedRow(arrays=arrays, sizes=sizes, head=head, tokens=tokens, columns=columns, inside=inside, dim=dim)

    def angles() -> tuple[Array, Array]:
        cos, sin = (load_or_zero(arrays[name].at[tokens[:, None], lanes[None, :]], inside) for name in ("cos", "sin"))
        return cos, sin

    def write(is_value: bool, first: Array) -> None:
        slots = TokenSlots.of(tokens, pool, arrays["first_page"][0] * sizes.stride, batch)
        turn = None if is_value else angles()
        for index in range(num_heads[1]):
            group = first + index
            own = row(heads + group + int(is_value) * groups)
            halves = own.load() if turn is None else own.prepared("k_norm", heads, turn)
            for half, at in zip(halves, columns, strict=True):
                kv_row = 2 * group + int(is_value)
                slots.store(pool, divided(half, kv_row, arrays), kv_row, at, dim)

    @pl.when(block < query_blocks)
    def _() -> None:
        turn = angles()
        for index in range(num_heads[0]):
            head = block * num_heads[0] + index
            for half, at in zip(row(head).prepared("q_norm", 0, turn), columns, strict=True):
                plgpu.store(queries.at[tokens[:, None], head, at[None, :]], half, mask=inside)

    @pl.when((block >= query_blocks) & (block < query_blocks + kv_blocks))
    def _() -> None:
        write(False, (block - query_blocks) * num_heads[1])

    @pl.when(block >= query_blocks + kv_blocks)
    def _() -> None:
        write(True, (block - query_blocks - kv_blocks) * num_heads[1])


def most_heads(count: int) -> int:
    """Heads of a block: a power of two that divides `count`, `_MOST_HEADS` at most."""
    return math.gcd(count, _MOST_HEADS)
