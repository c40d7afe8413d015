"""Assign the devices of a new placement so that the fewest experts move; its balance does not change.

Any device of a node can hold any set of instances, so the sets are matched to the devices that already hold most of
them (an assignment problem, SciPy), and instances that stay on a device stay in their slots. Dims: M MoE layers, E
experts, I instances, J replica positions, V devices, s = I / V slots, R = M * V."""

from typing import Any

import numpy as np
from jaxtyping import Int64

from routed_experts.core.errors import PlacementError
from routed_experts.core.installation import import_optional
from routed_experts.core.integers import to_int
from routed_experts.core.placement import ExpertPlacement
from routed_experts.placement.arguments import check_type


def num_copies(old: ExpertPlacement, new: ExpertPlacement) -> Int64[np.ndarray, " M"]:
    """Instances of each layer whose device did not hold that expert before: each is one expert's weights over the
    link."""
    check_same_sizes(old, new)
    both_hold = np.zeros((old.num_layers, old.num_devices, old.num_experts), np.bool_)
    layers, devices = np.arange(old.num_layers)[:, None], np.arange(old.num_instances) // old.instances_per_device
    both_hold[layers, devices, old.physical_to_logical_map] = True
    return np.count_nonzero(~both_hold[layers, devices, new.physical_to_logical_map], axis=1)


def check_same_sizes(old: ExpertPlacement, new: ExpertPlacement) -> None:
    """Raise PlacementError unless one can follow the other in the same tables."""
    for name, plan in (("old", old), ("new", new)):
        check_type(name, plan, ExpertPlacement)
    sizes = [(plan.num_layers, plan.num_experts, plan.num_instances, plan.num_devices) for plan in (old, new)]
    if sizes[0] != sizes[1]:
        old_sizes, new_sizes = ("{} MoE layers, {} experts, {} instances, {} devices".format(*size) for size in sizes)
        raise PlacementError(f"a placement of {new_sizes} cannot follow one of {old_sizes}; plan with the same numbers")


def relabel(new: ExpertPlacement, old: ExpertPlacement, *, num_nodes: int = 1) -> ExpertPlacement:
    """Return `new` with devices renamed within their nodes and slots within their devices, as close to `old` as
    possible; its epoch follows that of `old`. Raises PlacementError where the sizes differ, ConfigError without
    SciPy (routed-experts[placement])."""
    check_same_sizes(old, new)
    num_nodes = to_int("num_nodes", num_nodes, 1, error=PlacementError)
    if new.num_devices % num_nodes:
        raise PlacementError(
            f"num_nodes={num_nodes} does not divide num_devices={new.num_devices}; choose one that does"
        )
    shape = (new.num_layers, new.num_devices, new.instances_per_device)
    before = old.physical_to_logical_map.reshape(shape).astype(np.int64)
    after = new.physical_to_logical_map.reshape(shape).astype(np.int64)
    order = _match_devices(new, old, num_nodes)
    after = np.take_along_axis(after, order[:, :, None], axis=1)
    aligned = _keep_slots(after.reshape(-1, shape[2]), before.reshape(-1, shape[2]), new.num_experts)
    return ExpertPlacement.from_instances(
        aligned.reshape(new.num_layers, new.num_instances),
        num_experts=new.num_experts,
        num_devices=new.num_devices,
        max_replicas=new.logical_to_physical_map.shape[2],
        epoch=old.epoch + 1,
    )


def _match_devices(new: ExpertPlacement, old: ExpertPlacement, num_nodes: int) -> Int64[np.ndarray, "M V"]:
    """Return, for each old device, the device of the new placement that takes its id."""
    assign = _assignment()
    common = _common(new, old)
    num_layers, num_devices = common.shape[:2]
    width = num_devices // num_nodes
    order = np.empty((num_layers, num_devices), np.int64)
    for layer in range(num_layers):
        for low in range(0, num_devices, width):
            node = slice(low, low + width)
            order[layer, node] = low + assign(common[layer, node, node], maximize=True)[1]
    return order


def _common(new: ExpertPlacement, old: ExpertPlacement) -> Int64[np.ndarray, "M V V"]:
    """Count the instances of a new device whose expert an old one (rows) holds: those that need no copy there."""
    before = _devices(old, each_once=True)[:, :, :, None]
    after = _devices(new, each_once=False)[:, :, None, :]  # [M, E, J, J], once they meet
    both_hold = (before >= 0) & (after >= 0)
    num_layers, num_devices = new.num_layers, new.num_devices
    keys = (np.arange(num_layers)[:, None, None, None] * num_devices + before) * num_devices + after
    return np.bincount(keys[both_hold], minlength=num_layers * num_devices**2).reshape(
        num_layers, num_devices, num_devices
    )


def _devices(placement: ExpertPlacement, *, each_once: bool) -> Int64[np.ndarray, "M E J"]:
    """Return the devices of each expert's instances, or each device once, and -1."""
    instances = placement.logical_to_physical_map
    devices = np.sort(np.where(instances >= 0, instances // placement.instances_per_device, -1), axis=2).astype(
        np.int64
    )
    if each_once:
        devices[:, :, 1:][devices[:, :, 1:] == devices[:, :, :-1]] = -1
    return devices


def _keep_slots(
    after: Int64[np.ndarray, "R s"], before: Int64[np.ndarray, "R s"], num_experts: int
) -> Int64[np.ndarray, "R s"]:
    """Order each device's new instances so that those it held before keep their slots; the others fill the rest."""
    same = (
        _numbered(after, num_experts)[:, :, None] == _numbered(before, num_experts)[:, None, :]
    )  # [R, new, old], one to one
    stays, stayed = same.any(axis=2), same.any(axis=1)
    aligned = np.empty_like(after)
    arrivals = np.take_along_axis(after, np.argsort(stays, axis=1, kind="stable"), axis=1)  # those first
    np.put_along_axis(aligned, np.argsort(stayed, axis=1, kind="stable"), arrivals, axis=1)
    rows, slots = np.nonzero(stayed)
    aligned[rows, slots] = before[rows, slots]
    return aligned


def _numbered(experts: Int64[np.ndarray, "R s"], num_experts: int) -> Int64[np.ndarray, "R s"]:
    """Number the instances of one expert on one device: expert + E times the number of those before it."""
    order = np.argsort(experts, axis=1, kind="stable")
    ordered = np.take_along_axis(experts, order, axis=1)
    slots = np.arange(experts.shape[1])
    first = np.maximum.accumulate(np.where(np.diff(ordered, axis=1, prepend=-1) != 0, slots, 0), axis=1)
    numbered = np.empty_like(experts)
    np.put_along_axis(numbered, order, ordered + num_experts * (slots - first), axis=1)
    return numbered


def _assignment() -> Any:
    optimize = import_optional("scipy.optimize", purpose="matching devices", extra="placement")
    return optimize.linear_sum_assignment
