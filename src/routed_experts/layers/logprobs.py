"""Log probabilities of chosen and best tokens.

One formula, float32 log_softmax, of two sources: raw logprobs are of the model's logits; processed ones are of what
`sampling.sample` returned (after penalties, temperature and filters; a dropped token has -inf). For greedy rows both
are equal, unless penalised. Dims: B rows, N prompt tokens, D hidden, V vocabulary, T best tokens requested."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from routed_experts.layers.parallel import SINGLE_DEVICE, AxisGroup

MAX_TOP_LOGPROBS = 20
_BLOCK_ROWS = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """Row t is the logprob of `targets[t]`, the token that follows hidden state t. T may be 0."""

    target: Float[Array, " N"]
    top: Float[Array, "N T"]  # best first
    top_ids: Int[Array, "N T"]


def bitcast_int32(x: Float[Array, "..."]) -> Int32[Array, "..."]:
    """The bits of floats as float32, which leave the device among integers."""
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def token_logprobs(logits: Float[Array, "B V"], tokens: Int[Array, " B"]) -> Float[Array, " B"]:
    """Return the log probability of one token per row. Ids are in 0..V-1."""
    logprobs = _log_softmax(logits)
    return jnp.take_along_axis(logprobs, tokens[:, None], axis=-1, mode="clip")[:, 0]


def top_logprobs(
    logits: Float[Array, "B V"], k: int = MAX_TOP_LOGPROBS
) -> tuple[Float[Array, "B T"], Int[Array, "B T"]]:
    """Return the best T = min(k, V) log probabilities of each row and their ids, best first, ties to the lower id."""
    values, ids = lax.top_k(_log_softmax(logits), min(k, logits.shape[-1]))
    return values, ids.astype(jnp.int32)


def cap_logits(logits: Float[Array, "N V"], softcap: float) -> Float[Array, "N V"]:
    """c tanh(logits / c) for a softcap c, which bounds them (Gemma 2, section 2); 0 for none."""
    return jnp.tanh(logits / softcap) * softcap if softcap else logits


def prompt_logprobs(
    hidden: Float[Array, "N D"],
    head: Float[Array, "D V"],
    targets: Int[Array, " N"],
    *,
    top: int,
    bias: Float[Array, " V"] | None = None,
    softcap: float = 0.0,
    group: AxisGroup = SINGLE_DEVICE,
) -> PromptLogprobs:
    """Project hidden states and return the log probability of each target and of the `top` best tokens.

    Works in blocks of 64 rows, so no [N, V] array exists, and a row is computed at one matmul shape for every N. With
    a `group`, `head` is one device's rows [D/V, V]."""
    num_tokens, width = hidden.shape
    padding = -num_tokens % _BLOCK_ROWS
    hidden_blocks = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, _BLOCK_ROWS, width)  # [N, D] -> [N/64, 64, D]
    target_blocks = jnp.pad(targets, (0, padding)).reshape(-1, _BLOCK_ROWS)

    def of_block(block: tuple[Float[Array, "R D"], Int[Array, " R"]]) -> PromptLogprobs:
        block_hidden, block_targets = block
        own = group.local_columns(block_hidden, head.shape[0])
        logits = group.all_reduce(jnp.matmul(own, head, preferred_element_type=jnp.float32))
        logits = cap_logits(logits if bias is None else logits + bias.astype(jnp.float32), softcap)
        best, best_ids = top_logprobs(logits, top)
        return PromptLogprobs(target=token_logprobs(logits, block_targets), top=best, top_ids=best_ids)

    blocks = lax.map(of_block, (hidden_blocks, target_blocks))
    rows = num_tokens + padding
    return jax.tree.map(
        lambda leaf: leaf.reshape(rows, *leaf.shape[2:])[:num_tokens], blocks
    )  # [N/64, 64, ...] -> [N, ...]


def _log_softmax(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
