"""The gated delta rule on a GPU, with its short convolution: `delta_ragged` on the states of requests, in place.

The convolution is one kernel over tokens and heads. Where every request has one token, a second one updates and reads
each memory, some columns a block. Prompts take two: chunks of all requests are solved side by side (the inverse of
each chunk's unit triangular system, by doubling its diagonal blocks), then a block walks the chunks of a request with
some columns of its memory in registers. A decay is one number for a head, or one for each of its key channels: then
the ratio of two tokens is a number of each channel, too, and the products of keys are summed a token at a time.
Memories and sums are float32; products take three passes of TF32, whose errors are those of float32. Dims: N tokens, B
requests, C tokens of a chunk, Q channels, W width of the convolution, J key heads, H value heads, K key dim, V value
dim, T columns of a block."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.delta_rule import EPS, DeltaInputs, DeltaShape, DeltaState
from routed_experts.layers.gpu.activations import sigmoid
from routed_experts.layers.gpu.blocks import power_of_two, product_width
from routed_experts.layers.gpu.ragged import find_tile, most_tiles

CHUNK = 32
COLUMNS = 32  # of a memory in a block
PART = 32  # key dims of a product: three passes hold its sides in registers, twice
CONV_TILE = 16  # tokens of a prompt in a block of the convolution
_NEVER = -1e30  # exp of it is 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Constants of the kernels."""

    shape: DeltaShape
    tile: int = 1  # tokens of a block of the convolution, or of a chunk
    columns: int = COLUMNS
    exact: bool = False  # products in plain float32: interpreted, where there is no TF32

    @property
    def share(self) -> int:
        """Value heads of a key head."""
        return self.shape.value_heads // self.shape.key_heads

    @property
    def parts(self) -> list[Array]:
        """Key dims of each product."""
        width = min(PART, product_width(self.shape.key_dim))
        return [start + jnp.arange(width) for start in range(0, self.shape.key_dim, width)]

    @property
    def blocks(self) -> int:
        """Blocks of a memory's columns."""
        return pl.cdiv(self.shape.value_dim, self.columns)

    def dot(self, left: Array, right: Array) -> Array:
        """A float32 product: errors would add up along a sequence."""
        precision = lax.Precision.HIGHEST if self.exact else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        return jnp.dot(left, right, precision=precision, preferred_element_type=jnp.float32)


def _is_finite(x: Array) -> Array:
    return jnp.abs(x) < jnp.inf


def _convolve(
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
    sizes: _Sizes,
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


def _shift_conv(
    layer: Array,
    slot: Array,
    keeps: Array,
    start: Array,
    stop: Array,
    share: Array,
    mixed: Any,
    conv: Any,
    out: Any,
    sizes: _Sizes,
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


def _memory(
    recurrent: Any, index: tuple[Array, Array, Array], block: Array, lanes: Array, sizes: _Sizes
) -> tuple[Any, Array]:
    """Some key dims and a block's columns of a memory as a reference, and which of them exist [K T]."""
    columns = block * sizes.columns + jnp.arange(sizes.columns)
    mask = (lanes < sizes.shape.key_dim)[:, None] & (columns < sizes.shape.value_dim)[None, :]
    return recurrent.at[(*index, lanes[:, None], columns[None, :])], mask


def _step(
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
    sizes: _Sizes,
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
        own, mask = _memory(recurrent, (layer[0], slot, head), block, lanes, sizes)
        memory = plgpu.load(own, mask=mask & keeps, other=0.0)
        memory = lax.fori_loop(start, stop, add_token, memory)
        plgpu.store(_memory(recurrent_out, (layer[0], slot, head), block, lanes, sizes)[0], memory, mask=mask)
        share = head * sizes.blocks + block
        _shift_conv(layer[0], slot, keeps, start, stop, share, mixed, conv, conv_out, sizes)


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
    sizes: _Sizes,
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
    queries_keys: Any, decay: Any, tokens: tuple[Array, Array, Array], head: Array, sizes: _Sizes
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


def _solve(starts: Any, queries_keys: Any, decay: Any, beta: Any, out: Any, *, sizes: _Sizes) -> None:
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
    sizes: _Sizes

    @property
    def order(self) -> Array:
        """Places in the chunk."""
        return jnp.arange(self.sizes.tile)

    def load(self, source: Any, of_head: Array, lanes: Array) -> tuple[Array, Array]:
        """`_load_chunk` of some key dims."""
        mask = (self.tokens < self.stop)[:, None] & (lanes < self.sizes.shape.key_dim)[None, :]
        return _load_chunk(source, self.tokens, of_head, lanes, mask)

    def load_query(self, lanes: Array) -> tuple[Array, Array]:
        """Of the head's key head."""
        return self.load(self.queries_keys, self.head // self.sizes.share, lanes)

    def load_key(self, lanes: Array) -> tuple[Array, Array]:
        """Of the head's key head."""
        return self.load(self.queries_keys, self.sizes.shape.key_heads + self.head // self.sizes.share, lanes)

    def load_solved(self, of_head: Array) -> Array:
        """What `_solve` stored."""
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


def _walk(
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
    sizes: _Sizes,
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
            own, mask = _memory(recurrent, (layer[0], slot, head), block, lanes, sizes)
            part = plgpu.load(own, mask=mask & keeps, other=0.0)
            finite = _is_finite(part)
            broken += jnp.sum(jnp.sum((~finite).astype(jnp.int32), axis=1), axis=0)
            memory.append(jnp.where(finite, part, 0.0))
        memory, broken = lax.fori_loop(0, pl.cdiv(stop - start, sizes.tile), add_chunk, (memory, broken))
        for lanes, part in zip(sizes.parts, memory, strict=True):
            own, mask = _memory(recurrent_out, (layer[0], slot, head), block, lanes, sizes)
            plgpu.store(own, jnp.where(broken > 0, jnp.nan, part), mask=mask)
        share = head * sizes.blocks + block
        _shift_conv(layer[0], slot, keeps, start, stop, share, mixed, conv, conv_out, sizes)


def gpu_delta(
    inputs: DeltaInputs,
    states: DeltaState,
    layer: Int[Array, ""],
    slots: Int[Array, " B"],
    fresh: Bool[Array, " B"],
    query_starts: Int[Array, " B1"],
    *,
    chunk: int = CHUNK,
    interpret: bool = False,
) -> tuple[Float[Array, "N H V"], DeltaState]:
    """What was read, and the states after it, in place. Rows of padding are not written. As many tokens as requests
    are taken one by one."""
    shape, (num_tokens, num_requests) = inputs.shape, (inputs.mixed.shape[0], slots.shape[0])
    is_step, heads = num_tokens == num_requests, shape.value_heads
    sizes = _Sizes(shape=shape, exact=interpret, columns=min(COLUMNS, product_width(shape.value_dim)))
    tile = 1 if is_step else CONV_TILE
    scalars = [jnp.asarray(layer, jnp.int32).reshape(1), query_starts, slots, fresh]
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    queries_keys, values = pl.pallas_call(
        functools.partial(_convolve, sizes=dataclasses.replace(sizes, tile=tile)),
        (float32((num_tokens, 2 * shape.key_heads, shape.key_dim)), float32((num_tokens, heads, shape.value_dim))),
        grid=(2 * shape.key_heads + heads, most_tiles(num_tokens, num_requests, tile)),
        compiler_params=plgpu.CompilerParams(num_warps=1 if is_step else 4, num_stages=1),
        interpret=interpret,
        name="delta_convolution",
    )(*scalars, inputs.mixed, inputs.kernel, states.conv)
    rates = [inputs.decay.astype(jnp.float32), inputs.beta.astype(jnp.float32)]
    if shape.by_channel:
        rates[0] = rates[0].reshape(num_tokens, heads, shape.key_dim)
    arrays = [*scalars, inputs.mixed, queries_keys, values, *rates]
    kernel = functools.partial(_step, sizes=sizes)
    if not is_step:
        sizes = dataclasses.replace(sizes, tile=chunk)
        kernel = functools.partial(_walk, sizes=sizes)
        arrays.append(
            pl.pallas_call(
                functools.partial(_solve, sizes=sizes),
                float32((num_tokens, 2 * heads if shape.by_channel else heads, chunk)),
                grid=(heads, most_tiles(num_tokens, num_requests, chunk)),
                compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
                interpret=interpret,
                name="delta_solve",
            )(query_starts, queries_keys, *rates)
        )
    leaves = [states.conv, states.recurrent]
    read, conv, recurrent = pl.pallas_call(
        kernel,
        (
            float32((num_tokens, heads, shape.value_dim)),
            *(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves),
        ),
        grid=(sizes.blocks, heads, num_requests),
        input_output_aliases={len(arrays): 1, len(arrays) + 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="delta_step" if is_step else "delta_chunks",
    )(*arrays, *leaves)
    return read, DeltaState(conv, recurrent)
