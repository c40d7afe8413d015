"""Router on a GPU: softmax, top-k, weights and the write of the executed ids, one kernel. Knows nothing of experts.

It decides as `replay_topk` does: scores in float32, the lowest id among equal scores, weights renormalised over the K slots
where the family does. The ids go into the step's block [M*K, N] in place, so that capture adds no launch. Rows to replay, and
very many experts, take the plain code.
Dims: N tokens, E experts, M MoE layers, K experts per token, S parts of a sum."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.gpu.blocks import load_or_zero, power_of_two
from routed_experts.layers.routing import LayerRouting, RouterSpec, Routing, replay_topk

MOST_EXPERTS = 256  # each is compared with each


def _route(logits: Any, column: Any, *refs: Any, spec: RouterSpec) -> None:
    """One row. An expert's rank is the number of experts before it, so no pass waits for another; each of the first K writes itself."""
    weights, ids, block = (*refs[-3:],) if len(refs) == 4 else (*refs, None)
    experts, top_k = spec.num_experts, spec.top_k
    token, lanes = pl.program_id(0), jnp.arange(power_of_two(experts))
    real = lanes < experts
    parts = [load_or_zero(logits.at[part, token, lanes], real) for part in range(logits.shape[0])]
    wide = functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts])
    powers = jnp.where(real, jnp.exp(wide - jnp.max(jnp.where(real, wide, -jnp.inf), axis=0)), 0.0)
    scores = powers / jnp.sum(powers, axis=0)
    ordered = jnp.where(real, jnp.where(scores == scores, scores, -1.0), -2.0)  # NaN comes last, and has an id all the same
    higher = ordered[None, :] > ordered[:, None]
    before = higher | ((ordered[None, :] == ordered[:, None]) & (lanes[None, :] < lanes[:, None]))
    rank = jnp.sum(before.astype(jnp.int32), axis=1)
    chosen = rank < top_k
    if spec.renormalize:
        powers = jnp.where(chosen, jnp.exp(wide - jnp.max(jnp.where(chosen, wide, -jnp.inf), axis=0)), 0.0)
        scores = powers / jnp.sum(powers, axis=0)
    place = jnp.where(chosen, rank, ids.shape[0] * top_k)
    plgpu.store(ids.at[token, place], lanes.astype(jnp.int32), mask=chosen)
    plgpu.store(weights.at[token, place], scores, mask=chosen)
    if block is not None:
        plgpu.store(block.at[jnp.where(chosen, column[0] * top_k + rank, block.shape[0]), token], lanes.astype(jnp.int32), mask=chosen)


def route_rows(
    logits: Float[Array, "N E"] | Float[Array, "S N E"],
    routed: LayerRouting | None,
    block: Int[Array, "MK N"] | None,
    column: Int[Array, ""],
    spec: RouterSpec,
    *,
    interpret: bool = False,
) -> tuple[Routing, Int[Array, "MK N"] | None]:
    """Decide, and write the ids under the layer's column of the block. Logits may come as S parts of their sums."""
    logits = logits.reshape(-1, *logits.shape[-2:])  # [S, N, E]
    num_tokens, top_k = logits.shape[1], spec.top_k
    if routed is not None or spec.num_experts > MOST_EXPERTS:
        routing = replay_topk(jnp.sum(logits.astype(jnp.float32), axis=0), routed, spec=spec)
        if block is not None:
            block = jax.lax.dynamic_update_slice_in_dim(block, routing.ids.T, column * top_k, axis=0)
        return routing, block
    shapes = [jax.ShapeDtypeStruct((num_tokens, top_k), jnp.float32), jax.ShapeDtypeStruct((num_tokens, top_k), jnp.int32)]
    args = [logits, jnp.asarray(column, jnp.int32).reshape(1)]
    if block is not None:
        shapes.append(jax.ShapeDtypeStruct(block.shape, block.dtype))
        args.append(block)
    weights, ids, *rest = pl.pallas_call(
        functools.partial(_route, spec=spec),
        shapes,
        grid=(num_tokens,),
        input_output_aliases={} if block is None else {2: 2},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="route",
    )(*args)
    routing = Routing(weights=weights, ids=ids, native_ids=ids, replaced=jnp.zeros(num_tokens, bool))
    return routing, rest[0] if rest else None
