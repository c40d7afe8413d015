"""Balanced expert selection by its definition: one slot after another, in NumPy, on the host. The oracle of every fast
form. Dims: N tokens, E experts, K experts per token, J replica positions, I instances, V sources."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SequentialSelection:
    """What `balanced_expert_selection` gives in mode "reroute", as NumPy arrays; a sequence has no rounds."""

    logical_ids: Int[ndarray, "N K"]
    instance_ids: Int[ndarray, "N K"]
    weights: Float[ndarray, "N K"]
    counts: Int[ndarray, " I"]
    num_rerouted: int
    num_overflowed: int
    num_dropped: int


@dataclasses.dataclass(slots=True)
class _Slots:
    """The slots filled so far, the load of each instance, and how many experts each token has passed."""

    ids: Int[ndarray, "N K"]
    instances: Int[ndarray, "N K"]
    used: Int[ndarray, " I"]
    passed: Int[ndarray, " N"]

    def assign(self, token: int, rank: int, expert: int, instance: int) -> None:
        """Fill a slot."""
        self.ids[token, rank], self.instances[token, rank] = expert, instance
        self.used[instance] += 1


def sequential_selection(
    select_scores: Float[ndarray, "N E"],
    weight_scores: Float[ndarray, "N E"],
    replica_order: Int[ndarray, "*V E J"],
    capacity: Int[ndarray, " I"],
    *,
    k: int,
    source: Int[ndarray, " N"] | None = None,
    valid: Bool[ndarray, " N"] | None = None,
    on_exhausted: str = "overflow",
    renormalize: bool = True,
) -> SequentialSelection:
    """Rank after rank, token after token: the best expert not yet passed of which an instance has room, and its first
    such instance.

    Scores descend by IEEE total order (-0.0 below 0.0, as in `lax.top_k`), ties go to the lower id, NaN and -inf are
    never selected. Arguments as in `balanced_expert_selection`, checked by the caller."""
    num_tokens = select_scores.shape[0]
    scores = np.where(np.isnan(select_scores), -np.inf, select_scores).astype(np.float32)
    orders = replica_order if replica_order.ndim == 3 else replica_order[None]
    tables = orders[np.zeros(num_tokens, int) if source is None else source]  # [N, E, J]
    ranked = _ranked(scores)
    tokens = range(num_tokens) if valid is None else np.flatnonzero(valid).tolist()
    empty = np.full((num_tokens, k), -1, np.int32)
    slots = _Slots(empty, empty.copy(), np.zeros(len(capacity), np.int32), np.zeros(num_tokens, int))
    rerouted = 0
    for rank in range(k):
        for token in tokens:
            rerouted += _take_with_room(slots, token, rank, ranked[token], tables[token], capacity, k)
    overflowed = 0
    for rank in range(k if on_exhausted == "overflow" else 0):
        for token in tokens:
            overflowed += _take_beyond_room(slots, token, rank, ranked[token], tables[token])
    return SequentialSelection(
        logical_ids=slots.ids,
        instance_ids=slots.instances,
        weights=_weights(weight_scores.astype(np.float32), slots.ids, renormalize),
        counts=slots.used,
        num_rerouted=rerouted,
        num_overflowed=overflowed,
        num_dropped=int(np.sum(slots.ids[list(tokens)] < 0)),
    )


def _ranked(scores: Float[ndarray, "N E"]) -> list[list[int]]:
    """List each token's selectable experts, the best first."""
    bits = scores.view(np.int32)
    keys = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)  # int32 in the total order of floats
    order = np.argsort(~keys, axis=1, kind="stable")
    return [[int(e) for e in row if scores[token, e] > -np.inf] for token, row in enumerate(order)]


def _take_with_room(
    slots: _Slots,
    token: int,
    rank: int,
    ranked: list[int],
    table: Int[ndarray, "E J"],
    capacity: Int[ndarray, " I"],
    top_k: int,
) -> int:
    """Fill the slot where any expert has room; 1 if that expert is none of the token's K best, else 0."""
    while slots.passed[token] < len(ranked):
        index = int(slots.passed[token])
        slots.passed[token] += 1  # a full expert stays full: passing it is final
        for instance in table[ranked[index]]:
            if instance >= 0 and slots.used[instance] < capacity[instance]:
                slots.assign(token, rank, ranked[index], int(instance))
                return int(index >= top_k)
    return 0


def _take_beyond_room(slots: _Slots, token: int, rank: int, ranked: list[int], table: Int[ndarray, "E J"]) -> int:
    """Fill an empty slot with the best expert not yet selected, ignoring capacities; 1 if there was one, else 0."""
    if slots.ids[token, rank] >= 0:
        return 0
    for expert in ranked:
        if expert not in slots.ids[token]:
            slots.assign(token, rank, expert, int(table[expert, 0]))
            return 1
    return 0


def _weights(
    weight_scores: Float[ndarray, "N E"], ids: Int[ndarray, "N K"], renormalize: bool
) -> Float[ndarray, "N K"]:
    weights = np.where(ids >= 0, np.take_along_axis(weight_scores, np.maximum(ids, 0), axis=1), np.float32(0))
    if renormalize:
        total = np.zeros(len(ids), np.float32)
        for rank in range(ids.shape[1]):
            total = total + weights[:, rank]
        weights = weights * (np.float32(1) / (total + np.float32(1e-20)))[:, None]
    return weights
