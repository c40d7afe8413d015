"""Loads of devices under replicas: the best that can be had, by linear programming, and the shares of water-filling as
loops. Shares no code with the package. Dims: E experts, J replica positions, I instances, V devices."""

import numpy as np
import scipy.optimize
import scipy.sparse


def best_max_load(counts, table, num_devices, num_instances):
    """The lowest possible load of the fullest device when every expert's occurrences may be split over its replicas at
    will."""
    experts, positions = np.nonzero(table >= 0)
    instances, per_device = table[experts, positions], num_instances // num_devices
    ones, columns = np.ones(num_instances), np.arange(num_instances)
    split = scipy.sparse.coo_array((ones, (experts, columns)), shape=(len(table), num_instances + 1))
    load = scipy.sparse.coo_array(
        (ones, (instances // per_device, columns)), shape=(num_devices, num_instances + 1)
    ).tolil()
    load[:, -1] = -1
    goal = np.zeros(num_instances + 1)
    goal[-1] = 1
    done = scipy.optimize.linprog(goal, A_ub=load.tocsr(), b_ub=np.zeros(num_devices), A_eq=split.tocsr(), b_eq=counts)
    assert done.success, done.message
    return done.fun


def device_loads(instances, num_devices, num_instances):
    """Count what each device has to do; -1 is nothing."""
    counts = np.bincount(instances[instances >= 0].ravel(), minlength=num_instances)
    return counts.reshape(num_devices, -1).sum(axis=1)


def plain_shares(counts, table, num_devices, num_instances, iterations):
    """Shares {(expert, position): p} after steps towards devices that do less, in float64; those of the lowest
    maximum."""
    per_device = num_instances // num_devices
    replicas = {e: [int(i) for i in row if i >= 0] for e, row in enumerate(table)}
    shares = {(e, j): 1 / len(row) for e, row in replicas.items() for j in range(len(row))}
    best, lowest = shares, float("inf")
    for _ in range(iterations):
        load = [0.0] * num_devices
        for (e, j), share in shares.items():
            load[replicas[e][j] // per_device] += counts[e] * share
        if max(load) < lowest:
            best, lowest = shares, max(load)
        mean = sum(load) / num_devices
        moved = {
            (e, j): share * (mean / max(load[replicas[e][j] // per_device], 1e-3 * mean)) ** 1.5
            for (e, j), share in shares.items()
        }
        total = {e: sum(moved[e, j] for j in range(len(row))) for e, row in replicas.items()}
        shares = {(e, j): moved[e, j] / total[e] for e, j in shares}
    return best, lowest


def plain_waterfill(ids, table, num_devices, num_instances, iterations):
    """The instance of every occurrence, one after another."""
    counts = np.bincount(ids[ids >= 0].ravel(), minlength=len(table))
    shares, _ = plain_shares(counts, table, num_devices, num_instances, iterations)
    cuts = {}
    for e, row in enumerate(table):
        ends = np.cumsum([shares[e, j] for j in range(int(np.sum(row >= 0)))])
        cuts[e] = [*(int(np.floor(counts[e] * end + 0.5)) for end in ends[:-1]), float("inf")]
    num_seen, out = [0] * len(table), np.full(ids.shape, -1)
    for index, e in np.ndenumerate(ids):
        if e >= 0:
            out[index] = table[e, sum(cut <= num_seen[e] for cut in cuts[e])]
            num_seen[e] += 1
    return out
