"""The native kernels as backends. Each implements its registry's contract and equals `reference` within rounding.
Weights are not copied. Not differentiable. Dims as in layers/moe.py, layers/linear.py, layers/attention.py."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.attention import AttentionBackend, FusedQKV, LatentQKV, PagedBatch
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.delta_rule import DeltaInputs, DeltaState
from routed_experts.layers.kernels import FusedRouter, Kernels, RowKernels
from routed_experts.layers.linear import LinearBackend
from routed_experts.layers.moe import ALL_EXPERTS, ExpertCall, MoeBackend
from routed_experts.layers.native.ffi_targets import register_ffi_targets
from routed_experts.layers.native.kernel_values import (
    ACTIVATION_ORDER,
    ATTENTION_FEATURES,
    QK_NORMS,
    router_law,
    scale_group,
    weight_arrays,
)
from routed_experts.layers.native.layer_stack import NATIVE_LAYER_STACK
from routed_experts.layers.quantized import E2M1, E4M3, INT4, SPANS, QuantizedWeight, Weight
from routed_experts.layers.routing import LayerRouting, RouterSpec, Routing, RoutingBlock
from routed_experts.layers.stack_traits import PLAIN_TRAITS


def native_experts(call: ExpertCall) -> Float[Array, "N D"]:
    """Each chosen expert is read once, by one core; the K outputs of a row are summed in executed order, in float32.
    Rows are float32, or have the dtype of the experts, which biases have; with codes that of the model."""
    assert register_ffi_targets()
    run = jax.ffi.ffi_call("RexExperts", jax.ShapeDtypeStruct(call.x.shape, call.x.dtype))
    ids, weights, first = (
        call.ids.astype(jnp.int32),
        call.weights.astype(jnp.float32),
        call.first_expert.astype(jnp.int32),
    )
    dtype = _model_dtype(call.x, call.gate_up)
    biases = (
        jnp.zeros(0, dtype) if bias is None else bias.astype(dtype) for bias in (call.gate_up_bias, call.down_bias)
    )
    return run(
        call.x,
        ids,
        weights,
        call.valid,
        *weight_arrays(call.gate_up),
        *weight_arrays(call.down),
        first.reshape(1),
        *biases,
        num_experts=np.int64(call.num_experts),
        activation=np.int64(ACTIVATION_ORDER.index(call.activation)),
        gate_up_group=np.int64(scale_group(call.gate_up)),
        down_group=np.int64(scale_group(call.down)),
    )


def _model_dtype(x: Float[Array, "N D"], weights: Weight) -> jnp.dtype:
    """The dtype of weights that are not codes. Rows of half precision have it, too."""
    codes = isinstance(weights, QuantizedWeight)
    return x.dtype if codes and x.dtype != jnp.float32 else weights.dtype


def native_linear(
    x: Float[Array, "N D"], weights: Weight, layer: Int[Array, ""] | int, dtype: Any
) -> Float[Array, "N O"]:
    """Columns are divided among the cores. Rows are float32, or have the dtype of the weights; with codes, any."""
    return _native_linear(x, weights, layer, dtype, exact=False)


def native_exact_linear(
    x: Float[Array, "N D"], weights: Weight, layer: Int[Array, ""] | int, dtype: Any
) -> Float[Array, "N O"]:
    """The same of rows as they are, which are not rounded to bfloat16 where the weights are: for routers and gates."""
    return _native_linear(x, weights, layer, dtype, exact=True)


def _native_linear(
    x: Float[Array, "N D"], weights: Weight, layer: Int[Array, ""] | int, dtype: Any, *, exact: bool
) -> Float[Array, "N O"]:
    assert register_ffi_targets()
    run = jax.ffi.ffi_call("RexLinear", jax.ShapeDtypeStruct((x.shape[0], weights.shape[2]), dtype))
    exact = exact or _model_dtype(x, weights) != jnp.bfloat16
    index = jnp.asarray(layer, jnp.int32).reshape(1)
    return run(x, *weight_arrays(weights), index, exact=exact, group=np.int64(scale_group(weights)))


def native_attention(
    queries: Float[Array, "N H C"], pool: Float[Array, "LP page 2G C"], first_page: Int[Array, ""], batch: PagedBatch
) -> Float[Array, "N H C"]:
    """Online softmax over the pages of each request; (tokens, kv head) pieces are divided among the cores."""
    return native_variant(queries, pool, first_page, batch, AttentionFeatures())


def native_variant(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page X C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    features: AttentionFeatures,
) -> Float[Array, "N H V"]:
    """The same with features; blocks of keys that no query of a piece sees are not read."""
    assert register_ffi_targets()
    shape = (*queries.shape[:2], features.latent or queries.shape[2])
    sinks = jnp.zeros(0, jnp.float32) if features.sinks is None else features.sinks.astype(jnp.float32)
    return jax.ffi.ffi_call("RexAttention", jax.ShapeDtypeStruct(shape, queries.dtype))(
        queries,
        pool,
        jnp.asarray(first_page, jnp.int32).reshape(1),
        batch.positions,
        batch.query_starts,
        batch.page_table,
        sinks,
        latent=np.int64(features.latent),
        window=np.int64(features.window),
        chunk=np.int64(features.chunk),
        scale=np.float32(features.scale),
    )


def native_write(
    pool: Float[Array, "LP page X C"],
    keys: Float[Array, "N G C"],
    values: Float[Array, "N G C"] | None,
    first_page: Int[Array, ""],
    batch: PagedBatch,
) -> Float[Array, "LP page X C"]:
    """Keys and values, or latent rows, to their slots in place; padding writes nothing."""
    assert register_ffi_targets()
    write = jax.ffi.ffi_call("RexKvWrite", jax.ShapeDtypeStruct(pool.shape, pool.dtype), input_output_aliases={2: 0})
    return write(
        keys,
        jnp.zeros(0, keys.dtype) if values is None else values,
        pool,
        jnp.asarray(first_page, jnp.int32).reshape(1),
        batch.positions,
        batch.token_rows,
        batch.valid,
        batch.page_table,
    )


def native_qk_norm_rope(
    projected: FusedQKV, pool: Float[Array, "LP page 2G C"], first_page: Int[Array, ""], batch: PagedBatch
) -> tuple[Float[Array, "N H C"], Float[Array, "LP page 2G C"]]:
    """Norms, rotary positions and the write of keys and values, by their scales where there are some, as one kernel."""
    assert register_ffi_targets()
    qkv, groups, dim = projected.qkv, pool.shape[2] // 2, pool.shape[3]
    queries = jax.ShapeDtypeStruct((qkv.shape[0], qkv.shape[1] // dim - 2 * groups, dim), qkv.dtype)
    results: list[jax.ShapeDtypeStruct] = [queries, jax.ShapeDtypeStruct(pool.shape, pool.dtype)]
    run = jax.ffi.ffi_call("RexQkNormRope", results, input_output_aliases={6: 1})
    layer, first = (jnp.asarray(index, jnp.int32).reshape(1) for index in (projected.layer, first_page))
    norms, cos_sin = (projected.q_norm, projected.k_norm), (projected.cos, projected.sin)
    locations = (batch.positions, batch.token_rows, batch.valid, batch.page_table)
    scales = [] if projected.kv_scales is None else [jnp.stack(projected.kv_scales.of_layer())]
    rotated, pool = run(qkv, *norms, layer, *cos_sin, pool, first, *locations, *scales, eps=np.float32(projected.eps))
    return rotated, pool


def native_qk_prepare(
    projected: FusedQKV, pool: Float[Array, "LP page 2G C"], first_page: Int[Array, ""], batch: PagedBatch
) -> tuple[Float[Array, "N H C"], Float[Array, "LP page 2G C"]]:
    """The same for layers with traits, as the stack of layers does it: rows and queries are float32."""
    assert register_ffi_targets()
    traits, qkv = projected.traits, projected.qkv.astype(jnp.float32)
    groups, dim = pool.shape[2] // 2, pool.shape[3]
    heads = (qkv.shape[1] // dim - 2 * groups) // (2 if traits.gated else 1)
    queries = jax.ShapeDtypeStruct((qkv.shape[0], heads, dim), jnp.float32)
    results = [queries, jax.ShapeDtypeStruct(pool.shape, pool.dtype)]
    run = jax.ffi.ffi_call("RexQkPrepare", results, input_output_aliases={6: 1})
    norms = [jnp.zeros(0, jnp.float32) if norm is None else norm for norm in (projected.q_norm, projected.k_norm)]
    layer, first = (jnp.asarray(index, jnp.int32).reshape(1) for index in (projected.layer, first_page))
    locations = (batch.positions, batch.token_rows, batch.valid, batch.page_table)
    scales = [] if projected.kv_scales is None else [jnp.stack(projected.kv_scales.of_layer())]
    rotated, pool = run(
        qkv,
        *norms,
        layer,
        projected.cos,
        projected.sin,
        pool,
        first,
        *locations,
        *scales,
        eps=np.float32(projected.eps),
        norm_offset=np.float32(traits.qk_norm_offset),
        norm=np.int64(QK_NORMS.index(traits.qk_norm)),
        frequencies=np.int64(_num_frequencies(projected, dim)),
        interleaved=traits.interleaved,
        gated=traits.gated,
        norm_after_rope=traits.norm_after_rope,
        biased=projected.is_biased,
    )
    return rotated, pool


def _num_frequencies(projected: FusedQKV, dim: int) -> int:
    """Frequencies of a row of angles, in which those of whole heads stand twice."""
    num_angles = projected.cos.shape[1]
    return num_angles // 2 if num_angles == dim else num_angles


def native_gate_heads(
    qkv: Float[Array, "N HHGGC"], mixed: Float[Array, "N H C"], *, groups: int
) -> Float[Array, "N H C"]:
    """Mixed values times the sigmoid of the gates beside the queries, as the stack of layers does it; in place."""
    assert register_ffi_targets()
    result = jax.ShapeDtypeStruct(mixed.shape, jnp.float32)
    run = jax.ffi.ffi_call("RexGateHeads", result, input_output_aliases={1: 0})
    return run(qkv.astype(jnp.float32), mixed.astype(jnp.float32), groups=np.int64(groups))


def native_fused_attention(
    projected: FusedQKV, pool: Float[Array, "LP page 2G C"], layer: Int[Array, ""], batch: PagedBatch, num_pages: int
) -> tuple[Float[Array, "N H C"], Float[Array, "LP page 2G C"]]:
    """From a projection to mixed values: prepare, then attend, with the bits of the stack of layers."""
    first_page, traits, dtype = layer * num_pages, projected.traits, projected.qkv.dtype
    is_whole = projected.cos.shape[1] == pool.shape[3]
    if traits == PLAIN_TRAITS and is_whole and not projected.is_biased:
        queries, pool = native_qk_norm_rope(projected, pool, first_page, batch)
    else:
        queries, pool = native_qk_prepare(projected, pool, first_page, batch)
    sinks = None if projected.sinks is None else projected.sinks[projected.layer]
    features = AttentionFeatures(sinks=sinks, window=traits.window, chunk=traits.chunk, scale=traits.scale)

    def attend(rows: Float[Array, "N H C"]) -> Float[Array, "N H C"]:
        return native_variant(rows, pool, first_page, batch, features)

    mixed = attend(queries) if projected.kv_scales is None else projected.kv_scales.around(attend, queries)
    if traits.gated:
        mixed = native_gate_heads(projected.qkv, mixed, groups=pool.shape[2] // 2)
    return mixed.astype(dtype), pool


def native_latent(
    projected: LatentQKV,
    pool: Float[Array, "LP page 1 C"],
    layer: Int[Array, ""],
    batch: PagedBatch,
    num_pages: int,
) -> tuple[Float[Array, "N H V"], Float[Array, "LP page 1 C"]]:
    """Norm, rotary and the write of rows, queries absorbed, attention, and values, as one kernel."""
    assert register_ffi_targets()
    queries, (num_tokens, heads, _) = projected.queries, projected.queries.shape
    key_dim = queries.shape[2] - projected.compressed.shape[1] + projected.norm.shape[0]
    value_dim = projected.up.shape[1] // heads - key_dim
    results = [
        jax.ShapeDtypeStruct((num_tokens, heads, value_dim), queries.dtype),
        jax.ShapeDtypeStruct(pool.shape, pool.dtype),
    ]
    cos, sin = projected.angles
    values, pool = jax.ffi.ffi_call("RexLatentAttention", results, input_output_aliases={6: 1})(
        queries,
        projected.compressed,
        projected.norm,
        projected.up,
        cos,
        sin,
        pool,
        jnp.asarray(layer * num_pages, jnp.int32).reshape(1),
        batch.positions,
        batch.token_rows,
        batch.valid,
        batch.query_starts,
        batch.page_table,
        interleaved=projected.interleaved,
        scale=np.float32(projected.scale),
        eps=np.float32(projected.eps),
    )
    return values, pool


def native_delta(
    inputs: DeltaInputs,
    states: DeltaState,
    layer: Int[Array, ""],
    slots: Int[Array, " B"],
    fresh: Bool[Array, " B"],
    query_starts: Int[Array, " B1"],
) -> tuple[Float[Array, "N H V"], DeltaState]:
    """Token by token, a few columns of a memory at a time; the states of requests are updated in place."""
    assert register_ffi_targets()
    shape = inputs.shape
    read = (inputs.mixed.shape[0], shape.value_heads, shape.value_dim)
    state_shapes = (jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in (states.conv, states.recurrent))
    run = jax.ffi.ffi_call(
        "RexDeltaRule", [jax.ShapeDtypeStruct(read, jnp.float32), *state_shapes], input_output_aliases={4: 1, 5: 2}
    )
    dtype, kernel = states.conv.dtype, inputs.kernel
    rates = (inputs.decay.astype(jnp.float32), inputs.beta.astype(jnp.float32))
    out, conv, recurrent = run(
        inputs.mixed.astype(dtype),
        *rates,
        kernel,
        states.conv,
        states.recurrent,
        jnp.asarray(layer, jnp.int32).reshape(1),
        query_starts,
        slots,
        fresh,
        key_heads=np.int64(shape.key_heads),
        by_channel=shape.by_channel,
    )
    return out, DeltaState(conv, recurrent)


def native_router(
    logits: Float[Array, "N E"],
    routed: LayerRouting | None,
    block: RoutingBlock | None,
    layer: Int[Array, ""],
    spec: RouterSpec,
    bias: Float[Array, " E"] | None = None,
) -> tuple[Routing, RoutingBlock | None]:
    """Scores, choice (or the rows to replay), weights and the write of the ids, as one kernel; recorded weights are
    written by an operation of their own."""
    assert register_ffi_targets()
    assert (bias is not None) == spec.biased, "a selection bias and RouterSpec.biased belong together"
    num_tokens = logits.shape[0]
    shape = (num_tokens, spec.top_k)
    results = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.int32, jnp.float32)]
    inputs = (
        logits.astype(jnp.float32),
        jnp.zeros(0, jnp.float32) if bias is None else bias.astype(jnp.float32),
        jnp.zeros((0, spec.top_k), jnp.int32) if routed is None else routed.ids.astype(jnp.int32),
        jnp.zeros(0, bool) if routed is None else routed.valid,
    )
    if block is None:
        ids, native_ids, weights = jax.ffi.ffi_call("RexRouter", results)(*inputs, **router_law(spec))
    else:
        run = jax.ffi.ffi_call(
            "RexRecordingRouter",
            [*results, jax.ShapeDtypeStruct(block.ids.shape, block.ids.dtype)],
            input_output_aliases={4: 3},
        )
        column = jnp.asarray(layer, jnp.int32).reshape(1)
        ids, native_ids, weights, written = run(*inputs, block.ids, column, **router_law(spec))
        block = dataclasses.replace(block, ids=written).write_weights(layer, weights)
    replaced = jnp.zeros(num_tokens, bool) if routed is None else routed.valid
    return Routing(weights=weights, ids=ids, native_ids=native_ids, replaced=replaced), block


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


def native_logprobs(logits: Float[Array, "B V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Log probabilities of tokens of each row, with the normaliser of `native_argmax`; a row with NaN gives NaN."""
    assert register_ffi_targets()
    run = jax.ffi.ffi_call("RexLogprobs", jax.ShapeDtypeStruct(tokens.shape, jnp.float32))
    return run(logits.astype(jnp.float32), tokens.astype(jnp.int32))


def native_tied_linear(x: Float[Array, "N D"], table: Float[Array, "V D"]) -> Float[Array, "N V"]:
    """Rows times the transpose of the table, which is read in place; the result is float32."""
    assert register_ffi_targets()
    run = jax.ffi.ffi_call("RexTiedLinear", jax.ShapeDtypeStruct((x.shape[0], table.shape[0]), jnp.float32))
    return run(x, table)


def native_rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"], *, eps: float, offset: float = 0.0
) -> Float[Array, "... D"]:
    """Normalised rows in x's dtype, rounded once."""
    return _native_norm(x, scale, jnp.zeros(0, scale.dtype), eps, offset)


def native_layer_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"], bias: Float[Array, " D"], *, eps: float
) -> Float[Array, "... D"]:
    """Centred and normalised rows in x's dtype, rounded once."""
    return _native_norm(x, scale, bias, eps, 0.0)


def _native_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"], bias: Float[Array, " D0"], eps: float, offset: float
) -> Float[Array, "... D"]:
    assert register_ffi_targets()
    run = jax.ffi.ffi_call("RexNorm", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return run(x, scale, bias, eps=np.float32(eps), offset=np.float32(offset))


def native_gated(x: Float[Array, "N 2F"], activation: str = "silu") -> Float[Array, "N F"]:
    """SiLU(gate) * up, or another of ACTIVATIONS, in x's dtype, rounded once."""
    assert register_ffi_targets()
    run = jax.ffi.ffi_call("RexGate", jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // 2), x.dtype))
    return run(x, activation=np.int64(ACTIVATION_ORDER.index(activation)))


def native_product(x: Float[Array, "N D"], matrix: Float[Array, "D O"]) -> Float[Array, "N O"]:
    """Rows of float32, or others in the dtype of the matrix, times it; the result is float32."""
    rows = x if x.dtype == jnp.float32 else x.astype(matrix.dtype)
    return native_exact_linear(rows, matrix[None], 0, jnp.float32)


def native_add_gated(
    y: Float[Array, "N D"], shared: Float[Array, "N D"], x: Float[Array, "N D"], gate: Float[Array, "D 1"]
) -> Float[Array, "N D"]:
    """`y` and the gated output of the shared experts, as the stack of layers adds them; in float32."""
    assert register_ffi_targets()
    run = jax.ffi.ffi_call("RexAddGated", jax.ShapeDtypeStruct(y.shape, jnp.float32), input_output_aliases={0: 0})
    y32, shared32, x32 = (rows.astype(jnp.float32) for rows in (y, shared, x))
    return run(y32, shared32, x32, gate.reshape(-1)).astype(y.dtype)


_LINEAR = LinearBackend(name="native", run=native_linear, takes_stacked=True, batch_invariant=True)
_EXACT_LINEAR = LinearBackend(name="native", run=native_exact_linear, takes_stacked=True, batch_invariant=True)
NATIVE_KERNELS = Kernels(
    moe=MoeBackend(name="native", run=native_experts, features=ALL_EXPERTS, batch_invariant=True),
    linear=_LINEAR,
    rows=RowKernels(
        rms_norm=native_rms_norm,
        layer_norm=native_layer_norm,
        gated=native_gated,
        product=native_product,
        add_gated=native_add_gated,
    ),
    router=FusedRouter(name="native", run=native_router, linear=_EXACT_LINEAR, supports=lambda spec: True),
    layer_stack=NATIVE_LAYER_STACK,
    argmax=native_argmax,
    logprobs=native_logprobs,
    tied_linear=native_tied_linear,
    code_formats=frozenset({E4M3, INT4, E2M1}),
    code_spans=SPANS,
    takes_bf16_scales=True,
    stream_dtype=jnp.dtype(jnp.float32),
)
NATIVE_ATTENTION = AttentionBackend(
    name="native",
    run=native_attention,
    fused=native_fused_attention,
    fused_features=ATTENTION_FEATURES,
    run_with_features=native_variant,
    write=native_write,
    latent=native_latent,
    recur=native_delta,
    batch_invariant=True,
    kv_formats=frozenset({E4M3}),
    fused_takes_kv_scales=True,
)
