"""A stack of layers as one native kernel: threads stay awake and control does not return to XLA between its first
norm and its last. Not differentiable. Dims as in layers/layer_stack.py."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from routed_experts.layers.layer_stack import (
    LayerStackKernel,
    RunRouting,
    StackOffsets,
    StackWeights,
    StepInputs,
)
from routed_experts.layers.native.ffi_targets import register_ffi_targets
from routed_experts.layers.native.kernel_values import (
    ACTIVATION_ORDER,
    ATTENTION_FEATURES,
    QK_NORMS,
    router_law,
    scale_group,
    weight_arrays,
)
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.layers.quantized import Weight
from routed_experts.layers.routing import RouterSpec, RoutingBlock

_STREAM, _POOL, _LAYERS = 0, 11, 12  # places of what is updated in place, and of the layers, among the arguments
_NO_ROUTER = RouterSpec(num_experts=1, top_k=1, renormalize=False)  # of dense layers: its law is not read
_FEATURES = ATTENTION_FEATURES | frozenset(
    {
        *("layers of several kinds", "offset norms", "a residual scale", "input biases", "an output bias"),
        *("biased experts", "clamped swiglu experts", "shared experts", "gated shared experts"),
        "a dense network",
        *("a float32 router", "a router bias", "a selection bias"),
    }
)


def native_layer_stack(
    x: Float[Array, "N D"],
    arrays: StackWeights | tuple[StackWeights, ...],
    step: StepInputs,
    attend: PagedAttend,
    pool: Float[Array, "LP page 2G C"],
    block: RoutingBlock | None,
    routed: RunRouting | None,
    offsets: StackOffsets,
    spec: RouterSpec | None,
) -> tuple[Float[Array, "N D"], Float[Array, "N D"], Float[Array, "LP page 2G C"], RoutingBlock | None]:
    """All layers of the run over the tokens of a step. The stream is float32, or has the dtype of the weights. Rows of
    padding tokens keep their stream, and their norm is 0."""
    assert register_ffi_targets()
    assert routed is None or block is not None, "rows are replayed where rows are recorded"
    pattern, batch = arrays if isinstance(arrays, tuple) else (arrays,), attend.batch
    first = pattern[0]
    shared = {(layer.eps, layer.norm_offset, layer.residual_scale) for layer in pattern}
    assert len(shared) == 1, f"the layers of a stack share eps, norm_offset and residual_scale: {shared}"
    results = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(x.shape, first.next_norm.dtype),
        jax.ShapeDtypeStruct(pool.shape, pool.dtype),
    ]
    layers = [array for layer in pattern for array in _layer_arrays(layer)]
    aliases = {_STREAM: 0, _POOL: 2}
    blocks: list[Array] = jax.tree.leaves(block)  # the ids, and the weights where they are recorded
    for array in blocks:
        aliases[_LAYERS + len(layers) + len(results) - 3] = len(results)
        results.append(jax.ShapeDtypeStruct(array.shape, array.dtype))
    positions = (batch.positions, batch.token_rows, step.valid, batch.query_starts, batch.page_table)
    replay = [] if routed is None else [routed.ids.astype(jnp.int32), routed.valid]
    assert len(attend.kv_scales) < 2, "the rows of a stack have one shape"
    stream, normed, written, *blocks = jax.ffi.ffi_call("RexLayerStack", results, input_output_aliases=aliases)(
        x,
        first.next_norm,
        step.cos,
        step.sin,
        *positions,
        jnp.asarray([_traits(layer) for layer in pattern], jnp.int32),
        jnp.asarray([(layer.traits.scale, layer.traits.qk_norm_offset) for layer in pattern], jnp.float32),
        pool,
        *layers,
        *blocks,
        *replay,
        *attend.kv_scales,
        pattern=np.int64(len(pattern)),
        first_layer=np.int64(offsets.first_layer),
        first_column=np.int64(offsets.first_moe_layer),
        layer_pages=np.int64(attend.num_pages),
        top_k=np.int64(0 if spec is None else spec.top_k),
        eps=np.float32(first.eps),
        norm_offset=np.float32(first.norm_offset),
        residual_scale=np.float32(first.residual_scale),
        **router_law(_NO_ROUTER if spec is None else spec),
    )
    return stream, normed, written, RoutingBlock(*blocks) if blocks else None


def _layer_arrays(layer: StackWeights) -> list[Array]:
    """The arrays of one layer of the pattern, in the order of LayerArg in layer_stack_handler.h; [0] in place of what
    it has not. Sinks and selection biases are float32 for every dtype of the weights. Scales of matrices are last."""
    dtype = layer.next_norm.dtype

    def given(array: Array | None, *, wide: bool = False) -> Array:
        if array is None:
            return jnp.zeros(0, jnp.float32 if wide else dtype)
        return array.astype(jnp.float32) if wide else array

    absent = jnp.zeros(0, dtype)
    matrices, scales = zip(
        *(weight_arrays(absent if matrix is None else matrix) for matrix in _matrices(layer)), strict=True
    )
    qkv, out, gate_up, down, shared_gate_up, shared_down = matrices
    return [
        layer.input_norm,
        layer.post_norm,
        given(layer.q_norm),
        given(layer.k_norm),
        qkv,
        given(layer.qkv_bias),
        out,
        given(layer.out_bias),
        given(layer.sinks, wide=True),
        given(layer.router),
        given(layer.router_bias),
        given(layer.selection_bias, wide=True),
        gate_up,
        down,
        given(layer.gate_up_bias),
        given(layer.down_bias),
        shared_gate_up,
        shared_down,
        given(layer.shared_gate),
        *scales,
    ]


def _matrices(layer: StackWeights) -> tuple[Weight | None, ...]:
    """Those that may be codes, in the order of kMatrices in layer_stack_handler.h."""
    return (layer.qkv, layer.out, layer.gate_up, layer.down, layer.shared_gate_up, layer.shared_down)


def _traits(layer: StackWeights) -> tuple[int, ...]:
    """In the order of LayerTrait in layer_stack_handler.h, and the groups of the matrices."""
    traits = layer.traits
    flags = (traits.rotary, traits.interleaved, traits.gated, traits.norm_after_rope)
    numbers = (traits.window, traits.chunk, ACTIVATION_ORDER.index(traits.activation))
    groups = (scale_group(matrix) for matrix in _matrices(layer))
    return (QK_NORMS.index(traits.qk_norm), *(int(flag) for flag in flags), *numbers, *groups)


NATIVE_LAYER_STACK = LayerStackKernel(
    name="native",
    attention="native",
    run=native_layer_stack,
    supports=lambda spec: True,
    features=_FEATURES,
)
