"""The two greedy steps of expert placement, for many rows at once: how many instances an expert gets, and on which
device they go. Knows no groups, nodes or layers. The order of all choices is fixed: ties go to the lower index.

Source: the expert-parallel load balancer that DeepSeek published with DeepSeek-V3 (EPLB). Dims: R rows that are placed
apart (a layer, or a layer's part on one node), E experts, I instances, V devices, s = I / V slots."""

import numpy as np
from jaxtyping import Float64, Int64


def replicate(
    load: Float64[np.ndarray, "R E"], num_instances: int, max_replicas: int
) -> tuple[Int64[np.ndarray, "R I"], Int64[np.ndarray, "R E"]]:
    """Give every expert an instance, and each further one to the expert of the largest load an instance; none gets more
    than `max_replicas`. Returns the expert of each instance, in the order in which they were made, and the instances of
    each expert."""
    num_rows, num_experts = load.shape
    rows = np.arange(num_rows)
    counts = np.ones((num_rows, num_experts), np.int64)
    made = np.empty((num_rows, num_instances), np.int64)
    made[:, :num_experts] = np.arange(num_experts)
    for instance in range(num_experts, num_instances):
        dearest = np.where(counts < max_replicas, load / counts, -1.0).argmax(axis=1)
        made[:, instance] = dearest
        counts[rows, dearest] += 1
    return made, counts


def pack(weight: Float64[np.ndarray, "R I"], num_packs: int) -> Int64[np.ndarray, "R I"]:
    """Put items into packs of equal size, heaviest first, each into the lightest pack with room. Returns the item of
    each place; pack v has the places [v * I / num_packs, (v + 1) * I / num_packs), in the order in which they were
    filled."""
    num_rows, num_items = weight.shape
    room = num_items // num_packs
    rows = np.arange(num_rows)
    total = np.zeros((num_rows, num_packs))
    filled = np.zeros((num_rows, num_packs), np.int64)
    placed = np.empty((num_rows, num_items), np.int64)
    for item in np.argsort(-weight, axis=1, kind="stable").T:
        lightest = np.where(filled < room, total, np.inf).argmin(axis=1)
        placed[rows, lightest * room + filled[rows, lightest]] = item
        total[rows, lightest] += weight[rows, item]
        filled[rows, lightest] += 1
    return placed
