"""Linear attention by the gated delta rule (Yang, Kautz and Hatamizadeh 2024), as Qwen3-Next has it: a short causal convolution over
queries, keys and values, then a memory S [K, V] for each value head, that forgets, is corrected, and is read:

    S <- exp(decay) S;   S <- S + k (beta (v - S^T k))^T;   y = S^T q          with |q| = |k| = 1, q divided by sqrt(K)

A sequence's state is the last W - 1 inputs of the convolution, and S. Knows nothing of requests beyond the arrays of a step.
Dims: N tokens, B sequences, S tokens of a sequence, Q channels of the convolution (queries, keys, values), W its width, H value heads,
J key heads, K key dim, V value dim."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_EPS = 1e-6  # of the norm of queries and keys


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Sizes of one layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def channels(self) -> int:
        """Q."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaInputs:
    """What a layer computes of its tokens before they see one another."""

    mixed: Float[Array, "N Q"]  # before the convolution
    decay: Float[Array, "N H"]  # logarithms, at most 0
    beta: Float[Array, "N H"]
    kernel: Float[Array, "Q W"]
    shape: DeltaShape = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaState:
    """States of B sequences."""

    recent: Float[Array, "B W1 Q"]
    memory: Float[Array, "B H K V"]

    @staticmethod
    def zeros(count: int, shape: DeltaShape, dtype: jnp.dtype) -> "DeltaState":
        """Nothing seen yet."""
        recent = jnp.zeros((count, shape.width - 1, shape.channels), dtype)
        return DeltaState(recent, jnp.zeros((count, shape.value_heads, shape.key_dim, shape.value_dim), jnp.float32))

    def where(self, keep: Bool[Array, " B"], other: "DeltaState") -> "DeltaState":
        """These states where `keep`, the others elsewhere."""
        pairs = ((self.recent, other.recent), (self.memory, other.memory))
        recent, memory = (jnp.where(keep.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in pairs)
        return DeltaState(recent, memory)


def delta_step(
    mixed: Float[Array, "B Q"],
    decay: Float[Array, "B H"],
    beta: Float[Array, "B H"],
    state: DeltaState,
    kernel: Float[Array, "Q W"],
    shape: DeltaShape,
) -> tuple[Float[Array, "B H V"], DeltaState]:
    """One token of each sequence."""
    window = jnp.concatenate([state.recent, mixed[:, None].astype(state.recent.dtype)], axis=1)  # [B, W, Q]
    turned = jnp.sum(window.astype(jnp.float32) * kernel.astype(jnp.float32).T, axis=1)
    split = jnp.split(jax.nn.silu(turned), [shape.key_heads * shape.key_dim, 2 * shape.key_heads * shape.key_dim], axis=-1)
    shares = shape.value_heads // shape.key_heads
    queries, keys = (jnp.repeat(_unit(part.reshape(mixed.shape[0], shape.key_heads, -1)), shares, axis=1) for part in split[:2])
    values = split[2].reshape(mixed.shape[0], shape.value_heads, -1)
    memory = state.memory * jnp.exp(decay)[..., None, None]
    wrong = (values - jnp.einsum("bhkv,bhk->bhv", memory, keys)) * beta[..., None]
    memory = memory + keys[..., None] * wrong[:, :, None]
    read = jnp.einsum("bhkv,bhk->bhv", memory, queries * shape.key_dim**-0.5)
    return read, DeltaState(window[:, 1:], memory)


def delta_ragged(inputs: DeltaInputs, state: DeltaState, query_starts: Int[Array, " B1"]) -> tuple[Float[Array, "N H V"], DeltaState]:
    """Tokens of B sequences, neighbours in order: all sequences side by side, one token of each after another. Sequences without a
    token keep their state; rows of no sequence give 0."""
    starts, lengths = query_starts[:-1], query_starts[1:] - query_starts[:-1]
    num_tokens, shape = inputs.mixed.shape[0], inputs.shape

    def add_token(index: Int[Array, ""], carry: tuple[Float[Array, "N H V"], DeltaState]) -> tuple[Float[Array, "N H V"], DeltaState]:
        outputs, state = carry
        there = index < lengths
        at = jnp.where(there, starts + index, 0)
        read, new = delta_step(inputs.mixed[at], inputs.decay[at], inputs.beta[at], state, inputs.kernel, shape)
        outputs = outputs.at[jnp.where(there, at, num_tokens)].set(read, mode="drop")
        return outputs, new.where(there, state)

    outputs = jnp.zeros((num_tokens, shape.value_heads, shape.value_dim), jnp.float32)
    return lax.fori_loop(0, jnp.max(lengths), add_token, (outputs, state))


def delta_whole(inputs: DeltaInputs, segment_ids: Int[Array, "B S"] | None, num_sequences: int) -> Float[Array, "N H V"]:
    """Whole sequences from nothing; where the segment changes, a sequence starts anew. Differentiable; for training."""
    rows = tuple(jnp.swapaxes(part.reshape(num_sequences, -1, part.shape[-1]), 0, 1) for part in (inputs.mixed, inputs.decay, inputs.beta))
    length = rows[0].shape[0]
    starts = jnp.zeros((length, num_sequences), bool)
    if segment_ids is not None:
        starts = jnp.concatenate([starts[:1], (segment_ids[:, 1:] != segment_ids[:, :-1]).T], axis=0)
    empty = DeltaState.zeros(num_sequences, inputs.shape, inputs.mixed.dtype)

    def add_token(state: DeltaState, scanned: tuple[Array, ...]) -> tuple[DeltaState, Float[Array, "B H V"]]:
        start, mixed, decay, beta = scanned
        read, state = delta_step(mixed, decay, beta, empty.where(start, state), inputs.kernel, inputs.shape)
        return state, read

    _, read = lax.scan(add_token, empty, (starts, *rows))
    return jnp.swapaxes(read, 0, 1).reshape(-1, *read.shape[2:])


def _unit(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)
