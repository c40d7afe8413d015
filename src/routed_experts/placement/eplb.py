"""EPLB: how many instances each expert gets, and on which device, so that devices carry equal load.

The algorithm is the one that DeepSeek published (EPLB): expert groups are packed to nodes; within a node every spare
instance goes to the expert of the largest load an instance; instances are packed to the node's devices. Hierarchical
where the nodes divide the groups, else one group on one node. The order of all choices is fixed: ties go to the lower
index.

`refine` then improves a row whose most loaded device is more than 0.8 % above a bound that no placement beats:
exchanges between devices, then other numbers of replicas. Greedy placement alone misses the best by up to a third on
small cases; a placement of hundreds of instances on few devices is seldom touched. Host NumPy, all layers at once.
Dims: M MoE layers, R rows placed separately (a layer, or its part on one node), E experts, I instances, V devices, s =
I / V slots, C candidates of a row."""

import functools

import numpy as np
from jaxtyping import Float, Float64, Int64

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PlacementError
from routed_experts.core.integers import to_int
from routed_experts.core.placement import ExpertPlacement, default_max_replicas

_CLOSE = 1.008
_STRICTLY = 1 - 1e-12  # below this share of the old value is an improvement; above it is rounding
_ROUNDS, _MOST_CANDIDATES = 16, 512
_ROUND_INSTANCES, _ALL_INSTANCES = 100_000, 400_000  # of all candidates; bounds the time, about 1 us each
# Pairs of instances compared together; bounds the memory, 8 bytes each in a few arrays.
_PAIRS = 4_000_000
_NOISE = (0.0, 0.05, 0.1, 0.2, 0.4, 1.0)  # standard deviation of the logarithm of perturbed loads
_TRANSFERS = 5


def rebalance(
    load: Float[np.ndarray, "M E"],
    *,
    num_instances: int,
    num_devices: int,
    num_groups: int = 1,
    num_nodes: int = 1,
    max_replicas: int | None = None,
    refined: bool = True,
    epoch: int = 0,
) -> ExpertPlacement:
    """Place `num_instances` instances of the experts by their load (any unit, such as tokens). No expert gets more than
    `max_replicas`, by default min(16, I - E + 1). A layer, or a node's part of one, without load is placed as if all
    experts had the same.

    `refined` improves what the greedy choices leave, within each node; without it the placement is the published one.
    Raises PlacementError."""
    load = checked_load(load)
    # To below 1, so that no sum overflows; exact but for loads 2**1022 below the largest.
    shift = np.maximum(np.frexp(load.max(axis=1))[1], 0)  # [M]
    load = np.ldexp(load, -shift[:, None])
    num_experts = load.shape[1]
    to_count = functools.partial(to_int, low=1, error=PlacementError)
    num_instances = to_count("num_instances", num_instances)
    usual = default_max_replicas(num_instances, num_experts)  # below 1 where the instances are too few
    limit = usual if max_replicas is None else to_count("max_replicas", max_replicas)
    num_devices = to_count("num_devices", num_devices)
    num_groups = to_count("num_groups", num_groups)
    num_nodes = to_count("num_nodes", num_nodes)
    _check_sizes(num_experts, num_instances, num_devices, num_groups, num_nodes, limit)
    groups, nodes = (num_groups, num_nodes) if num_groups % num_nodes == 0 else (1, 1)
    experts = _experts_of_nodes(load, groups, nodes)  # [M * nodes, E / nodes]
    rows = np.take_along_axis(np.repeat(load, nodes, axis=0), experts, axis=1)
    silent = rows.sum(axis=1) == 0
    rows[silent] = np.ldexp(1.0, -np.repeat(shift, nodes))[silent, None]
    instance_experts, counts = replicate(rows, num_instances // nodes, limit)
    order = pack(np.take_along_axis(rows / counts, instance_experts, axis=1), num_devices // nodes)
    instance_experts = np.take_along_axis(instance_experts, order, axis=1)
    if refined:
        instance_experts = refine(
            rows, instance_experts, num_devices=num_devices // nodes, max_replicas=limit, num_nodes=nodes
        )
    instances = np.take_along_axis(experts, instance_experts, axis=1).reshape(len(load), num_instances)
    return ExpertPlacement.from_instances(
        instances, num_experts=num_experts, num_devices=num_devices, max_replicas=limit, epoch=epoch
    )


def checked_load(load: Float[np.ndarray, "M E"]) -> Float64[np.ndarray, "M E"]:
    """Return the load as float64. Raises PlacementError for what is no array of real numbers, for another shape, for
    negative or infinite values, and for an infinite sum."""
    expected = "[M, E], the load of each expert of each MoE layer"
    try:
        read = np.asarray(load)
        read = read.astype(np.float64, copy=False) if read.dtype.kind in "biufOV" else None
    except OverflowError as error:
        text = f"load={short_repr(load)} holds an integer that is too large for a float"
        raise PlacementError(f"{text}; expected {expected}: scale the load down") from error
    except (TypeError, ValueError):
        read = None
    if read is None:
        raise PlacementError(f"load={short_repr(load)} is no array of real numbers; expected {expected}")
    if read.ndim != 2 or read.size == 0:
        raise PlacementError(f"load has shape {list(read.shape)}; expected {expected}")
    wrong = np.argwhere(~np.isfinite(read) | (read < 0))
    if wrong.size:
        layer, expert = wrong[0]
        raise PlacementError(
            f"load of MoE layer {layer}, expert {expert} is {read[layer, expert]}; expected a finite number of at "
            "least 0"
        )
    with np.errstate(over="ignore"):
        infinite_layers = np.flatnonzero(~np.isfinite(read.sum(axis=1)))
    if infinite_layers.size:
        layer = infinite_layers[0]
        text = f"load of MoE layer {layer} has an infinite sum, with values of up to {read[layer].max():g}"
        raise PlacementError(f"{text}; expected a finite sum: scale the load down")
    return read


def _experts_of_nodes(
    load: Float64[np.ndarray, "M E"], groups: int, nodes: int
) -> Int64[np.ndarray, "M*nodes E/nodes"]:
    """The experts of each node, group by group in the order in which the groups were packed."""
    num_layers, num_experts = load.shape
    size = num_experts // groups
    packed = pack(load.reshape(num_layers, groups, size).sum(axis=2), nodes)  # [M, groups], the group at each position
    experts = packed[:, :, None] * size + np.arange(size)
    return experts.reshape(num_layers * nodes, num_experts // nodes)


def _check_sizes(
    num_experts: int, num_instances: int, num_devices: int, num_groups: int, num_nodes: int, max_replicas: int
) -> None:
    if num_instances < num_experts:
        raise PlacementError(
            f"num_instances={num_instances} for {num_experts} experts; expected at least one each, {num_experts} or "
            "more"
        )
    if num_instances > num_experts * max_replicas:
        raise PlacementError(
            f"num_instances={num_instances} is above {num_experts} experts x max_replicas={max_replicas}; lower the "
            "one or raise the other"
        )
    for name, divisor, divided, value in (
        ("num_devices", num_devices, "num_instances", num_instances),
        ("num_nodes", num_nodes, "num_devices", num_devices),
        ("num_groups", num_groups, "the number of experts", num_experts),
    ):
        if value % divisor:
            raise PlacementError(f"{name}={divisor} does not divide {divided}={value}; choose one that does")


def replicate(
    load: Float64[np.ndarray, "R E"], num_instances: int, max_replicas: int
) -> tuple[Int64[np.ndarray, "R I"], Int64[np.ndarray, "R E"]]:
    """Give every expert an instance, and each further one to the expert of the largest load an instance; none gets more
    than `max_replicas`. Returns the expert of each instance, in the order in which they were made, and the instances of
    each expert."""
    num_rows, num_experts = load.shape
    rows = np.arange(num_rows)
    counts = np.ones((num_rows, num_experts), np.int64)
    experts = np.empty((num_rows, num_instances), np.int64)
    experts[:, :num_experts] = np.arange(num_experts)
    for instance in range(num_experts, num_instances):
        most_loaded = np.where(counts < max_replicas, load / counts, -1.0).argmax(axis=1)
        experts[:, instance] = most_loaded
        counts[rows, most_loaded] += 1
    return experts, counts


def pack(weight: Float64[np.ndarray, "R I"], num_packs: int) -> Int64[np.ndarray, "R I"]:
    """Put items into packs of equal size, heaviest first, each into the lightest pack with room. Returns the item at
    each position; pack v has positions [v * I / num_packs, (v + 1) * I / num_packs), in the order in which they were
    filled."""
    num_rows, num_items = weight.shape
    room = num_items // num_packs
    rows = np.arange(num_rows)
    total = np.zeros((num_rows, num_packs))
    filled = np.zeros((num_rows, num_packs), np.int64)
    packed = np.empty((num_rows, num_items), np.int64)
    for item in np.argsort(-weight, axis=1, kind="stable").T:
        lightest = np.where(filled < room, total, np.inf).argmin(axis=1)
        packed[rows, lightest * room + filled[rows, lightest]] = item
        total[rows, lightest] += weight[rows, item]
        filled[rows, lightest] += 1
    return packed


def refine(
    load: Float64[np.ndarray, "R E"],
    instance_experts: Int64[np.ndarray, "R I"],
    *,
    num_devices: int,
    max_replicas: int,
    num_nodes: int = 1,
) -> Int64[np.ndarray, "R I"]:
    """Return placements whose most loaded device has at most the load that it has in `instance_experts`; instance i is
    on device i // s. Every `num_nodes` rows are the nodes of one layer: none of them is improved beyond what another
    must carry."""
    num_instances = instance_experts.shape[1]
    rng = np.random.default_rng(0)
    bound = lower_bound(load, num_instances, num_devices=num_devices, max_replicas=max_replicas)
    bound = np.repeat(bound.reshape(-1, num_nodes).max(axis=1), num_nodes)
    instance_experts = instance_experts.copy()
    peak = swap_instances(load, instance_experts, bound, num_devices)
    spent = 0
    for _ in range(_ROUNDS):
        rows = np.flatnonzero(peak > bound * _CLOSE)
        count = min(max(_ROUND_INSTANCES // max(rows.size * num_instances, 1), 1), _MOST_CANDIDATES)
        spent += rows.size * count * num_instances
        if rows.size == 0 or spent > _ALL_INSTANCES:
            break
        loads = np.repeat(load[rows], count, axis=0)  # [R, E] -> [R * C, E]
        candidates = _candidates(
            loads, np.repeat(instance_experts[rows], count, axis=0), num_devices, max_replicas, rng
        )
        reached = swap_instances(loads, candidates, np.repeat(bound[rows], count), num_devices).reshape(
            rows.size, count
        )
        best = reached.argmin(axis=1)
        reached = reached[np.arange(rows.size), best]
        better = reached < peak[rows] * _STRICTLY
        instance_experts[rows[better]] = candidates.reshape(rows.size, count, num_instances)[
            np.arange(rows.size), best
        ][better]
        peak[rows[better]] = reached[better]
    return instance_experts


def lower_bound(
    load: Float64[np.ndarray, "R E"], num_instances: int, *, num_devices: int, max_replicas: int
) -> Float64[np.ndarray, " R"]:
    """A load that the most loaded device of no placement is below: the mean device's, or the smallest that the largest
    instance can be."""
    counts = replicate(load, num_instances, max_replicas)[1]
    return np.maximum(load.sum(axis=1) / num_devices, (load / counts).max(axis=1))


def swap_instances(
    load: Float64[np.ndarray, "R E"],
    instance_experts: Int64[np.ndarray, "R I"],
    bound: Float64[np.ndarray, " R"],
    num_devices: int,
) -> Float64[np.ndarray, " R"]:
    """Swap, in place, an instance of the most loaded device for another's, the best pair first, until none helps or the
    bound is close. Returns the load of the most loaded device."""
    most = max(1, _PAIRS // (instance_experts.shape[1] ** 2 // num_devices))
    parts = [slice(low, low + most) for low in range(0, len(instance_experts), most)]
    return np.concatenate([_swap_chunk(load[part], instance_experts[part], bound[part], num_devices) for part in parts])


def _swap_chunk(
    load: Float64[np.ndarray, "R E"],
    instance_experts: Int64[np.ndarray, "R I"],
    bound: Float64[np.ndarray, " R"],
    num_devices: int,
) -> Float64[np.ndarray, " R"]:
    """`swap_instances` of rows whose pairs fit in memory at once; `instance_experts` is a view."""
    num_rows, num_instances = instance_experts.shape
    slots = num_instances // num_devices
    weight = instance_load(load, instance_experts)
    rows = np.arange(num_rows)
    while rows.size:
        row, weights = np.arange(rows.size), weight[rows]
        device = weights.reshape(-1, num_devices, slots).sum(axis=2)
        top = device.argmax(axis=1)
        peak = device[row, top]
        mine = top[:, None] * slots + np.arange(slots)  # [R, s], the instances of the most loaded device
        moved = (
            weights[row[:, None], mine][:, :, None] - weights[:, None, :]
        )  # [R, s, I], load that a swap removes from it
        after = np.maximum(peak[:, None, None] - moved, np.repeat(device, slots, axis=1)[:, None, :] + moved)
        after[row[:, None], :, mine] = np.inf
        flat = after.reshape(rows.size, -1)
        best = flat.argmin(axis=1)
        helps = (flat[row, best] < peak * _STRICTLY) & (peak > bound[rows] * _CLOSE)
        ours, theirs = mine[row, best // num_instances][helps], (best % num_instances)[helps]
        rows = rows[helps]
        for array in (instance_experts, weight):
            array[rows, ours], array[rows, theirs] = array[rows, theirs], array[rows, ours]
    return weight.reshape(num_rows, num_devices, slots).sum(axis=2).max(axis=1)


def instance_load(
    load: Float64[np.ndarray, "R E"], instance_experts: Int64[np.ndarray, "R I"]
) -> Float64[np.ndarray, "R I"]:
    """The load of each instance: its expert's, divided evenly among the expert's instances."""
    return np.take_along_axis(load / count_instances(instance_experts, load.shape[1]), instance_experts, axis=1)


def count_instances(instance_experts: Int64[np.ndarray, "R I"], num_experts: int) -> Int64[np.ndarray, "R E"]:
    """The number of instances of each expert."""
    keys = np.arange(len(instance_experts))[:, None] * num_experts + instance_experts
    return np.bincount(keys.ravel(), minlength=len(instance_experts) * num_experts).reshape(
        len(instance_experts), num_experts
    )


def _candidates(
    load: Float64[np.ndarray, "R E"],
    instance_experts: Int64[np.ndarray, "R I"],
    num_devices: int,
    max_replicas: int,
    rng: np.random.Generator,
) -> Int64[np.ndarray, "R I"]:
    """One placement a row: of `instance_experts` with a few replicas moved to other experts, or, for a quarter of the
    rows, of what greedy replication gives for loads with noise. Both are packed by loads with noise, so that equal
    replicas are packed in other ways."""
    num_rows, num_experts = load.shape
    size = np.resize(_NOISE, num_rows)[:, None]
    counts = count_instances(instance_experts, num_experts)
    _transfer(counts, max_replicas, rng.integers(0, _TRANSFERS + 1, num_rows), rng)
    anew = rng.random(num_rows) < 0.25
    noisy = load[anew] * np.exp(size[anew] * rng.standard_normal(load[anew].shape))
    counts[anew] = replicate(noisy, instance_experts.shape[1], max_replicas)[1]
    made = np.repeat(np.tile(np.arange(num_experts), num_rows), counts.ravel()).reshape(instance_experts.shape)
    weight = instance_load(load, made) * np.exp(size * rng.standard_normal(made.shape))
    return np.take_along_axis(made, pack(weight, num_devices), axis=1)


def _transfer(
    counts: Int64[np.ndarray, "R E"], max_replicas: int, times: Int64[np.ndarray, " R"], rng: np.random.Generator
) -> None:
    """Take, in place, one instance from a random expert that has several and give it to another; `times` of each
    row."""
    rows = np.arange(len(counts))
    for step in range(_TRANSFERS):
        giver = np.where(counts > 1, rng.random(counts.shape), -1.0).argmax(axis=1)
        taker = np.where(counts < max_replicas, rng.random(counts.shape), -1.0).argmax(axis=1)
        moved = (step < times) & (giver != taker) & (counts[rows, giver] > 1) & (counts[rows, taker] < max_replicas)
        counts[rows, giver] -= moved
        counts[rows, taker] += moved
