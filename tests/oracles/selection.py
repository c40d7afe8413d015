"""Balanced selection one slot at a time, with dictionaries and sets, and cases to select from. Shares no code with the
package.

It looks at every expert anew for each slot, keeps no list and no pointer: the best of those that the token does not
hold and that have an instance with room. Dims: N tokens, E experts, K experts per token, J replica positions, I
instances, V sources."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass
class Case:
    """One batch to select for. `sources` is None with one order for all."""

    scores: np.ndarray
    order: np.ndarray
    capacity: np.ndarray
    valid: np.ndarray
    sources: np.ndarray | None

    @property
    def weights(self):
        """Scores for weights that identify their expert."""
        return (1 + np.arange(self.scores.size, dtype=np.float32) % 97).reshape(self.scores.shape)


def replica_table(rng, num_experts, num_instances, width):
    """Each expert gets one instance, the rest go where they fall and fit; instances are numbered at random."""
    copies = np.ones(num_experts, int)
    while copies.sum() < num_instances:
        expert = rng.integers(num_experts)
        copies[expert] += copies[expert] < width
    table, names, offset = np.full((num_experts, width), -1, np.int32), rng.permutation(num_instances), 0
    for expert, count in enumerate(copies):
        table[expert, :count] = names[offset : offset + count]
        offset += count
    return table


def shuffled(rng, table, num_sources):
    """The same instances of each expert in another order for each source."""
    tables = np.repeat(table[None], num_sources, axis=0)
    for order in tables:
        for row in order:
            count = np.sum(row >= 0)
            row[:count] = rng.permutation(row[:count])
    return tables


def plain_selection(case, k, *, overflows=True):
    """Select; give ids, instances, loads, and how many slots were rerouted, overflowed, dropped."""
    num_tokens = len(case.scores)
    ids, instances = np.full((num_tokens, k), -1), np.full((num_tokens, k), -1)
    load, selected = dict.fromkeys(range(len(case.capacity)), 0), {t: set() for t in range(num_tokens)}
    tokens = [t for t in range(num_tokens) if case.valid[t]]
    worth = {
        t: {e: float(s) for e, s in enumerate(case.scores[t]) if not math.isnan(s) and s > -math.inf} for t in tokens
    }
    best = {t: sorted(worth[t], key=lambda e: (-worth[t][e], e))[:k] for t in tokens}
    rerouted = overflowed = 0

    def replicas(token, expert):
        table = case.order if case.sources is None else case.order[case.sources[token]]
        return [int(i) for i in table[expert] if i >= 0]

    def put(token, rank, expert, instance):
        ids[token, rank], instances[token, rank] = expert, instance
        load[instance] += 1
        selected[token].add(expert)

    for rank in range(k):
        for t in tokens:
            roomy = {
                e: [i for i in replicas(t, e) if load[i] < case.capacity[i]] for e in worth[t] if e not in selected[t]
            }
            fitting = [e for e in roomy if roomy[e]]
            if fitting:
                expert = min(fitting, key=lambda e: (-worth[t][e], e))
                put(t, rank, expert, roomy[expert][0])
                rerouted += expert not in best[t]
    for rank in range(k):
        for t in tokens:
            free = set(worth[t]) - selected[t]
            if overflows and ids[t, rank] < 0 and free:
                expert = min(free, key=lambda e: (-worth[t][e], e))
                put(t, rank, expert, replicas(t, expert)[0])
                overflowed += 1
    dropped = sum(int(np.sum(ids[t] < 0)) for t in tokens)
    return ids, instances, np.array([load[i] for i in range(len(load))]), (rerouted, overflowed, dropped)


def num_filled(case, ids):
    """Count the experts with any room that end without: `ids` were placed within capacity."""
    table = case.order if case.sources is None else case.order[0]
    room = [sum(int(case.capacity[i]) for i in row if i >= 0) for row in table]
    return sum(0 < room[e] == int(np.sum(ids == e)) for e in range(len(room)))


def popular(seed, spread, num_instances, num_devices, *, num_tokens=512, num_experts=256, width=16):
    """Scores of tokens with a taste of their own for experts of lognormal popularity, and a table that is placed by
    that popularity: an instance more where an instance has most to do, and each to the device that has least to do so
    far. Float32 [N, E], int32 [E, J]."""
    rng = np.random.default_rng(seed)
    popularity = np.exp(spread * rng.standard_normal(num_experts))
    scores = np.log(popularity) + rng.gumbel(size=(num_tokens, num_experts))
    copies, per_device = np.ones(num_experts, int), num_instances // num_devices
    for _ in range(num_instances - num_experts):
        copies[np.argmax(np.where(copies < width, popularity / copies, 0))] += 1
    share = popularity / copies
    table, replica_counts = np.full((num_experts, width), -1, np.int32), np.zeros(num_experts, int)
    filled, load = np.zeros(num_devices, int), np.zeros(num_devices)
    for expert in sorted(np.repeat(np.arange(num_experts), copies), key=lambda e: -share[e]):
        device = np.argmin(np.where(filled < per_device, load, np.inf))
        table[expert, replica_counts[expert]] = device * per_device + filled[device]
        replica_counts[expert], filled[device], load[device] = (
            replica_counts[expert] + 1,
            filled[device] + 1,
            load[device] + share[expert],
        )
    return scores.astype(np.float32), table
