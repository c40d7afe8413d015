"""The jitted program that follows the layers of a verify step: logits of all tokens to tokens, and accepted drafts.

Each token of a request is sampled after with the request's own parameters and the noise of its position, as if it had
been fed alone; so the tokens do not depend on the drafts. Dims: N padded tokens, S rows of logits (the first S tokens
of the step), B padded requests, R request slots, V vocabulary, T top logprobs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Int32

from routed_experts.execution.forward_batch import BatchShape, SamplerBatch, unpack, unpack_sampler
from routed_experts.execution.row_blocks import map_blocks
from routed_experts.execution.sampler import PenaltyInputs, SamplerSpec, choose_tokens, without_model
from routed_experts.execution.spmd import REPLICATED, jit_sharded
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
    *,
    spec: VerifySpec,
) -> tuple[Int[Array, " R"], Int32[Array, "S columns"], Int[Array, " B"]]:
    """Sample after every token and count the accepted drafts. Returns the slots' last tokens, one int32 array a row:
    token, logprob bits, accepted drafts (row b: of request b), and the rest as `sample_tokens` has it; and the accepted
    drafts of each request for the device."""
    shape, num_rows = spec.shape, logits.shape[0]
    paged = unpack(words, shape).paged
    row_requests, positions = paged.token_rows[:num_rows], paged.positions[:num_rows] + 1
    by_request = unpack_sampler(words, shape.num_requests)

    def choose(logits: Float[Array, "R V"], rows: tuple[Int[Array, " R"], Int[Array, " R"]]) -> Any:
        own = _of_rows(by_request, *rows)
        inputs = None if full is None else jax.tree.map(lambda leaf: leaf[rows[0]], full)
        return choose_tokens(logits, own, inputs, spec=spec.sampler)

    choices = map_blocks(choose, spec.block, logits, (row_requests, positions))
    accepted = count_accepted(choices.tokens, tokens[:num_rows], paged.query_starts, num_drafts=spec.num_drafts)
    last_rows = jnp.minimum(paged.query_starts[:-1] + accepted, num_rows - 1)
    last_tokens = last_tokens.at[by_request.request_slots].set(choices.tokens[last_rows])
    column = jnp.pad(accepted, (0, num_rows - shape.num_requests))[:, None]
    columns = [choices.tokens[:, None], bitcast_int32(choices.logprobs)[:, None], column, *choices.top]
    if spec.sampler.row_words:
        columns.append(words[shape.packed.shape[0] :].reshape(spec.sampler.row_words, num_rows).T)
    return last_tokens, jnp.concatenate(columns, axis=1), accepted


def _of_rows(batch: SamplerBatch, requests: Int[Array, " R"], positions: Int[Array, " R"]) -> SamplerBatch:
    """The parameters of each row's request, and the position that the row samples."""
    own = jax.tree.map(lambda leaf: leaf[requests], batch)
    return dataclasses.replace(own, sampling=dataclasses.replace(own.sampling, position=positions))


@functools.lru_cache(maxsize=256)
def accept_program(spec: VerifySpec, mesh: Mesh | None) -> Any:
    """`accept_tokens`, jitted and cached; all engines of a process share its traces."""
    same = (REPLICATED,)
    program = functools.wraps(accept_tokens)(functools.partial(accept_tokens, spec=spec))
    return jit_sharded(program, without_model(mesh), in_specs=same * 5, out_specs=same * 3, donate_argnums=(1,))
