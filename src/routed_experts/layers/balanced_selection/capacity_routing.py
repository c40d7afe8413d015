"""Routing under capacities, as the engine's routers run it: the K experts of each token that have room, and their
weights.

Experts are chosen by `balanced_expert_selection` ("reroute"); weights follow the model's own scoring function at the
ids that were chosen. A slot that stays empty has id and instance -1 and weight 0. Where weights sum to one, the
other slots share what an empty slot would have had. Dims: N tokens, E experts, K experts per token, J replica
positions, I instances."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from routed_experts.core.errors import ConfigError
from routed_experts.core.placement_config import MAX_TERM
from routed_experts.layers.balanced_selection.selection import balanced_expert_selection
from routed_experts.layers.parallel import Capacities
from routed_experts.layers.routing import LayerRouting, RouterSpec, Routing, replay_topk, selection_scores


def reroute_topk(
    logits: Float[Array, "N E"],
    valid: Bool[Array, " N"],
    capacities: Capacities,
    spec: RouterSpec,
    bias: Float[Array, " E"] | None,
    *,
    num_instances: int,
    drops: bool,
) -> tuple[Routing, Int[Array, "N 2"]]:
    """Route a step's tokens to experts of `num_instances` instances. A slot without room overflows, or with `drops`
    stays empty. The second result counts each token's slots that run an expert outside its K best, and its empty
    slots. Padding keeps its own K best and has no instance."""
    scores = selection_scores(logits, spec=spec, bias=bias)
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    native = jax.lax.top_k(scores, spec.top_k)[1].astype(jnp.int32)
    room = instance_capacity(capacities.factor, valid, top_k=spec.top_k, num_instances=num_instances)
    selection = balanced_expert_selection(
        scores,
        scores,
        capacities.replicas,
        room,
        k=spec.top_k,
        valid=valid,
        mode="reroute",
        on_exhausted="drop" if drops else "overflow",
    )
    ids, instances = selection.logical_ids, selection.instance_ids
    if not drops:  # where fewer than K experts can be chosen at all, fill up as an unbounded router does
        unfilled = (ids < 0) & valid[:, None]
        ids, instances = (
            jnp.where(unfilled, native, ids),
            jnp.where(unfilled, capacities.replicas[native, 0], instances),
        )
    filled = ids >= 0
    is_rerouted = filled & ~jnp.any(ids[:, :, None] == native[:, None, :], axis=-1)
    changed = jnp.stack(
        [jnp.sum(is_rerouted, axis=1, dtype=jnp.int32), jnp.sum(~filled, axis=1, dtype=jnp.int32)], axis=1
    )
    ids = jnp.where(valid[:, None], ids, native)
    routing = replay_topk(logits, LayerRouting(_compact(ids), jnp.ones_like(valid)), spec=spec, bias=bias)
    weights = _renormalize_filled(routing.weights, ids >= 0, spec) if drops else routing.weights
    routing = dataclasses.replace(routing, ids=ids, native_ids=native, weights=weights, instances=instances)
    return routing, jnp.where(valid[:, None], changed, 0)


def instance_capacity(
    factor: Int[Array, " 2"], valid: Bool[Array, " N"], *, top_k: int, num_instances: int
) -> Int[Array, " I"]:
    """Slots of every instance: max(1, ceil(factor * tokens * K / I)), as `expert_capacity` computes on the host."""
    if valid.size * top_k * MAX_TERM > jnp.iinfo(jnp.int32).max:
        raise ConfigError(
            f"{valid.size} tokens of {top_k} slots under capacities are counted in int32; lower "
            "precompile_token_paddings"
        )
    numerator, denominator = factor[0], factor[1]
    shared = jnp.maximum(denominator, 1) * num_instances
    slots = jnp.maximum(-(-(numerator * jnp.sum(valid, dtype=jnp.int32) * top_k) // shared), 1)
    return jnp.full(num_instances, jnp.where(denominator == 0, valid.size * top_k, slots), jnp.int32)


def _compact(ids: Int[Array, "N K"]) -> Int[Array, "N K"]:
    """An id for every slot, to compute weights at: an empty slot takes the token's best."""
    return jnp.where(ids < 0, jnp.maximum(ids[:, :1], 0), ids)


def _renormalize_filled(
    weights: Float[Array, "N K"], filled: Bool[Array, "N K"], spec: RouterSpec
) -> Float[Array, "N K"]:
    """Set the weight of empty slots to 0. Where weights sum to one, renormalise the others."""
    weights_of_filled = jnp.where(filled, weights, 0.0)
    if spec.scoring_func == "sparsemixer" or not (spec.renormalize or spec.scoring_func == "logits"):
        return weights_of_filled
    total = jnp.sum(weights_of_filled, axis=1, keepdims=True)
    return weights_of_filled / jnp.where(total > 0, total, 1.0) * spec.scale
