"""What the programs of all draft models share: the inputs of a step, and the chain of drafts that follows it.

A chain drafts the next tokens of each request one after another: each is sampled with the noise, the temperature, the
filters and the bias that the target will sample that position with, so that equal scores give equal tokens. No penalty
is applied. Dims: N padded tokens, B padded requests, R request slots, T width of the target, V vocabulary of the
scores, X bias entries of a request, k drafts."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from routed_experts.core.model_worker_batch import ForwardMode, ModelWorkerBatch, SamplingMode
from routed_experts.execution.forward_batch import BatchShape, unpack, unpack_sampler
from routed_experts.layers.attention import AttentionBackend, PagedBatch
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.logprobs import bitcast_int32, token_logprobs
from routed_experts.layers.sampling import SamplingBatch, penalize, sample

CHAIN_MODES = (SamplingMode.GREEDY, SamplingMode.RANDOM, SamplingMode.FULL)  # a chain in FULL serves FILTERED, too
# (index of the draft in its chain, drafted tokens [B], where they are fed, carry) -> (scores of the next token [B V],
# carry)
Advance = Callable[[int, Int[Array, " B"], PagedBatch, Any], tuple[Float[Array, "B V"], Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """Static parameters of all draft programs of an engine. `graphdef`: of the draft model; `target`, `target_tree`: of
    the served model and its weights; `vocab_size`: of the target; `static_modes`: each of CHAIN_MODES has programs of
    its own."""

    graphdef: nnx.GraphDef[Any]
    target: nnx.GraphDef[Any]
    target_tree: Any
    kernels: Kernels
    attention: AttentionBackend
    num_pages: int
    page_size: int
    vocab_size: int
    static_modes: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetOutputs:
    """What a draft model may read of the target: the leaves of its weights, the hidden states of a step, and the
    outputs of the tapped layers."""

    weights: Any  # list[Array], or their shapes
    hidden: Float[Array, "N T"]
    streams: tuple[Float[Array, "N T"], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bias:
    """What is added to scores of the target's ids; an id of the target's vocabulary size is padding. Read by
    chains in the FULL mode alone."""

    ids: Int[Array, "B X"]
    values: Float[Array, "B X"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftStep:
    """A step of the target, as a draft model reads it. `last`: the row of the last token of each request that is no
    rejected draft; `after`: the token that follows it. `sampling`: its position is not that of a draft; `mode`: of
    CHAIN_MODES, or an index of SamplingMode that the device reads."""

    paged: PagedBatch
    last: Int[Array, " B"]
    after: Int[Array, " B"]
    sampling: SamplingBatch
    mode: SamplingMode | Int[Array, ""]
    bias: Bias


def pack_draft_inputs(batch: ModelWorkerBatch) -> Int32[np.ndarray, " B1"]:
    """What the draft program needs beside the packed batch: `next_tokens`, and the sampling mode."""
    assert batch.next_tokens is not None, "an engine with a draft model"
    return np.append(batch.next_tokens, np.int32(batch.sampling_mode))


def chain_mode(mode: SamplingMode) -> SamplingMode:
    """The least of CHAIN_MODES that serves a step which samples in this mode."""
    return min(own for own in CHAIN_MODES if own >= mode)


def unpack_draft_step(
    packed: Int32[Array, " words"],
    inputs: Int32[Array, " B1"],
    last_tokens: Int[Array, " R"],
    bias: Bias,
    accepted: Int[Array, " B"] | None,
    *,
    shape: BatchShape,
    num_drafts: int,
    mode: SamplingMode | None,
) -> DraftStep:
    """The inputs of a draft program. `last_tokens`: after the step was sampled; `accepted`: of a verify step, whose
    requests have at most `num_drafts` drafts; `mode`: of the program, None: `inputs` has it."""
    batch = unpack(packed, shape)
    paged, starts = batch.paged, batch.paged.query_starts
    if accepted is None:
        last = jnp.maximum(starts[1:] - 1, 0)
        paged = dataclasses.replace(paged, decode=shape.mode is ForwardMode.DECODE)
    else:
        last = jnp.minimum(starts[:-1] + accepted, shape.num_tokens - 1)
        paged = dataclasses.replace(paged, max_queries=num_drafts + 1)
    next_tokens = inputs[: shape.num_requests]
    after = jnp.where(next_tokens >= 0, next_tokens, last_tokens[batch.request_slots])
    return DraftStep(
        paged=paged,
        last=last,
        after=after,
        sampling=unpack_sampler(packed, shape.num_requests).sampling,
        mode=inputs[shape.num_requests] if mode is None else mode,
        bias=bias,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftChain:
    """The chain of drafts behind a step. `lag`: how many positions before its own a draft is fed; `context_length`:
    positions at which tokens may be fed, None: all; `vocab_size`: of the target; `token_ids`: the target's id of each
    column of the scores, None where they are the same."""

    step: DraftStep
    num_drafts: int
    page_size: int
    vocab_size: int
    lag: int
    context_length: int | None = None
    token_ids: Int[Array, " V"] | None = None

    def single_tokens(self, position: Int[Array, " B"]) -> PagedBatch:
        """A step of one token a request. Tokens behind the pages of a request go to page 0, as padding does."""
        paged = self.step.paged
        rows, valid = paged.seq_lens.shape[0], paged.seq_lens > 0
        return PagedBatch(
            positions=position,
            token_rows=jnp.arange(rows, dtype=jnp.int32),
            valid=valid,
            query_starts=jnp.arange(rows + 1, dtype=jnp.int32),
            seq_lens=jnp.where(valid, position + 1, 0),
            page_table=jnp.pad(paged.page_table, ((0, 0), (0, -(-self.num_drafts // self.page_size)))),
            decode=True,
        )

    def can_feed(self, single: PagedBatch) -> Bool[Array, " B"]:
        """Which requests have a page for the token that they feed, inside of the draft model's context."""
        page = jnp.take_along_axis(single.page_table, single.positions[:, None] // self.page_size, axis=1)[:, 0]
        has_page = page > 0
        return has_page if self.context_length is None else has_page & (single.positions < self.context_length)

    def run(
        self,
        logits: Float[Array, "B V"],
        position: Int[Array, " B"],
        usable: Bool[Array, " B"] | None,
        advance: Advance,
        carry: Any,
    ) -> tuple[Any, Int32[Array, "B 2k"]]:
        """Draft from the scores of the first drafts, which are at `position`; `usable`: requests that may have
        drafts, None: all. Returns the carry, and drafts with the bits of their probabilities. Drafts end with -1 at
        the first that has NaN among its scores, or that follows one which cannot be fed."""
        step, drafts, logprobs = self.step, list[Array](), list[Array]()
        for draft_index in range(self.num_drafts):
            sampling = dataclasses.replace(step.sampling, position=position)
            chosen, logprob = self._choose(logits, sampling)
            drafts.append(chosen if usable is None else jnp.where(usable, chosen, -1))
            logprobs.append(logprob)
            if draft_index == self.num_drafts - 1:
                break
            single = self.single_tokens(position - self.lag)
            usable = self.can_feed(single) if usable is None else usable & self.can_feed(single)
            logits, carry = advance(draft_index, jnp.maximum(chosen, 0), single, carry)
            position = position + 1
        columns = [jnp.stack(drafts, axis=1), bitcast_int32(jnp.exp(jnp.stack(logprobs, axis=1)))]
        return carry, jnp.concatenate(columns, axis=1)

    def _choose(
        self, logits: Float[Array, "B V"], sampling: SamplingBatch
    ) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        """The target's id of the draft of each row, and its logprob; -1 for a row with NaN."""

        def in_mode(mode: SamplingMode) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
            scores = self._biased(logits) if mode is SamplingMode.FULL else logits
            chosen, processed = sample(scores, sampling, mode, token_ids=self.token_ids)
            return chosen, token_logprobs(processed, chosen)

        mode = self.step.mode
        if isinstance(mode, SamplingMode):
            chosen, logprobs = in_mode(mode)
        else:
            chosen, logprobs = lax.switch(mode, [functools.partial(in_mode, mode) for mode in SamplingMode])
        chosen = chosen if self.token_ids is None else self.token_ids[chosen]
        return jnp.where(jnp.isnan(logprobs), -1, chosen).astype(jnp.int32), logprobs

    def _biased(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """The scores with the bias of each request."""
        bias = self.step.bias
        if self.token_ids is None:
            return penalize(logits, None, bias.ids, bias.values)
        none = jnp.zeros((logits.shape[0], self.vocab_size), logits.dtype)
        return logits + penalize(none, None, bias.ids, bias.values)[:, self.token_ids]
