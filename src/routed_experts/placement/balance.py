"""How evenly a placement loads its devices. Knows no plan and no record: loads in, numbers out.

The two metrics are those that SGLang and vLLM report under like names; they differ, so both are here.
Dims: M MoE layers, E experts, I instances, V devices."""

import numpy as np
from jaxtyping import Float, Float64, Int64

from routed_experts.core.errors import PlacementError
from routed_experts.core.placement import ExpertPlacement

_EPSILON = 1e-5


def device_load(load: Float[np.ndarray, "M E"], placement: ExpertPlacement) -> Float64[np.ndarray, "M V"]:
    """The load of each device when an expert's load is divided evenly among its instances. Raises PlacementError for
    another model."""
    placement.check_model(*load.shape)
    share = load / placement.logical_replica_count
    instances = np.take_along_axis(share, placement.physical_to_logical_map, axis=1)
    return instances.reshape(placement.num_layers, placement.num_devices, placement.instances_per_device).sum(axis=2)


def eplb_balancedness(devices: Float[np.ndarray, "M V"]) -> float:
    """Mean over layers of mean / max device load, each with 1e-5 added: 1 at best, 1 for a layer without load
    (SGLang's)."""
    return float(np.mean((devices.mean(axis=1) + _EPSILON) / (devices.max(axis=1) + _EPSILON)))


def eplb_balancedness_weighted(devices: Float[np.ndarray, "M V"]) -> float:
    """Sum over layers of the mean device load / sum of the maximum (vLLM's): the share of time that devices do not
    wait, if time is load. 1 without load."""
    most = devices.max(axis=1).sum()
    return float(devices.mean(axis=1).sum() / most) if most > 0 else 1.0


def num_copies(old: ExpertPlacement, new: ExpertPlacement) -> Int64[np.ndarray, " M"]:
    """Instances of each layer whose device did not hold that expert before: each is one expert's weights over the
    link."""
    check_alike(old, new)
    held = np.zeros((old.num_layers, old.num_devices, old.num_experts), np.bool_)
    layers, devices = np.arange(old.num_layers)[:, None], np.arange(old.num_instances) // old.instances_per_device
    held[layers, devices, old.physical_to_logical_map] = True
    return np.count_nonzero(~held[layers, devices, new.physical_to_logical_map], axis=1)


def check_alike(old: ExpertPlacement, new: ExpertPlacement) -> None:
    """Raise PlacementError unless one can follow the other in the same tables."""
    sizes = [(one.num_layers, one.num_experts, one.num_instances, one.num_devices) for one in (old, new)]
    if sizes[0] != sizes[1]:
        old_told, new_told = ("{} MoE layers, {} experts, {} instances, {} devices".format(*size) for size in sizes)
        raise PlacementError(f"a placement of {new_told} cannot follow one of {old_told}; plan with the same numbers")
