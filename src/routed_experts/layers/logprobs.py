"""Log probabilities of chosen and best tokens.

One formula, float32 log_softmax, of two sources: raw logprobs are of the model's logits; processed ones are of what
`sampling.sample` returned (after penalties, temperature and filters; a dropped token has -inf). For greedy rows both
are equal, unless penalised. Dims: B rows, N prompt tokens, D hidden, V vocabulary, T tokens of a row."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from routed_experts.core.sampling_params import MAX_TOP_LOGPROBS
from routed_experts.layers.lm_head import REFERENCE_HEAD, HeadProduct, LmHead

_BLOCK_ROWS = 64

# The log probabilities of given tokens of each row, ids in 0..V-1.
LogprobsKernel = Callable[[Float[Array, "B V"], Int[Array, "B T"]], Float[Array, "B T"]]


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


def log_softmax_at(logits: Float[Array, "B V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The LogprobsKernel of array code."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(logprobs, tokens, axis=-1, mode="clip")


def token_logprobs(
    logits: Float[Array, "B V"], tokens: Int[Array, " B"], kernel: LogprobsKernel = log_softmax_at
) -> Float[Array, " B"]:
    """Return the log probability of one token per row. Ids are in 0..V-1."""
    return kernel(logits, tokens[:, None])[:, 0]


def ranked_logprobs(
    logits: Float[Array, "B V"],
    tokens: Int[Array, " B"],
    k: int = MAX_TOP_LOGPROBS,
    kernel: LogprobsKernel = log_softmax_at,
) -> tuple[Float[Array, " B"], Float[Array, "B T"], Int[Array, "B T"]]:
    """Return the log probability of one token per row, and the best T = min(k, V) ones with their ids, best first, ties
    to the lower id."""
    best = lax.top_k(logits, min(k, logits.shape[-1]))[1].astype(jnp.int32)
    logprobs = kernel(logits, jnp.concatenate([tokens[:, None], best], axis=1))
    return logprobs[:, 0], logprobs[:, 1:], best


def prompt_logprobs(
    hidden: Float[Array, "N D"],
    head: LmHead,
    targets: Int[Array, " N"],
    *,
    top: int,
    product: HeadProduct = REFERENCE_HEAD,
    kernel: LogprobsKernel = log_softmax_at,
) -> PromptLogprobs:
    """Project hidden states and return the log probability of each target and of the `top` best tokens.

    Works in blocks of 64 rows, so no [N, V] array exists, and a row is computed at one matmul shape for every N. Fewer
    rows are a block of their own where the product is batch-invariant; the kernel then has to be so, too."""
    num_tokens, width = hidden.shape
    block_rows = min(num_tokens, _BLOCK_ROWS) if product.linear.batch_invariant else _BLOCK_ROWS
    padding = -num_tokens % block_rows
    hidden_blocks = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, block_rows, width)  # [N, D] -> [N/64, 64, D]
    target_blocks = jnp.pad(targets, (0, padding)).reshape(-1, block_rows)

    def of_block(block: tuple[Float[Array, "R D"], Int[Array, " R"]]) -> PromptLogprobs:
        block_hidden, block_targets = block
        target, best, best_ids = ranked_logprobs(head.logits(block_hidden, product), block_targets, top, kernel)
        return PromptLogprobs(target=target, top=best, top_ids=best_ids)

    blocks = lax.map(of_block, (hidden_blocks, target_blocks))
    rows = num_tokens + padding
    return jax.tree.map(
        lambda leaf: leaf.reshape(rows, *leaf.shape[2:])[:num_tokens], blocks
    )  # [N/64, 64, ...] -> [N, ...]
