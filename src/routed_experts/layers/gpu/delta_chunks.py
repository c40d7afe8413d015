"""Prompts: chunks of all requests are solved side by side, then a block walks the chunks of a request.

The inverse of a chunk's unit triangular system comes from doubling its diagonal blocks. Dims: C tokens of a chunk, K
key dim, T columns of a block, Q channels with decays of their own."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from routed_experts.layers.gpu.delta_conv import shift_conv
from routed_experts.layers.gpu.delta_sizes import DeltaSizes, memory_block
from routed_experts.layers.gpu.ragged import find_tile

CHUNK = 32
_NEVER = -1e30  # exp of it is 0


def _is_finite(x: Array) -> Array:
    return jnp.abs(x) < jnp.inf


def _load_rates(rates: Any, tokens: Array, valid: Array, head: Array) -> tuple[Array, Array]:
    """A head's numbers of a chunk with 0 for what is not finite or absent, and which tokens are finite."""
    values = plgpu.load(rates.at[tokens, head], mask=valid, other=0.0)
    finite = _is_finite(values)
    return jnp.where(finite, values, 0.0), finite


def _load_chunk(source: Any, tokens: Array, head: Array, lanes: Array, mask: Array) -> tuple[Array, Array]:
    """A head's rows of a chunk with 0 for what is not finite or absent, and which tokens are finite."""
    rows = plgpu.load(source.at[tokens[:, None], head, lanes[None, :]], mask=mask, other=0.0)
    finite = _is_finite(rows)
    return jnp.where(finite, rows, 0.0), jnp.min(finite.astype(jnp.int32), axis=1) > 0


def _ratios(sums: Array) -> Array:
    """What is left at token t of what token i adds, for i up to t; else 0."""
    order = jnp.arange(sums.shape[0])
    return jnp.exp(jnp.where(order[:, None] >= order[None, :], sums[:, None] - sums[None, :], _NEVER))


def _weigh_channels(
    queries_keys: Any,
    decay: Any,
    tokens: tuple[Array, Array, Array],
    head: Array,
    lanes: Array,
    sums: tuple[Array, Array],
    sizes: DeltaSizes,
) -> tuple[Array, Array]:
    """Add to `sums` [C C] what some channels give: keys times keys, and queries times keys, each at token t and i up to
    t, times what is left of the channel. `tokens`: of the chunk, which are valid, the end. Decays are summed from i on:
    sums from the chunk's beginning would lose digits where they are subtracted."""
    (rows, valid, last), order, share = tokens, jnp.arange(sizes.tile), sizes.share
    is_key, key_heads = lanes < sizes.shape.key_dim, sizes.shape.key_heads
    mask = valid[:, None] & is_key[None, :]
    query, key = (
        _load_chunk(queries_keys, rows, of_head, lanes, mask)[0]
        for of_head in (head // share, key_heads + head // share)
    )

    def load_row(source: Any, token: Array, of_head: Array) -> Array:
        row = plgpu.load(source.at[token, of_head, lanes], mask=is_key & (token < last), other=0.0)
        return jnp.where(_is_finite(row), row, 0.0)

    def add_column(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        column = sizes.tile - 1 - step
        token, is_column = last_row - step, (order == column)[None, :]
        decays = carry[0] + jnp.where((order > column)[:, None], load_row(decay, token + 1, head)[None, :], 0.0)
        left = jnp.exp(jnp.where((order >= column)[:, None], decays, _NEVER))
        left *= load_row(queries_keys, token, key_heads + head // share)[None, :]
        products, weights = (
            total + jnp.where(is_column, jnp.sum(part * left, axis=1)[:, None], 0.0)
            for total, part in zip(carry[1:], (key, query), strict=True)
        )
        return decays, products, weights

    last_row = jnp.max(rows)
    _, products, weights = lax.fori_loop(0, sizes.tile, add_column, (jnp.zeros(key.shape, jnp.float32), *sums))
    return products, weights


def _weigh_keys(
    queries_keys: Any, decay: Any, tokens: tuple[Array, Array, Array], head: Array, sizes: DeltaSizes
) -> tuple[Array, Array]:
    """Keys times keys [C C] over all channels, and what is left at token t of what i adds [C C], where a head has one
    decay."""
    (rows, valid, _), shape = tokens, sizes.shape
    sums, _ = _load_rates(decay, rows, valid, head)
    products = jnp.zeros((sizes.tile, sizes.tile), jnp.float32)
    for lanes in sizes.parts:
        mask = valid[:, None] & (lanes < shape.key_dim)[None, :]
        keys, _ = _load_chunk(queries_keys, rows, shape.key_heads + head // sizes.share, lanes, mask)
        products += sizes.dot(keys, keys.T)
    return products, _ratios(jnp.cumsum(sums))


def solve_chunks(starts: Any, queries_keys: Any, decay: Any, beta: Any, out: Any, *, sizes: DeltaSizes) -> None:
    """Block (head, chunk): the inverse of I + L, where L[t, i] = beta_t exp(G_t - G_i) (k_t k_i) for i < t. Where each
    channel has a decay, G is a number of each, within the product, and exp(G_t - G_i) (q_t k_i) is stored, too."""
    shape, head, num_requests = sizes.shape, pl.program_id(0), starts.shape[0] - 1
    request, start, last = find_tile(starts, pl.program_id(1), num_requests, sizes.tile)

    @pl.when(request < num_requests)
    def _() -> None:
        order = jnp.arange(sizes.tile)
        tokens, valid = start + order, start + order < last
        betas, _ = _load_rates(beta, tokens, valid, head)
        rows, columns = order[:, None], order[None, :]
        at = jnp.where(valid, tokens, out.shape[0])
        if shape.by_channel:
            zeros = jnp.zeros((sizes.tile, sizes.tile), jnp.float32)
            sums = zeros, zeros
            for lanes in sizes.parts:
                sums = _weigh_channels(queries_keys, decay, (tokens, valid, last), head, lanes, sums, sizes)
            system, weights = betas[:, None] * sums[0], sums[1]
            plgpu.store(out.at[at[:, None], shape.value_heads + head, columns], weights, mask=valid[:, None])
        else:
            products, ratios = _weigh_keys(queries_keys, decay, (tokens, valid, last), head, sizes)
            system = betas[:, None] * ratios * products
        system, inverse = jnp.where(rows > columns, system, 0.0), jnp.where(rows == columns, 1.0, 0.0)
        size = 1
        while size < sizes.tile:  # the inverse of diagonal blocks of `size` gives that of blocks twice as large
            between = (rows // (2 * size) == columns // (2 * size)) & (rows // size != columns // size)
            inverse -= sizes.dot(sizes.dot(inverse, jnp.where(between, system, 0.0)), inverse)
            size *= 2
        plgpu.store(out.at[at[:, None], head, columns], inverse, mask=valid[:, None])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A head's chunk of a request that ends at `stop`. Memories are lists of some key dims each [Kp T]."""

    queries_keys: Any
    decay: Any
    solved: Any
    tokens: Array
    stop: Array
    head: Array
    sizes: DeltaSizes

    @property
    def order(self) -> Array:
        """Places in the chunk."""
        return jnp.arange(self.sizes.tile)

    def load(self, source: Any, of_head: Array, lanes: Array) -> tuple[Array, Array]:
        """`_load_chunk` of some key dims."""
        mask = (self.tokens < self.stop)[:, None] & (lanes < self.sizes.shape.key_dim)[None, :]
        return _load_chunk(source, self.tokens, of_head, lanes, mask)

    def load_query(self, lanes: Array) -> tuple[Array, Array]:
        """Load the queries of the head's key head."""
        return self.load(self.queries_keys, self.head // self.sizes.share, lanes)

    def load_key(self, lanes: Array) -> tuple[Array, Array]:
        """Load the keys of the head's key head."""
        return self.load(self.queries_keys, self.sizes.shape.key_heads + self.head // self.sizes.share, lanes)

    def load_solved(self, of_head: Array) -> Array:
        """What `solve_chunks` stored."""
        at = self.solved.at[self.tokens[:, None], of_head, self.order[None, :]]
        return plgpu.load(at, mask=(self.tokens < self.stop)[:, None], other=0.0)

    def read(self, memory: list[Array], sums: Array, finite: Array) -> tuple[Array, Array, Array, Array]:
        """What tokens add to what later ones read [C C], what the memory gives for keys and for queries [C T], and
        which of the `finite` tokens are so in these, too. `sums`: of the head's decays."""
        dot, zeros = self.sizes.dot, jnp.zeros((self.sizes.tile, self.sizes.columns), jnp.float32)
        weights, known, answer = jnp.zeros((self.sizes.tile, self.sizes.tile), jnp.float32), zeros, zeros
        for lanes, part in zip(self.sizes.parts, memory, strict=True):
            query, finite_query = self.load_query(lanes)
            key, finite_key = self.load_key(lanes)
            weights, finite = weights + dot(query, key.T), finite & finite_query & finite_key
            known, answer = known + dot(key, part), answer + dot(query, part)
        decayed = jnp.exp(sums)[:, None]
        return _ratios(sums) * weights, decayed * known, decayed * answer, finite

    def add(self, memory: list[Array], sums: Array, added: Array) -> list[Array]:
        """The memory after the chunk."""
        total = jnp.sum(jnp.where(self.order == self.sizes.tile - 1, sums, 0.0))
        added = jnp.exp(total - sums)[:, None] * added
        keys = (self.load_key(lanes)[0] for lanes in self.sizes.parts)
        return [jnp.exp(total) * part + self.sizes.dot(key.T, added) for part, key in zip(memory, keys, strict=True)]

    def read_by_channel(self, memory: list[Array], finite: Array) -> tuple[Array, Array, Array, Array]:
        """`read`, where each key dim has a decay."""
        known = answer = jnp.zeros((self.sizes.tile, self.sizes.columns), jnp.float32)
        for lanes, part in zip(self.sizes.parts, memory, strict=True):
            query, finite_query = self.load_query(lanes)
            key, finite_key = self.load_key(lanes)
            decays, finite_decay = self.load(self.decay, self.head, lanes)
            left, finite = jnp.exp(jnp.cumsum(decays, axis=0)), finite & finite_query & finite_key & finite_decay
            known, answer = known + self.sizes.dot(left * key, part), answer + self.sizes.dot(left * query, part)
        return self.load_solved(self.sizes.shape.value_heads + self.head), known, answer, finite

    def add_by_channel(self, memory: list[Array], added: Array) -> list[Array]:
        """`add`, where each key dim has a decay."""
        after = list[Array]()
        for lanes, part in zip(self.sizes.parts, memory, strict=True):
            key, sums = self.load_key(lanes)[0], jnp.cumsum(self.load(self.decay, self.head, lanes)[0], axis=0)
            total = jnp.sum(jnp.where((self.order == self.sizes.tile - 1)[:, None], sums, 0.0), axis=0)
            key *= jnp.exp(total[None, :] - sums)
            after.append(jnp.exp(total)[:, None] * part + self.sizes.dot(key.T, added))
        return after


def walk_chunks(
    layer: Any,
    starts: Any,
    slots: Any,
    fresh: Any,
    mixed: Any,
    queries_keys: Any,
    values: Any,
    decay: Any,
    beta: Any,
    solved: Any,
    conv: Any,
    recurrent: Any,
    read: Any,
    conv_out: Any,
    recurrent_out: Any,
    *,
    sizes: DeltaSizes,
) -> None:
    """Block (columns, head, request): the request's chunks, one after another. A token that is not finite makes itself
    and later ones NaN."""
    shape, (block, head, request) = sizes.shape, (pl.program_id(axis) for axis in range(3))
    start, stop, slot, keeps = starts[request], starts[request + 1], slots[request], ~fresh[request]
    order, columns = jnp.arange(sizes.tile), block * sizes.columns + jnp.arange(sizes.columns)
    create = functools.partial(
        _Chunk, queries_keys=queries_keys, decay=decay, solved=solved, stop=stop, head=head, sizes=sizes
    )

    def add_chunk(index: Array, carry: tuple[list[Array], Array]) -> tuple[list[Array], Array]:
        memory, broken = carry
        tokens = start + index * sizes.tile + order
        valid, chunk = tokens < stop, create(tokens=tokens)
        column_mask = valid[:, None] & (columns < shape.value_dim)[None, :]
        betas, finite = _load_rates(beta, tokens, valid, head)
        if shape.by_channel:
            sums = None
            weights, known, answer, finite = chunk.read_by_channel(memory, finite)
        else:
            decays, finite_decay = _load_rates(decay, tokens, valid, head)
            sums = jnp.cumsum(decays)
            weights, known, answer, finite = chunk.read(memory, sums, finite & finite_decay)
        value, finite_value = _load_chunk(values, tokens, head, columns, column_mask)
        added = sizes.dot(chunk.load_solved(head), betas[:, None] * (value - known))
        result = sizes.dot(weights, added) + answer
        is_broken = ~(finite & finite_value)
        spoiled = (jnp.cumsum(is_broken.astype(jnp.int32)) + broken) > 0
        at = jnp.where(valid, tokens, read.shape[0])
        result = jnp.where(spoiled[:, None], jnp.nan, result)
        plgpu.store(read.at[at[:, None], head, columns[None, :]], result, mask=column_mask)
        memory = chunk.add_by_channel(memory, added) if sums is None else chunk.add(memory, sums, added)
        return memory, broken + jnp.sum(is_broken.astype(jnp.int32))

    @pl.when(start < stop)
    def _() -> None:
        memory, broken = list[Array](), jnp.int32(0)
        for lanes in sizes.parts:
            own, mask = memory_block(recurrent, (layer[0], slot, head), block, lanes, sizes)
            part = plgpu.load(own, mask=mask & keeps, other=0.0)
            finite = _is_finite(part)
            broken += jnp.sum(jnp.sum((~finite).astype(jnp.int32), axis=1), axis=0)
            memory.append(jnp.where(finite, part, 0.0))
        memory, broken = lax.fori_loop(0, pl.cdiv(stop - start, sizes.tile), add_chunk, (memory, broken))
        for lanes, part in zip(sizes.parts, memory, strict=True):
            own, mask = memory_block(recurrent_out, (layer[0], slot, head), block, lanes, sizes)
            plgpu.store(own, jnp.where(broken > 0, jnp.nan, part), mask=mask)
        share = head * sizes.blocks + block
        shift_conv(layer[0], slot, keeps, start, stop, share, mixed, conv, conv_out, sizes)
