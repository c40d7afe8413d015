"""Which tokens an expert admits under capacity: requests counted and ranked, experts chosen, then instances, in a few
parallel rounds.

If every token's K best fit, they are the answer. Else ranks are settled one by one. In a round each token requests its
best expert, after the one it took last, that has room for it. An expert with more requests than room lowers its cutoff
to its last admitted token, and the round is repeated; when no expert is over its room, the rank is settled. That is
deferred acceptance (Gale and Shapley 1962) with one priority list for all experts, so its fixpoint is the result of
reference.py, in at most K + f rounds, f = experts that fill.

Instances: the slots of one expert never number more than its instances' capacities together, so each finds room. With
one order for all sources, the o-th slot of an expert takes the first replica that o fits into. With an order per source
the same cutoff iteration runs over instances: at most J + 1 rounds.

All is integer arithmetic, so every device computes the same. Dims: A requests in order of priority, X targets, N
tokens, E experts, K experts per token, J replica positions, I instances, V sources."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

NEVER = jnp.iinfo(jnp.int32).min  # the key of an expert that cannot be chosen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelectionInputs:
    """Inputs of a selection. `scores` holds no NaN, capacities are in 0 .. K*N; V = 1: one order for all
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertChoice:
    """Experts in the order of choice, -1 where no selectable expert had room. `num_rerouted`: slots outside their
    token's K best."""

    ids: Int[Array, "N K"]
    num_rerouted: Int[Array, ""]
    rounds: Int[Array, ""]


ChooseExperts = Callable[[Float[Array, "N E"], Int[Array, " E"], Bool[Array, " N"], int], ExpertChoice]


def count_requests(targets: Int[Array, " A"], num_targets: int) -> Int[Array, " X"]:
    """Requests of each target. A target of `num_targets` is none, and is not counted."""
    return jnp.zeros(num_targets, jnp.int32).at[targets].add(1, mode="drop")


def admission_cutoff(
    targets: Int[Array, " A"], num_requests: Int[Array, " X"], room: Int[Array, " X"]
) -> Int[Array, " X"]:
    """The index after the last request that each target admits: its `room`-th one. Without meaning where
    `num_requests` <= `room`, or `room` is 0."""
    size = targets.shape[0]
    last = jnp.cumsum(num_requests, dtype=jnp.int32) - num_requests + room - 1
    return _packed(targets)[jnp.clip(last, 0, size - 1)] % size + 1


def rank_in_expert(targets: Int[Array, " A"], num_targets: int) -> Int[Array, " A"]:
    """The rank of each request among those of its target, from 0 on, in order of priority."""
    size, num_requests = targets.shape[0], count_requests(targets, num_targets)
    packed, before = _packed(targets), jnp.cumsum(num_requests, dtype=jnp.int32) - num_requests
    number = (
        jnp.arange(size, dtype=jnp.int32) - jnp.append(before, jnp.sum(num_requests, dtype=jnp.int32))[packed // size]
    )
    return jnp.zeros(size, jnp.int32).at[packed % size].set(number, unique_indices=True)


def _packed(targets: Int[Array, " A"]) -> Int[Array, " A"]:
    """Requests sorted by target, then by priority, as target * A + index."""
    size = targets.shape[0]
    return jnp.sort(targets * size + jnp.arange(size, dtype=jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Last:
    """Key and id of the expert that each token took last."""

    key: Int[Array, " N"]
    expert: Int[Array, " N"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """Between two rounds: `last` taken by each token, and of each expert the room left and the first token not
    admitted."""

    chosen: Int[Array, "K N"]
    last: _Last
    room: Int[Array, " E"]
    cut: Int[Array, " E"]
    rank: Int[Array, ""]
    rounds: Int[Array, ""]
    rerouted: Int[Array, ""]


def choose_by_rounds(
    scores: Float[Array, "N E"], room: Int[Array, " E"], valid: Bool[Array, " N"], top_k: int
) -> ExpertChoice:
    """Choose K experts a token, as reference.py does. `scores` is float32 without NaN; -inf is never chosen."""
    num_experts = scores.shape[1]
    values, best = lax.top_k(scores, top_k)
    ids = jnp.where(valid[:, None] & (values > -jnp.inf), best, num_experts)
    fits = jnp.all(count_requests(ids.reshape(-1), num_experts) <= room)

    def all_fit() -> ExpertChoice:
        return ExpertChoice(jnp.where(ids < num_experts, ids, -1), jnp.int32(0), jnp.int32(1))

    def in_rounds() -> ExpertChoice:
        worst = _Last(order_keys(values[:, -1]), best[:, -1])
        end = _settle_ranks(jnp.where(valid[:, None], order_keys(scores), NEVER), room, worst, top_k)
        return ExpertChoice(end.chosen.T, end.rerouted, end.rounds)

    return lax.cond(fits, all_fit, in_rounds)


def order_keys(scores: Float[Array, "..."]) -> Int[Array, "..."]:
    """Map float32 to int32 of the same total order; -inf becomes NEVER."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    return jnp.where(scores > -jnp.inf, jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), NEVER)


def _settle_ranks(keys: Int[Array, "N E"], room: Int[Array, " E"], worst: _Last, top_k: int) -> _State:
    """Settle rank after rank. `worst`: the last of each token's K best, ignoring capacities."""
    num_tokens, num_experts = keys.shape
    tokens, experts = jnp.arange(num_tokens, dtype=jnp.int32), jnp.arange(num_experts, dtype=jnp.int32)

    def settle(state: _State, took: _Last, num_requests: Int[Array, " E"]) -> _State:
        left, has_expert = state.room - num_requests, took.expert < num_experts
        beyond = has_expert & ((took.key < worst.key) | ((took.key == worst.key) & (took.expert > worst.expert)))
        return _State(
            chosen=state.chosen.at[state.rank].set(jnp.where(has_expert, took.expert, -1)),
            last=took,
            room=left,
            cut=jnp.where(left > 0, num_tokens, 0),
            rank=state.rank + 1,
            rounds=state.rounds + 1,
            rerouted=state.rerouted + jnp.sum(beyond, dtype=jnp.int32),
        )

    def run_round(state: _State) -> _State:
        key, expert = state.last.key[:, None], state.last.expert[:, None]
        is_open = (tokens[:, None] < state.cut) & ((keys < key) | ((keys == key) & (experts > expert)))
        open_keys = jnp.where(is_open, keys, NEVER)
        best = jnp.max(open_keys, axis=1)
        targets = jnp.min(jnp.where((open_keys == best[:, None]) & (open_keys > NEVER), experts, num_experts), axis=1)
        num_requests = count_requests(targets, num_experts)
        over = num_requests > state.room
        return lax.cond(
            jnp.any(over),
            lambda: dataclasses.replace(
                state,
                cut=jnp.where(over, admission_cutoff(targets, num_requests, state.room), state.cut),
                rounds=state.rounds + 1,
            ),
            lambda: settle(state, _Last(best, targets), num_requests),
        )

    zero = jnp.int32(0)
    start = _State(
        chosen=jnp.full((top_k, num_tokens), -1, jnp.int32),
        last=_Last(
            jnp.full(num_tokens, jnp.iinfo(jnp.int32).max, jnp.int32), jnp.full(num_tokens, num_experts, jnp.int32)
        ),
        room=room,
        cut=jnp.where(room > 0, num_tokens, 0),
        rank=zero,
        rounds=zero,
        rerouted=zero,
    )
    return lax.while_loop(lambda state: state.rank < top_k, run_round, start)


def instance_room(replica_order: Int[Array, "*V E J"], capacity: Int[Array, " I"]) -> Int[Array, "*V E J"]:
    """Give the capacity at each replica position: 0 where there is no replica."""
    return jnp.where(replica_order >= 0, capacity[replica_order], 0)  # -1 wraps to the last instance, and is masked


def in_shared_order(
    experts: Int[Array, " A"], replica_order: Int[Array, "E J"], capacity: Int[Array, " I"]
) -> Int[Array, " A"]:
    """Fill each expert's replicas from the first to the last; -1 for a slot without expert (-1)."""
    num_experts, width = replica_order.shape
    number = rank_in_expert(jnp.where(experts < 0, num_experts, experts), num_experts)
    filled = jnp.cumsum(instance_room(replica_order, capacity), axis=1, dtype=jnp.int32)
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

    def run_round(state: _Cuts) -> _Cuts:
        is_open = (order >= 0) & (slots[:, None] < state.cut[order])
        first = jnp.min(jnp.where(is_open, positions, width), axis=1)
        chosen = jnp.take_along_axis(order, jnp.minimum(first, width - 1)[:, None], axis=1)[:, 0]
        chosen = jnp.where(first < width, chosen, num_instances)
        num_requests = count_requests(chosen, num_instances)
        over = num_requests > capacity
        cut = jnp.where(over, admission_cutoff(chosen, num_requests, capacity), state.cut)
        return _Cuts(cut, chosen, state.rounds + 1, ~jnp.any(over))

    start = _Cuts(
        jnp.where(capacity > 0, num_slots, 0),
        jnp.full(num_slots, num_instances, jnp.int32),
        jnp.int32(0),
        jnp.zeros((), bool),
    )
    end = lax.while_loop(lambda state: ~state.settled, run_round, start)
    return jnp.where(end.instances < num_instances, end.instances, -1), end.rounds


def assign(inputs: SelectionInputs, choose: ChooseExperts, top_k: int, *, overflows: bool) -> Assignment:
    """Choose experts by the room of all their instances, then instances by their own."""
    num_tokens = inputs.scores.shape[0]
    rooms = jnp.sum(instance_room(inputs.replica_order[0], inputs.capacity), axis=1, dtype=jnp.int32)
    chosen = choose(inputs.scores, jnp.minimum(rooms, top_k * num_tokens), inputs.valid, top_k)
    slots = chosen.ids.T.reshape(-1)  # [K N]: rank by rank is the order of priority
    if inputs.replica_order.shape[0] == 1:
        instances, replica_rounds = in_shared_order(slots, inputs.replica_order[0], inputs.capacity), jnp.int32(0)
    else:
        sources = jnp.tile(inputs.source, top_k)
        instances, replica_rounds = by_source(slots, sources, inputs.replica_order, inputs.capacity)
    assignment = Assignment(
        chosen.ids, instances.reshape(top_k, -1).T, chosen.num_rerouted, jnp.int32(0), chosen.rounds, replica_rounds
    )
    if not overflows:
        return assignment
    is_short = jnp.any(inputs.valid[:, None] & (chosen.ids < 0))
    return lax.cond(is_short, lambda: _place_overflow(inputs, assignment), lambda: assignment)


def _place_overflow(inputs: SelectionInputs, assignment: Assignment) -> Assignment:
    """Give each empty slot its token's best expert not yet selected, at the first replica of its source's order."""
    ids, (num_tokens, num_experts) = assignment.ids, inputs.scores.shape
    empty = ids < 0
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    left = inputs.scores.at[tokens, jnp.where(empty, num_experts, ids)].set(-jnp.inf, mode="drop")
    values, best = lax.top_k(left, ids.shape[1])
    number = jnp.maximum(jnp.cumsum(empty, axis=1, dtype=jnp.int32) - 1, 0)
    experts = jnp.take_along_axis(best, number, axis=1)
    fills = empty & inputs.valid[:, None] & (jnp.take_along_axis(values, number, axis=1) > -jnp.inf)
    return dataclasses.replace(
        assignment,
        ids=jnp.where(fills, experts, ids),
        instances=jnp.where(fills, inputs.replica_order[inputs.source[:, None], experts, 0], assignment.instances),
        num_overflowed=jnp.sum(fills, dtype=jnp.int32),
    )
