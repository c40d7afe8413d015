"""One token of each request: update and read each memory, some columns a block."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from routed_experts.layers.gpu.blocks import product_width
from routed_experts.layers.gpu.delta_conv import shift_conv
from routed_experts.layers.gpu.delta_sizes import DeltaSizes, memory_block


def delta_step(
    layer: Any,
    starts: Any,
    slots: Any,
    fresh: Any,
    mixed: Any,
    queries_keys: Any,
    values: Any,
    decay: Any,
    beta: Any,
    conv: Any,
    recurrent: Any,
    read: Any,
    conv_out: Any,
    recurrent_out: Any,
    *,
    sizes: DeltaSizes,
) -> None:
    """Block (columns, head, request): the request's tokens, one after another."""
    shape, (block, head, request) = sizes.shape, (pl.program_id(axis) for axis in range(3))
    start, stop, slot, keeps = starts[request], starts[request + 1], slots[request], ~fresh[request]
    lanes, columns = jnp.arange(product_width(shape.key_dim)), block * sizes.columns + jnp.arange(sizes.columns)
    is_key, is_column, key_head = lanes < shape.key_dim, columns < shape.value_dim, head // sizes.share

    def add_token(token: Array, memory: Array) -> Array:
        query, key = (
            plgpu.load(queries_keys.at[token, of_head, lanes], mask=is_key, other=0.0)[:, None]
            for of_head in (key_head, shape.key_heads + key_head)
        )
        value = plgpu.load(values.at[token, head, columns], mask=is_column, other=0.0)
        if shape.by_channel:
            memory *= jnp.exp(plgpu.load(decay.at[token, head, lanes], mask=is_key, other=0.0))[:, None]
        else:
            memory *= jnp.exp(decay[token, head])
        wrong = (value - jnp.sum(memory * key, axis=0)) * beta[token, head]
        memory += key * wrong[None, :]
        plgpu.store(read.at[token, head, columns], jnp.sum(memory * query, axis=0), mask=is_column)
        return memory

    @pl.when(start < stop)
    def _() -> None:
        own, mask = memory_block(recurrent, (layer[0], slot, head), block, lanes, sizes)
        memory = plgpu.load(own, mask=mask & keeps, other=0.0)
        memory = lax.fori_loop(start, stop, add_token, memory)
        plgpu.store(memory_block(recurrent_out, (layer[0], slot, head), block, lanes, sizes)[0], memory, mask=mask)
        share = head * sizes.blocks + block
        shift_conv(layer[0], slot, keeps, start, stop, share, mixed, conv, conv_out, sizes)
