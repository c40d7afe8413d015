"""Tiles of the tokens of requests that have any number of them. Dims: B requests, N tokens, Q tokens of a tile."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from routed_experts.layers.gpu.blocks import power_of_two


def most_tiles(num_tokens: int, num_requests: int, tile: int) -> int:
    """Tiles of Q tokens, each of one request, that suffice for any division of the tokens."""
    return min(num_tokens, num_tokens // tile + num_requests)


def find_tile(starts: Any, index: Array, num_requests: int, tile: int) -> tuple[Array, Array, Array]:
    """Inside a kernel: the request of a tile, its first token, and the end of its last; the request is `num_requests`
    or more past the last tile. `starts`: a reference to the first token of each request and the end of the last."""
    requests = jnp.arange(power_of_two(num_requests))
    begin = plgpu.load(starts.at[requests], mask=requests < num_requests, other=0)
    stop = plgpu.load(starts.at[requests + 1], mask=requests < num_requests, other=0)
    tiles = (stop - begin + tile - 1) // tile
    ends = jnp.cumsum(tiles)
    request = jnp.sum((ends <= index).astype(jnp.int32))
    is_request = requests == request
    start = jnp.sum(jnp.where(is_request, begin + (index - ends + tiles) * tile, 0))
    return request, start, jnp.minimum(start + tile, jnp.sum(jnp.where(is_request, stop, 0)))
