"""The native kernels as backends. Each implements its registry's contract and equals `reference` within rounding.
Weights are not copied. Not differentiable. Dims as in layers/moe.py, layers/linear.py, layers/attention.py."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import AttentionBackend, FusedQKV, PagedBatch
from routed_experts.layers.kernels import FusedRouter, Kernels
from routed_experts.layers.linear import LinearBackend
from routed_experts.layers.moe import ExpertCall, MoeBackend
from routed_experts.layers.native.ffi_targets import register_ffi_targets
from routed_experts.layers.native.layer_stack import NATIVE_LAYER_STACK
from routed_experts.layers.routing import LayerRouting, RouterSpec, Routing, replay_topk


def native_experts(call: ExpertCall) -> Float[Array, "N D"]:
    """Each chosen expert is read once, by one core; the K outputs of a row are summed in executed order, in float32."""
    assert register_ffi_targets()
    run = jax.ffi.ffi_call("RexExperts", jax.ShapeDtypeStruct(call.x.shape, call.x.dtype))
    ids, weights, first = (
        call.ids.astype(jnp.int32),
        call.weights.astype(jnp.float32),
        call.first_expert.astype(jnp.int32),
    )
    return run(
        call.x, ids, weights, call.valid, call.gate_up, call.down, first.reshape(1), num_experts=call.num_experts
    )


def native_linear(
    x: Float[Array, "N D"], weights: Float[Array, "R D O"], layer: Int[Array, ""] | int, dtype: Any
) -> Float[Array, "N O"]:
    """Columns are divided among the cores."""
    assert register_ffi_targets()
    run = jax.ffi.ffi_call("RexLinear", jax.ShapeDtypeStruct((x.shape[0], weights.shape[2]), dtype))
    return run(x, weights, jnp.asarray(layer, jnp.int32).reshape(1))


def native_attention(
    queries: Float[Array, "N H C"], pool: Float[Array, "LP page 2G C"], first_page: Int[Array, ""], batch: PagedBatch
) -> Float[Array, "N H C"]:
    """Online softmax over the pages of each request; (tokens, kv head) pieces are divided among the cores."""
    assert register_ffi_targets()
    run = jax.ffi.ffi_call("RexAttention", jax.ShapeDtypeStruct(queries.shape, queries.dtype))
    return run(
        queries,
        pool,
        jnp.asarray(first_page, jnp.int32).reshape(1),
        batch.positions,
        batch.query_starts,
        batch.page_table,
    )


def native_qk_norm_rope(
    projected: FusedQKV, pool: Float[Array, "LP page 2G C"], first_page: Int[Array, ""], batch: PagedBatch
) -> tuple[Float[Array, "N H C"], Float[Array, "LP page 2G C"]]:
    """Norms, rotary positions and the write of keys and values, as one kernel."""
    assert register_ffi_targets()
    qkv, groups, dim = projected.qkv, pool.shape[2] // 2, pool.shape[3]
    queries = jax.ShapeDtypeStruct((qkv.shape[0], qkv.shape[1] // dim - 2 * groups, dim), qkv.dtype)
    results: list[jax.ShapeDtypeStruct] = [queries, jax.ShapeDtypeStruct(pool.shape, pool.dtype)]
    run = jax.ffi.ffi_call("RexQkNormRope", results, input_output_aliases={6: 1})
    layer, first = (jnp.asarray(index, jnp.int32).reshape(1) for index in (projected.layer, first_page))
    norms, cos_sin = (projected.q_norm, projected.k_norm), (projected.cos, projected.sin)
    locations = (batch.positions, batch.token_rows, batch.valid, batch.page_table)
    rotated, pool = run(qkv, *norms, layer, *cos_sin, pool, first, *locations, eps=np.float32(projected.eps))
    return rotated, pool


def native_fused_attention(
    projected: FusedQKV, pool: Float[Array, "LP page 2G C"], layer: Int[Array, ""], batch: PagedBatch, num_pages: int
) -> tuple[Float[Array, "N H C"], Float[Array, "LP page 2G C"]]:
    """From a projection to mixed values: prepare, then attend."""
    first_page = layer * num_pages
    queries, pool = native_qk_norm_rope(projected, pool, first_page, batch)
    return native_attention(queries, pool, first_page, batch), pool


def native_router(
    logits: Float[Array, "N E"],
    routed: LayerRouting | None,
    block: Int[Array, "MK N"] | None,
    layer: Int[Array, ""],
    spec: RouterSpec,
) -> tuple[Routing, Int[Array, "MK N"] | None]:
    """Softmax, choice, weights and the write of the ids, as one kernel; rows to replay go through plain array code."""
    if routed is not None:
        routing = replay_topk(logits, routed, spec=spec)
        if block is not None:
            block = lax.dynamic_update_slice_in_dim(block, routing.ids.T, layer * spec.top_k, axis=0)
        return routing, block
    assert register_ffi_targets()
    shape = (logits.shape[0], spec.top_k)
    results: list[jax.ShapeDtypeStruct] = [
        jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    ]
    wide = logits.astype(jnp.float32)
    if block is None:
        ids, weights = jax.ffi.ffi_call("RexRouter", results)(wide, renormalize=spec.renormalize)
    else:
        run = jax.ffi.ffi_call(
            "RexRecordingRouter",
            [*results, jax.ShapeDtypeStruct(block.shape, block.dtype)],
            input_output_aliases={1: 2},
        )
        ids, weights, block = run(wide, block, jnp.asarray(layer, jnp.int32).reshape(1), renormalize=spec.renormalize)
    return Routing(weights=weights, ids=ids, native_ids=ids, replaced=jnp.zeros(logits.shape[0], bool)), block


def native_argmax(logits: Float[Array, "B V"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The best token of each row and its logprob; equal scores go to the lower id, and NaN gives the last one."""
    assert register_ffi_targets()
    rows = logits.shape[:1]
    results: list[jax.ShapeDtypeStruct] = [
        jax.ShapeDtypeStruct(rows, jnp.int32),
        jax.ShapeDtypeStruct(rows, jnp.float32),
    ]
    tokens, logprobs = jax.ffi.ffi_call("RexArgmax", results)(logits)
    return tokens, logprobs


_LINEAR = LinearBackend(name="native", run=native_linear, takes_stacked=True)
NATIVE_KERNELS = Kernels(
    moe=MoeBackend(name="native", run=native_experts),
    linear=_LINEAR,
    router=FusedRouter(name="native", run=native_router, linear=_LINEAR),
    layer_stack=NATIVE_LAYER_STACK,
    argmax=native_argmax,
)
NATIVE_ATTENTION = AttentionBackend(name="native", run=native_attention, fused=native_fused_attention)
