"""The serving operators on a recorded step: the instance of every slot. One compiled program a placement.

Dims: M MoE layers, N tokens of a step (-1 is padding), K experts per token, E experts, J replica positions, I
instances."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from routed_experts.core.placement import ExpertPlacement
from routed_experts.layers.balanced_selection.checks import expert_capacity
from routed_experts.layers.balanced_selection.selection import balanced_expert_selection
from routed_experts.layers.balanced_selection.waterfill import waterfill_replicas

CAPACITY_FACTOR = 1.25

# (ids, number of real tokens) -> instances
Choose = Callable[[Int[np.ndarray, "M N K"], int], Int[np.ndarray, "M N K"]]


def choose_by_load(placement: ExpertPlacement) -> Choose:
    """Choose instances by water-filling, layer by layer."""

    def layer(ids: Int[Array, "N K"], order: Int[Array, "E J"]) -> Int[Array, "N K"]:
        return waterfill_replicas(ids, order, num_devices=placement.num_devices, num_instances=placement.num_instances)

    choose = jax.jit(jax.vmap(layer))
    return lambda ids, _: np.asarray(choose(ids, placement.logical_to_physical_map))


def dispatch_with_capacity(placement: ExpertPlacement) -> Choose:
    """Choose instances with room, 1.25 times the mean share; -1 where no instance of the expert has."""

    def layer(inputs: tuple[Int[Array, "N K"], Int[Array, "E J"]], capacity: Int[Array, " I"]) -> Int[Array, "N K"]:
        ids, order = inputs
        tokens, ranks = jnp.arange(len(ids))[:, None], jnp.arange(ids.shape[1], 0, -1, dtype=jnp.float32)
        unknown: Float[Array, "N E"] = jnp.full((len(ids), order.shape[0]), -jnp.inf, jnp.float32)
        scores = unknown.at[tokens, jnp.maximum(ids, 0)].set(ranks)
        picked = balanced_expert_selection(
            scores,
            scores,
            order,
            capacity,
            k=ids.shape[1],
            valid=ids[:, 0] >= 0,
            mode="reroute",
            on_exhausted="drop",
            impl="rounds",
        )
        return picked.instance_ids

    @jax.jit
    def choose(ids: Any, orders: Any, capacity: Any) -> Any:
        return jax.lax.map(lambda inputs: layer(inputs, capacity), (ids, orders))

    def chosen(ids: Int[np.ndarray, "M N K"], num_tokens: int) -> Int[np.ndarray, "M N K"]:
        capacity = expert_capacity(num_tokens, ids.shape[2], placement.num_instances, CAPACITY_FACTOR)
        return np.asarray(choose(ids, placement.logical_to_physical_map, capacity))

    return chosen
