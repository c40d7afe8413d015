"""Router on a GPU: softmax, top-k, weights and the write of the executed ids, one kernel. Knows nothing of experts.

It decides as `replay_topk` does: scores in float32, the lowest id among equal scores, weights renormalised over the K slots
where the family does. The ids go into the step's block [M*K, N] in place, so that capture adds no launch. Rows to replay take the
plain code: replay is for training and for tests, not for the measured step.
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

ROWS = 4  # of a block; comparing every expert with every other in one pass took a third longer


def _route(logits: Any, column: Any, *refs: Any, spec: RouterSpec, rows: int) -> None:
    """Rows of one block: K passes of maximum and lowest id."""
    weights, ids, block = (*refs[-3:],) if len(refs) == 4 else (*refs, None)
    experts, top_k, num_tokens = spec.num_experts, spec.top_k, logits.shape[1]
    first = 0 if block is None else column[0] * top_k  # read here, once: behind a store each slot would read it anew, and wait
    tokens, lanes = pl.program_id(0) * rows + jnp.arange(rows), jnp.arange(power_of_two(experts))
    inside, real = tokens < num_tokens, (lanes < experts)[None, :]
    mask = inside[:, None] & real
    parts = [load_or_zero(logits.at[part, tokens[:, None], lanes[None, :]], mask) for part in range(logits.shape[0])]
    wide = functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts])
    powers = jnp.where(real, jnp.exp(wide - jnp.max(jnp.where(real, wide, -jnp.inf), axis=1)[:, None]), 0.0)
    scores = jnp.where(real, powers / jnp.sum(powers, axis=1)[:, None], -1.0)
    left, picked = scores, []
    for k in range(top_k):
        best = jnp.max(left, axis=1)
        chosen = jnp.min(jnp.where(left == best[:, None], lanes[None, :], experts - 1), axis=1).astype(jnp.int32)  # NaN: an id all the same
        mine = lanes[None, :] == chosen[:, None]
        picked.append(jnp.sum(jnp.where(mine, wide if spec.renormalize else scores, 0.0), axis=1))
        left = jnp.where(mine, -2.0, left)
        plgpu.store(ids.at[tokens, k], chosen, mask=inside)
        if block is not None:
            plgpu.store(block.at[first + k, tokens], chosen, mask=inside)
    if spec.renormalize:
        top = functools.reduce(jnp.maximum, picked)
        picked = [jnp.exp(value - top) for value in picked]
        total = functools.reduce(jnp.add, picked)
        picked = [value / total for value in picked]
    for k, value in enumerate(picked):
        plgpu.store(weights.at[tokens, k], value, mask=inside)


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
    if routed is not None:
        routing = replay_topk(jnp.sum(logits.astype(jnp.float32), axis=0), routed, spec=spec)
        if block is not None:
            block = jax.lax.dynamic_update_slice_in_dim(block, routing.ids.T, column * top_k, axis=0)
        return routing, block
    shapes = [jax.ShapeDtypeStruct((num_tokens, top_k), jnp.float32), jax.ShapeDtypeStruct((num_tokens, top_k), jnp.int32)]
    args = [logits, jnp.asarray(column, jnp.int32).reshape(1)]
    if block is not None:
        shapes.append(jax.ShapeDtypeStruct(block.shape, block.dtype))
        args.append(block)
    rows = min(power_of_two(num_tokens), ROWS)
    weights, ids, *rest = pl.pallas_call(
        functools.partial(_route, spec=spec, rows=rows),
        shapes,
        grid=(pl.cdiv(num_tokens, rows),),
        input_output_aliases={} if block is None else {2: 2},
        compiler_params=plgpu.CompilerParams(num_warps=rows, num_stages=1),
        interpret=interpret,
        name="route",
    )(*args)
    routing = Routing(weights=weights, ids=ids, native_ids=ids, replaced=jnp.zeros(num_tokens, bool))
    return routing, rest[0] if rest else None
