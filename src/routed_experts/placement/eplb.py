"""EPLB: how many instances each expert gets and on which device they live, so that devices carry equal load. Knows no
records.

The algorithm is the one that DeepSeek published (EPLB): expert groups are packed to nodes; within a node every spare
instance goes to the expert of the largest load an instance; instances are packed to the node's devices. Hierarchical
where the nodes divide the groups, else one group on one node. Host NumPy, all layers at once. Dims: M MoE layers, E
experts, I instances, V devices."""

import numpy as np
from jaxtyping import Float, Float64, Int64

from routed_experts.core.errors import PlacementError
from routed_experts.core.placement import ExpertPlacement, default_max_replicas
from routed_experts.placement.greedy import pack, replicate
from routed_experts.placement.refine import refine


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
    num_experts = load.shape[1]
    most = default_max_replicas(num_instances, num_experts) if max_replicas is None else max_replicas
    _check_sizes(num_experts, num_instances, num_devices, num_groups, num_nodes, most)
    groups, nodes = (num_groups, num_nodes) if num_groups % num_nodes == 0 else (1, 1)
    experts = _experts_of_nodes(load, groups, nodes)  # [M * nodes, E / nodes]
    rows = np.take_along_axis(np.repeat(load, nodes, axis=0), experts, axis=1)
    rows[rows.sum(axis=1) == 0] = 1.0
    held, counts = replicate(rows, num_instances // nodes, most)
    places = pack(np.take_along_axis(rows / counts, held, axis=1), num_devices // nodes)
    held = np.take_along_axis(held, places, axis=1)
    if refined:
        held = refine(rows, held, num_devices=num_devices // nodes, max_replicas=most, num_nodes=nodes)
    instances = np.take_along_axis(experts, held, axis=1).reshape(len(load), num_instances)
    return ExpertPlacement.of(
        instances, num_experts=num_experts, num_devices=num_devices, max_replicas=most, epoch=epoch
    )


def checked_load(load: Float[np.ndarray, "M E"]) -> Float64[np.ndarray, "M E"]:
    """The load as float64; raises PlacementError where it is no load."""
    read = np.asarray(load, np.float64)
    if read.ndim != 2 or read.size == 0:
        raise PlacementError(
            f"load has shape {list(read.shape)}; expected [M, E], the load of each expert of each MoE layer"
        )
    wrong = np.argwhere(~np.isfinite(read) | (read < 0))
    if wrong.size:
        layer, expert = wrong[0]
        raise PlacementError(
            f"load of MoE layer {layer}, expert {expert} is {read[layer, expert]}; expected a finite number of at least 0"
        )
    return read


def _experts_of_nodes(
    load: Float64[np.ndarray, "M E"], groups: int, nodes: int
) -> Int64[np.ndarray, "M*nodes E/nodes"]:
    """The experts of each node, group by group in the order in which the groups were packed."""
    num_layers, num_experts = load.shape
    size = num_experts // groups
    packed = pack(load.reshape(num_layers, groups, size).sum(axis=2), nodes)  # [M, groups], the group of each place
    experts = packed[:, :, None] * size + np.arange(size)
    return experts.reshape(num_layers * nodes, num_experts // nodes)


def _check_sizes(
    num_experts: int, num_instances: int, num_devices: int, num_groups: int, num_nodes: int, max_replicas: int
) -> None:
    sizes = {
        "num_instances": num_instances,
        "num_devices": num_devices,
        "num_groups": num_groups,
        "num_nodes": num_nodes,
    }
    for name, value in sizes.items():
        if value < 1:
            raise PlacementError(f"{name}={value}; expected at least 1")
    if num_instances < num_experts:
        raise PlacementError(
            f"num_instances={num_instances} for {num_experts} experts; expected at least one each, {num_experts} or more"
        )
    if num_instances > num_experts * max_replicas:
        raise PlacementError(
            f"num_instances={num_instances} is above {num_experts} experts x max_replicas={max_replicas}; lower the one or raise the other"
        )
    for name, divisor, divided, value in (
        ("num_devices", num_devices, "num_instances", num_instances),
        ("num_nodes", num_nodes, "num_devices", num_devices),
        ("num_groups", num_groups, "the number of experts", num_experts),
    ):
        if value % divisor:
            raise PlacementError(f"{name}={divisor} does not divide {divided}={value}; choose one that does")
