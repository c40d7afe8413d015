"""The jitted programs of a step, as pure functions of arrays.

A step is `forward` (tokens to hidden states and logits; writes the KV pool in place; returns the routed experts as one
fresh array or after the sampler's metadata) and the sampler's program, with penalties two (sampler.py; of a verify step
verify.py, and then recurrent_ops.py where layers keep states). `score_prompt` follows where a prompt's logprobs are
requested. Capture off is None at trace time: the program is the one without the feature. Dims: N padded tokens, B
padded requests, R request slots, V vocabulary, M MoE layers, K experts per token, W words of a packed row, T
top logprobs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Int32, UInt

from routed_experts.capture.device_cache import create_device_cache
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.routing_stats import PHASES
from routed_experts.execution.forward_batch import BatchShape, num_sampler_words, unpack
from routed_experts.execution.recurrent_ops import hybrid_ops, with_inputs
from routed_experts.execution.row_blocks import map_blocks
from routed_experts.execution.spmd import BY_RANK, GATHERED, REPLICATED, MeshSpecs
from routed_experts.layers.attention import AttentionBackend, PagedBatch
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.kv_format import LayerScales
from routed_experts.layers.logprobs import MAX_TOP_LOGPROBS, bitcast_int32, prompt_logprobs
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.memory.kv_pool import HybridPool
from routed_experts.models.base.interface import TokenRouting


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec:
    """What all programs of an engine share; static. `mesh_specs`: the mesh that they run on, None for one device; on a
    mesh `graphdef` is one device's share of the model. `count_spec`: the experts of a step are counted on the device;
    None: they are not. `piggyback_row_words`: words of a packed row, where the rows of steps of the modes
    `piggyback_modes` leave in the table of their tokens (0: all in an array of their own). They follow the metadata
    that both programs read. This pays where the host reads outputs in place, and where the next step waits for rows.
    `with_logits`: tokens are sampled after the layers, so logits are computed. `num_drafts`: the longest draft of a
    verify step. `batch_invariant`: a verify step samples in blocks of as many rows as other steps have, so that no
    product and no sum depends on the number of drafts. `draft_model`: a model drafts after each step; `tapped_layers`:
    those whose outputs it reads. `kv_scales`: of a pool of codes, by shape of rows and layer; () for 1. They are
    constants of the programs."""

    graphdef: nnx.GraphDef[Any]
    capture: CaptureSpec | None  # None: off
    kernels: Kernels
    attention: AttentionBackend
    num_pages: int
    raw_logprobs: bool
    mesh_specs: MeshSpecs | None = None
    count_spec: CaptureSpec | None = None
    piggyback_row_words: int = 0
    piggyback_modes: frozenset[ForwardMode] = frozenset()
    with_logits: bool = True
    num_drafts: int = 0
    batch_invariant: bool = False
    draft_model: bool = False
    tapped_layers: tuple[int, ...] = ()
    kv_scales: tuple[LayerScales, ...] = ()

    @property
    def has_text_ahead(self) -> bool:
        """Whether verify steps may be ahead of the host with drafts of a text: on one device."""
        return self.num_drafts > 0 and not self.draft_model and self.mesh_specs is None

    def attend(self, batch: PagedBatch) -> PagedAttend:
        """Attention of a step's tokens to the pool."""
        scales = tuple(jnp.asarray(layers, jnp.float32) for layers in self.kv_scales)
        return PagedAttend(backend=self.attention, batch=batch, num_pages=self.num_pages, kv_scales=scales)

    @property
    def counts(self) -> jax.ShapeDtypeStruct | None:
        """Shape of the counts: by phase, MoE layer and expert."""
        spec = self.count_spec
        return (
            None
            if spec is None
            else jax.ShapeDtypeStruct((len(PHASES), spec.num_moe_layers, spec.num_experts), jnp.int32)
        )

    def row_words_in(self, shape: BatchShape) -> int:
        """Words of a packed row that leave with its token in a step of this shape: one whose tokens are all sampled
        after. 0: they leave in an array of their own."""
        each_token = shape.mode in self.piggyback_modes and self.sampled_rows(shape) == shape.num_tokens
        return self.piggyback_row_words if each_token else 0

    def sampled_rows(self, shape: BatchShape) -> int:
        """Rows of a step's logits: one a request, or one a token where drafts are verified."""
        if shape.mode is not ForwardMode.TARGET_VERIFY:
            return shape.num_requests
        most = min(shape.num_tokens, shape.num_requests * (self.num_drafts + 1))
        return most - most % shape.num_requests


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardOut:
    """Outputs of `forward`. `rows` leave the device, and `rerouting`: slots of each token that capacities moved or left
    empty. `counts` are donated to the next step; the rest feeds the programs that follow. Rows that leave with the
    tokens follow the metadata in `words`. `streams`: outputs of the tapped layers. `recurrent_inputs` are those of a
    verify step, by layer with a state. `spec`: how an output is sharded, where it is not by data rank."""

    hidden: Float[Array, "N D"]
    logits: Float[Array, "B V"] | Float[Array, "N V"] | None  # None: nothing is sampled
    tokens: Int[Array, " N"]
    words: Int32[Array, " words"]  # the sampler's metadata, of a verify step all of it, now on the device
    rows: UInt[Array, "N MK"] | Int32[Array, "N W"] | None = dataclasses.field(
        default=None, metadata={"spec": GATHERED}
    )
    counts: Int32[Array, "F M E"] | None = dataclasses.field(default=None, metadata={"spec": REPLICATED})
    rerouting: Int32[Array, "N 2"] | None = dataclasses.field(default=None, metadata={"spec": GATHERED})
    streams: tuple[Float[Array, "N D"], ...] = ()
    recurrent_inputs: Any = None


# Specs of the outputs of all devices.
OUT_SPECS: Any = ForwardOut(
    **{part.name: part.metadata.get("spec", BY_RANK) for part in dataclasses.fields(ForwardOut)}
)


def forward(
    state: nnx.State[Any, Any],
    pool: Any,  # shapes: KVPoolSpec.abstract
    last_tokens: Int[Array, " R"],
    packed: Int32[Array, " words"],
    counts: Int32[Array, "F M E"] | None = None,
    *,
    spec: ProgramSpec,
    shape: BatchShape,
    routed: TokenRouting | None = None,
) -> tuple[Any, ForwardOut]:
    """Run all layers over the tokens of a step; with `routed`, on its ids where they are valid. `counts`
    of the steps before, where there are some, grow by those of this step."""
    model = nnx.merge(spec.graphdef, state)
    batch = unpack(packed, shape)
    tokens = batch.resolve_tokens(last_tokens)

    is_verify = shape.mode is ForwardMode.TARGET_VERIFY
    paged = dataclasses.replace(batch.paged, max_queries=spec.num_drafts + 1) if is_verify else batch.paged
    attend = spec.attend(paged)
    capture = create_device_cache(
        spec.count_spec if spec.capture is None else spec.capture,
        shape.num_tokens,
        capacity_limited=spec.kernels.group.rerouter is not None,
    )
    ops = hybrid_ops(attend, batch) if isinstance(pool, HybridPool) else attend
    if is_verify and isinstance(pool, HybridPool):
        pool = with_inputs(pool, model.config.cache.recurrent, spec.sampled_rows(shape))
    inputs = tokens, paged.positions, paged.valid, ops, pool, capture
    streams: tuple[Array, ...] = ()
    if spec.tapped_layers:
        hidden, pool, capture, streams = model.run_tapped(*inputs, kernels=spec.kernels, tapped=spec.tapped_layers)
    else:
        hidden, pool, capture = model(*inputs, kernels=spec.kernels, routed=routed)
    rows = None if capture is None or spec.capture is None else capture.rows()
    words = packed if is_verify else packed[: num_sampler_words(shape.num_requests)]
    if capture is not None and spec.row_words_in(shape):
        words, rows = jnp.concatenate([words, capture.packed_rows().reshape(-1)]), None
    sum_ranks = spec.kernels.ranks.all_reduce if spec.kernels.ranks.count > 1 else None
    counted = paged.valid, batch.generated
    counts = None if capture is None or counts is None else capture.count_experts(counts, *counted, sum_ranks=sum_ranks)
    rerouting = None if capture is None else capture.rerouting
    logits = None
    if spec.with_logits:
        scored = hidden[: spec.sampled_rows(shape)] if is_verify else batch.of_last_tokens(hidden)
        block = shape.num_requests if is_verify and spec.batch_invariant else scored.shape[0]
        logits = map_blocks(functools.partial(model.logits, product=spec.kernels.lm_head), block, scored)
    recurrent_inputs = None
    if isinstance(pool, HybridPool):
        pool, recurrent_inputs = dataclasses.replace(pool, inputs=None), pool.inputs
    return pool, ForwardOut(hidden, logits, tokens, words, rows, counts, rerouting, streams, recurrent_inputs)


def score_prompt(
    state: nnx.State[Any, Any],
    hidden: Float[Array, "N D"],
    targets: Int[Array, " N"],
    *,
    spec: ProgramSpec,
    top: int = MAX_TOP_LOGPROBS,
) -> Int32[Array, "N columns"]:
    """Logprobs of each token's successor in the prompt: logprob bits, T = min(`top`, V) top ids, bits of T top
    logprobs."""
    head, kernels = nnx.merge(spec.graphdef, state).lm_head(), spec.kernels
    top = min(top, head.vocab_size)
    scored = prompt_logprobs(hidden, head, targets, top=top, product=kernels.prompt_head, kernel=kernels.logprobs)
    return jnp.concatenate([bitcast_int32(scored.target)[:, None], scored.top_ids, bitcast_int32(scored.top)], axis=1)
