"""The short convolution before the delta rule on a GPU, and its last inputs, which a request keeps."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from routed_experts.layers.delta_rule import EPS
from routed_experts.layers.gpu.activations import sigmoid
from routed_experts.layers.gpu.blocks import power_of_two, product_width
from routed_experts.layers.gpu.delta_sizes import DeltaSizes
from routed_experts.layers.gpu.ragged import find_tile

CONV_TILE = 16  # tokens of a prompt in a block of the convolution


def convolve(
    layer: Any,
    starts: Any,
    slots: Any,
    fresh: Any,
    mixed: Any,
    kernel: Any,
    conv: Any,
    queries_keys: Any,
    values: Any,
    *,
    sizes: DeltaSizes,
) -> None:
    """Block (head, tile): a head of queries, keys (both of norm 1) or values, after the convolution."""
    shape, head, index = sizes.shape, pl.program_id(0), pl.program_id(1)
    request, start, last = find_tile(starts, index, slots.shape[0], sizes.tile)
    is_tile = request < slots.shape[0]
    request = jnp.where(is_tile, request, 0)
    tokens, first = start + jnp.arange(sizes.tile), starts[request]
    valid, slot, keeps = is_tile & (tokens < last), slots[request], ~fresh[request]

    def convolved(channel: Array, size: int) -> tuple[Array, Array]:
        lanes = jnp.arange(product_width(size))
        mask, columns = valid[:, None] & (lanes < size)[None, :], channel + lanes[None, :]
        total = jnp.zeros((sizes.tile, lanes.shape[0]), jnp.float32)
        for tap in range(shape.width):
            source = tokens - (shape.width - 1) + tap
            is_old = (source < first)[:, None]
            row = jnp.where(is_old, (source - first)[:, None] + shape.width - 1, 0)
            old = plgpu.load(conv.at[layer[0], slot, row, columns], mask=mask & is_old & keeps, other=0.0)
            new = plgpu.load(mixed.at[source[:, None], columns], mask=mask & ~is_old, other=0.0)
            weight = plgpu.load(kernel.at[channel + lanes, tap], mask=lanes < size, other=0.0)
            window = jnp.where(is_old, old, new.astype(conv.dtype))
            total += window.astype(jnp.float32) * weight.astype(jnp.float32)[None, :]
        return total * sigmoid(total), mask

    def store(out: Any, of_head: Array, value: Array, mask: Array) -> None:
        rows = jnp.where(valid, tokens, out.shape[0])
        plgpu.store(out.at[rows[:, None], of_head, jnp.arange(value.shape[1])[None, :]], value, mask=mask)

    @pl.when(head < 2 * shape.key_heads)
    def _() -> None:
        value, mask = convolved(head * shape.key_dim, shape.key_dim)
        value *= lax.rsqrt(jnp.sum(value * value, axis=1) + EPS)[:, None]
        is_query = jnp.full(value.shape, head) < shape.key_heads
        store(queries_keys, head, jnp.where(is_query, value * shape.key_dim**-0.5, value), mask)

    @pl.when(head >= 2 * shape.key_heads)
    def _() -> None:
        of_head = head - 2 * shape.key_heads
        channel = 2 * shape.key_heads * shape.key_dim + of_head * shape.value_dim
        store(values, of_head, *convolved(channel, shape.value_dim))


def shift_conv(
    layer: Array,
    slot: Array,
    keeps: Array,
    start: Array,
    stop: Array,
    share: Array,
    mixed: Any,
    conv: Any,
    out: Any,
    sizes: DeltaSizes,
) -> None:
    """Store the last inputs of the convolution: this block's share of the channels, read and written by no other."""
    shape = sizes.shape
    size = pl.cdiv(shape.channels, shape.value_heads * sizes.blocks)
    lanes = jnp.arange(power_of_two(size))
    columns = share * size + lanes
    is_own = (lanes < size) & (columns < shape.channels)
    rows: list[Array] = []
    for row in range(shape.width - 1):
        source = stop - (shape.width - 1) + row
        is_old = source < start
        at = jnp.where(is_old, source - start + shape.width - 1, 0)
        old = plgpu.load(conv.at[layer, slot, at, columns], mask=is_own & is_old & keeps, other=0.0)
        new = plgpu.load(mixed.at[source, columns], mask=is_own & ~is_old, other=0.0)
        rows.append(jnp.where(is_old, old, new.astype(conv.dtype)))
    for row, value in enumerate(rows):
        plgpu.store(out.at[layer, slot, row, columns], value, mask=is_own)
