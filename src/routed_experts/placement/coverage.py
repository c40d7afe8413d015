"""What any number of resident experts would catch, before a policy is chosen: the most used, or those used last. Knows
no plan.

`static_coverage(load)[m, n]` and `lru_coverage(records).hits[m, n]` are the shares of slots of MoE layer m that find
their expert among n. Dims: T tokens, M MoE layers, E experts, K experts per token."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64

from routed_experts.analysis import known_rows
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.placement.eplb import checked_load


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LruCoverage:
    """What a cache of the n experts used last would do, for n of 0 to E: share of hits, and copies a token."""

    hits: Float64[np.ndarray, "M E1"]
    copies_per_token: Float64[np.ndarray, "M E1"]


def static_coverage(load: Float[np.ndarray, "M E"]) -> Float64[np.ndarray, "M E1"]:
    """Share of the load that the n most used experts carry; judged on the load that chose them, so the best that any
    fixed set can do. 0 for a layer without load."""
    ordered = -np.sort(-checked_load(load), axis=1)
    covered = np.concatenate([np.zeros((len(ordered), 1)), np.cumsum(ordered, axis=1)], axis=1)
    return covered / np.maximum(covered[:, -1:], np.finfo(np.float64).tiny)


def concentration(load: Float[np.ndarray, "M E"]) -> Float64[np.ndarray, " M"]:
    """E * sum of the squared shares of the load: 1 where all experts have the same, E where one has all, 0 without
    load."""
    load = checked_load(load)
    share = load / np.maximum(load.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return load.shape[1] * (share**2).sum(axis=1)


def lru_coverage(*records: RoutedExperts) -> LruCoverage:
    """Run caches of all sizes at once over the records, one after the other: an access hits the caches that are larger
    than the number of other experts used since its expert's last use. Caches begin empty, and every miss is a copy.
    Raises RoutingAlignmentError for records of two models."""
    rows, num_experts = known_rows(*records).astype(np.int64), records[0].num_experts
    num_tokens, num_layers, top_k = rows.shape
    last = np.full((num_layers, num_experts), -1)  # the access at which an expert was used last
    distances = np.zeros(
        (num_layers, num_experts + 1), np.int64
    )  # [m, d]: accesses with d others in between; d = E: the first use
    layers = np.arange(num_layers)
    for token in range(num_tokens):
        for slot in range(top_k):
            expert = rows[token, :, slot]
            before = last[layers, expert]
            newer = np.count_nonzero(last > before[:, None], axis=1)
            distances[layers, np.where(before < 0, num_experts, newer)] += 1
            last[layers, expert] = token * top_k + slot
    hits = np.concatenate([np.zeros((num_layers, 1), np.int64), np.cumsum(distances[:, :-1], axis=1)], axis=1)
    accesses = num_tokens * top_k
    return LruCoverage(hits=hits / max(accesses, 1), copies_per_token=(accesses - hits) / max(num_tokens, 1))
