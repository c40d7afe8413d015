"""From scores to slots under capacity: experts chosen, instances chosen, slots that found no room placed beyond it.
Pure array code. Knows nothing of weights or platforms: who chooses the experts is an argument.

Dims: N tokens, E experts, K experts per token, J replica positions, I instances, V sources."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.balanced_selection.replica_choice import by_source, in_shared_order, room_of
from routed_experts.layers.balanced_selection.rounds import Chosen

ChooseExperts = Callable[[Float[Array, "N E"], Int[Array, " E"], Bool[Array, " N"], int], Chosen]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelectionInputs:
    """What selection decides on. `scores` holds no NaN, capacities lie in 0 .. K*N; V = 1: one order for all
    sources."""

    scores: Float[Array, "N E"]
    replica_order: Int[Array, "V E J"]
    capacity: Int[Array, " I"]
    source: Int[Array, " N"]
    valid: Bool[Array, " N"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Assignment:
    """What was decided; -1 for a slot without expert."""

    ids: Int[Array, "N K"]
    instances: Int[Array, "N K"]
    num_rerouted: Int[Array, ""]
    num_overflowed: Int[Array, ""]
    rounds: Int[Array, ""]
    replica_rounds: Int[Array, ""]


def assign(slate: SelectionInputs, choose: ChooseExperts, top_k: int, *, overflows: bool) -> Assignment:
    """Choose experts by the room of all their instances, then instances by their own."""
    num_tokens = slate.scores.shape[0]
    rooms = jnp.sum(room_of(slate.replica_order[0], slate.capacity), axis=1, dtype=jnp.int32)
    chosen = choose(slate.scores, jnp.minimum(rooms, top_k * num_tokens), slate.valid, top_k)
    slots = chosen.ids.T.reshape(-1)  # [K N]: rank by rank is the order of priority
    if slate.replica_order.shape[0] == 1:
        instances, replica_rounds = in_shared_order(slots, slate.replica_order[0], slate.capacity), jnp.int32(0)
    else:
        sources = jnp.tile(slate.source, top_k)
        instances, replica_rounds = by_source(slots, sources, slate.replica_order, slate.capacity)
    done = Assignment(
        chosen.ids, instances.reshape(top_k, -1).T, chosen.num_rerouted, jnp.int32(0), chosen.rounds, replica_rounds
    )
    if not overflows:
        return done
    is_short = jnp.any(slate.valid[:, None] & (chosen.ids < 0))
    return lax.cond(is_short, lambda: _place_beyond_capacity(slate, done), lambda: done)


def _place_beyond_capacity(slate: SelectionInputs, done: Assignment) -> Assignment:
    """Give each empty slot its token's best expert not yet selected, at the first replica of its source's order."""
    ids, (num_tokens, num_experts) = done.ids, slate.scores.shape
    empty = ids < 0
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    left = slate.scores.at[tokens, jnp.where(empty, num_experts, ids)].set(-jnp.inf, mode="drop")
    values, best = lax.top_k(left, ids.shape[1])
    number = jnp.maximum(jnp.cumsum(empty, axis=1, dtype=jnp.int32) - 1, 0)
    experts = jnp.take_along_axis(best, number, axis=1)
    fills = empty & slate.valid[:, None] & (jnp.take_along_axis(values, number, axis=1) > -jnp.inf)
    return dataclasses.replace(
        done,
        ids=jnp.where(fills, experts, ids),
        instances=jnp.where(fills, slate.replica_order[slate.source[:, None], experts, 0], done.instances),
        num_overflowed=jnp.sum(fills, dtype=jnp.int32),
    )
