"""The path of a block of layers: one kernel, few kernels a layer for steps of few tokens (fused_layers.py), or layer by
layer. Kernels say which features they have; a block that needs others runs layer by layer. The results are those of
the layers one by one. Dims: N tokens, D hidden."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from routed_experts.layers.attention import AttentionBackend
from routed_experts.layers.attention_variants import ATTENTION_BACKENDS
from routed_experts.layers.delta_rule import DeltaShape
from routed_experts.layers.kernels import FusedSteps, Kernels
from routed_experts.layers.layer_stack import LayerStackKernel, RunRouting, StackOffsets, StackWeights, StepInputs
from routed_experts.layers.linear import REFERENCE_LINEAR
from routed_experts.layers.paged_attend import AnyPagedAttend, HybridAttend, PagedAttend
from routed_experts.layers.routing import RouterSpec
from routed_experts.models.base.interface import TokenRouting, slice_layers
from routed_experts.models.decoder.family_config import FamilyConfig, LayerBlock, LayerSpec
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.decoder.fused_layers import Carry, run_fused_layers
from routed_experts.models.decoder.grouped_attention import GroupedAttention
from routed_experts.models.decoder.layer_counts import LayerCounts
from routed_experts.models.decoder.layer_params import weight_stack
from routed_experts.models.decoder.layer_parts import LayerContext
from routed_experts.models.decoder.step_record import to_block, with_block

_MATRICES = frozenset(("qkv", "out", "gate_up", "down", "shared_gate_up", "shared_down", "dense_gate_up", "dense_down"))
_ARRAYS = _MATRICES | frozenset(
    {
        *("input_norm", "post_norm", "q_norm", "k_norm", "qkv_bias", "out_bias", "sinks"),
        *("router", "router_bias", "selection_bias", "gate_up_bias", "down_bias", "shared_gate"),
    }
)
_DENSE = {"dense_gate_up": "shared_gate_up", "dense_down": "shared_down"}  # a dense network is an expert of all tokens


def find_fused_path(
    config: FamilyConfig, block: LayerBlock, step: LayerContext, routed: TokenRouting | None
) -> LayerStackKernel | FusedSteps | None:
    """The fastest path for all layers of a block in this step: one kernel, or few. None: layer by layer, which
    replayed weights, attention without pages, and features that no kernel has need."""
    attend = step.attend
    if not isinstance(attend, AnyPagedAttend) or (routed is not None and routed.weights is not None):
        return None
    kernel = block_kernel(config, block, step.kernels, attend.backend)
    if isinstance(kernel, FusedSteps) and step.valid.shape[0] > kernel.max_tokens:
        return None
    return kernel


def block_kernel(
    config: FamilyConfig, block: LayerBlock, kernels: Kernels, attention: AttentionBackend
) -> LayerStackKernel | FusedSteps | None:
    """The kernel, or the few of them, that can run all layers of a block; None where none can."""
    needs, stack, fused, router = config.stack_needs(block), kernels.layer_stack, kernels.fused_layer, kernels.router
    specs = {layer.feed.router for layer in block.pattern if isinstance(layer.feed, Sparse)}
    if stack is not None and attention.name == stack.attention:
        supported = all(stack.supports(spec) for spec in specs) and needs <= stack.features
        return stack if supported and _same_sizes(block) else None
    if fused is None or router is None or not specs or not all(router.supports(spec) for spec in specs):
        return None
    of_mixers = frozenset[str]().union(*(layer.mixer.stack_needs for layer in block.pattern))
    return fused if needs - of_mixers <= fused.features else None


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
    """How the layers of a model run: "fused run" (of its MoE layers, or of all where it has none), "fused feed-forward"
    (from the mixer's last projection on), "pieces: " and the parts of a layer that have kernels of their own, or
    "plain", all of it array code."""
    sparse = [block for block in config.blocks if block.num_moe]
    block_kernels = [block_kernel(config, block, kernels, attention) for block in sparse or config.blocks]
    limits = [kernel.max_tokens for kernel in block_kernels if isinstance(kernel, FusedSteps)]
    mixers_fused = all(
        isinstance(layer.mixer, GroupedAttention) and layer.mixer.is_fused_by(attention) for layer in config.layers
    )
    if None not in block_kernels and (mixers_fused or not limits):
        return f"fused run, up to {min(limits)} tokens" if limits else "fused run"
    feeds = [layer.feed for layer in config.layers if isinstance(layer.feed, Sparse)]
    mixers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, GroupedAttention)]
    has_kernels, router = kernels.linear is not REFERENCE_LINEAR, kernels.router
    parts = {
        "projections": has_kernels,
        "q/k norm": any(m.qk_norm and m.is_fused_by(attention) for m in mixers),
        "attention": attention.name not in ATTENTION_BACKENDS
        and (attention.latent is not None or not config.cache.latent),
        "delta rule": isinstance(config.cache.recurrent, DeltaShape) and attention.recur is not None,
        "router": router is not None and bool(feeds) and all(router.supports(feed.router) for feed in feeds),
        "experts": has_kernels and bool(feeds),
    }
    pieces = f"pieces: {', '.join(part for part, holds in parts.items() if holds)}" if any(parts.values()) else "plain"
    return pieces if None in block_kernels else f"fused feed-forward, up to {min(limits)} tokens; {pieces}"


def run_fused(
    kernel: LayerStackKernel | FusedSteps,
    config: FamilyConfig,
    block: LayerBlock,
    arrays: tuple[Mapping[str, nnx.Param[Array]], ...],
    next_norm: Float[Array, " D"],
    step: LayerContext,
    carry: Carry,
    routed: TokenRouting | None,
    counts: LayerCounts,
) -> tuple[Carry, Float[Array, "N D"]]:
    """Run the layers on the stream, the cache and the capture, and on the rows of `routed` where they are valid;
    returns the three, and the stream's norm by `next_norm`."""
    rows = slice_layers(routed, counts.moe, block.num_moe * block.repeats) if block.num_moe else None
    replay = None if rows is None or routed is None else RunRouting(rows[0], routed.valid)
    if isinstance(kernel, FusedSteps):
        return run_fused_layers(kernel, config, block, arrays, next_norm, step, carry, replay, counts)
    (x, cache, capture), attend, spec = carry, step.attend, _router(block)
    paged, pages = (attend.paged, cache.pages) if isinstance(attend, HybridAttend) else (attend, cache)
    assert isinstance(paged, PagedAttend), attend
    pattern = tuple(
        _stack_weights(config, layer, own, next_norm, step.kernels)
        for layer, own in zip(block.pattern, arrays, strict=True)
    )
    inputs = _stack_inputs(block, step)
    offsets = StackOffsets(first_layer=counts.attending, first_moe_layer=counts.moe)
    recorded = to_block(capture)
    x, normed, pages, recorded = kernel.run(x, pattern, inputs, paged, pages, recorded, replay, offsets, spec)
    cache = dataclasses.replace(cache, pages=pages) if isinstance(attend, HybridAttend) else pages
    capture = with_block(capture, recorded)
    return (x, cache, capture), normed


def _stack_weights(
    config: FamilyConfig,
    layer: LayerSpec,
    arrays: Mapping[str, nnx.Param[Array]],
    next_norm: Float[Array, " D"],
    kernels: Kernels,
) -> StackWeights:
    """A layer of the pattern: its arrays in all repeats, and its traits."""
    mixer, feed = layer.mixer, layer.feed
    assert isinstance(mixer, GroupedAttention), layer
    activation = feed.activation if isinstance(feed, Sparse) else "silu"
    own: dict[str, Any] = {
        _DENSE.get(name, name): weight_stack(arrays, name, kernels) if name in _MATRICES else arrays[name][...]
        for name in arrays
        if name in _ARRAYS
    }
    return StackWeights(
        **own,
        next_norm=next_norm,
        eps=config.norm_eps,
        traits=dataclasses.replace(mixer.traits, activation=activation),
        norm_offset=config.norm_offset,
        residual_scale=config.residual_scale,
    )


def _stack_inputs(block: LayerBlock, step: LayerContext) -> StepInputs:
    """The angles of the layers that rotate, where there are some."""
    mixers = [layer.mixer for layer in block.pattern if isinstance(layer.mixer, GroupedAttention)]
    specs = [mixer.rotary for mixer in mixers if mixer.rotary is not None]
    if not specs:
        none = jnp.zeros((step.valid.shape[0], mixers[0].head_dim), jnp.float32)
        return StepInputs(cos=none, sin=none, valid=step.valid)
    cos, sin = step.cos_sin[specs[0]]
    return StepInputs(cos=cos, sin=sin, valid=step.valid)
