"""Router on a GPU: scores, top-k, weights and the write of the executed ids, as one kernel.

It decides as `replay_topk` does by every law of RouterSpec: scores in float32, the lowest id among equal scores, groups
and a selection bias where the family has them. A choice that is not a number counts as 0. The ids go into the step's
block [M*K, N] in place, and so do the weights where they are recorded, so that capture adds no launch. Rows to replay
are two more inputs of a second variant of the kernel: a step that replays none does not read them. Dims: N tokens, E
experts, M MoE layers, R layers of the stack, K experts per token, S parts of a sum."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.gpu.activations import sigmoid
from routed_experts.layers.gpu.blocks import load_or_zero, power_of_two
from routed_experts.layers.kernels import RouterBiases
from routed_experts.layers.routing import LayerRouting, RouterSpec, Routing, RoutingBlock

_LEAST, _OUTSIDE = -3.0e38, -3.2e38  # of a choice, and of experts outside of the chosen groups; -inf: no expert
_MAGNITUDE, _TAKEN = 0x7FFFFFFF, -0x7F800001  # bits of a float without its sign; the key of -inf: already taken


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Static:
    """What the kernel is compiled for."""

    spec: RouterSpec
    replays: bool
    blocks: int  # that are written: none, ids, or ids and weights
    shifted: bool  # a bias of the logits
    biased: bool


def _route(logits: Any, column: Any, layer: Any, *refs: Any, static: _Static) -> None:
    """Route one token, in a block of one warp: no reduction leaves it, and the bits of a token do not depend on the
    others. Refs: the biases, rows to replay and their flags, the blocks; weights, ids, the live choice, the blocks. An
    expert's lane keeps its rank among the chosen and stores for itself: what is known by lane is not gathered by slot,
    which takes a pass each."""
    left = list(refs)
    logit_bias, selection_bias = (left.pop(0) if present else None for present in (static.shifted, static.biased))
    replay_ids, valid = (left.pop(0) if static.replays else None for _ in range(2))
    weights, ids, *rest = left[static.blocks :]
    native = rest.pop(0) if static.replays else None
    block, weights_block = (*rest, None, None)[:2]
    spec, token = static.spec, pl.program_id(0)
    experts, top_k = spec.num_experts, spec.top_k
    first = 0 if block is None else column[0] * top_k  # read once, before the first store: a load after it would stall
    lanes = jnp.arange(power_of_two(experts))
    real = lanes < experts
    parts = [load_or_zero(logits.at[part, token, lanes], real) for part in range(logits.shape[0])]
    wide = functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts])
    if logit_bias is not None:
        wide = wide + load_or_zero(logit_bias.at[layer[0], lanes], real).astype(jnp.float32)
    scores = _scores(wide, real, spec)
    choice = scores
    if selection_bias is not None:
        choice = scores + load_or_zero(selection_bias.at[layer[0], lanes], real).astype(jnp.float32)
    live = _ranks(_keep_groups(_clean(choice, real), lanes, spec), lanes, top_k)
    if replay_ids is None or valid is None or native is None:
        values = _weights(wide, scores, [live == k for k in range(top_k)], real, spec)
        is_chosen = live < top_k
        plgpu.store(ids.at[token, live], lanes, mask=is_chosen)
        plgpu.store(weights.at[token, live], values, mask=is_chosen)
        if block is not None:
            plgpu.store(block.at[first + live, token], lanes, mask=is_chosen)
        if weights_block is not None:
            plgpu.store(weights_block.at[first + live, token], values, mask=is_chosen)
        return
    forced = valid[token] != 0
    chosen = []
    for k in range(top_k):
        native_id = jnp.sum(jnp.where(live == k, lanes, 0), axis=0).astype(jnp.int32)
        native[token, k] = native_id
        chosen.append(jnp.where(forced, replay_ids[token, k], native_id))
    values = _weights(wide, scores, [lanes == expert for expert in chosen], real, spec)
    for k, expert in enumerate(chosen):
        ids[token, k] = expert
        weight = jnp.sum(jnp.where(lanes == expert, values, 0.0), axis=0)
        weight = jnp.where((expert >= 0) & (expert < experts), weight, jnp.nan)
        weights[token, k] = weight
        if block is not None:
            block[first + k, token] = expert
        if weights_block is not None:
            weights_block[first + k, token] = weight


def _softmax(wide: Float[Array, " E"], picked: Bool[Array, " E"]) -> Float[Array, " E"]:
    """Over the picked lanes; 0 in the others."""
    top = jnp.max(jnp.where(picked, wide, -jnp.inf), axis=0)
    powers = jnp.where(picked, jnp.exp(wide - top), 0.0)
    return powers / jnp.sum(powers, axis=0)


def _scores(wide: Float[Array, " E"], real: Bool[Array, " E"], spec: RouterSpec) -> Float[Array, " E"]:
    if spec.scoring_func == "softmax":
        return _softmax(wide, real)
    return sigmoid(wide) if spec.scoring_func == "sigmoid" else wide


def _clean(choice: Float[Array, " E"], real: Bool[Array, " E"]) -> Float[Array, " E"]:
    """Finite choices, so that the ids of a row are distinct even where its logits are not numbers."""
    finite = jnp.minimum(jnp.maximum(jnp.where(choice == choice, choice, 0.0), _LEAST), -_LEAST)
    return jnp.where(real, finite, -jnp.inf)


def _swap_order(bits: Int[Array, "*E"]) -> Int[Array, "*E"]:
    """From the bits of float32 numbers to integers in their order, and back."""
    return bits ^ ((bits >> 31) & _MAGNITUDE)


def _to_keys(values: Float[Array, " E"]) -> Int[Array, " E"]:
    """Integers in the order of the numbers; both zeros are equal. A warp finds its highest integer by one instruction,
    and its highest float by five exchanges of lanes."""
    return _swap_order(jax.lax.bitcast_convert_type(jnp.where(values == 0.0, 0.0, values), jnp.int32))


def _from_key(key: Int[Array, ""]) -> Float[Array, ""]:
    return jax.lax.bitcast_convert_type(_swap_order(key), jnp.float32)


def _highest(keys: Int[Array, " E"], lanes: Int[Array, " E"]) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """The highest key, and the first lane that has it."""
    best = jnp.max(keys, axis=0)
    return best, jnp.min(jnp.where(keys == best, lanes, lanes.shape[0]), axis=0)


def _keep_groups(choice: Float[Array, " E"], lanes: Int[Array, " E"], spec: RouterSpec) -> Float[Array, " E"]:
    """Choices of the best groups; those of the others are less than any."""
    if spec.num_groups == spec.topk_group:
        return choice
    size = spec.num_experts // spec.num_groups
    group, keys, totals = lanes // size, _to_keys(choice), jnp.full(choice.shape, -jnp.inf, jnp.float32)
    for index in range(spec.num_groups):
        own = jnp.where(group == index, keys, _TAKEN)
        best, first = _highest(own, lanes)
        total = _from_key(best)
        for _ in range(spec.group_score_topk - 1):
            own = jnp.where(lanes == first, _TAKEN, own)
            best, first = _highest(own, lanes)
            total = total + _from_key(best)
        totals = jnp.where(group == index, total, totals)
    keeps, keys = jnp.zeros(choice.shape, jnp.bool_), _to_keys(totals)
    for _ in range(spec.topk_group):
        _, first = _highest(keys, lanes)
        is_best = group == first // size
        keeps, keys = keeps | is_best, jnp.where(is_best, _TAKEN, keys)
    return jnp.where(keeps, choice, jnp.where(lanes < spec.num_experts, _OUTSIDE, -jnp.inf))


def _ranks(choice: Float[Array, " E"], lanes: Int[Array, " E"], top_k: int) -> Int[Array, " E"]:
    """The rank of each lane among the chosen, the highest first and the lowest id among equals; `top_k` for the others.
    Lanes of -inf are never chosen."""
    keys, ranks = _to_keys(choice), jnp.full(choice.shape, top_k, jnp.int32)
    for k in range(top_k):
        _, first = _highest(keys, lanes)
        ranks = jnp.where(lanes == first, k, ranks)
        keys = jnp.where(lanes == first, _TAKEN, keys)
    return ranks


def _weights(
    wide: Float[Array, " E"],
    scores: Float[Array, " E"],
    slots: list[Bool[Array, " E"]],
    real: Bool[Array, " E"],
    spec: RouterSpec,
) -> Float[Array, " E"]:
    """Weights by lane; `slots` are the lanes of each slot."""
    if spec.scoring_func == "sparsemixer":
        values = _sparsemixer(wide, slots, real, spec.jitter_eps)
    else:
        picked = functools.reduce(jnp.logical_or, slots)
        if spec.scoring_func == "logits" or (spec.scoring_func == "softmax" and spec.renormalize):
            values = _softmax(wide, picked)
        elif spec.renormalize:
            values = scores / (jnp.sum(jnp.where(picked, scores, 0.0), axis=0) + spec.epsilon)
        else:
            values = scores
    return values * spec.scale if spec.scale != 1.0 else values


def _sparsemixer(
    wide: Float[Array, " E"], slots: list[Bool[Array, " E"]], real: Bool[Array, " E"], jitter_eps: float
) -> Float[Array, " E"]:
    """As `sparsemixer_weights`."""
    left, values = jnp.where(real, wide, -jnp.inf), jnp.zeros(wide.shape, jnp.float32)
    for chosen in slots:
        best = jnp.max(left, axis=0)
        far = (best - wide) / jnp.maximum(jnp.abs(wide), best) > 2 * jitter_eps
        near = jnp.where(far & ~chosen, -jnp.inf, left)
        values = jnp.where(chosen, _softmax(near, near > -jnp.inf), values)
        left = jnp.where(chosen, -jnp.inf, left)
    return values


def route_rows(
    logits: Float[Array, "N E"] | Float[Array, "S N E"],
    routed: LayerRouting | None,
    block: RoutingBlock | None,
    column: Int[Array, ""],
    spec: RouterSpec,
    biases: RouterBiases | Float[Array, " E"] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Routing, RoutingBlock | None]:
    """Decide, or take the rows to replay where they are valid, and write the layer's rows of the block.
    Logits may come as S parts of their sums. An array of biases is the layer's selection bias. The ids of a row to
    replay are distinct; the weight of one that is no expert is NaN."""
    if not isinstance(biases, RouterBiases):
        biases = RouterBiases(selection=None if biases is None else biases[None])
    assert (biases.selection is not None) == spec.biased, "a selection bias and RouterSpec.biased belong together"
    logits = logits.reshape(-1, *logits.shape[-2:])  # [S, N, E]
    num_tokens, top_k = logits.shape[1], spec.top_k
    assert routed is None or routed.weights is None, "weights that are replayed go through plain code"
    chosen = jax.ShapeDtypeStruct((num_tokens, top_k), jnp.int32)
    shapes = [jax.ShapeDtypeStruct((num_tokens, top_k), jnp.float32), chosen]
    args = [logits, *(jnp.asarray(value, jnp.int32).reshape(1) for value in (column, biases.layer))]
    args += [array for array in (biases.logits, biases.selection) if array is not None]
    if routed is not None:
        shapes.append(chosen)
        args += [routed.ids.astype(jnp.int32), routed.valid.astype(jnp.int32)]
    blocks: list[Array] = jax.tree.leaves(block)  # the ids, and the weights where they are recorded
    first_block, first_written = len(args), len(shapes)
    shapes += [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in blocks]
    args += blocks
    static = _Static(
        spec=spec,
        replays=routed is not None,
        blocks=len(blocks),
        shifted=biases.logits is not None,
        biased=spec.biased,
    )
    weights, ids, *rest = pl.pallas_call(
        functools.partial(_route, static=static),
        shapes,
        grid=(num_tokens,),
        input_output_aliases={first_block + index: first_written + index for index in range(len(blocks))},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="route",
    )(*args)
    native, replaced = (ids, jnp.zeros(num_tokens, bool)) if routed is None else (rest[0], routed.valid)
    written = None if block is None else RoutingBlock(*rest[-len(blocks) :])
    return Routing(weights=weights, ids=ids, native_ids=native, replaced=replaced), written
