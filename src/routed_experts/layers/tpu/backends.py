"""The TPU's entries in the tables of backends.

A kernel's module, and with it Pallas, is imported when the kernel is traced: a machine without a TPU never loads it."""

import functools
from typing import Any

from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import AttentionBackend, FusedQKV, PagedBatch
from routed_experts.layers.kernels import FusedRouter, Kernels
from routed_experts.layers.linear import LinearBackend
from routed_experts.layers.moe import ExpertCall, MoeBackend
from routed_experts.layers.routing import LayerRouting, RouterSpec, Routing

NAME = "tpu"


def tpu_kernels(*, interpret: Any = False) -> Kernels:
    """Experts, projections and router; `interpret` runs them on a CPU, slowly."""
    return Kernels(
        moe=MoeBackend(name=NAME, run=functools.partial(_run_experts, interpret=interpret)),
        linear=LinearBackend(name=NAME, run=functools.partial(_project, interpret=interpret), takes_stacked=True),
        router=FusedRouter(name=NAME, run=functools.partial(_route, interpret=interpret)),
    )


def tpu_attention(*, interpret: Any = False) -> AttentionBackend:
    """Attention over the pool, with q/k norm, rotary positions and the write of keys and values."""
    run, fused = (
        functools.partial(_attend, interpret=interpret),
        functools.partial(_prepare_and_attend, interpret=interpret),
    )
    return AttentionBackend(name=NAME, run=run, fused=fused)


def _run_experts(call: ExpertCall, *, interpret: Any) -> Float[Array, "N D"]:
    from routed_experts.layers.tpu.experts import fused_experts

    return fused_experts(call, interpret=interpret)


def _project(
    x: Float[Array, "N D"], weights: Float[Array, "R D O"], layer: Int[Array, ""] | int, dtype: Any, *, interpret: Any
) -> Float[Array, "N O"]:
    from routed_experts.layers.tpu.linear import layered_linear

    return layered_linear(x, weights, layer, dtype, interpret=interpret)


def _route(
    logits: Float[Array, "N E"],
    routed: LayerRouting | None,
    block: Int[Array, "MK N"] | None,
    layer: Int[Array, ""],
    spec: RouterSpec,
    *,
    interpret: Any,
) -> tuple[Routing, Int[Array, "MK N"] | None]:
    from routed_experts.layers.tpu.router import fused_router

    return fused_router(logits, routed, block, layer, spec, interpret=interpret)


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


def _prepare_and_attend(
    projected: FusedQKV,
    pool: Float[Array, "LP page 2G C"],
    layer: Int[Array, ""],
    batch: PagedBatch,
    num_pages: int,
    *,
    interpret: Any,
) -> tuple[Float[Array, "N H C"], Float[Array, "LP page 2G C"]]:
    from routed_experts.layers.tpu.qk_norm_rope import prepare

    first_page = layer * num_pages
    queries, pool = prepare(projected, pool, first_page, batch, interpret=interpret)
    return _attend(queries, pool, first_page, batch, interpret=interpret), pool


TPU_KERNELS = tpu_kernels()
TPU_ATTENTION = tpu_attention()
