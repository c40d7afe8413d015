"""The jitted program of a draft model, which follows the sampler of a step.

It feeds the step's tokens to the draft model, each with the token that follows it, so that the draft layers hold keys
and values of all tokens that the target holds. With `num_drafts` it then drafts so many tokens of each request, one
after another: each is sampled with the noise, the temperature and the filters that the target will sample that position
with, so that equal scores give equal tokens. No bias and no penalty is applied. Nothing of the draft model's experts is
recorded. Dims: N padded tokens, B padded requests, R request slots, T width of the target, W pages of a request, k
drafts."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from routed_experts.core.model_worker_batch import ForwardMode, ModelWorkerBatch, SamplingMode
from routed_experts.execution.forward_batch import BatchShape, unpack, unpack_sampler
from routed_experts.layers.attention import AttentionBackend, PagedBatch
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.logprobs import bitcast_int32, token_logprobs
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.layers.sampling import SamplingBatch, sample
from routed_experts.models.decoder.decoder import embed

_MODES = (SamplingMode.GREEDY, SamplingMode.RANDOM, SamplingMode.FILTERED)  # the last one serves FULL steps, too


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """Static parameters of all draft programs of an engine. `graphdef`: of the DraftModel; `target`: of the served
    model, whose embedding, norm and head are used."""

    graphdef: nnx.GraphDef[Any]
    target: nnx.GraphDef[Any]
    kernels: Kernels
    attention: AttentionBackend
    num_pages: int
    page_size: int


def pack_draft_inputs(batch: ModelWorkerBatch) -> Int32[np.ndarray, " B1"]:
    """What the draft program needs beside the packed batch: `next_tokens`, and the sampling mode."""
    assert batch.next_tokens is not None, "an engine with a draft model"
    return np.append(batch.next_tokens, np.int32(min(batch.sampling_mode, SamplingMode.FILTERED)))


def run_draft_model(
    state: nnx.State[Any, Any],
    target_state: nnx.State[Any, Any],
    pool: Any,
    hidden: Float[Array, "N T"],
    streams: tuple[Float[Array, "N T"], ...],
    tokens: Int[Array, " N"],
    last_tokens: Int[Array, " R"],
    packed: Int32[Array, " words"],
    inputs: Int32[Array, " B1"],
    accepted: Int[Array, " B"] | None = None,
    *,
    spec: DraftSpec,
    shape: BatchShape,
    num_drafts: int,
) -> tuple[Any, Int32[Array, "B 2k"] | None]:
    """Feed a step's tokens and draft. `hidden`, `streams`, `tokens`: of the target's forward pass; `last_tokens`: after
    the step was sampled; `accepted`: of a verify step. Returns the draft layers' pool, and drafts with the bits of
    their probabilities; None for no drafts."""
    model, target = nnx.merge(spec.graphdef, state), nnx.merge(spec.target, target_state)
    batch, kernels = unpack(packed, shape), spec.kernels
    paged, starts = batch.paged, batch.paged.query_starts
    is_verify = shape.mode is ForwardMode.TARGET_VERIFY
    if accepted is None:
        last = jnp.maximum(starts[1:] - 1, 0)
        paged = dataclasses.replace(paged, decode=shape.mode is ForwardMode.DECODE)
    else:
        last = jnp.minimum(starts[:-1] + accepted, shape.num_tokens - 1)
    next_tokens, mode = inputs[: shape.num_requests], inputs[shape.num_requests]
    after = jnp.where(next_tokens >= 0, next_tokens, last_tokens[batch.request_slots])
    is_last = jnp.arange(shape.num_tokens) == last[paged.token_rows]
    successors = jnp.where(is_last, after[paged.token_rows], jnp.roll(tokens, -1))
    paged = dataclasses.replace(paged, max_queries=_most_queries(shape)) if is_verify else paged

    def run(
        features: Float[Array, "n F"], successors: Int[Array, " n"], paged: PagedBatch, pool: Any, place: int
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
            place=place,
            target_norm=target.norm[...],
            kernels=kernels,
            tokens=successors,
        )

    features = model.features(hidden, streams, kernels=kernels)
    output, recycled, pool = run(features, successors, paged, pool, 0)
    if num_drafts == 0:
        return pool, None
    sampling = unpack_sampler(packed, shape.num_requests).sampling
    head, token_ids = model.lm_head(target.lm_head()), model.target_ids()
    output, recycled, position = output[last], recycled[last], paged.positions[last]
    drafts, logprobs = list[Array](), list[Array]()
    for place in range(num_drafts):
        logits = head.logits(output, kernels.lm_head)
        chosen, logprob = _choose(logits, dataclasses.replace(sampling, position=position + 2), mode, token_ids)
        drafts.append(chosen)
        logprobs.append(logprob)
        if place == num_drafts - 1:
            break
        position = position + 1
        following = _single_tokens(paged, position, num_drafts, spec.page_size)
        output, recycled, pool = run(recycled, jnp.maximum(chosen, 0), following, pool, place + 1)
    columns = [jnp.stack(drafts, axis=1), bitcast_int32(jnp.exp(jnp.stack(logprobs, axis=1)))]
    return pool, jnp.concatenate(columns, axis=1)


def _single_tokens(paged: PagedBatch, position: Int[Array, " B"], num_drafts: int, page_size: int) -> PagedBatch:
    """A step of one token a request. Tokens behind the pages of a request go to page 0, as padding does: their drafts
    are lost, and nothing else."""
    rows = paged.seq_lens.shape[0]
    valid = paged.seq_lens > 0
    return PagedBatch(
        positions=position,
        token_rows=jnp.arange(rows, dtype=jnp.int32),
        valid=valid,
        query_starts=jnp.arange(rows + 1, dtype=jnp.int32),
        seq_lens=jnp.where(valid, position + 1, 0),
        page_table=jnp.pad(paged.page_table, ((0, 0), (0, -(-num_drafts // page_size)))),
        decode=True,
    )


def _choose(
    logits: Float[Array, "B V"], sampling: SamplingBatch, mode: Int[Array, ""], token_ids: Int[Array, " V"] | None
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The target's id of the draft of each row, and its logprob; -1 for a row with NaN."""

    def in_mode(mode: SamplingMode) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        chosen, processed = sample(logits, sampling, mode, token_ids=token_ids)
        return chosen, token_logprobs(processed, chosen)

    chosen, logprobs = lax.switch(mode, [functools.partial(in_mode, mode) for mode in _MODES])
    chosen = chosen if token_ids is None else token_ids[chosen]
    return jnp.where(jnp.isnan(logprobs), -1, chosen).astype(jnp.int32), logprobs


def _most_queries(shape: BatchShape) -> int:
    return shape.num_tokens // shape.num_requests
