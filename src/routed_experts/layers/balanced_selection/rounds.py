"""Sequential expert selection under capacity, as a few parallel rounds over all scores: CPU and GPU. Knows nothing of
instances: an expert has room or has none.

If every token's K best fit, they are the answer. Else ranks are settled one by one. In a round each token takes its
best expert, after the one it took last, that has room for it; an expert with more takers than room lowers its cutoff to
its last admitted token, and the round is repeated; when none has, the rank is settled. That is deferred acceptance
(Gale and Shapley 1962) with one priority list for all experts, so its fixpoint is the sequential result, in at most K +
f rounds, f = experts that fill. No sort but that of a round's takers. Dims: N tokens, E experts, K experts per
token."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.balanced_selection.admission import admission_cutoff, count_takers

NEVER = jnp.iinfo(jnp.int32).min  # the key of what cannot be chosen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chosen:
    """Experts in the order of choice, -1 where no selectable expert had room. `num_rerouted`: slots outside their
    token's K best."""

    ids: Int[Array, "N K"]
    num_rerouted: Int[Array, ""]
    rounds: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Last:
    """Key and id of an expert of each token: others come before it or after it."""

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
) -> Chosen:
    """Choose as the sequential algorithm does. `scores` is float32 without NaN; -inf is never chosen."""
    num_experts = scores.shape[1]
    values, best = lax.top_k(scores, top_k)
    ids = jnp.where(valid[:, None] & (values > -jnp.inf), best, num_experts)
    fits = jnp.all(count_takers(ids.reshape(-1), num_experts) <= room)

    def nobody_overflows() -> Chosen:
        return Chosen(jnp.where(ids < num_experts, ids, -1), jnp.int32(0), jnp.int32(1))

    def in_rounds() -> Chosen:
        worst = _Last(order_keys(values[:, -1]), best[:, -1])
        end = _settle_ranks(jnp.where(valid[:, None], order_keys(scores), NEVER), room, worst, top_k)
        return Chosen(end.chosen.T, end.rerouted, end.rounds)

    return lax.cond(fits, nobody_overflows, in_rounds)


def order_keys(scores: Float[Array, "..."]) -> Int[Array, "..."]:
    """Turn float32 into int32 of the same total order; -inf, the least of them, becomes NEVER."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    return jnp.where(scores > -jnp.inf, jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), NEVER)


def _settle_ranks(keys: Int[Array, "N E"], room: Int[Array, " E"], worst: _Last, top_k: int) -> _State:
    """Settle rank after rank. `worst`: the last of each token's K best by any room."""
    num_tokens, num_experts = keys.shape
    tokens, experts = jnp.arange(num_tokens, dtype=jnp.int32), jnp.arange(num_experts, dtype=jnp.int32)

    def settle(state: _State, took: _Last, takers: Int[Array, " E"]) -> _State:
        left, found = state.room - takers, took.expert < num_experts
        beyond = found & ((took.key < worst.key) | ((took.key == worst.key) & (took.expert > worst.expert)))
        return _State(
            chosen=state.chosen.at[state.rank].set(jnp.where(found, took.expert, -1)),
            last=took,
            room=left,
            cut=jnp.where(left > 0, num_tokens, 0),
            rank=state.rank + 1,
            rounds=state.rounds + 1,
            rerouted=state.rerouted + jnp.sum(beyond, dtype=jnp.int32),
        )

    def one_round(state: _State) -> _State:
        key, expert = state.last.key[:, None], state.last.expert[:, None]
        is_open = (tokens[:, None] < state.cut) & ((keys < key) | ((keys == key) & (experts > expert)))
        wanted = jnp.where(is_open, keys, NEVER)
        best = jnp.max(wanted, axis=1)
        choice = jnp.min(jnp.where((wanted == best[:, None]) & (wanted > NEVER), experts, num_experts), axis=1)
        takers = count_takers(choice, num_experts)
        over = takers > state.room
        return lax.cond(
            jnp.any(over),
            lambda: dataclasses.replace(
                state,
                cut=jnp.where(over, admission_cutoff(choice, takers, state.room), state.cut),
                rounds=state.rounds + 1,
            ),
            lambda: settle(state, _Last(best, choice), takers),
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
    return lax.while_loop(lambda state: state.rank < top_k, one_round, start)
