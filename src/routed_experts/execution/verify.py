"""The jitted program that follows the layers of a verify step: logits of all tokens to tokens, and accepted drafts.

Each token of a request is sampled after with the request's own parameters and the noise of its position, as if it had
been fed alone; so the tokens do not depend on the drafts. Penalties of a row count what its slot has fed before the
step, and at most Q tokens of the step: those up to the row. `add_accepted` then adds the accepted ones to the slot.
Dims: N padded tokens, S rows of logits (the first S tokens of the step), B padded requests, R request slots, V
vocabulary, W mask words, T top logprobs, Q = num_drafts + 1 tokens of a request."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Int32, UInt32

from routed_experts.execution.forward_batch import BatchShape, SamplerBatch, unpack, unpack_sampler
from routed_experts.execution.row_blocks import map_blocks
from routed_experts.execution.sampler import (
    Choices,
    PenaltyInputs,
    SamplerSpec,
    TokenCounts,
    choose_tokens,
    without_model,
)
from routed_experts.execution.spmd import BY_RANK, GATHERED, jit_sharded
from routed_experts.layers.acceptance import count_accepted
from routed_experts.layers.logprobs import bitcast_int32

ACCEPTED_COLUMN = 2  # of the table: row b has the accepted drafts of request b


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerifySpec:
    """Static parameters of an accept program. `block`: rows that are sampled at once."""

    sampler: SamplerSpec
    shape: BatchShape
    num_drafts: int
    block: int


def accept_tokens(
    logits: Float[Array, "S V"],
    last_tokens: Int[Array, " R"],
    words: Int32[Array, " words"],
    tokens: Int[Array, " N"],
    full: PenaltyInputs | None,
    mask: UInt32[Array, "B W"] | None = None,
    *,
    spec: VerifySpec,
) -> tuple[Int[Array, " R"], Int32[Array, "S columns"], Int[Array, " B"]]:
    """Sample after every token and count the accepted drafts. `full` has the counts of all slots, without the tokens of
    this step. `mask`: by request; one with a grammar has no drafts, so its mask is that of its one row. Returns the
    slots' last tokens; one int32 array a row: token, logprob bits, accepted drafts (row b: of request b), and the rest
    as `sample_tokens` has it; and the accepted drafts of each request for the device."""
    shape, num_rows = spec.shape, logits.shape[0]
    paged = unpack(words, shape).paged
    row_requests, positions = paged.token_rows[:num_rows], paged.positions[:num_rows] + 1
    by_request = unpack_sampler(words, shape.num_requests)
    fed = None
    if full is not None:
        fed = _fed_before(
            tokens, paged.query_starts[row_requests], num_rows, most=spec.num_drafts + 1, pad=logits.shape[1]
        )

    def choose(
        logits: Float[Array, "rows V"], requests: Int[Array, " rows"], positions: Int[Array, " rows"], fed: Any
    ) -> Choices:
        own = _of_rows(by_request, requests, positions)
        inputs = None
        if full is not None:
            counts = _add_fed(full.counts, own.request_slots, fed)
            inputs = PenaltyInputs(counts, full.bias_ids[requests], full.bias_values[requests])
        return choose_tokens(logits, own, inputs, None if mask is None else mask[requests], spec=spec.sampler)

    choices = map_blocks(choose, spec.block, logits, row_requests, positions, fed)
    accepted = count_accepted(choices.tokens, tokens[:num_rows], paged.query_starts, num_drafts=spec.num_drafts)
    last_rows = jnp.minimum(paged.query_starts[:-1] + accepted, num_rows - 1)
    last_tokens = last_tokens.at[by_request.request_slots].set(choices.tokens[last_rows])
    of_rows = jnp.pad(accepted, (0, num_rows - shape.num_requests))
    columns = [choices.tokens[:, None], bitcast_int32(choices.logprobs)[:, None], of_rows[:, None], *choices.top]
    if spec.sampler.row_words:
        columns.append(words[shape.packed.shape[0] :].reshape(spec.sampler.row_words, num_rows).T)
    return last_tokens, jnp.concatenate(columns, axis=1), accepted


def add_accepted(
    generated: Int[Array, "R V"],
    tokens: Int[Array, " N"],
    packed: Int32[Array, " words"],
    accepted: Int[Array, " B"],
    *,
    shape: BatchShape,
) -> Int[Array, "R V"]:
    """Add the first token and the accepted drafts of each request to the counts of its slot. A rejected draft is never
    counted; the token that was sampled last is counted by the step that feeds it. All of them are generated: a verify
    step feeds no token of a prompt."""
    batch = unpack(packed, shape)
    paged = batch.paged
    last = (paged.query_starts[:-1] + accepted)[paged.token_rows]
    is_counted = paged.valid & (jnp.arange(shape.num_tokens) <= last)
    return generated.at[batch.request_slots[paged.token_rows], tokens].add(is_counted.astype(generated.dtype))


def _fed_before(
    tokens: Int[Array, " N"], first: Int[Array, " S"], num_rows: int, *, most: int, pad: int
) -> Int[Array, "S Q"]:
    """The tokens of its request that this step feeds up to each row, that of the row included, and then `pad`. `first`:
    the first token of the row's request."""
    at = first[:, None] + jnp.arange(most)
    return jnp.where(at <= jnp.arange(num_rows)[:, None], tokens[jnp.minimum(at, tokens.shape[0] - 1)], pad)


def _add_fed(counts: TokenCounts, slots: Int[Array, " rows"], fed: Int[Array, "rows Q"]) -> TokenCounts:
    """The counts of each row: those of its slot, and the tokens `fed` before it; ids of V are padding. What is new for
    each row takes a byte a token of the vocabulary; the counts of the slot are read where they are used."""
    num_rows, most = fed.shape
    assert most <= jnp.iinfo(jnp.int8).max, most
    rows = jnp.arange(num_rows)[:, None]
    new = jnp.zeros((num_rows, counts.generated.shape[1]), jnp.int8).at[rows, fed].add(jnp.int8(1), mode="drop")
    return TokenCounts(counts.generated[slots] + new.astype(jnp.int32), counts.prompt[slots])


def _of_rows(batch: SamplerBatch, requests: Int[Array, " R"], positions: Int[Array, " R"]) -> SamplerBatch:
    """The parameters of each row's request, and the position that the row samples."""
    own = jax.tree.map(lambda leaf: leaf[requests], batch)
    return dataclasses.replace(own, sampling=dataclasses.replace(own.sampling, position=positions))


@functools.lru_cache(maxsize=256)
def accept_program(spec: VerifySpec, mesh: Mesh | None) -> Any:
    """`accept_tokens`, jitted and cached; all engines of a process share its traces."""
    program = functools.wraps(accept_tokens)(functools.partial(accept_tokens, spec=spec))
    out_specs = (BY_RANK, GATHERED, BY_RANK)
    in_specs = (BY_RANK,) * (6 if spec.sampler.masked else 5)
    return jit_sharded(
        program,
        without_model(mesh),
        in_specs=in_specs,
        out_specs=out_specs,
        donate_argnums=(1,),
        out_shardings=(None, spec.sampler.table_sharding, None),
    )


@functools.lru_cache(maxsize=256)
def accepted_counting_program(shape: BatchShape, mesh: Mesh | None) -> Any:
    """`add_accepted`, jitted in the same way."""
    own = (BY_RANK,)
    program = functools.wraps(add_accepted)(functools.partial(add_accepted, shape=shape))
    return jit_sharded(program, without_model(mesh), in_specs=own * 4, out_specs=BY_RANK, donate_argnums=(0,))
