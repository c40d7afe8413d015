"""Loads and slow oracles for the tests of placement/: plain loops, and enumeration of all placements."""

import itertools

import numpy as np

from routed_experts.core.routed_experts import RoutedExperts

# DeepSeek's worked example: 2 layers of 12 experts in 4 groups, 16 instances, 2 nodes of 4 devices.
GOLDEN_LOAD = np.array(
    [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
)
GOLDEN_SIZES = {"num_instances": 16, "num_groups": 4, "num_nodes": 2, "num_devices": 8}
GOLDEN_MAP = [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]]


def greedy_row(load, *, num_instances, num_groups, num_nodes, num_devices, max_replicas):
    """One layer by the published steps, one choice at a time, in Python; ties go to the lower index."""
    groups, nodes = (num_groups, num_nodes) if num_groups % num_nodes == 0 else (1, 1)
    size = len(load) // groups
    sums = [sum(load[g * size : (g + 1) * size]) for g in range(groups)]
    instances, loads = [], load
    for node in serial_pack(sums, nodes):
        experts = [g * size + e for g in node for e in range(size)]
        load = loads if any(loads[e] for e in experts) else [1] * len(loads)  # nothing is known of this node's
        counts, made = dict.fromkeys(experts, 1), list(experts)
        while len(made) < num_instances // nodes:
            most = max((load[e] / counts[e] for e in experts if counts[e] < max_replicas), default=None)
            dearest = next(e for e in experts if counts[e] < max_replicas and load[e] / counts[e] == most)
            counts[dearest] += 1
            made.append(dearest)
        instances += [
            made[i] for pack in serial_pack([load[e] / counts[e] for e in made], num_devices // nodes) for i in pack
        ]
    return instances


def serial_pack(weights, num_packs):
    """Heaviest first into the lightest pack with room."""
    packs, totals = [[] for _ in range(num_packs)], [0.0] * num_packs
    for item in sorted(range(len(weights)), key=lambda item: (-weights[item], item)):
        pack = min(
            (p for p in range(num_packs) if len(packs[p]) < len(weights) // num_packs), key=lambda p: (totals[p], p)
        )
        packs[pack].append(item)
        totals[pack] += weights[item]
    return packs


def least_peak(load, *, num_instances, num_devices, max_replicas):
    """The load of the most loaded device in the best placement: every number of replicas, every division among the
    devices."""
    divisions = np.array(list(_divisions(tuple(range(num_instances)), num_instances // num_devices)))
    best = np.inf
    for cuts in itertools.combinations(range(1, num_instances), len(load) - 1):
        counts = np.diff((0, *cuts, num_instances))
        if counts.max() <= max_replicas:
            weights = np.repeat(load / counts, counts)
            best = min(best, weights[divisions].sum(axis=2).max(axis=1).min())
    return best


def _divisions(instances, room):
    """Every way to divide instances into sets of `room`."""
    if not instances:
        yield ()
        return
    for rest in itertools.combinations(instances[1:], room - 1):
        first = (instances[0], *rest)
        left = tuple(i for i in instances if i not in first)
        yield from ((first, *others) for others in _divisions(left, room))


def skewed_record(rng, logits, num_tokens, *, top_k=4, prompt_len=0):
    """A record whose experts are drawn without repetition by logits [M, E]; one row a token."""
    num_layers, num_experts = logits.shape
    scores = logits + rng.gumbel(size=(num_tokens, num_layers, num_experts))
    ids = np.argsort(-scores, axis=2)[:, :, :top_k].astype(np.uint8)
    return RoutedExperts(
        ids=np.ascontiguousarray(ids),
        start=0,
        num_tokens=num_tokens,
        num_prompt_tokens=prompt_len,
        layer_ids=tuple(range(num_layers)),
        num_hidden_layers=num_layers,
        num_experts=num_experts,
        version_spans=((0, num_tokens, 0),),
    )
