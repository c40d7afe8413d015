"""The TPU's entries in the tables of backends.

A kernel's module, and with it Pallas, is imported when the kernel is traced: a machine without a TPU never loads it."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.attention import AttentionBackend, FusedQKV, LatentQKV, PagedBatch, write_kv
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.delta_rule import DeltaInputs, DeltaState
from routed_experts.layers.kernels import FusedRouter, Kernels
from routed_experts.layers.linear import LinearBackend
from routed_experts.layers.moe import ALL_EXPERTS, ExpertCall, MoeBackend
from routed_experts.layers.quantized import E2M1, E4M3, INT4, Weight
from routed_experts.layers.routing import LayerRouting, RouterSpec, Routing, RoutingBlock

NAME = "tpu"
_FUSED_FEATURES = frozenset(
    {
        *("no q/k norm", "a q/k norm of all heads", "a q/k norm without a scale", "an offset q/k norm"),
        *("no rotary positions", "partial rotary positions", "interleaved rotary positions"),
        *("a norm after rotary positions", "a norm of all heads after rotary positions"),
        *("a sliding window", "chunks", "sinks", "its own scale", "gated heads"),
    }
)


def tpu_kernels(*, interpret: Any = False) -> Kernels:
    """Experts, projections and router; `interpret` runs them on a CPU, slowly."""
    return Kernels(
        moe=MoeBackend(name=NAME, run=functools.partial(_run_experts, interpret=interpret), features=ALL_EXPERTS),
        linear=LinearBackend(name=NAME, run=functools.partial(_project, interpret=interpret), takes_stacked=True),
        router=FusedRouter(name=NAME, run=functools.partial(_route, interpret=interpret), supports=lambda _: True),
        code_formats=frozenset({E4M3, INT4, E2M1}),
    )


def tpu_attention(*, interpret: Any = False) -> AttentionBackend:
    """Attention over the pool, with q/k norm, rotary positions and the write of keys and values."""
    run, fused = (
        functools.partial(_attend, interpret=interpret),
        functools.partial(_prepare_and_attend, interpret=interpret),
    )
    with_features = functools.partial(_attend_with_features, interpret=interpret)
    return AttentionBackend(
        name=NAME,
        run=run,
        fused=fused,
        fused_features=_FUSED_FEATURES,
        run_with_features=with_features,
        write=functools.partial(_write, interpret=interpret),
        latent=functools.partial(_attend_latent, interpret=interpret),
        recur=functools.partial(_recur, interpret=interpret),
    )


def _run_experts(call: ExpertCall, *, interpret: Any) -> Float[Array, "N D"]:
    from routed_experts.layers.tpu.experts import fused_experts

    return fused_experts(call, interpret=interpret)


def _project(
    x: Float[Array, "N D"], weights: Weight, layer: Int[Array, ""] | int, dtype: Any, *, interpret: Any
) -> Float[Array, "N O"]:
    from routed_experts.layers.tpu.linear import layered_linear

    return layered_linear(x, weights, layer, dtype, interpret=interpret)


def _route(
    logits: Float[Array, "N E"],
    routed: LayerRouting | None,
    block: RoutingBlock | None,
    layer: Int[Array, ""],
    spec: RouterSpec,
    bias: Float[Array, " E"] | None = None,
    *,
    interpret: Any,
) -> tuple[Routing, RoutingBlock | None]:
    from routed_experts.layers.tpu.router import fused_router

    return fused_router(logits, routed, block, layer, spec, bias, interpret=interpret)


def _attend(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page 2G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    *,
    interpret: Any,
) -> Float[Array, "N H C"]:
    from routed_experts.layers.tpu.attention import ragged_attention

    return ragged_attention(queries, pool, first_page, batch, interpret=interpret)


def _attend_with_features(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page X C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    features: AttentionFeatures,
    *,
    interpret: Any,
) -> Float[Array, "N H V"]:
    from routed_experts.layers.tpu.attention import ragged_attention

    return ragged_attention(queries, pool, first_page, batch, features, interpret=interpret)


def _write(
    pool: Float[Array, "LP page X C"],
    keys: Float[Array, "N G C"],
    values: Float[Array, "N G C"] | None,
    first_page: Int[Array, ""],
    batch: PagedBatch,
    *,
    interpret: Any,
) -> Float[Array, "LP page X C"]:
    from routed_experts.layers.tpu.latent_attention import write_rows

    if values is not None:
        return write_kv(pool, keys, values, first_page, batch)  # XLA scatters them in place
    return write_rows(pool, keys, first_page, batch, interpret=interpret)


def _attend_latent(
    projected: LatentQKV,
    pool: Float[Array, "LP page 1 C"],
    layer: Int[Array, ""],
    batch: PagedBatch,
    num_pages: int,
    *,
    interpret: Any,
) -> tuple[Float[Array, "N H V"], Float[Array, "LP page 1 C"]]:
    from routed_experts.layers.tpu.latent_attention import attend_latent

    return attend_latent(projected, pool, layer, batch, num_pages, interpret=interpret)


def _recur(
    inputs: DeltaInputs,
    states: DeltaState,
    layer: Int[Array, ""],
    slots: Int[Array, " B"],
    fresh: Bool[Array, " B"],
    query_starts: Int[Array, " B1"],
    *,
    interpret: Any,
) -> tuple[Float[Array, "N H V"], DeltaState]:
    from routed_experts.layers.tpu.delta_rule import recur

    return recur(inputs, states, layer, slots, fresh, query_starts, interpret=interpret)


def _prepare_and_attend(
    projected: FusedQKV,
    pool: Float[Array, "LP page 2G C"],
    layer: Int[Array, ""],
    batch: PagedBatch,
    num_pages: int,
    *,
    interpret: Any,
) -> tuple[Float[Array, "N H C"], Float[Array, "LP page 2G C"]]:
    from routed_experts.layers.tpu.attention import ragged_attention
    from routed_experts.layers.tpu.qk_norm_rope import gates_of, prepare

    first_page, head_dim = layer * num_pages, projected.head_dim or pool.shape[3]
    queries, pool = prepare(projected, pool, first_page, batch, interpret=interpret)
    traits, sinks = projected.traits, None if projected.sinks is None else projected.sinks[projected.layer]
    features = AttentionFeatures(
        sinks=sinks, window=traits.window, chunk=traits.chunk, scale=traits.scale or head_dim**-0.5
    )
    mixed = ragged_attention(queries, pool, first_page, batch, features, interpret=interpret)[..., :head_dim]
    return mixed * jax.nn.sigmoid(gates_of(projected, mixed.shape[1])) if traits.gated else mixed, pool


TPU_KERNELS = tpu_kernels()
TPU_ATTENTION = tpu_attention()
