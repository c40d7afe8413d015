"""Tiles of query tokens, and the rows that a warpgroup multiplies: what attention of prompts by warpgroups is cut into.

Dims: N tokens, B requests, T tiles."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from routed_experts.layers.attention import PagedBatch
from routed_experts.layers.gpu.warpgroups import CONSUMERS, SIDE

ALIGNED = 8  # rows that a copy of swizzled memory starts at a multiple of


@dataclasses.dataclass(frozen=True, slots=True)
class QueryRows:
    """What the 64 rows of a warpgroup are: tokens times `heads`. `apart`: the consumers have tokens of their own, one
    run after the other, of the same heads; else the same tokens, of two neighbouring heads."""

    heads: int
    apart: bool

    @property
    def tokens(self) -> int:
        """Tokens of a warpgroup."""
        return SIDE // self.heads

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        return self.tokens * CONSUMERS if self.apart else self.tokens

    @property
    def aligned(self) -> int:
        """Tokens that a tile starts at a multiple of."""
        return ALIGNED if self.heads == 1 else 1

    @property
    def block_heads(self) -> int:
        """Heads of a block."""
        return self.heads if self.apart else self.heads * CONSUMERS


def find_query_rows(share: int) -> QueryRows:
    """The rows of groups of so many heads."""
    if share % ALIGNED == 0 and SIDE % share == 0:
        return QueryRows(share, apart=True)
    return QueryRows(1, apart=share % 2 == 1)


class QueryTiles(NamedTuple):
    """Tiles of tokens of one request each: request, first token, first and end of the request's tokens, and position of
    the first token. A tile may start before its request does, at a multiple of so many tokens."""

    columns: Int[Array, "T 5"]
    total: Int[Array, "1"]


def find_query_tiles(batch: PagedBatch, tile: int, aligned: int) -> QueryTiles:
    """The tiles of a batch; the rows past the last are not defined."""
    begin, end = batch.query_starts[:-1], batch.query_starts[1:]
    num_tokens, num_requests = batch.positions.shape[0], begin.shape[0]
    first = begin // aligned * aligned
    counts = jnp.where(end > begin, (end - first + tile - 1) // tile, 0)
    ends = jnp.cumsum(counts)
    tiles = jnp.arange(min(num_tokens, num_tokens // tile + 2 * num_requests), dtype=jnp.int32)
    request = jnp.minimum(jnp.sum(ends[None, :] <= tiles[:, None], axis=1), num_requests - 1)
    own_begin = begin[request]
    token = first[request] + (tiles - (ends - counts)[request]) * tile
    position = batch.positions[jnp.minimum(own_begin, num_tokens - 1)] + token - own_begin
    columns = jnp.stack([request, token, own_begin, end[request], position], axis=1)
    return QueryTiles(columns.astype(jnp.int32), ends[-1:].astype(jnp.int32))
