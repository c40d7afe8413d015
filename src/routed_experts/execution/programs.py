"""The jitted programs of a step, as pure functions of arrays. Knows nothing of schedules, pools' owners or threads.

A step is two programs: `forward` (tokens to hidden states; writes the KV pool in place; hands out the routed experts, as one
fresh array or behind the step's metadata) and `sample` (hidden states to tokens). `prompt_logprobs` follows where a prompt's
logprobs were asked for.
Capture off is None at trace time: the program is the one that never heard of it.
Dims: N padded tokens, B padded requests, R request slots, V vocabulary, M MoE layers, K experts per token, T top logprobs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32, UInt

from routed_experts.capture.device_cache import create_device_cache
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.model_worker_batch import ForwardMode, SamplerForm
from routed_experts.core.routing_stats import PHASES
from routed_experts.execution.forward_batch import BatchShape, ForwardBatch, unpack
from routed_experts.execution.hybrid_ops import hybrid_ops
from routed_experts.execution.on_mesh import OnMesh
from routed_experts.layers.attention import AttentionBackend
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.logprobs import MAX_TOP_LOGPROBS, prompt_logprobs, token_logprobs, top_logprobs
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.layers.sampling import Penalties, SamplingMode, penalize, sample
from routed_experts.memory.kv_pool import HybridPool
from routed_experts.models.interface import TokenRouting

_MODES = {
    SamplerForm.GREEDY: SamplingMode.GREEDY,
    SamplerForm.RANDOM: SamplingMode.RANDOM,
    SamplerForm.FILTERED: SamplingMode.FILTERED,
    SamplerForm.FULL: SamplingMode.FILTERED,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec:
    """What all programs of an engine share; static. `on`: the mesh that they run on, None for one device; on a mesh `graphdef` is one
    device's share of the model. `counted`: the experts of a step are counted on the device; None: they are not. `told`: words of a
    packed row, where rows of a step that decodes leave in the table of its tokens (0: they do not). They go there behind the metadata
    that both programs see: where the host reads outputs where they lie, an array less is worth most. Elsewhere rows leave alone."""

    graphdef: nnx.GraphDef[Any]
    capture: CaptureSpec | None  # None: off
    kernels: Kernels
    attention: AttentionBackend
    num_pages: int
    raw_logprobs: bool
    on: OnMesh | None = None
    counted: CaptureSpec | None = None
    told: int = 0

    @property
    def counts(self) -> jax.ShapeDtypeStruct | None:
        """Shape of the counts: by phase, MoE layer and expert."""
        spec = self.counted
        return None if spec is None else jax.ShapeDtypeStruct((len(PHASES), spec.num_moe_layers, spec.num_experts), jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardOut:
    """Outputs of `forward`. `rows` leave the device, and `changed`: slots of each token that capacities moved or left empty. `counts` are
    donated to the next step; the rest feeds the programs that follow. `packed` has rows behind it that are told with the tokens."""

    hidden: Float[Array, "N D"]
    last_hidden: Float[Array, "B D"]
    tokens: Int[Array, " N"]
    packed: Int32[Array, " words"]  # the step's metadata, now on the device
    rows: UInt[Array, "N MK"] | None
    counts: Int32[Array, "F M E"] | None = None
    changed: Int32[Array, "N 2"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpokenTokens:
    """What each request slot has fed so far: counts of generated tokens, and which tokens its prompt held. Donated."""

    generated: Int[Array, "R V"]
    prompt: Bool[Array, "R V"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FullInputs:
    """What only the FULL sampler needs."""

    tokens: Int[Array, " N"]
    bias_ids: Int[Array, "B X"]
    bias_values: Float[Array, "B X"]


def forward(
    state: nnx.State[Any, Any],
    pool: Any,  # as KVPoolSpec.abstract says
    last_tokens: Int[Array, " R"],
    packed: Int32[Array, " words"],
    counts: Int32[Array, "F M E"] | None = None,
    *,
    spec: ProgramSpec,
    shape: BatchShape,
    routed: TokenRouting | None = None,
) -> tuple[Any, ForwardOut]:
    """Run all layers over the tokens of a step; with `routed`, on the ids that are given where they are valid. `counts` of the steps
    before, where there are some, grow by those of this step."""
    model = nnx.merge(spec.graphdef, state)
    batch = unpack(packed, shape)
    tokens = batch.resolve_tokens(last_tokens)

    attend = PagedAttend(backend=spec.attention, batch=batch.paged, num_pages=spec.num_pages)
    capture = create_device_cache(
        spec.counted if spec.capture is None else spec.capture, shape.num_tokens, reroutes=spec.kernels.peers.rerouter is not None
    )
    ops = hybrid_ops(attend, batch) if isinstance(pool, HybridPool) else attend
    paged = batch.paged
    hidden, pool, capture = model(tokens, paged.positions, paged.valid, ops, pool, capture, kernels=spec.kernels, routed=routed)
    rows = None if capture is None or spec.capture is None else capture.rows()
    if capture is not None and spec.told and shape.mode is ForwardMode.DECODE:
        packed, rows = jnp.concatenate([packed, capture.words().reshape(-1)]), None
    counts = None if capture is None or counts is None else capture.counted(counts, paged.valid, batch.generated)
    changed = None if capture is None else capture.departed
    last_hidden = jnp.take(hidden, batch.last_token_of_row, axis=0)
    return pool, ForwardOut(hidden, last_hidden, tokens, packed, rows, counts, changed)


def sample_tokens(
    state: nnx.State[Any, Any],
    last_hidden: Float[Array, "B D"],
    last_tokens: Int[Array, " R"],
    packed: Int32[Array, " words"],
    spoken: SpokenTokens | None,
    full: FullInputs | None,
    *,
    spec: ProgramSpec,
    shape: BatchShape,
    form: SamplerForm,
) -> tuple[Int[Array, " R"], SpokenTokens | None, Int32[Array, "B columns"]]:
    """Choose the next token of every row. Returns the slots' last tokens, and one int32 array a row: token, logprob bits, and
    in the FULL form T top ids and the bits of T top logprobs, and last the packed rows of experts where they are told."""
    batch = unpack(packed, shape)
    raw = nnx.merge(spec.graphdef, state).logits(last_hidden, linear=spec.kernels.head)
    logits = raw
    if spoken is not None and full is not None:
        spoken, penalties = count_spoken(spoken, full.tokens, batch)
        logits = penalize(raw, penalties, full.bias_ids, full.bias_values)
    mode, choose = _MODES[form], spec.kernels.choose
    if mode is SamplingMode.GREEDY and choose is not None:  # nothing was processed: raw logprobs and processed ones are the same
        tokens, logprobs = choose(logits)
        source = raw
    else:
        tokens, processed = sample(logits, batch.sampling, mode)
        source = raw if spec.raw_logprobs else processed
        logprobs = token_logprobs(source, tokens)
    columns = [tokens[:, None], _bits(logprobs)[:, None]]
    if full is not None:
        values, ids = top_logprobs(source)
        columns += [ids, _bits(values)]
    if spec.told and shape.mode is ForwardMode.DECODE:
        columns.append(packed[shape.packed.size :].reshape(spec.told, shape.num_tokens).T)
    return last_tokens.at[batch.request_slots].set(tokens), spoken, jnp.concatenate(columns, axis=1)


def score_prompt(
    state: nnx.State[Any, Any], hidden: Float[Array, "N D"], targets: Int[Array, " N"], *, spec: ProgramSpec
) -> Int32[Array, "N columns"]:
    """Logprobs of each token's successor in the prompt: logprob bits, T top ids, bits of T top logprobs."""
    model = nnx.merge(spec.graphdef, state)
    head, bias = model.unembedding(), None if model.head_bias is None else model.head_bias[...]
    top = min(MAX_TOP_LOGPROBS, head.shape[1])
    scored = prompt_logprobs(hidden, head, targets, top=top, bias=bias, peers=spec.kernels.peers)
    return jnp.concatenate([_bits(scored.target)[:, None], scored.top_ids, _bits(scored.top)], axis=1)


def count_spoken(spoken: SpokenTokens, tokens: Int[Array, " N"], batch: ForwardBatch) -> tuple[SpokenTokens, Penalties]:
    """Add the tokens of this step to the counts of their slots; a request that feeds position 0 starts anew."""
    paged, slots = batch.paged, batch.request_slots
    starts_anew = (paged.positions[jnp.minimum(paged.query_starts[:-1], tokens.shape[0] - 1)] == 0)[:, None]
    generated = jnp.where(starts_anew, 0, spoken.generated[slots])
    prompt = jnp.where(starts_anew, False, spoken.prompt[slots])
    of_prompt = paged.positions < batch.prompt_len[paged.token_rows]
    generated = generated.at[paged.token_rows, tokens].add((paged.valid & ~of_prompt).astype(jnp.int32))
    prompt = prompt.at[paged.token_rows, tokens].max(paged.valid & of_prompt)
    penalties = Penalties(
        presence=batch.presence,
        frequency=batch.frequency,
        repetition=batch.repetition,
        generated_counts=generated,
        prompt_seen=prompt,
    )
    return SpokenTokens(spoken.generated.at[slots].set(generated), spoken.prompt.at[slots].set(prompt)), penalties


def _bits(x: Float[Array, "..."]) -> Int32[Array, "..."]:
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
