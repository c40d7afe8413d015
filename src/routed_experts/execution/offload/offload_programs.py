"""The jitted programs of a step that is cut at its experts, as pure functions of arrays. Knows nothing of their order
or of devices: split_runner.py runs `open_step`, then `layer_step` for each layer with `home_step` and `host_step`
between them, then `close_step`. Dims: N padded tokens, B padded requests, R request slots, D hidden, M MoE layers, E
experts, K experts per token, C experts on the host."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from routed_experts.capture.device_cache import create_device_cache
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.execution.forward_batch import BatchShape, num_sampler_words, unpack
from routed_experts.execution.programs import ForwardOut
from routed_experts.execution.recurrent_ops import hybrid_ops
from routed_experts.layers.attention import AttentionBackend
from routed_experts.layers.expert_slots import ExpertTable, run_slots
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MoeBackend
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.memory.kv_pool import HybridPool
from routed_experts.models.base.interface import SequenceOps
from routed_experts.models.decoder.decoder import embed, final_norm
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.decoder.layer_parts import LayerContext
from routed_experts.models.offload.layers import (
    ExpertInputs,
    LayerGroup,
    LayerIndex,
    LayerIndexArrays,
    Stream,
    add_expert_outputs,
    attention_and_router,
    device_experts,
)
from routed_experts.models.offload.offloaded_model import EmbedHeadArrays


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSpec:
    """What all programs of a split model share; static. `num_resident`: experts of a layer in the accelerator's tables;
    `host_experts`: the kernel that runs the others; `deferred` slots of a token may wait for them in decode steps."""

    config: FamilyConfig
    capture: CaptureSpec | None  # None: off
    kernels: Kernels
    attention: AttentionBackend
    host_experts: MoeBackend
    num_pages: int
    num_moe_layers: int
    num_experts: int
    num_resident: int
    deferred: int = 0
    counted: CaptureSpec | None = None  # the experts of a step are counted on the device; None: they are not
    samples: bool = True  # tokens are chosen behind the layers

    @property
    def has_host(self) -> bool:
        """Whether any expert may be on the host."""
        return self.num_resident < self.num_experts

    def has_device_experts(self, kind: LayerGroup) -> bool:
        """Whether the accelerator has anything to do for the experts of such a layer."""
        feed = kind.of(self.config).feed
        return isinstance(feed, Sparse) and (self.num_resident > 0 or feed.shared_width > 0)

    def deferred_in(self, shape: BatchShape) -> int:
        """How many slots of a token may wait in a step of this shape."""
        return self.deferred if self.has_host and shape.mode is ForwardMode.DECODE else 0

    def num_given(self, layer: LayerIndex, shape: BatchShape) -> int:
        """How many sums are added behind a layer: of each side that there is, and of what waited in the MoE layer
        before."""
        if layer.column < 0:
            return 0
        return self.has_device_experts(layer.kind) + self.has_host + (layer.column > 0 and self.deferred_in(shape) > 0)


def open_step(
    table: Float[Array, "V D"],
    last_tokens: Int[Array, " R"],
    packed: Int32[Array, " words"],
    *,
    spec: OffloadSpec,
    shape: BatchShape,
) -> tuple[Stream, Int[Array, " N"], Int32[Array, " words"]]:
    """The stream before the first layer, the step's tokens, and its metadata, now on the accelerator."""
    tokens = unpack(packed, shape).resolve_tokens(last_tokens)
    capture = create_device_cache(spec.counted if spec.capture is None else spec.capture, shape.num_tokens)
    tally = jnp.zeros((spec.num_moe_layers, 3), jnp.int32)
    return Stream(embed(spec.config, table, tokens), capture, tally), tokens, packed


def layer_step(
    stream: Stream,
    pool: Any,  # as KVPoolSpec.abstract says
    arrays: Mapping[str, Array],
    numbers: LayerIndexArrays,
    packed: Int32[Array, " words"],
    given: Sequence[Float32[Array, "N D"]],
    slot_of: Int32[Array, "M E"],
    *,
    spec: OffloadSpec,
    shape: BatchShape,
    kind: LayerGroup,
) -> tuple[Stream, ExpertInputs | None, Any]:
    """One layer up to its experts. Stream and pool are donated."""
    step = step_of(spec, packed, shape, recurrent=isinstance(pool, HybridPool))
    return attention_and_router(
        spec.config, kind, arrays, numbers, stream, given, step, pool, slot_of, deferred=spec.deferred_in(shape)
    )


def home_step(
    table: ExpertTable,
    arrays: Mapping[str, Array],
    numbers: LayerIndexArrays,
    packed: Int32[Array, " words"],
    errand: ExpertInputs,
    *,
    spec: OffloadSpec,
    shape: BatchShape,
    kind: LayerGroup,
) -> Float32[Array, "N D"]:
    """The residents, and the experts that every token runs, on the accelerator."""
    step = step_of(spec, packed, shape, recurrent=False)
    return device_experts(spec.config, kind, table, arrays, numbers, errand, step, size=spec.num_resident)


def host_step(
    stored: ExpertTable,
    place: Int32[Array, ""],
    fed: Float[Array, "N D"],
    away: Int32[Array, "N K"],
    weights: Float[Array, "N K"],
    *,
    spec: OffloadSpec,
) -> Float32[Array, "N D"]:
    """The experts that are not resident, on the host."""
    return run_slots(fed, away, weights, stored, place, size=spec.num_experts, backend=spec.host_experts)


def stream_step(
    block: ExpertTable, block_slots: Int32[Array, " E"], errand: ExpertInputs, *, spec: OffloadSpec
) -> Float32[Array, "N D"]:
    """The same experts on the accelerator, from a block [C ...] that was copied there for this step; `block_slots` are
    their rows in it, by expert."""
    slots = jnp.where(errand.away >= 0, block_slots[jnp.maximum(errand.away, 0)], -1)
    layer, size = jnp.zeros((), jnp.int32), spec.num_experts - spec.num_resident
    return run_slots(errand.fed, slots, errand.weights, block, layer, size=size, backend=spec.kernels.moe)


def close_step(
    rim: EmbedHeadArrays,
    stream: Stream,
    given: Sequence[Float32[Array, "N D"]],
    tokens: Int[Array, " N"],
    packed: Int32[Array, " words"],
    counts: Int32[Array, "F M E"] | None = None,
    *,
    spec: OffloadSpec,
    shape: BatchShape,
) -> ForwardOut:
    """Add what the last experts gave, norm, and score the vocabulary: the outputs of `programs.forward`."""
    hidden = final_norm(spec.config, add_expert_outputs(spec.config, stream.x, given), rim.norm, rim.norm_bias)
    batch, capture = unpack(packed, shape), stream.capture
    rows = None if capture is None or spec.capture is None else capture.rows()
    if capture is not None and counts is not None:
        counts = capture.count_experts(counts, batch.paged.valid, batch.generated)
    logits = rim.logits(batch.of_last_tokens(hidden), linear=spec.kernels.lm_head) if spec.samples else None
    return ForwardOut(hidden, logits, tokens, packed[: num_sampler_words(shape.num_requests)], rows, counts)


def step_of(spec: OffloadSpec, packed: Int32[Array, " words"], shape: BatchShape, *, recurrent: bool) -> LayerContext:
    """What the layers of a step share; `recurrent`: some keep states."""
    batch = unpack(packed, shape)
    attend = PagedAttend(backend=spec.attention, batch=batch.paged, num_pages=spec.num_pages)
    ops = hybrid_ops(attend, batch) if recurrent else SequenceOps(attend)
    positions = batch.paged.positions
    angles = {rotary: rotary.cos_sin(positions) for rotary in spec.config.rotary}
    return LayerContext(positions, batch.paged.valid, ops.attend, ops.recur, spec.kernels, angles)
