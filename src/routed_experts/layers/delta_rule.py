"""Linear attention by the gated delta rule (Yang, Kautz and Hatamizadeh 2024), as Qwen3-Next has it: a short causal
convolution over queries, keys and values, then a memory S [K, V] for each value head, that forgets, is corrected, and
is read:

    S <- exp(decay) S;   S <- S + k (beta (v - S^T k))^T;   y = S^T q          with |q| = |k| = 1, q divided by sqrt(K)

The decay is one number for a head, or one for each of its K key channels (Kimi Team 2025), X numbers in all.

A sequence's state is the last W - 1 inputs of the convolution, and S. Dims: N tokens, B sequences, S tokens of a
sequence, C tokens of a chunk, Q channels of the convolution (queries, keys, values), W its width, H value heads, J
key heads, K key dim, V value dim."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.recurrent import select_states

CHUNK = 64  # tokens of a sequence at once
CHANNEL_CHUNK = 16  # where each channel has a decay: the ratios of a chunk are [H, C, C, K]
EPS = 1e-6  # of the norm of queries and keys
_NEVER = -1e30  # exp of it is 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Sizes of one layer. `by_channel`: each key channel of a head has a decay of its own."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    by_channel: bool = False

    @property
    def chunk(self) -> int:
        """C, at most."""
        return CHANNEL_CHUNK if self.by_channel else CHUNK

    @property
    def num_decays(self) -> int:
        """X: decays of a token."""
        return self.value_heads * (self.key_dim if self.by_channel else 1)

    @property
    def channels(self) -> int:
        """Q."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def zeros(self, count: int, dtype: jnp.dtype) -> "DeltaState":
        """The initial states of `count` sequences."""
        conv = jnp.zeros((count, self.width - 1, self.channels), dtype)
        return DeltaState(conv, jnp.zeros((count, self.value_heads, self.key_dim, self.value_dim), jnp.float32))

    def no_inputs(self, num_tokens: int, dtype: jnp.dtype) -> "DeltaInputs":
        """Zeroed inputs: those of the convolution in the dtype that it rounds them to, all others in float32."""
        sizes = {"decay": (num_tokens, self.num_decays), "beta": (num_tokens, self.value_heads)}
        wide = {name: jnp.zeros(size, jnp.float32) for name, size in sizes.items()}
        kernel = jnp.zeros((self.channels, self.width), jnp.float32)
        return DeltaInputs(jnp.zeros((num_tokens, self.channels), dtype), kernel=kernel, shape=self, **wide)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaInputs:
    """Per-token values of a layer, before tokens are mixed."""

    mixed: Float[Array, "N Q"]  # before the convolution
    decay: Float[Array, "N X"]  # logarithms, at most 0
    beta: Float[Array, "N H"]
    kernel: Float[Array, "Q W"]
    shape: DeltaShape = dataclasses.field(metadata={"static": True})

    def of_states(self, rows: Int[Array, " M"] | slice) -> "DeltaInputs":
        """These tokens; states need all of their values."""
        return DeltaInputs(self.mixed[rows], self.decay[rows], self.beta[rows], self.kernel, self.shape)

    def ragged(
        self, state: "DeltaState", query_starts: Int[Array, " B1"]
    ) -> tuple[Float[Array, "N H V"], "DeltaState"]:
        """`delta_ragged`."""
        return delta_ragged(self, state, query_starts)

    def sequences(self, segment_ids: Int[Array, "B S"] | None, count: int) -> Float[Array, "N H V"]:
        """`delta_sequence`."""
        return delta_sequence(self, segment_ids, count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaState:
    """States of B sequences."""

    conv: Float[Array, "B W1 Q"]
    recurrent: Float[Array, "B H K V"]


def delta_step(
    mixed: Float[Array, "B Q"],
    decay: Float[Array, "B X"],
    beta: Float[Array, "B H"],
    state: DeltaState,
    kernel: Float[Array, "Q W"],
    shape: DeltaShape,
) -> tuple[Float[Array, "B H V"], DeltaState]:
    """One token of each sequence."""
    window, queries, keys, values = convolve_step(mixed, state.conv, kernel, shape)
    recurrent = state.recurrent * jnp.exp(decay).reshape(*keys.shape[:2], -1, 1)
    wrong = (values - jnp.einsum("bhkv,bhk->bhv", recurrent, keys)) * beta[..., None]
    recurrent = recurrent + keys[..., None] * wrong[:, :, None]
    read = jnp.einsum("bhkv,bhk->bhv", recurrent, queries)
    return read, DeltaState(window[:, 1:], recurrent)


def convolve_step(
    mixed: Float[Array, "B Q"], conv: Float[Array, "B W1 Q"], kernel: Float[Array, "Q W"], shape: DeltaShape
) -> tuple[Float[Array, "B W Q"], Float[Array, "B H K"], Float[Array, "B H K"], Float[Array, "B H V"]]:
    """The inputs of the convolution of one token of each sequence, and queries (scaled), keys and values of each value
    head."""
    window = jnp.concatenate([conv, mixed[:, None].astype(conv.dtype)], axis=1)
    convolved = jnp.sum(window.astype(jnp.float32) * kernel.astype(jnp.float32).T, axis=1)
    split = jnp.split(
        jax.nn.silu(convolved), [shape.key_heads * shape.key_dim, 2 * shape.key_heads * shape.key_dim], axis=-1
    )
    shares = shape.value_heads // shape.key_heads
    queries, keys = (
        jnp.repeat(_unit(part.reshape(mixed.shape[0], shape.key_heads, -1)), shares, axis=1) for part in split[:2]
    )
    return window, queries * shape.key_dim**-0.5, keys, split[2].reshape(mixed.shape[0], shape.value_heads, -1)


def delta_ragged(
    inputs: DeltaInputs, state: DeltaState, query_starts: Int[Array, " B1"]
) -> tuple[Float[Array, "N H V"], DeltaState]:
    """Tokens of B sequences, neighbours in order. Sequences of one token run in one batch; the others run chunk by
    chunk. Sequences without a token keep their state; rows of no sequence give 0."""
    starts, lengths = query_starts[:-1], query_starts[1:] - query_starts[:-1]
    num_tokens, shape = inputs.mixed.shape[0], inputs.shape
    chunk = min(shape.chunk, num_tokens)
    single = lengths == 1
    at = jnp.where(single, starts, 0)
    read, new = delta_step(inputs.mixed[at], inputs.decay[at], inputs.beta[at], state, inputs.kernel, shape)
    outputs = jnp.zeros((num_tokens + chunk, shape.value_heads, shape.value_dim), jnp.float32)
    outputs = outputs.at[jnp.where(single, at, num_tokens)].set(jnp.where(single[:, None, None], read, 0.0))
    outputs, state = run_chunks(
        inputs,
        query_starts,
        outputs,
        select_states(single, new, state),
        chunk=chunk,
        read=lambda state, row, number: jax.tree.map(lambda leaf: leaf[row], state),
        write=lambda state, row, own: jax.tree.map(lambda leaf, part: leaf.at[row].set(part), state, own),
    )
    return outputs[:num_tokens], state


def run_chunks(
    inputs: DeltaInputs,
    query_starts: Int[Array, " B1"],
    outputs: Float[Array, "NC H V"],
    states: DeltaState,
    *,
    chunk: int,
    read: Callable[[DeltaState, Int[Array, ""], Int[Array, ""]], DeltaState],
    write: Callable[[DeltaState, Int[Array, ""], DeltaState], DeltaState],
) -> tuple[Float[Array, "NC H V"], DeltaState]:
    """Sequences of several tokens, one chunk of C tokens after another. `read`: (states, sequence, chunk of it) -> the
    sequence's state; `write`: (states, sequence, its new state) -> states."""
    lengths = query_starts[1:] - query_starts[:-1]
    chunks = (jnp.where(lengths > 1, lengths, 0) + chunk - 1) // chunk
    chunk_ends = jnp.cumsum(chunks)
    padded = [jnp.pad(part, ((0, chunk), (0, 0))) for part in (inputs.mixed, inputs.decay, inputs.beta)]

    def run_chunk(
        index: Int[Array, ""], carry: tuple[Float[Array, "NC H V"], DeltaState]
    ) -> tuple[Float[Array, "NC H V"], DeltaState]:
        outputs, states = carry
        row = jnp.searchsorted(chunk_ends, index, side="right", method="compare_all").astype(jnp.int32)
        number = index - (chunk_ends[row] - chunks[row])
        start = query_starts[row] + number * chunk
        valid = jnp.arange(chunk) < query_starts[row + 1] - start
        mixed, decay, beta = (lax.dynamic_slice_in_dim(part, start, chunk) for part in padded)
        rows = ChunkInputs(mixed, decay, beta, jnp.zeros(chunk, jnp.int32), valid)
        values, new = delta_chunk(rows, read(states, row, number), inputs.kernel, inputs.shape)
        merged = jnp.where(valid[:, None, None], values, lax.dynamic_slice_in_dim(outputs, start, chunk))
        return lax.dynamic_update_slice_in_dim(outputs, merged, start, axis=0), write(states, row, new)

    return lax.fori_loop(0, chunk_ends[-1], run_chunk, (outputs, states))


def delta_sequence(
    inputs: DeltaInputs, segment_ids: Int[Array, "B S"] | None, num_sequences: int
) -> Float[Array, "N H V"]:
    """Whole sequences from the initial state; where the segment changes, a sequence starts anew. Differentiable; for
    training."""
    shape, length = inputs.shape, inputs.mixed.shape[0] // num_sequences
    chunk = min(shape.chunk, length)
    starts = jnp.zeros((num_sequences, length), jnp.int32)
    if segment_ids is not None:
        changes = (segment_ids[:, 1:] != segment_ids[:, :-1]).astype(jnp.int32)
        starts = jnp.concatenate([starts[:, :1], changes], axis=1)

    def by_chunk(part: Array) -> Array:
        """[B S ...] to [chunks B C ...], padded."""
        padded = jnp.pad(part, ((0, 0), (0, -length % chunk), *[(0, 0)] * (part.ndim - 2)))
        return jnp.swapaxes(padded.reshape(num_sequences, -1, chunk, *part.shape[2:]), 0, 1)

    numbers = (inputs.mixed, inputs.decay, inputs.beta)
    mixed, decay, beta = (by_chunk(part.reshape(num_sequences, length, -1)) for part in numbers)
    valid = by_chunk(jnp.ones((num_sequences, length), bool))
    rows = ChunkInputs(mixed, decay, beta, jnp.cumsum(by_chunk(starts), axis=2), valid)
    batched = jax.vmap(lambda rows, state: delta_chunk(rows, state, inputs.kernel, shape))

    def add_chunk(state: DeltaState, rows: ChunkInputs) -> tuple[DeltaState, Float[Array, "B C H V"]]:
        read, state = batched(rows, state)
        return state, read

    _, read = lax.scan(add_chunk, shape.zeros(num_sequences, inputs.mixed.dtype), rows)
    by_sequence = jnp.swapaxes(read, 0, 1).reshape(num_sequences, -1, *read.shape[3:])[:, :length]
    return by_sequence.reshape(-1, *by_sequence.shape[2:])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkInputs:
    """C neighbouring tokens of one sequence; those that are not `valid` are last. `segment` counts the sequences that
    began among them: tokens of segment 0 go on from the state."""

    mixed: Float[Array, "C Q"]
    decay: Float[Array, "C X"]
    beta: Float[Array, "C H"]
    segment: Int[Array, " C"]
    valid: Bool[Array, " C"]


def delta_chunk(
    rows: ChunkInputs, state: DeltaState, kernel: Float[Array, "Q W"], shape: DeltaShape
) -> tuple[Float[Array, "C H V"], DeltaState]:
    """All tokens of a chunk at once (Yang et al. 2024, section 3.3): with G the sum of decays up to a token and U =
    what each token adds,

        u_t = beta_t (v_t - exp(G_t) S0^T k_t - sum_{i<t} exp(G_t - G_i) (k_t k_i) u_i)         a triangular system
        y_t = exp(G_t) S0^T q_t + sum_{i<=t} exp(G_t - G_i) (q_t k_i) u_i

    A nonfinite token makes itself and later tokens NaN, as in a sequential run; earlier tokens and other sequences
    are unaffected. `state` is that of this sequence, without the axis B."""
    usable, spoiled, ends_spoiled = _usable(rows, state)
    window, queries, keys, values = _convolved(usable, state.conv, kernel, shape)
    positions, segment = jnp.arange(rows.valid.shape[0]), rows.segment
    sums = jnp.cumsum(usable.decay, axis=0).reshape(positions.size, shape.value_heads, -1)
    sums = jnp.swapaxes(sums, 0, 1)  # [H, C, K], or [H, C, 1]
    earlier = (positions[:, None] >= positions) & (segment[:, None] == segment)
    ratio = jnp.exp(jnp.where(earlier[..., None], sums[:, :, None] - sums[:, None], _NEVER))  # [H, C, C, K]
    decayed = jnp.where((segment == 0)[:, None], jnp.exp(sums), 0.0)
    recurrent, beta = jnp.where(jnp.isfinite(state.recurrent), state.recurrent, 0.0), usable.beta.T[..., None]
    system = jnp.where(positions[:, None] > positions, beta * _scores(keys, keys, ratio), 0.0)
    targets = beta * (values - _dot("htk,hkv->htv", decayed * keys, recurrent))
    added = lax.linalg.triangular_solve(system, targets, left_side=True, lower=True, unit_diagonal=True)
    read = _dot("hti,hiv->htv", _scores(queries, keys, ratio), added) + _dot(
        "htk,hkv->htv", decayed * queries, recurrent
    )
    left = jnp.where((segment == segment[-1])[:, None], jnp.exp(sums[:, -1:] - sums), 0.0)
    recurrent = decayed[:, -1][..., None] * recurrent + _dot("htk,htv->hkv", left * keys, added)
    read = jnp.where(spoiled[:, None, None], jnp.nan, jnp.swapaxes(read, 0, 1))
    window = jnp.where(jnp.pad(segment, (shape.width - 1, 0))[:, None] == segment[-1], window, 0)
    conv = lax.dynamic_slice_in_dim(window, jnp.sum(rows.valid), shape.width - 1)
    return read, DeltaState(conv, jnp.where(ends_spoiled, jnp.nan, recurrent))


def _usable(rows: ChunkInputs, state: DeltaState) -> tuple[ChunkInputs, Bool[Array, " C"], Bool[Array, ""]]:
    """The chunk with 0 in place of absent and nonfinite tokens; the tokens that a nonfinite one makes NaN; and whether
    the state after it is NaN."""
    finite = jnp.stack([jnp.all(jnp.isfinite(part), axis=-1) for part in (rows.mixed, rows.decay, rows.beta)]).all(
        axis=0
    )
    broken, positions = rows.valid & ~finite, jnp.arange(rows.valid.shape[0])
    before = (positions[:, None] >= positions) & (rows.segment[:, None] == rows.segment)
    began = ~(jnp.all(jnp.isfinite(state.recurrent)) & jnp.all(jnp.isfinite(state.conv)))
    spoiled = jnp.any(before & broken, axis=-1) | (began & (rows.segment == 0))
    mixed, decay, beta = (
        jnp.where((rows.valid & finite)[:, None], part, 0) for part in (rows.mixed, rows.decay, rows.beta)
    )
    return ChunkInputs(mixed, decay, beta, rows.segment, rows.valid), spoiled, spoiled[-1]


def _convolved(
    rows: ChunkInputs, conv: Float[Array, "W1 Q"], kernel: Float[Array, "Q W"], shape: DeltaShape
) -> tuple[Float[Array, "WC Q"], Float[Array, "H C K"], Float[Array, "H C K"], Float[Array, "H C V"]]:
    """The inputs of the convolution with those before them, and queries (scaled), keys and values of each value
    head."""
    chunk, width = rows.valid.shape[0], shape.width
    conv = jnp.where(jnp.isfinite(conv), conv, 0)
    window, segment = jnp.concatenate([conv, rows.mixed.astype(conv.dtype)]), jnp.pad(rows.segment, (width - 1, 0))
    taps = [
        jnp.where(segment[tap : tap + chunk] == rows.segment, 1.0, 0.0)[:, None] * kernel[:, tap].astype(jnp.float32)
        for tap in range(width)
    ]
    convolved = sum(
        (window[tap : tap + chunk].astype(jnp.float32) * weight for tap, weight in enumerate(taps)),
        jnp.zeros((), jnp.float32),
    )
    split = jnp.split(
        jax.nn.silu(convolved), [shape.key_heads * shape.key_dim, 2 * shape.key_heads * shape.key_dim], axis=-1
    )
    shares = shape.value_heads // shape.key_heads
    queries, keys = (jnp.repeat(_unit(part.reshape(chunk, shape.key_heads, -1)), shares, axis=1) for part in split[:2])
    values = split[2].reshape(chunk, shape.value_heads, -1)
    queries, keys, values = (jnp.swapaxes(part, 0, 1) for part in (queries * shape.key_dim**-0.5, keys, values))
    return window, queries, keys, values


def _scores(
    left: Float[Array, "H C K"], keys: Float[Array, "H C K"], ratio: Float[Array, "H C C K"] | Float[Array, "H C C 1"]
) -> Float[Array, "H C C"]:
    """Products of each row with each key as it has decayed since."""
    if ratio.shape[-1] == 1:
        return ratio[..., 0] * _dot("htk,hik->hti", left, keys)
    return _dot("htk,htik->hti", left, ratio * keys[:, None])


def _dot(subscripts: str, left: Float[Array, "..."], right: Float[Array, "..."]) -> Float[Array, "..."]:
    """A float32 product in full precision: errors would add up along a sequence."""
    return jnp.einsum(subscripts, left, right, precision=lax.Precision.HIGHEST)


def _unit(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)
