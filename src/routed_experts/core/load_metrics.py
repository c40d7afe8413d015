"""How evenly load is spread over the experts of a layer, or over the devices of a placement.

Two balancedness metrics are here because SGLang and vLLM report different ones under like names. A ratio that no load
determines is NaN unless noted otherwise. Dims: M MoE layers, E experts, X experts or devices, V devices, N rows, K
experts per token."""

import numpy as np
from jaxtyping import Float, Float64, Int, Int64

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PlacementError
from routed_experts.core.placement import ExpertPlacement

_EPSILON = 1e-5
_DEVICES = "[M, V], the load of each device of each MoE layer, as device_load returns it"

Load = Float[np.ndarray, "M X"] | Int[np.ndarray, "M X"]


def count_experts(rows: Int[np.ndarray, "N M K"], num_experts: int) -> Int64[np.ndarray, "M E"]:
    """How often each layer's rows name each expert."""
    num_layers = rows.shape[1]
    keys = rows + (np.arange(num_layers) * num_experts)[:, None]
    return np.bincount(keys.ravel(), minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def device_load(load: Float[np.ndarray, "M E"], placement: ExpertPlacement) -> Float64[np.ndarray, "M V"]:
    """The load of each device when an expert's load is divided evenly among its instances. Raises PlacementError for
    another model, and for what is no array [M, E]."""
    load = _checked("load", load, "[M, E], the load of each expert of each MoE layer")
    placement.check_model(*load.shape)
    share = load / placement.logical_replica_count
    instances = np.take_along_axis(share, placement.physical_to_logical_map, axis=1)
    return instances.reshape(placement.num_layers, placement.num_devices, placement.instances_per_device).sum(axis=2)


def load_imbalance(load: Load) -> Float64[np.ndarray, " M"]:
    """Largest over mean load: 1 is even, X is all on one."""
    return ratio(load.max(axis=1), load.mean(axis=1))


def load_entropy(load: Load) -> Float64[np.ndarray, " M"]:
    """Entropy of the shares p over that of an even load, -sum p ln p / ln X: 1 is even, 0 is all on one of several."""
    share = ratio(load, load.sum(axis=1, keepdims=True))
    if load.shape[1] == 1:
        return share[:, 0]
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    return -(share * logs).sum(axis=1) / np.log(load.shape[1])


def load_gini(load: Load) -> Float64[np.ndarray, " M"]:
    """Gini coefficient, sum over i and j of |c_i - c_j| / (2 X sum c): 0 is even."""
    num = load.shape[1]
    rank = np.arange(1, num + 1)  # of ascending loads c_(r): the sum is 2 * sum over r of (2r - X - 1) * c_(r)
    spread = ((2 * rank - num - 1) * np.sort(load, axis=1)).sum(axis=1)
    return ratio(spread, num * load.sum(axis=1))


def load_variation(load: Load) -> Float64[np.ndarray, " M"]:
    """Coefficient of variation: population standard deviation over mean, 0 is even."""
    return ratio(load.std(axis=1), load.mean(axis=1))


def num_unused(load: Load) -> Int64[np.ndarray, " M"]:
    """Experts or devices without load."""
    return (load == 0).sum(axis=1)


def eplb_balancedness(devices: Float[np.ndarray, "M V"]) -> float:
    """Mean over layers of mean / max device load, each with 1e-5 added: 1 at best, 1 for a layer without load
    (SGLang's). Raises PlacementError for what is no array [M, V]."""
    devices = _checked("devices", devices, _DEVICES)
    return float(np.mean((devices.mean(axis=1) + _EPSILON) / (devices.max(axis=1) + _EPSILON)))


def eplb_balancedness_weighted(devices: Float[np.ndarray, "M V"]) -> float:
    """Sum over layers of the mean device load / sum of the maximum (vLLM's): the share of time that devices do not
    wait, if time is load. 1 without load. Raises PlacementError for what is no array [M, V]."""
    devices = _checked("devices", devices, _DEVICES)
    largest = devices.max(axis=1).sum()
    return float(devices.mean(axis=1).sum() / largest) if largest > 0 else 1.0


def _checked(name: str, load: Load, expected: str) -> Load:
    """The load as an array. Raises PlacementError for what is none of real numbers with two dims."""
    try:
        array = np.asarray(load)
    except (ValueError, OverflowError):
        array = None
    if array is None or array.dtype.kind not in "biuf" or array.ndim != 2 or array.size == 0:
        received = short_repr(load) if array is None else f"{array.dtype}{list(array.shape)}"
        raise PlacementError(f"{name} is {received}; expected {expected}")
    return array


def ratio(above: np.ndarray, below: np.ndarray | float) -> Float64[np.ndarray, "..."]:
    """Divide, NaN where the divisor is 0."""
    above, below = np.broadcast_arrays(above, below)
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below != 0)
