"""The jitted programs that follow the layers of a step, as pure functions of arrays: logits to tokens.

`sample_tokens` depends only on sizes (padded requests, request slots, vocabulary) and on the logprobs mode. Steps of as
many requests share it, and so do models of one vocabulary, through the compilation cache. The exception are decode
steps whose rows leave with the tokens: their width is the model's. In the FULL mode `update_token_counts` comes first
(not in verify steps: verify.py).

Where a request of a step has a grammar, the step has a sampler of its own trace with one more argument, the mask: a bit
a token of the vocabulary. It is needed by this program alone, so the host reads the step before and fills it while
the device runs the layers. A masked row is sampled from the allowed tokens: after penalties and bias, before
temperature and filters. Its processed logprobs are of that distribution; those of a row with one allowed token, which
was not chosen, are the model's own, as in a prompt. Rows without a grammar have all bits set, and the bits that they
have without a mask.
Dims: N padded tokens, B padded requests, R request slots, V vocabulary, W mask words, X bias entries, T top
logprobs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Bool, Float, Int, Int32, UInt32

from routed_experts.core.model_worker_batch import SamplingMode
from routed_experts.execution.forward_batch import BatchShape, SamplerBatch, num_sampler_words, unpack, unpack_sampler
from routed_experts.execution.spmd import BY_RANK, GATHERED, REPLICATED, MeshSpecs, jit_sharded
from routed_experts.layers.logprobs import LogprobsKernel, bitcast_int32, ranked_logprobs, token_logprobs
from routed_experts.layers.sampling import Penalties, has_no_choice, mask_logits, penalize, sample, unpack_mask

HOST_MEMORY = "pinned_host"  # JAX's name of memory of the host that devices write to
_HOST_TABLE_PLATFORMS = frozenset({"gpu"})
GreedyKernel = Callable[
    [Float[Array, "B V"]], tuple[Int[Array, " B"], Float[Array, " B"]]
]  # the best token of each row, and its logprob


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec:
    """Static parameters of a sampler program. `row_words`: words of a row of experts that follow the metadata and leave
    with each token. `greedy_kernel`: a kernel for the greedy choice, None: array code. `logprobs`: of tokens that
    other modes chose. `masked`: the program takes a mask. `table_sharding`: of the table that the host reads, where it
    is not in the memory of the device."""

    mode: SamplingMode
    num_requests: int
    row_words: int
    raw_logprobs: bool
    greedy_kernel: GreedyKernel | None
    logprobs: LogprobsKernel
    masked: bool = False
    table_sharding: Sharding | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """What request slots, or the rows of a step, have fed so far: counts of generated tokens, and which tokens the
    prompt held."""

    generated: Int[Array, "rows V"]
    prompt: Bool[Array, "rows V"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PenaltyInputs:
    """What only the FULL sampler needs. `counts` is by row; in a verify step by request slot, as the step found it."""

    counts: TokenCounts
    bias_ids: Int[Array, "B X"]
    bias_values: Float[Array, "B X"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choices:
    """The chosen token of each row, its logprob, and in the FULL mode T top ids and the bits of T top logprobs."""

    tokens: Int[Array, " B"]
    logprobs: Float[Array, " B"]
    top: tuple[Int32[Array, "B T"], ...]


def update_token_counts(
    counts: TokenCounts, tokens: Int[Array, " N"], packed: Int32[Array, " words"], *, shape: BatchShape
) -> tuple[TokenCounts, TokenCounts]:
    """Add the tokens of this step to the counts of their slots; a request that feeds position 0 starts anew. Returns
    the counts of all slots, and those of the step's rows."""
    batch = unpack(packed, shape)
    paged, slots = batch.paged, batch.request_slots
    starts_anew = (paged.positions[jnp.minimum(paged.query_starts[:-1], tokens.shape[0] - 1)] == 0)[:, None]
    generated = jnp.where(starts_anew, 0, counts.generated[slots])
    prompt = jnp.where(starts_anew, False, counts.prompt[slots])
    of_prompt = paged.positions < batch.prompt_len[paged.token_rows]
    generated = generated.at[paged.token_rows, tokens].add((paged.valid & ~of_prompt).astype(jnp.int32))
    prompt = prompt.at[paged.token_rows, tokens].max(paged.valid & of_prompt)
    all_counts = TokenCounts(counts.generated.at[slots].set(generated), counts.prompt.at[slots].set(prompt))
    return all_counts, TokenCounts(generated, prompt)


def sample_tokens(
    logits: Float[Array, "B V"],
    last_tokens: Int[Array, " R"],
    words: Int32[Array, " words"],
    full: PenaltyInputs | None,
    mask: UInt32[Array, "B W"] | None = None,
    *,
    spec: SamplerSpec,
) -> tuple[Int[Array, " R"], Int32[Array, "B columns"]]:
    """Choose the next token of every row. Returns the slots' last tokens, and one int32 array a row: token, logprob
    bits, and in the FULL mode T top ids and the bits of T top logprobs, and last the packed rows of experts where they
    leave with the tokens."""
    batch = unpack_sampler(words, spec.num_requests)
    choices = choose_tokens(logits, batch, full, mask, spec=spec)
    columns = [choices.tokens[:, None], bitcast_int32(choices.logprobs)[:, None], *choices.top]
    if spec.row_words:
        columns.append(words[num_sampler_words(spec.num_requests) :].reshape(spec.row_words, spec.num_requests).T)
    return last_tokens.at[batch.request_slots].set(choices.tokens), jnp.concatenate(columns, axis=1)


def choose_tokens(
    raw: Float[Array, "B V"],
    batch: SamplerBatch,
    full: PenaltyInputs | None,
    mask: UInt32[Array, "B W"] | None = None,
    *,
    spec: SamplerSpec,
) -> Choices:
    """Choose the next token of every row, among those that `mask` allows."""
    logits = raw
    if full is not None:
        penalties = Penalties(
            presence=batch.presence,
            frequency=batch.frequency,
            repetition=batch.repetition,
            generated_counts=full.counts.generated,
            prompt_seen=full.counts.prompt,
        )
        logits = penalize(raw, penalties, full.bias_ids, full.bias_values)
    if mask is not None:
        logits = mask_logits(logits, raw, unpack_mask(mask, raw.shape[1]), may_be_banned=full is not None)
    top: tuple[Int32[Array, "B T"], ...] = ()
    if spec.mode is SamplingMode.GREEDY and spec.greedy_kernel is not None:
        # Nothing was processed: raw logprobs and processed ones are equal.
        tokens, logprobs = spec.greedy_kernel(logits)
        if mask is not None:  # the kernel saw the allowed tokens alone
            takes_raw = jnp.any(~mask != 0, axis=-1) if spec.raw_logprobs else has_no_choice(mask)
            logprobs = jnp.where(takes_raw, token_logprobs(raw, tokens, spec.logprobs), logprobs)
    else:
        tokens, processed = sample(logits, batch.sampling, spec.mode)
        source = raw if spec.raw_logprobs else processed
        if mask is not None:
            source = jnp.where(has_no_choice(mask)[:, None], raw, source)
        if full is None:
            logprobs = token_logprobs(source, tokens, spec.logprobs)
        else:
            logprobs, values, ids = ranked_logprobs(source, tokens, kernel=spec.logprobs)
            top = (ids, bitcast_int32(values))
    return Choices(tokens, logprobs, top)


@functools.lru_cache(maxsize=256)
def sampler_program(spec: SamplerSpec, mesh: Mesh | None) -> Any:
    """`sample_tokens`, jitted and cached; all engines of a process share its traces."""
    program = functools.wraps(sample_tokens)(functools.partial(sample_tokens, spec=spec))
    out_specs, num_inputs = (BY_RANK, GATHERED), 5 if spec.masked else 4
    return jit_sharded(
        program,
        without_model(mesh),
        in_specs=(BY_RANK,) * num_inputs,
        out_specs=out_specs,
        donate_argnums=(1,),
        out_shardings=(None, spec.table_sharding),
    )


def host_table_sharding(on_device: Sharding | None) -> Sharding | None:
    """The sharding of a table that a program writes to the host's memory by itself: on a GPU a copy that starts when
    the program has ended arrives later. None: it stays on the device, as on a mesh, where `on_device` is None."""
    if on_device is None or {device.platform for device in on_device.device_set} - _HOST_TABLE_PLATFORMS:
        return None
    return on_device.with_memory_kind(HOST_MEMORY)


def given_logprobs(logits: Float[Array, "B V"], ids: Int32[Array, "B G"]) -> Float[Array, "B G"]:
    """The model's logprobs of the given ids, at temperature 1 and without penalties, bias and mask."""
    chosen = jnp.take_along_axis(logits, ids, axis=-1)
    return chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


@functools.lru_cache(maxsize=64)
def given_program(mesh: Mesh | None) -> Any:
    """`given_logprobs`, jitted in the same way."""
    return jit_sharded(given_logprobs, without_model(mesh), in_specs=(BY_RANK,) * 2, out_specs=GATHERED)


@functools.lru_cache(maxsize=256)
def counting_program(shape: BatchShape, mesh: Mesh | None) -> Any:
    """`update_token_counts`, jitted in the same way."""
    own = (BY_RANK,)
    program = functools.wraps(update_token_counts)(functools.partial(update_token_counts, shape=shape))
    return jit_sharded(program, without_model(mesh), in_specs=own * 3, out_specs=own * 2, donate_argnums=(0,))


def without_model(mesh: Mesh | None) -> MeshSpecs | None:
    """The mesh of a program that has no weights."""
    return None if mesh is None else MeshSpecs(mesh=mesh, weights=(), pool=REPLICATED)
