"""The jitted program of a draft model that is a decoder of its own; it follows the sampler of a step.

It feeds the step's tokens to the draft model, at the same positions and slots, so that its layers hold keys and values
of all tokens that the target holds. With `num_drafts` it then feeds the token that was sampled, and drafts so many
tokens of each request (draft_chain.py). Nothing of the draft model's experts is recorded. Dims: N padded tokens, B
padded requests, R request slots, D hidden, V vocabulary of the target, k drafts."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from routed_experts.core.model_worker_batch import SamplingMode
from routed_experts.execution.draft_chain import Bias, DraftChain, DraftSpec, TargetOutputs, unpack_draft_step
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.layers.attention import PagedBatch
from routed_experts.layers.paged_attend import PagedAttend

OWN_LAG = 0  # a draft is fed at its own position


def run_standalone(
    state: nnx.State[Any, Any],
    target_outputs: TargetOutputs | None,
    pool: Any,
    tokens: Int[Array, " N"],
    last_tokens: Int[Array, " R"],
    packed: Int32[Array, " words"],
    inputs: Int32[Array, " B1"],
    bias: Bias,
    accepted: Int[Array, " B"] | None = None,
    *,
    spec: DraftSpec,
    shape: BatchShape,
    num_drafts: int,
    mode: SamplingMode | None = None,
) -> tuple[Any, Int32[Array, "B 2k"] | None]:
    """Feed a step's tokens and draft; `state` is of a Decoder. `target_outputs`: None; the other arguments and what is
    returned are as for `run_draft_model`."""
    assert target_outputs is None, "a decoder of its own reads tokens alone"
    model = nnx.merge(spec.graphdef, state)
    step = unpack_draft_step(packed, inputs, last_tokens, bias, accepted, shape=shape, num_drafts=num_drafts, mode=mode)
    own_size = model.config.vocab_size

    def run(tokens: Int[Array, " n"], paged: PagedBatch, pool: Any) -> tuple[Float[Array, "n D"], Any]:
        # ids that only the padding of the target's vocabulary has would read outside of the embeddings
        known = jnp.minimum(tokens, own_size - 1) if own_size < spec.vocab_size else tokens
        attend = PagedAttend(backend=spec.attention, batch=paged, num_pages=spec.num_pages)
        hidden, pool, _ = model(known, paged.positions, paged.valid, attend, pool, None, kernels=spec.kernels)
        return hidden, pool

    def advance(draft_index: int, drafted: Int[Array, " B"], single: PagedBatch, pool: Any) -> tuple[Array, Any]:
        del draft_index
        hidden, pool = run(drafted, single, pool)
        return model.logits(hidden, product=spec.kernels.lm_head)[:, : spec.vocab_size], pool

    _, pool = run(tokens, step.paged, pool)
    if num_drafts == 0:
        return pool, None
    chain = DraftChain(
        step=step,
        num_drafts=num_drafts,
        page_size=spec.page_size,
        vocab_size=spec.vocab_size,
        lag=OWN_LAG,
        context_length=model.config.context_length,
    )
    sampled_at = step.paged.positions[step.last] + 1
    single = chain.single_tokens(sampled_at)
    logits, pool = advance(0, step.after, single, pool)
    return chain.run(logits, sampled_at + 1, chain.can_feed(single), advance, pool)
