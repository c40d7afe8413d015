"""Blocks of what a step records, as kernels write them."""

import jax.numpy as jnp

from routed_experts.layers.routing import RoutingBlock


def empty_block(rows, num_tokens):
    """A block of ids and weights, [rows, N], in which nothing is an expert."""
    return RoutingBlock(jnp.full((rows, num_tokens), -7, jnp.int32), jnp.full((rows, num_tokens), -7, jnp.float32))
