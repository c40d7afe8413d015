"""Prompts of the gated delta rule on TPU: chunks of all requests of several tokens by one kernel, on states in place.

A chunk's tokens are fetched from where they lie, those of the next chunk meanwhile. A request's memories are in VMEM
from its first chunk to its last. Each head solves the triangular system of `delta_chunk` by the inverse of I + A,
whose diagonal blocks are inverted first: two of a size and what lies between them make one of twice the size. Powers
of A are not used: they grow with repeated keys, and would cancel. Products are float32 in full precision.

    X <- X - X (A between neighbouring blocks) X        blocks of 1, 2, 4, ... C/2

A nonfinite token is zeroed before, and NaN takes the place of what it and later tokens of its request read. Dims: N
tokens, B requests, C tokens of a chunk, W width of the convolution, L layers, S slots, H value heads, J key heads, K
key dim, V value dim, R heads of an array, X its rows."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.delta_rule import CHUNK, EPS, DeltaInputs, DeltaShape

LANES, SUBLANES = 128, 8
VMEM_BYTES = 48 << 20  # a v5p has 64 MiB
_NEVER = -1e30  # exp of it is 0


def takes_chunks(shape: DeltaShape) -> bool:
    """Whether the kernel runs such heads: whole rows of lanes, and one decay a head."""
    return not shape.by_channel and shape.key_dim % LANES == 0 and shape.value_dim % LANES == 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Refs:
    """The kernel's arrays. Scalars: `num_chunks`; each chunk's request (`rows`), first token (`starts`) and number of
    tokens (`counts`); each request's slot, whether it starts anew, its tokens' `bounds`, and the first token that reads
    NaN (`spoiled`). In HBM: inputs of the convolution after some zeros, those of each request `before`, and decays
    beside learning rates."""

    num_chunks: Any
    rows: Any
    starts: Any
    counts: Any
    layer: Any
    slots: Any
    fresh: Any
    bounds: Any
    spoiled: Any
    kernels: Any  # [W R K] of queries and keys, and of values; in VMEM
    value_kernels: Any
    mixed: Any  # [X 2J K]
    values: Any  # [X H V]
    before: Any  # [B W1 2J K]
    values_before: Any
    gates: Any  # [X 2 H]
    outputs_before: Any  # the same memory as `outputs`
    states_before: Any  # the same memory as `states`
    outputs: Any  # [N H V]
    states: Any  # [L S H K V]
    window: Any  # [2 WC 2J K]: of two chunks, one of which is being fetched
    value_window: Any
    gate_window: Any  # [2 C 2 H]
    rows_by_token: Any  # [C 2J K], after the convolution
    values_by_token: Any  # [C H V]; in the end what they read
    rows_by_head: Any  # [2J C K]
    values_by_head: Any
    memory: Any  # [H K V]
    fetched: Any  # semaphores of the two windows
    moved: Any  # semaphore of all else


def run_chunks(
    inputs: DeltaInputs,
    conv: Float[Array, "B W1 Q"],
    outputs: Float[Array, "N H V"],
    states: Float[Array, "L S H K V"],
    requests: tuple[Int[Array, ""], Int[Array, " B"], Bool[Array, " B"], Int[Array, " B1"]],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "N H V"], Float[Array, "L S H K V"]]:
    """What tokens of requests of several tokens read, beside the `outputs` of others, and all states. `conv`: last
    inputs of the convolution of each request. `requests`: layer, slots, which start `fresh`, bounds."""
    (layer, slots, fresh, bounds), shape, num_tokens = requests, inputs.shape, inputs.mixed.shape[0]
    usable, spoiled = _usable(inputs, conv, bounds)
    split, early = 2 * shape.key_heads * shape.key_dim, shape.width - 1

    def by_head(part: Float[Array, "X Q"]) -> list[Float[Array, "X R K"]]:
        """Queries and keys, and values."""
        return [
            part[..., :split].reshape(*part.shape[:-1], -1, shape.key_dim),
            part[..., split:].reshape(*part.shape[:-1], -1, shape.value_dim),
        ]

    rows = _whole_tiles(num_tokens + CHUNK)
    mixed = jnp.pad(usable.mixed.astype(conv.dtype), ((_whole_tiles(early), rows - num_tokens), (0, 0)))
    gates = jnp.pad(jnp.stack([usable.decay, usable.beta], axis=1), ((0, rows - num_tokens), (0, 0), (0, 0)))
    taps, windows = by_head(inputs.kernel.T.astype(jnp.float32)), by_head(mixed)
    conv = jnp.where(jnp.isfinite(conv), conv, 0)
    scalars = (
        *_chunk_table(bounds, num_tokens),
        *(part.astype(jnp.int32) for part in (layer.reshape(1), slots, fresh, bounds, spoiled)),
    )
    whole, outside = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)
    tokens = [pltpu.VMEM((CHUNK, *part.shape[1:]), jnp.float32) for part in windows]
    heads = [pltpu.VMEM((part.shape[1], CHUNK, part.shape[2]), jnp.float32) for part in windows]
    outputs, states = pl.pallas_call(
        functools.partial(_kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[whole, whole, *[outside] * 7],
            out_specs=[outside, outside],
            scratch_shapes=[
                *(pltpu.VMEM((2, CHUNK + early, *part.shape[1:]), part.dtype) for part in windows),
                pltpu.VMEM((2, CHUNK, *gates.shape[1:]), jnp.float32),
                *tokens,
                *heads,
                pltpu.VMEM(states.shape[2:], jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(outputs.shape, outputs.dtype),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ],
        input_output_aliases={len(scalars) + 7: 0, len(scalars) + 8: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="delta_chunks",
    )(*scalars, *taps, *windows, *by_head(conv), gates, outputs, states)
    return outputs, states


def _whole_tiles(rows: int) -> int:
    """Rounded up: heads of other numbers of rows are cut out in a pass of their own."""
    return -(-rows // SUBLANES) * SUBLANES


def _usable(
    inputs: DeltaInputs, conv: Float[Array, "B W1 Q"], bounds: Int[Array, " B1"]
) -> tuple[DeltaInputs, Int[Array, " B"]]:
    """The inputs with 0 in place of nonfinite tokens, and the first token of each request that reads NaN; N, if
    none."""
    numbers = (inputs.mixed, inputs.decay, inputs.beta)
    finite = functools.reduce(jnp.logical_and, (jnp.all(jnp.isfinite(part), axis=-1) for part in numbers))
    mixed, decay, beta = (jnp.where(finite[:, None], part, 0) for part in numbers)
    positions, end = jnp.arange(finite.size), finite.size
    own = (positions >= bounds[:-1, None]) & (positions < bounds[1:, None])  # [B N]
    first = jnp.min(jnp.where(own & ~finite, positions, end), axis=1)
    first = jnp.where(jnp.all(jnp.isfinite(conv), axis=(1, 2)), first, bounds[:-1])
    return dataclasses.replace(inputs, mixed=mixed, decay=decay, beta=beta), first


def _chunk_table(bounds: Int[Array, " B1"], num_tokens: int) -> tuple[Int[Array, " X"], ...]:
    """The number of chunks of requests of several tokens; each one's request, first token and number of tokens."""
    lengths = bounds[1:] - bounds[:-1]
    most = num_tokens // CHUNK + min(lengths.size, num_tokens // 2) + 1
    chunks = (jnp.where(lengths > 1, lengths, 0) + CHUNK - 1) // CHUNK
    ends = jnp.cumsum(chunks)
    index = jnp.arange(most, dtype=jnp.int32)
    rows = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), lengths.size - 1)
    starts = bounds[rows] + (index - (ends - chunks)[rows]) * CHUNK
    counts = jnp.clip(bounds[rows + 1] - starts, 0, CHUNK)
    return tuple(part.astype(jnp.int32) for part in (ends[-1:], rows, starts, counts))


def _kernel(*refs: Any, shape: DeltaShape) -> None:
    """All chunks, one after another."""
    arrays = _Refs(**dict(zip((field.name for field in dataclasses.fields(_Refs)), refs, strict=True)))
    num_chunks = arrays.num_chunks[0]

    @pl.when(num_chunks > 0)
    def _() -> None:
        _fetch(arrays, jnp.int32(0), shape, wait=False)

    def run(index: Int[Array, ""], _: None) -> None:
        @pl.when(index + 1 < num_chunks)
        def _() -> None:
            _fetch(arrays, index + 1, shape, wait=False)

        _fetch(arrays, index, shape, wait=True)
        _run_chunk(arrays, index, shape)

    lax.fori_loop(0, num_chunks, run, None)


def _fetch(refs: _Refs, index: Int[Array, ""], shape: DeltaShape, *, wait: bool) -> None:
    """Start, or wait for, the copies of a chunk's tokens and of those before that its convolution reads."""
    half, start, early = lax.rem(index, 2), refs.starts[index], shape.width - 1
    for source, target, first, length in (
        (refs.mixed, refs.window, start + _whole_tiles(early) - early, CHUNK + early),
        (refs.values, refs.value_window, start + _whole_tiles(early) - early, CHUNK + early),
        (refs.gates, refs.gate_window, start, CHUNK),
    ):
        copy = pltpu.make_async_copy(source.at[pl.ds(first, length)], target.at[half], refs.fetched.at[half])
        (copy.wait if wait else copy.start)()


def _copy(source: Any, target: Any, semaphore: Any) -> None:
    copy = pltpu.make_async_copy(source, target, semaphore)
    copy.start()
    copy.wait()


def _run_chunk(refs: _Refs, index: Int[Array, ""], shape: DeltaShape) -> None:
    """One chunk that is in VMEM: its request's memories are fetched before the first, and stored after the last."""
    half, row = lax.rem(index, 2), refs.rows[index]
    start, count = refs.starts[index], refs.counts[index]
    own_states = refs.states.at[refs.layer[0], refs.slots[row]]

    @pl.when(start == refs.bounds[row])
    def _() -> None:
        early = pl.ds(0, shape.width - 1)
        _copy(refs.before.at[row], refs.window.at[half, early], refs.moved)
        _copy(refs.values_before.at[row], refs.value_window.at[half, early], refs.moved)

        @pl.when(refs.fresh[row] != 0)
        def _() -> None:
            refs.memory[...] = jnp.zeros(refs.memory.shape, jnp.float32)

        @pl.when(refs.fresh[row] == 0)
        def _() -> None:
            _copy(own_states, refs.memory, refs.moved)

    _convolve(refs, half, shape)
    _solve(refs, half, count, refs.spoiled[row] - start, shape)
    for head in range(shape.value_heads):
        refs.values_by_token[:, head, :] = refs.values_by_head[head]

    def store(first: Int[Array, ""], length: int) -> Any:
        return pltpu.make_async_copy(
            refs.values_by_token.at[pl.ds(first, length)], refs.outputs.at[pl.ds(start + first, length)], refs.moved
        )

    if refs.outputs.shape[0] >= CHUNK:

        @pl.when(count == CHUNK)
        def _() -> None:
            copy = store(jnp.int32(0), CHUNK)
            copy.start()
            copy.wait()

    @pl.when(count < CHUNK)
    def _() -> None:
        lax.fori_loop(0, count, lambda token, _: store(token, 1).start(), None)
        lax.fori_loop(0, count, lambda token, _: store(token, 1).wait(), None)

    @pl.when(start + count == refs.bounds[row + 1])
    def _() -> None:
        _copy(refs.memory, own_states, refs.moved)


def _convolve(refs: _Refs, half: Int[Array, ""], shape: DeltaShape) -> None:
    """Queries (scaled), keys and values of the window, by token and then by head."""
    heads = lax.broadcasted_iota(jnp.int32, (2 * shape.key_heads, 1), 0)
    scale = jnp.where(heads < shape.key_heads, shape.key_dim**-0.5, 1.0)

    def convolve(token: Int[Array, ""], _: None) -> None:
        def of(window: Any, kernels: Any) -> Float[Array, "R K"]:
            total = jnp.zeros(window.shape[2:], jnp.float32)
            for tap in range(shape.width):
                total = total + window[half, token + tap].astype(jnp.float32) * kernels[tap]
            return total * jax.nn.sigmoid(total)

        rows = of(refs.window, refs.kernels)
        refs.rows_by_token[token] = rows * lax.rsqrt(jnp.sum(rows * rows, axis=1, keepdims=True) + EPS) * scale
        refs.values_by_token[token] = of(refs.value_window, refs.value_kernels)

    lax.fori_loop(0, CHUNK, convolve, None)
    for source, target in ((refs.rows_by_token, refs.rows_by_head), (refs.values_by_token, refs.values_by_head)):
        for head in range(target.shape[0]):
            target[head] = source[:, head, :]


def _solve(
    refs: _Refs, half: Int[Array, ""], count: Int[Array, ""], spoiled: Int[Array, ""], shape: DeltaShape
) -> None:
    """All heads: values become what the tokens read, and memories those after the chunk. `spoiled`: the token of the
    chunk from which on all is NaN."""
    share = shape.value_heads // shape.key_heads
    later, earlier = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    token = lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0)
    valid = token < count
    decay = jnp.where(valid, refs.gate_window[half, :, 0, :], 0.0)
    beta = jnp.where(valid, refs.gate_window[half, :, 1, :], 0.0)
    sums = _dot(jnp.where(later >= earlier, 1.0, 0.0), decay)  # [C H]
    sums_by_head = sums.T
    is_spoiled, ends_spoiled = token >= spoiled, count > spoiled
    lane = lax.broadcasted_iota(jnp.int32, sums.shape, 1)
    sublane = lax.broadcasted_iota(jnp.int32, sums_by_head.shape, 0)

    def column(by_token: Float[Array, "C H"], head: Int[Array, ""]) -> Float[Array, "C 1"]:
        return jnp.sum(jnp.where(lane == head, by_token, 0.0), axis=1, keepdims=True)

    def solve(key_head: Int[Array, ""], _: None) -> None:
        queries, keys = refs.rows_by_head[key_head], refs.rows_by_head[shape.key_heads + key_head]
        alike, scores = _dot(keys, keys, by_rows=True), _dot(queries, keys, by_rows=True)
        for part in range(share):
            head = key_head * share + part
            sum_, rate = column(sums, head), column(beta, head)  # [C 1]
            sum_row = jnp.sum(jnp.where(sublane == head, sums_by_head, 0.0), axis=0, keepdims=True)  # [1 C]
            ratio = jnp.exp(jnp.where(later >= earlier, sum_ - sum_row, _NEVER))
            decayed, memory, last = jnp.exp(sum_), refs.memory[head], sum_[CHUNK - 1 :]
            inverse = _inverse(jnp.where(later > earlier, rate * ratio * alike, 0.0), later, earlier)
            added = _dot(inverse, rate * (refs.values_by_head[head] - _dot(decayed * keys, memory)))
            read = _dot(ratio * scores, added) + _dot(decayed * queries, memory)
            after = jnp.exp(last) * memory + _dot((jnp.exp(last - sum_) * keys).T, added)
            refs.values_by_head[head] = jnp.where(is_spoiled, jnp.nan, read)
            refs.memory[head] = jnp.where(ends_spoiled, jnp.nan, after)

    lax.fori_loop(0, shape.key_heads, solve, None)


def _inverse(below: Float[Array, "C C"], later: Int[Array, "C C"], earlier: Int[Array, "C C"]) -> Float[Array, "C C"]:
    """The inverse of I plus what is below the diagonal."""
    inverse, size = jnp.where(later == earlier, 1.0, 0.0), 1
    while size < CHUNK:
        between = (later // (2 * size) == earlier // (2 * size)) & (later // size != earlier // size)
        part = jnp.where(between, below, 0.0)
        inverse = inverse - (part if size == 1 else _dot(inverse, _dot(part, inverse)))
        size *= 2
    return inverse


def _dot(left: Float[Array, "X Y"], right: Float[Array, "Y Z"], *, by_rows: bool = False) -> Float[Array, "X Z"]:
    """A float32 product in full precision; `by_rows`: of each row with each row."""
    return lax.dot_general(
        left,
        right,
        (((1,), (1 if by_rows else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
