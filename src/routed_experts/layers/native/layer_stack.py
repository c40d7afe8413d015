"""A stack of layers as one native kernel: threads stay awake and control does not return to XLA between its first
norm and its last. Not differentiable. Dims as in layers/layer_stack.py."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from routed_experts.layers.layer_stack import LayerStackKernel, RunRouting, StackOffsets, StackWeights, StepInputs
from routed_experts.layers.native.ffi_targets import register_ffi_targets
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.layers.routing import RouterSpec

_STREAM, _POOL, _BLOCK = 0, 18, 19  # places of what is updated in place among the arguments


def native_layer_stack(
    x: Float[Array, "N D"],
    arrays: StackWeights,
    step: StepInputs,
    attend: PagedAttend,
    pool: Float[Array, "LP page 2G C"],
    block: Int[Array, "MK N"] | None,
    routed: RunRouting | None,
    offsets: StackOffsets,
    spec: RouterSpec,
) -> tuple[Float[Array, "N D"], Float[Array, "N D"], Float[Array, "LP page 2G C"], Int[Array, "MK N"] | None]:
    """All layers of the run over the tokens of a step. Rows of padding tokens keep their stream, and their norm is
    0."""
    assert register_ffi_targets()
    assert routed is None or block is not None, "rows are replayed where rows are recorded"
    batch = attend.batch
    results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, x, pool)]
    aliases = {_STREAM: 0, _POOL: 2}
    blocks = [] if block is None else [block]
    if block is not None:
        results.append(jax.ShapeDtypeStruct(block.shape, block.dtype))
        aliases[_BLOCK] = 3
    norms = (arrays.input_norm, arrays.post_norm, arrays.next_norm, arrays.q_norm, arrays.k_norm)
    matrices = (arrays.qkv, arrays.out, arrays.router, arrays.gate_up, arrays.down)
    positions = (batch.positions, batch.token_rows, step.valid, batch.query_starts, batch.page_table)
    replay = [] if routed is None else [routed.ids.astype(jnp.int32), routed.valid]
    stream, normed, written, *blocks = jax.ffi.ffi_call("RexLayerStack", results, input_output_aliases=aliases)(
        x,
        *norms,
        *matrices,
        step.cos,
        step.sin,
        *positions,
        pool,
        *blocks,
        *replay,
        first_layer=np.int64(offsets.first_layer),
        first_column=np.int64(offsets.first_moe_layer),
        layer_pages=np.int64(attend.num_pages),
        top_k=np.int64(spec.top_k),
        eps=np.float32(arrays.eps),
        renormalize=spec.renormalize,
    )
    return stream, normed, written, blocks[0] if blocks else None


NATIVE_LAYER_STACK = LayerStackKernel(name="native", attention="native", run=native_layer_stack)
