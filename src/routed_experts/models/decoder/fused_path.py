"""A stack of MoE layers in one kernel, or in few for steps of few tokens, with the results of the plain layers. The
few kernels round where the plain layers do. Layers are pre-norm, attention and experts.

In few kernels the stream is normalised where it is added to, so the carry of the scan holds it twice: as it is, and
under the norm of what comes next. Dims: N tokens, D hidden, R layers of the stack, E experts of a layer, F expert
width, H query heads, G kv heads, C head dim."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from routed_experts.capture.device_cache import RoutedExpertsDeviceCache
from routed_experts.layers.attention import FusedQKV
from routed_experts.layers.kernels import FusedSteps, Kernels
from routed_experts.layers.layer_stack import LayerStackKernel, RunRouting, StackOffsets, StackWeights, StepInputs
from routed_experts.layers.moe import ExpertCall
from routed_experts.layers.norm import rms_norm
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.layers.routing import LayerRouting, RouterSpec
from routed_experts.models.base.interface import AttentionFn, TokenRouting, slice_layers
from routed_experts.models.decoder.sparse_block import route


def find_fused_path(
    kernels: Kernels, attend: AttentionFn, routed: TokenRouting | None, num_tokens: int, spec: RouterSpec
) -> LayerStackKernel | FusedSteps | None:
    """The fastest path for all layers of a block in this step: one kernel, or few. None: layer by layer, which
    replayed weights, attention without pages, and unsupported routers need."""
    if not isinstance(attend, PagedAttend) or (routed is not None and routed.weights is not None):
        return None
    stack, fused, router = kernels.layer_stack, kernels.fused_layer, kernels.router
    if stack is not None and stack.supports(spec) and attend.backend.name == stack.attention:
        return stack
    if fused is None or router is None or not router.supports(spec) or attend.backend.fused is None:
        return None
    return fused if num_tokens <= fused.max_tokens else None


def run_fused(
    kernel: LayerStackKernel | FusedSteps,
    x: Float[Array, "N D"],
    run: StackWeights,
    step: StepInputs,
    attend: PagedAttend,
    cache: Any,
    capture: RoutedExpertsDeviceCache | None,
    routed: TokenRouting | None,
    *,
    offsets: StackOffsets,
    spec: RouterSpec,
    kernels: Kernels,
) -> tuple[Float[Array, "N D"], Float[Array, "N D"], Any, RoutedExpertsDeviceCache | None]:
    """Run the layers, on the rows of `routed` where they are valid; returns the stream, its norm by `next_norm`, the
    cache and the capture."""
    rows = slice_layers(routed, offsets.first_moe_layer, run.qkv.shape[0])
    replay = None if rows is None or routed is None else RunRouting(rows[0], routed.valid)
    if isinstance(kernel, FusedSteps):
        return _run_fused_layers(
            x, run, step, attend, cache, capture, replay, offsets=offsets, spec=spec, kernels=kernels, fused=kernel
        )
    block = None if capture is None else capture.ids
    x, normed, cache, block = kernel.run(x, run, step, attend, cache, block, replay, offsets, spec)
    if capture is not None and block is not None:
        capture = dataclasses.replace(capture, ids=block)
    return x, normed, cache, capture


def _run_fused_layers(
    x: Float[Array, "N D"],
    run: StackWeights,
    step: StepInputs,
    attend: PagedAttend,
    cache: Any,
    capture: RoutedExpertsDeviceCache | None,
    replay: RunRouting | None,
    *,
    offsets: StackOffsets,
    spec: RouterSpec,
    kernels: Kernels,
    fused: FusedSteps,
) -> tuple[Float[Array, "N D"], Float[Array, "N D"], Any, RoutedExpertsDeviceCache | None]:
    following = jnp.concatenate([run.input_norm[1:], run.next_norm[None]])
    normed = rms_norm(x, run.input_norm[0], eps=run.eps)

    def layer(stack_index: Int[Array, ""], carry: Any) -> Any:
        x, normed, cache, capture = carry
        arrays = {"q_norm": run.q_norm, "k_norm": run.k_norm, "cos": step.cos, "sin": step.sin}
        projected = FusedQKV(qkv=fused.product(normed, run.qkv, stack_index), layer=stack_index, **arrays, eps=run.eps)
        mixed, cache = attend.attend_fused(projected, cache, stack_index + offsets.first_layer)
        parts = fused.product(mixed.reshape(x.shape[0], -1), run.out, stack_index)
        x, normed = fused.add_parts(x, parts, run.post_norm, stack_index, eps=run.eps)
        logits = fused.product(normed, run.router, stack_index)
        rows = (
            None
            if replay is None
            else LayerRouting(lax.dynamic_index_in_dim(replay.ids, stack_index, keepdims=False), replay.valid)
        )
        routing, capture = route(
            logits, rows, stack_index + offsets.first_moe_layer, capture, spec=spec, kernels=kernels
        )
        call = ExpertCall(
            normed, routing.ids, routing.weights, step.valid, run.gate_up, run.down, stack_index, spec.num_experts
        )
        x, normed = fused.add_slots(
            x, fused.slots(call), routing.weights, step.valid, following, stack_index, eps=run.eps
        )
        return x, normed, cache, capture

    return lax.fori_loop(0, run.qkv.shape[0], layer, (x, normed, cache, capture))
