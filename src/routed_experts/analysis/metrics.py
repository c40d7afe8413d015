"""Metrics of recorded routing: how load spreads over experts, which experts work together, where two runs differ.

Letters of every formula: T rows that are known, c[l, e] = n(e in row t of layer l), K experts per token, E experts, M
MoE layers. n(.) counts known rows only. A metric that no row determines is NaN, never 0."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt

from routed_experts.core.errors import RoutingAlignmentError, RoutingFormatError
from routed_experts.core.load_metrics import load_entropy, load_gini, load_variation, num_unused, ratio
from routed_experts.core.record_validation import check_id_range
from routed_experts.core.routed_experts import RoutedExperts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Balance:
    """How evenly each MoE layer spreads its load; p = c / (T·K). A uniform layer has 1, 0, 0, 1 and 0."""

    max_load: Float64[np.ndarray, " M"]  # max_e u; 1 at best, E/K at worst
    gini: Float64[np.ndarray, " M"]  # Σ_i Σ_j |c_i - c_j| / (2·E·Σ c)
    variation: Float64[np.ndarray, " M"]  # std(c) / mean(c), population std
    entropy: Float64[np.ndarray, " M"]  # -Σ p ln p / ln E; 1 where there is one expert
    dead: Int64[np.ndarray, " M"]  # experts with c = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingDifference:
    """Where two records of the same tokens differ; A and B are the sets of experts of one token and layer."""

    tokens: Int64[np.ndarray, " T"]  # absolute indices of the tokens that both records know
    overlap: Float64[np.ndarray, "T M"]  # o = size(A∩B) / K
    jaccard: Float64[np.ndarray, "T M"]  # o / (2 - o)
    rank1_agreement: Float64[np.ndarray, " M"]  # share of rows with the same first expert
    flip_rate: Float64[np.ndarray, " M"]  # mean(o < 1)
    first_difference: Int64[np.ndarray, " T"]  # column of the first layer with o < 1, M if no layer differs


def expert_counts(*records: RoutedExperts) -> Int64[np.ndarray, "M E"]:
    """Count c[l, e], the known rows of layer l that went to expert e, over all records."""
    rows, num_experts = known_rows(*records), records[0].num_experts
    return np.stack(
        [_to_mask(rows[:, layer], num_experts).sum(axis=0, dtype=np.int64) for layer in range(rows.shape[1])]
    )


def utilization(*records: RoutedExperts) -> Float64[np.ndarray, "M E"]:
    """Load relative to uniform (the heat map of layers and experts): u = c·E / (T·K), so 1 is uniform and 0 is dead."""
    num_rows = len(known_rows(*records))
    return ratio(expert_counts(*records) * float(records[0].num_experts), float(num_rows * records[0].top_k))


def balance(*records: RoutedExperts) -> Balance:
    """Balance of each layer; see Balance for the formulas."""
    counts = expert_counts(*records)
    return Balance(
        max_load=utilization(*records).max(axis=1),
        gini=load_gini(counts),
        variation=load_variation(counts),
        entropy=load_entropy(counts),
        dead=num_unused(counts),
    )


def coactivation(*records: RoutedExperts) -> Float64[np.ndarray, "M E E"]:
    """Lift of two experts on one token: T·n(i and j) / (c_i·c_j), NaN where one is dead.

    A row names K different experts, so uniform routing has E·(K-1) / (K·(E-1)) off the diagonal, which is below 1. The
    diagonal is T / c_i."""
    rows, counts = known_rows(*records), expert_counts(*records)
    together = np.stack([_pairs(rows[:, layer], rows[:, layer], counts.shape[1]) for layer in range(rows.shape[1])])
    return ratio(len(rows) * together, counts[:, :, None] * counts[:, None, :].astype(np.float64))


def layer_flow(*records: RoutedExperts) -> Float64[np.ndarray, "M1 E E"]:
    """Where a token goes next: P(j at l+1 given i at l) = n(i at l and j at l+1) / (K·c[l, i]), for M-1
    steps."""
    rows, counts = known_rows(*records), expert_counts(*records)
    num_experts, steps = counts.shape[1], rows.shape[1] - 1
    pairs = [_pairs(rows[:, layer], rows[:, layer + 1], num_experts) for layer in range(steps)]
    return ratio(
        np.array(pairs).reshape(steps, num_experts, num_experts),
        rows.shape[2] * counts[:-1, :, None].astype(np.float64),
    )


def routing_difference(a: RoutedExperts, b: RoutedExperts) -> RoutingDifference:
    """Compare two records on the tokens that both know. Raises RoutingAlignmentError if they share none."""
    _check_alike(a, b)
    low, high = max(a.start, b.start), min(a.start + a.num_rows, b.start + b.num_rows)
    if low >= high:
        raise RoutingAlignmentError(f"records hold tokens {_span(a)} and {_span(b)}; expected tokens that are in both")
    left, right = a[low:high], b[low:high]
    known = left.known & right.known
    ours, theirs = left.ids[known], right.ids[known]
    ours_once, theirs_once = (_numbered_repeats(ids, a.num_experts) for ids in (ours, theirs))
    overlap = (ours_once[:, :, :, None] == theirs_once[:, :, None, :]).any(axis=3).mean(axis=2)
    flipped = overlap < 1
    num_rows = float(len(ours))
    return RoutingDifference(
        tokens=low + np.flatnonzero(known),
        overlap=overlap,
        jaccard=overlap / (2 - overlap),
        rank1_agreement=ratio((ours[:, :, 0] == theirs[:, :, 0]).sum(axis=0), num_rows),
        flip_rate=ratio(flipped.sum(axis=0), num_rows),
        first_difference=np.where(flipped.any(axis=1), flipped.argmax(axis=1), flipped.shape[1]),
    )


def known_rows(*records: RoutedExperts) -> UInt[np.ndarray, "T M K"]:
    """Join the known rows of records of one model. Raises RoutingAlignmentError when their shapes differ, or without a
    record, and RoutingFormatError for ids that are no experts."""
    if not records:
        raise RoutingAlignmentError("there are no records; expected at least one")
    for index, record in enumerate(records):
        if not isinstance(record, RoutedExperts):
            raise RoutingFormatError(f"record {index} is {type(record).__name__}; expected RoutedExperts")
        _check_alike(records[0], record)
        check_id_range(
            record.ids,
            start=record.start,
            layer_ids=record.layer_ids,
            num_experts=record.num_experts,
            known=record.known,
        )
    return np.concatenate([record.ids[record.known] for record in records])


def _check_alike(a: RoutedExperts, b: RoutedExperts) -> None:
    shapes = [f"layers {record.layer_ids}, {record.num_experts} experts, top-{record.top_k}" for record in (a, b)]
    if shapes[0] != shapes[1]:
        raise RoutingAlignmentError(f"records of {shapes[0]} and of {shapes[1]} differ; expected records of one model")


def _numbered_repeats(ids: UInt[np.ndarray, "T M K"], num_experts: int) -> Int64[np.ndarray, "T M K"]:
    """Ids in which an expert that a hash-routed row names again is another one: id + E times the number before it."""
    earlier = np.tri(ids.shape[2], k=-1, dtype=np.bool_)
    return ids + num_experts * ((ids[:, :, :, None] == ids[:, :, None, :]) & earlier).sum(axis=3)


def _to_mask(ids: UInt[np.ndarray, "T K"], num_experts: int) -> Bool[np.ndarray, "T E"]:
    """Mark the experts of each row; an expert that a hash-routed row names twice is marked once."""
    chosen = np.zeros((len(ids), num_experts), np.bool_)
    np.put_along_axis(chosen, ids.astype(np.intp), values=True, axis=1)
    return chosen


def _pairs(
    left: UInt[np.ndarray, "T K"], right: UInt[np.ndarray, "T K"], num_experts: int
) -> Float64[np.ndarray, "E E"]:
    """n(i in a row of left and j in the same row of right); float64 holds such counts exactly."""
    return _to_mask(left, num_experts).T.astype(np.float64) @ _to_mask(right, num_experts).astype(np.float64)


def _span(record: RoutedExperts) -> str:
    return f"[{record.start}, {record.start + record.num_rows})"
