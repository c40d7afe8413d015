"""Router on a GPU: softmax, top-k, weights and the write of the executed ids, as one kernel.

It decides as `replay_topk` does: scores in float32, the lowest id among equal scores, weights renormalised over the
K slots where the family does. The ids go into the step's block [M*K, N] in place, so that capture adds no launch.
Rows to replay are two more inputs of a second variant of the kernel: a step that replays none does not read them.
Dims: N tokens, E experts, M MoE layers, K experts per token, S parts of a sum."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.gpu.blocks import load_or_zero, power_of_two
from routed_experts.layers.routing import LayerRouting, RouterSpec, Routing

ROWS = 4  # of a block; comparing every expert with every other in one pass took a third longer


def _route(logits: Any, column: Any, *refs: Any, spec: RouterSpec, rows: int, replays: bool, captured: bool) -> None:
    """Rows of one block. Refs: rows to replay and their flags, the block; weights, ids, the live choice, the block. An
    expert's lane keeps its rank among the chosen and stores for itself: what is known by lane is not gathered by slot,
    which takes a pass each."""
    replay_ids, valid = refs[:2] if replays else (None, None)
    weights, ids, *rest = refs[2 * replays + captured :]
    native, block = rest[0] if replays else None, rest[-1] if captured else None
    experts, top_k, num_tokens = spec.num_experts, spec.top_k, logits.shape[1]
    first = (
        0 if block is None else column[0] * top_k
    )  # read here, once: after a store it would be loaded again, with a stall
    tokens, lanes = pl.program_id(0) * rows + jnp.arange(rows), jnp.arange(power_of_two(experts))[None, :]
    inside, real = tokens < num_tokens, lanes < experts
    mask = inside[:, None] & real
    parts = [load_or_zero(logits.at[part, tokens[:, None], lanes], mask) for part in range(logits.shape[0])]
    wide = functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts])
    powers = jnp.where(real, jnp.exp(wide - jnp.max(jnp.where(real, wide, -jnp.inf), axis=1)[:, None]), 0.0)
    scores = powers / jnp.sum(powers, axis=1)[:, None]
    live = _places(
        jnp.where(real, jnp.where(scores == scores, scores, 0.0), -1.0), lanes, top_k
    )  # NaN: distinct ids all the same
    if replay_ids is None or valid is None or native is None:
        values = _weights(wide, scores, live < top_k, spec)
        mine = inside[:, None] & (live < top_k)
        own = jnp.broadcast_to(lanes, live.shape)
        plgpu.store(ids.at[tokens[:, None], live], own, mask=mine)
        plgpu.store(weights.at[tokens[:, None], live], values, mask=mine)
        if block is not None:
            plgpu.store(block.at[first + live, tokens[:, None]], own, mask=mine)
        return
    forced = plgpu.load(valid.at[tokens], mask=inside, other=0) != 0
    chosen, picked = [], jnp.zeros(live.shape, jnp.bool_)
    for k in range(top_k):
        own = jnp.sum(jnp.where(live == k, lanes, 0), axis=1).astype(jnp.int32)
        plgpu.store(native.at[tokens, k], own, mask=inside)
        chosen.append(jnp.where(forced, plgpu.load(replay_ids.at[tokens, k], mask=inside, other=0), own))
        picked |= lanes == chosen[k][:, None]
    values = _weights(wide, scores, picked, spec)
    for k, expert in enumerate(chosen):
        plgpu.store(ids.at[tokens, k], expert, mask=inside)
        plgpu.store(
            weights.at[tokens, k], jnp.sum(jnp.where(lanes == expert[:, None], values, 0.0), axis=1), mask=inside
        )
        if block is not None:
            plgpu.store(block.at[first + k, tokens], expert, mask=inside)


def _places(left: Any, lanes: Any, top_k: int) -> Any:
    """The rank of each lane among the chosen of its row, the highest first and the lowest id among equals; `top_k` for
    the others. Lanes that hold less than 0 are never chosen."""
    places = jnp.full(left.shape, top_k, jnp.int32)
    for k in range(top_k):
        best = jnp.max(left, axis=1)[:, None]
        chosen = jnp.min(jnp.where(left == best, lanes, lanes.shape[1]), axis=1)[:, None]
        places = jnp.where(lanes == chosen, k, places)
        left = jnp.where(lanes == chosen, -2.0, left)
    return places


def _weights(wide: Any, scores: Any, picked: Any, spec: RouterSpec) -> Any:
    """Weights by lane: scores, or where the family does so, a softmax over the picked lanes alone."""
    if not spec.renormalize:
        return scores
    powers = jnp.where(picked, jnp.exp(wide - jnp.max(jnp.where(picked, wide, -jnp.inf), axis=1)[:, None]), 0.0)
    return powers / jnp.sum(powers, axis=1)[:, None]


def route_rows(
    logits: Float[Array, "N E"] | Float[Array, "S N E"],
    routed: LayerRouting | None,
    block: Int[Array, "MK N"] | None,
    column: Int[Array, ""],
    spec: RouterSpec,
    *,
    interpret: bool = False,
) -> tuple[Routing, Int[Array, "MK N"] | None]:
    """Decide, or take the rows to replay where they are valid, and write the ids under the layer's column of the block.
    Logits may come as S parts of their sums."""
    logits = logits.reshape(-1, *logits.shape[-2:])  # [S, N, E]
    num_tokens, top_k = logits.shape[1], spec.top_k
    assert routed is None or routed.weights is None, "weights that are replayed go through plain code"
    chosen = jax.ShapeDtypeStruct((num_tokens, top_k), jnp.int32)
    shapes = [jax.ShapeDtypeStruct((num_tokens, top_k), jnp.float32), chosen]
    args = [logits, jnp.asarray(column, jnp.int32).reshape(1)]
    if routed is not None:
        shapes.append(chosen)
        args += [routed.ids.astype(jnp.int32), routed.valid.astype(jnp.int32)]
    if block is not None:
        shapes.append(jax.ShapeDtypeStruct(block.shape, block.dtype))
        args.append(block)
    rows = min(power_of_two(num_tokens), ROWS)
    weights, ids, *rest = pl.pallas_call(
        functools.partial(_route, spec=spec, rows=rows, replays=routed is not None, captured=block is not None),
        shapes,
        grid=(pl.cdiv(num_tokens, rows),),
        input_output_aliases={} if block is None else {len(args) - 1: len(shapes) - 1},
        compiler_params=plgpu.CompilerParams(num_warps=rows, num_stages=1),
        interpret=interpret,
        name="route",
    )(*args)
    native, replaced = (ids, jnp.zeros(num_tokens, bool)) if routed is None else (rest[0], routed.valid)
    return Routing(weights=weights, ids=ids, native_ids=native, replaced=replaced), None if block is None else rest[-1]
