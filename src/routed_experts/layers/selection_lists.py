"""Sequential expert selection under capacity, as a few parallel rounds over each token's best candidates: CPU and GPU.
Knows nothing of instances: an expert has room or has none.

Ranks are settled one by one. In a round each token takes the first candidate of its list that has room for it; an expert with more
takers than room lowers its cutoff to its last admitted token, and the round is repeated; when none has, the rank is settled, and
passing a full expert is final. That is deferred acceptance (Gale and Shapley 1962) with one priority list for all experts,
so its fixpoint is the sequential result, in at most K + f rounds, f = experts that fill. Lists are cut: first to the K best,
which is all unless an expert overflows; then to 4K, with a certificate (no token walked off a cut list); then not at all.
Dims: N tokens, E experts, K experts per token, C candidates of a list."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.cutoffs import count_takers, cutoffs

LIST_FACTOR = 4  # candidates per slot of the longer list


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chosen:
    """Experts in the order of choice, -1 where no selectable expert had room. `num_rerouted`: slots outside their token's K best."""

    ids: Int[Array, "N K"]
    num_rerouted: Int[Array, ""]
    rounds: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Walk:
    """Between two rounds: `place` of each token in its list, and of each expert the room left and the first token not admitted."""

    chosen: Int[Array, "K N"]
    place: Int[Array, " N"]
    room: Int[Array, " E"]
    cut: Int[Array, " E"]
    rank: Int[Array, ""]
    rounds: Int[Array, ""]
    rerouted: Int[Array, ""]
    walked_off: Bool[Array, ""]


def choose_by_lists(scores: Float[Array, "N E"], room: Int[Array, " E"], valid: Bool[Array, " N"], top_k: int) -> Chosen:
    """Choose as the sequential algorithm does. `scores` holds no NaN; -inf is never chosen."""
    num_experts = scores.shape[1]
    values, best = lax.top_k(scores, top_k)
    ids = jnp.where(valid[:, None] & (values > -jnp.inf), best, num_experts)
    fits = jnp.all(count_takers(ids.reshape(-1), num_experts) <= room)

    def nobody_overflows() -> Chosen:
        return Chosen(jnp.where(ids < num_experts, ids, -1), jnp.int32(0), jnp.int32(1))

    return lax.cond(fits, nobody_overflows, lambda: _choose_from(LIST_FACTOR * top_k, scores, room, valid, top_k))


def _choose_from(num_candidates: int, scores: Float[Array, "N E"], room: Int[Array, " E"], valid: Bool[Array, " N"], top_k: int) -> Chosen:
    """Walk lists of that length; start again on whole lists if a token walked off a cut one."""
    num_experts = scores.shape[1]
    num_candidates = min(num_candidates, num_experts)
    end = _walk(scores, room, valid, top_k, num_candidates)
    chosen = Chosen(end.chosen.T, end.rerouted, end.rounds)
    if num_candidates == num_experts:
        return chosen
    return lax.cond(end.walked_off, lambda: _choose_from(num_experts, scores, room, valid, top_k), lambda: chosen)


def _walk(scores: Float[Array, "N E"], room: Int[Array, " E"], valid: Bool[Array, " N"], top_k: int, num_candidates: int) -> _Walk:
    """Settle rank after rank; stop early where a token walked off a list that was cut."""
    num_tokens, num_experts = scores.shape
    values, candidates = lax.top_k(scores, num_candidates)
    live = valid[:, None] & (values > -jnp.inf)
    is_cut = live[:, -1] & (num_candidates < num_experts)
    tokens, places = jnp.arange(num_tokens, dtype=jnp.int32), jnp.arange(num_candidates, dtype=jnp.int32)

    def settle(walk: _Walk, expert: Int[Array, " N"], first: Int[Array, " N"], takers: Int[Array, " E"]) -> _Walk:
        left, found = walk.room - takers, expert < num_experts
        return dataclasses.replace(
            walk,
            chosen=walk.chosen.at[walk.rank].set(jnp.where(found, expert, -1)),
            place=first + 1,
            room=left,
            cut=jnp.where(left > 0, num_tokens, 0),
            rank=walk.rank + 1,
            rerouted=walk.rerouted + jnp.sum(found & (first >= top_k), dtype=jnp.int32),
            walked_off=jnp.any(~found & is_cut),
        )

    def one_round(walk: _Walk) -> _Walk:
        is_open = live & (places >= walk.place[:, None]) & (tokens[:, None] < walk.cut[candidates])
        first = jnp.min(jnp.where(is_open, places, num_candidates), axis=1)
        expert = jnp.take_along_axis(candidates, jnp.minimum(first, num_candidates - 1)[:, None], axis=1)[:, 0]
        expert = jnp.where(first < num_candidates, expert, num_experts)
        takers = count_takers(expert, num_experts)
        over = takers > walk.room
        walk = dataclasses.replace(walk, rounds=walk.rounds + 1)
        return lax.cond(
            jnp.any(over),
            lambda: dataclasses.replace(walk, cut=jnp.where(over, cutoffs(expert, takers, walk.room), walk.cut)),
            lambda: settle(walk, expert, first, takers),
        )

    zero = jnp.int32(0)
    start = _Walk(
        chosen=jnp.full((top_k, num_tokens), -1, jnp.int32),
        place=jnp.zeros(num_tokens, jnp.int32),
        room=room,
        cut=jnp.where(room > 0, num_tokens, 0),
        rank=zero,
        rounds=zero,
        rerouted=zero,
        walked_off=jnp.zeros((), bool),
    )
    return lax.while_loop(lambda walk: (walk.rank < top_k) & ~walk.walked_off, one_round, start)
