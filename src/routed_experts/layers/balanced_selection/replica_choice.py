"""Which instance of its expert a slot runs on, under capacities of the instances: the order of replicas may depend on
the source. Knows nothing of scores: slots come with their expert, in order of priority.

The slots of one expert never number more than its instances' capacities together, so each finds a place. With one order
for all, the o-th slot of an expert takes the first replica that o fits into. With an order per source it is the cutoff
iteration of layers.selection_rounds with instances for experts: at most J + 1 rounds. Dims: A slots in order of
priority, E experts, J replica positions, I instances, V sources."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from routed_experts.layers.balanced_selection.admission import admission_cutoff, count_takers, rank_in_expert


def room_of(replica_order: Int[Array, "*V E J"], capacity: Int[Array, " I"]) -> Int[Array, "*V E J"]:
    """Give the capacity at each replica position: 0 where there is no replica."""
    return jnp.where(replica_order >= 0, capacity[replica_order], 0)  # -1 wraps to the last instance, and is masked


def in_shared_order(
    experts: Int[Array, " A"], replica_order: Int[Array, "E J"], capacity: Int[Array, " I"]
) -> Int[Array, " A"]:
    """Fill each expert's replicas from the first to the last; -1 for a slot without expert (-1)."""
    num_experts, width = replica_order.shape
    number = rank_in_expert(jnp.where(experts < 0, num_experts, experts), num_experts)
    filled = jnp.cumsum(room_of(replica_order, capacity), axis=1, dtype=jnp.int32)
    position = jnp.sum((filled[experts] <= number[:, None]).astype(jnp.int32), axis=1)
    return jnp.where(experts < 0, -1, replica_order[experts, jnp.minimum(position, width - 1)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Cuts:
    """Between two rounds: the first slot that an instance does not admit, and what the last round chose."""

    cut: Int[Array, " I"]
    instances: Int[Array, " A"]
    rounds: Int[Array, ""]
    settled: Bool[Array, ""]


def by_source(
    experts: Int[Array, " A"], sources: Int[Array, " A"], replica_order: Int[Array, "V E J"], capacity: Int[Array, " I"]
) -> tuple[Int[Array, " A"], Int[Array, ""]]:
    """Fill instances slot by slot, each along its source's order, and give the rounds that it took."""
    num_slots, num_instances, width = experts.shape[0], capacity.shape[0], replica_order.shape[-1]
    order = jnp.where(experts[:, None] < 0, -1, replica_order[sources, experts])  # [A, J]
    slots, positions = jnp.arange(num_slots, dtype=jnp.int32), jnp.arange(width, dtype=jnp.int32)

    def one_round(state: _Cuts) -> _Cuts:
        is_open = (order >= 0) & (slots[:, None] < state.cut[order])
        first = jnp.min(jnp.where(is_open, positions, width), axis=1)
        chosen = jnp.take_along_axis(order, jnp.minimum(first, width - 1)[:, None], axis=1)[:, 0]
        chosen = jnp.where(first < width, chosen, num_instances)
        takers = count_takers(chosen, num_instances)
        over = takers > capacity
        cut = jnp.where(over, admission_cutoff(chosen, takers, capacity), state.cut)
        return _Cuts(cut, chosen, state.rounds + 1, ~jnp.any(over))

    start = _Cuts(
        jnp.where(capacity > 0, num_slots, 0),
        jnp.full(num_slots, num_instances, jnp.int32),
        jnp.int32(0),
        jnp.zeros((), bool),
    )
    end = lax.while_loop(lambda state: ~state.settled, one_round, start)
    return jnp.where(end.instances < num_instances, end.instances, -1), end.rounds
