"""A block of layers in one kernel, or in few for steps of few tokens, with the results of the layers one by one. The
few kernels round where the layers do. Kernels say which features they have; a block that needs others runs layer by
layer.

In few kernels the stream is normalised where it is added to, so the carry of the scan holds it twice: as it is, and
under the norm of what comes next. Dims: N tokens, D hidden, R layers of the stack, E experts of a layer, F expert
width, H query heads, G kv heads, C head dim."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from routed_experts.capture.device_cache import RoutedExpertsDeviceCache
from routed_experts.layers.attention import AttentionBackend, FusedQKV
from routed_experts.layers.attention_variants import ATTENTION_BACKENDS
from routed_experts.layers.delta_rule import DeltaShape
from routed_experts.layers.kernels import FusedSteps, Kernels, RouterBiases, SharedExperts, SlotOutputs, StreamNorm
from routed_experts.layers.layer_stack import (
    LayerStackKernel,
    RunRouting,
    StackOffsets,
    StackWeights,
    StepInputs,
)
from routed_experts.layers.linear import REFERENCE_LINEAR
from routed_experts.layers.moe import ExpertCall
from routed_experts.layers.norm import rms_norm
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.layers.routing import LayerRouting, RouterSpec, Routing
from routed_experts.models.base.interface import TokenRouting, slice_layers
from routed_experts.models.decoder.family_config import FamilyConfig, LayerBlock, LayerSpec
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.decoder.grouped_attention import PROJECTION_BIASES, GroupedAttention, fused_angles
from routed_experts.models.decoder.layer_parts import LayerContext

# Stream, its norm, cache, capture
_Carry = tuple[Float[Array, "N D"], Float[Array, "N D"], Any, RoutedExpertsDeviceCache | None]
_ARRAYS = frozenset(
    {
        *("input_norm", "post_norm", "q_norm", "k_norm", "qkv", "qkv_bias", "out", "out_bias", "sinks"),
        *("router", "router_bias", "selection_bias", "gate_up", "down", "gate_up_bias", "down_bias"),
        *("shared_gate_up", "shared_down", "shared_gate"),
    }
)
_DENSE = {"dense_gate_up": "shared_gate_up", "dense_down": "shared_down"}  # a dense network is an expert of all tokens


def find_fused_path(
    config: FamilyConfig, block: LayerBlock, step: LayerContext, routed: TokenRouting | None
) -> LayerStackKernel | FusedSteps | None:
    """The fastest path for all layers of a block in this step: one kernel, or few. None: layer by layer, which
    replayed weights, attention without pages, and features that no kernel has need."""
    attend = step.attend
    if not isinstance(attend, PagedAttend) or (routed is not None and routed.weights is not None):
        return None
    kernel = block_kernel(config, block, step.kernels, attend.backend)
    if isinstance(kernel, FusedSteps) and step.valid.shape[0] > kernel.max_tokens:
        return None
    return kernel


def block_kernel(
    config: FamilyConfig, block: LayerBlock, kernels: Kernels, attention: AttentionBackend
) -> LayerStackKernel | FusedSteps | None:
    """The kernel, or the few of them, that can run all layers of a block; None where none can."""
    spec, needs = _router(block), config.stack_needs(block)
    if not _same_sizes(block):
        return None
    stack, fused, router = kernels.layer_stack, kernels.fused_layer, kernels.router
    if stack is not None and attention.name == stack.attention:
        return stack if (spec is None or stack.supports(spec)) and needs <= stack.features else None
    if fused is None or attention.fused is None or router is None or spec is None or not router.supports(spec):
        return None
    attends = [layer.mixer for layer in block.pattern if isinstance(layer.mixer, GroupedAttention)]
    of_attention = frozenset[str]().union(*(mixer.stack_needs - PROJECTION_BIASES for mixer in attends))
    if not all(mixer.is_fused_by(attention) for mixer in attends):
        return None
    return fused if needs - of_attention <= fused.features else None


def _router(block: LayerBlock) -> RouterSpec | None:
    """The router of a block's MoE layers; None where it has none."""
    return next((layer.feed.router for layer in block.pattern if isinstance(layer.feed, Sparse)), None)


def _same_sizes(block: LayerBlock) -> bool:
    """Whether the layers of a pattern differ in traits and dense networks alone: heads, angles, routers and widths of
    experts are those of all."""
    mixers = [layer.mixer for layer in block.pattern if isinstance(layer.mixer, GroupedAttention)]
    feeds = [layer.feed for layer in block.pattern if isinstance(layer.feed, Sparse)]
    heads = {(mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) for mixer in mixers}
    angles = {mixer.rotary for mixer in mixers} - {None}
    experts = {(feed.router, feed.width, feed.shared_width) for feed in feeds}
    return len(mixers) == len(block.pattern) and len(heads) == 1 and len(experts) < 2 and len(angles) < 2


def describe_path(config: FamilyConfig, kernels: Kernels, attention: AttentionBackend) -> str:
    """How the layers of a model run: "fused run" (of its MoE layers, or of all where it has none), "pieces: " and the
    parts of a layer that have kernels of their own, or "plain", all of it array code."""
    sparse = [block for block in config.blocks if block.num_moe]
    block_kernels = [block_kernel(config, block, kernels, attention) for block in sparse or config.blocks]
    if None not in block_kernels:
        limits = [kernel.max_tokens for kernel in block_kernels if isinstance(kernel, FusedSteps)]
        return f"fused run, up to {min(limits)} tokens" if limits else "fused run"
    feeds = [layer.feed for layer in config.layers if isinstance(layer.feed, Sparse)]
    mixers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, GroupedAttention)]
    has_kernels, router = kernels.linear is not REFERENCE_LINEAR, kernels.router
    parts = {
        "projections": has_kernels,
        "q/k norm": not config.cache.num_recurrent and any(m.qk_norm and m.is_fused_by(attention) for m in mixers),
        "attention": attention.name not in ATTENTION_BACKENDS
        and (attention.latent is not None or not config.cache.latent),
        "delta rule": isinstance(config.cache.recurrent, DeltaShape) and attention.recur is not None,
        "router": router is not None and bool(feeds) and all(router.supports(feed.router) for feed in feeds),
        "experts": has_kernels and bool(feeds),
    }
    pieces = [part for part, holds in parts.items() if holds]
    return f"pieces: {', '.join(pieces)}" if pieces else "plain"


def run_fused(
    kernel: LayerStackKernel | FusedSteps,
    config: FamilyConfig,
    block: LayerBlock,
    arrays: tuple[Mapping[str, nnx.Param[Array]], ...],
    next_norm: Float[Array, " D"],
    step: LayerContext,
    carry: tuple[Float[Array, "N D"], Any, RoutedExpertsDeviceCache | None],
    routed: TokenRouting | None,
    offsets: StackOffsets,
) -> tuple[tuple[Float[Array, "N D"], Any, RoutedExpertsDeviceCache | None], Float[Array, "N D"]]:
    """Run the layers on the stream, the cache and the capture, and on the rows of `routed` where they are valid;
    returns the three, and the stream's norm by `next_norm`."""
    (x, cache, capture), attend, spec = carry, step.attend, _router(block)
    assert isinstance(attend, PagedAttend), attend
    pattern = tuple(
        _stack_weights(config, layer, own, next_norm) for layer, own in zip(block.pattern, arrays, strict=True)
    )
    rows = slice_layers(routed, offsets.first_moe_layer, block.num_moe * block.repeats) if block.num_moe else None
    replay = None if rows is None or routed is None else RunRouting(rows[0], routed.valid)
    inputs = _stack_inputs(block, step, doubled=isinstance(kernel, FusedSteps))
    if isinstance(kernel, FusedSteps):
        return _run_fused_layers(kernel, block, pattern, inputs, attend, carry, replay, offsets)
    id_block = None if capture is None else capture.ids
    x, normed, cache, id_block = kernel.run(x, pattern, inputs, attend, cache, id_block, replay, offsets, spec)
    if capture is not None and id_block is not None:
        capture = dataclasses.replace(capture, ids=id_block)
    return (x, cache, capture), normed


def _stack_weights(
    config: FamilyConfig, layer: LayerSpec, arrays: Mapping[str, nnx.Param[Array]], next_norm: Float[Array, " D"]
) -> StackWeights:
    """A layer of the pattern: its arrays in all repeats, and its traits."""
    mixer, feed = layer.mixer, layer.feed
    assert isinstance(mixer, GroupedAttention), layer
    activation = feed.activation if isinstance(feed, Sparse) else "silu"
    return StackWeights(
        **{_DENSE.get(name, name): array[...] for name, array in arrays.items() if name in _ARRAYS | _DENSE.keys()},
        next_norm=next_norm,
        eps=config.norm_eps,
        traits=dataclasses.replace(mixer.traits, activation=activation),
        norm_offset=config.norm_offset,
        residual_scale=config.residual_scale,
    )


def _stack_inputs(block: LayerBlock, step: LayerContext, *, doubled: bool) -> StepInputs:
    """The angles of the layers that rotate, where there are some; `doubled`: as fused attention takes them."""
    mixers = [layer.mixer for layer in block.pattern if isinstance(layer.mixer, GroupedAttention)]
    specs = [mixer.rotary for mixer in mixers if mixer.rotary is not None]
    if not specs:
        none = jnp.zeros((step.valid.shape[0], mixers[0].head_dim), jnp.float32)
        return StepInputs(cos=none, sin=none, valid=step.valid)
    cos, sin = fused_angles(specs[0], mixers[0].head_dim, step) if doubled else step.cos_sin[specs[0]]
    return StepInputs(cos=cos, sin=sin, valid=step.valid)


def _run_fused_layers(
    fused: FusedSteps,
    block: LayerBlock,
    pattern: tuple[StackWeights, ...],
    step: StepInputs,
    attend: PagedAttend,
    carry: tuple[Float[Array, "N D"], Any, RoutedExpertsDeviceCache | None],
    replay: RunRouting | None,
    offsets: StackOffsets,
) -> tuple[tuple[Float[Array, "N D"], Any, RoutedExpertsDeviceCache | None], Float[Array, "N D"]]:
    """A loop over the repeats of the pattern. Its body has several layers, so that its counter and the layers' numbers
    are two launches for all of them; the numbers are one row of a table, because the compiler slices it once."""
    x, first, kinds = carry[0], pattern[0], len(pattern)
    last = jnp.concatenate([first.input_norm[1:], first.next_norm[None]])
    following = [*(layer.input_norm for layer in pattern[1:]), last]
    normed = rms_norm(x, first.input_norm[0], eps=first.eps, offset=first.norm_offset)

    def run_layer(kind: int, numbers: tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]], carry: _Carry) -> _Carry:
        mixer, feed = block.pattern[kind].mixer, block.pattern[kind].feed
        assert isinstance(mixer, GroupedAttention) and isinstance(feed, Sparse), block.pattern[kind]
        layer = _FusedLayer(fused, pattern[kind], following[kind], *numbers, mixer.eps)
        rows = None
        if replay is not None:
            index = numbers[2] - offsets.first_moe_layer
            rows = LayerRouting(lax.dynamic_index_in_dim(replay.ids, index, keepdims=False), replay.valid)
        return layer.run(carry, feed.router, step, attend, rows)

    # Per layer: its repeat, its layer of the pool, its MoE layer of the record, as (first, layers a number); equal
    # ones share a column. The device counts them: the compiler would slice a constant number by number.
    needed = [(0, kinds), (offsets.first_layer, 1), (offsets.first_moe_layer, 1)]
    distinct = list(dict.fromkeys(needed))
    counted = jnp.arange(block.num_layers, dtype=jnp.int32)
    table = jnp.stack([first + counted // share for first, share in distinct], axis=1)

    def body(carry: _Carry, row: Int[Array, " numbers"]) -> tuple[_Carry, None]:
        for index in range(row.shape[0] // len(distinct)):
            repeat, layer, moe_layer = (row[index * len(distinct) + distinct.index(number)] for number in needed)
            carry = run_layer(index % kinds, (repeat, layer, moe_layer), carry)
        return carry, None

    size = kinds * max(1, fused.unrolled // kinds)
    num_scanned = block.num_layers // size * size
    x, cache, capture = carry
    inner = x, normed, cache, capture
    if num_scanned:
        inner, _ = lax.scan(body, inner, table[:num_scanned].reshape(-1, size * len(distinct)))
    if num_scanned < block.num_layers:
        inner, _ = body(inner, table[num_scanned:].reshape(-1))
    x, normed, cache, capture = inner
    return (x, cache, capture), normed


@dataclasses.dataclass(frozen=True, slots=True)
class _FusedLayer:
    """One layer in few kernels. `index`: among the repeats of its place in the pattern; `layer` of the pool,
    `moe_layer` of the record."""

    fused: FusedSteps
    weights: StackWeights
    next_norms: Float[Array, "R D"]
    index: Int[Array, ""]
    layer: Int[Array, ""]
    moe_layer: Int[Array, ""]
    attention_eps: float

    def run(
        self, carry: _Carry, spec: RouterSpec, step: StepInputs, attend: PagedAttend, rows: LayerRouting | None
    ) -> _Carry:
        """Stream, its norm, cache and capture after the layer."""
        (x, normed, cache, capture), weights = carry, self.weights
        assert weights.router is not None, "the few kernels run MoE layers"
        projected = self._projected(self.fused.product(normed, weights.qkv, self.index), step)
        mixed, cache = attend.attend_fused(projected, cache, self.layer)
        parts = self.fused.product(mixed.reshape(x.shape[0], -1), weights.out, self.index)
        norm = self._norm(weights.post_norm)
        x, normed, logits = self.fused.add_parts(x, parts, weights.out_bias, norm, weights.router)
        biases = RouterBiases(logits=weights.router_bias, selection=weights.selection_bias, layer=self.index)
        id_block = None if capture is None else capture.ids
        routing, id_block = self.fused.route(logits, rows, id_block, self.moe_layer, spec, biases)
        if capture is not None and id_block is not None:
            capture = dataclasses.replace(capture, ids=id_block)
        outputs = self._experts(normed, routing, step, spec)
        x, normed = self.fused.add_slots(x, outputs, self._norm(self.next_norms))
        return x, normed, cache, capture

    def _projected(self, parts: Float[Array, "S N O"], step: StepInputs) -> FusedQKV:
        weights = self.weights
        return FusedQKV(
            qkv=parts,
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            layer=self.index,
            cos=step.cos if weights.traits.rotary else step.cos[:, :0],
            sin=step.sin if weights.traits.rotary else step.sin[:, :0],
            eps=self.attention_eps,
            bias=weights.qkv_bias,
            sinks=weights.sinks,
            traits=weights.traits,
        )

    def _norm(self, scales: Float[Array, "R D"]) -> StreamNorm:
        weights = self.weights
        return StreamNorm(
            scales=scales,
            layer=self.index,
            eps=weights.eps,
            offset=weights.norm_offset,
            residual_scale=weights.residual_scale,
        )

    def _experts(
        self, inputs: Float[Array, "N D"], routing: Routing, step: StepInputs, spec: RouterSpec
    ) -> SlotOutputs:
        weights, shared = self.weights, None
        assert weights.gate_up is not None and weights.down is not None, "the few kernels run MoE layers"
        if weights.shared_gate_up is not None and weights.shared_down is not None:
            shared = SharedExperts(gate_up=weights.shared_gate_up, down=weights.shared_down, gate=weights.shared_gate)
        call = ExpertCall(
            inputs,
            routing.ids,
            routing.weights,
            step.valid,
            weights.gate_up,
            weights.down,
            self.index,
            spec.num_experts,
            weights.gate_up_bias,
            weights.down_bias,
            weights.traits.activation,
        )
        slots = self.fused.slots(call, shared)
        return SlotOutputs(slots=slots, weights=routing.weights, valid=step.valid, inputs=inputs, shared=shared)
