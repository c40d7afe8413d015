"""The jitted program of a draft model that reads the target's hidden states; it follows the sampler of a step.

It feeds the step's tokens to the draft model, each with the token that follows it, so that the draft layers hold keys
and values of all tokens that the target holds. With `num_drafts` it then drafts so many tokens of each request
(draft_chain.py). Nothing of the draft model's experts is recorded. Dims: N padded tokens, B padded requests, R request
slots, k drafts."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from routed_experts.core.model_worker_batch import SamplingMode
from routed_experts.execution.draft_chain import Bias, DraftChain, DraftSpec, TargetOutputs, unpack_draft_step
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.layers.attention import PagedBatch
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.models.decoder.decoder import embed

PAIR_LAG = 1  # a draft is fed with features of the token before it, at the position of that token


def run_draft_model(
    state: nnx.State[Any, Any],
    target_outputs: TargetOutputs,
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
    """Feed a step's tokens and draft; `state` is of a DraftModel. `tokens`: of the target's forward pass;
    `last_tokens`: after the step was sampled; `accepted`: of a verify step; `mode`: of CHAIN_MODES,
    None: `inputs` has it. Returns the draft layers' pool, and drafts with the bits of their probabilities; None for no
    drafts."""
    target_state = jax.tree.unflatten(spec.target_tree, target_outputs.weights)
    model, target = nnx.merge(spec.graphdef, state), nnx.merge(spec.target, target_state)
    step = unpack_draft_step(packed, inputs, last_tokens, bias, accepted, shape=shape, num_drafts=num_drafts, mode=mode)
    kernels = spec.kernels
    rows, last = step.paged.token_rows, step.last
    is_last = jnp.arange(shape.num_tokens) == last[rows]
    successors = jnp.where(is_last, step.after[rows], jnp.roll(tokens, -1))

    def run(
        features: Float[Array, "n F"], successors: Int[Array, " n"], paged: PagedBatch, pool: Any, draft_index: int
    ) -> tuple[Float[Array, "n D"], Float[Array, "n F"], Any]:
        embedded = embed(target.config, target.embed[...], successors, kernels.group, kernels.stream_dtype)
        attend = PagedAttend(backend=spec.attention, batch=paged, num_pages=spec.num_pages)
        return model(
            features,
            embedded,
            paged.positions,
            paged.valid,
            attend,
            pool,
            draft_index=draft_index,
            target_norm=target.norm[...],
            kernels=kernels,
            tokens=successors,
        )

    features = model.features(target_outputs.hidden, target_outputs.streams, kernels=kernels)
    output, recycled, pool = run(features, successors, step.paged, pool, 0)
    if num_drafts == 0:
        return pool, None
    head = model.lm_head(target.lm_head())

    def advance(draft_index: int, drafted: Int[Array, " B"], single: PagedBatch, carry: Any) -> tuple[Array, Any]:
        recycled, pool = carry
        output, recycled, pool = run(recycled, drafted, single, pool, draft_index + 1)
        return head.logits(output, kernels.lm_head), (recycled, pool)

    chain = DraftChain(
        step=step,
        num_drafts=num_drafts,
        page_size=spec.page_size,
        vocab_size=spec.vocab_size,
        lag=PAIR_LAG,
        token_ids=model.target_ids(),
    )
    logits = head.logits(output[last], kernels.lm_head)
    first = step.paged.positions[last] + 1 + PAIR_LAG
    (_, pool), drafts = chain.run(logits, first, None, advance, (recycled[last], pool))
    return pool, drafts
