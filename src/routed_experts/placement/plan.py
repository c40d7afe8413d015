"""Plans from expert counts: instances on devices, and residents of the accelerator."""

import numpy as np
from jaxtyping import Float

from routed_experts.core.placement import ExpertPlacement, ResidencyMap
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.placement.arguments import check_type
from routed_experts.placement.eplb import rebalance
from routed_experts.placement.match_devices import relabel
from routed_experts.placement.residency import most_used

Load = RoutingStats | Float[np.ndarray, "M E"]


def eplb(
    load: Load,
    *,
    num_instances: int,
    num_devices: int,
    num_groups: int = 1,
    num_nodes: int = 1,
    previous: ExpertPlacement | None = None,
) -> ExpertPlacement:
    """Place experts by their load (of RoutingStats: all that it counted; pass `stats.recent_load` for what counted of
    late). With `previous`, which must have the same sizes, devices are named so that the fewest experts move, J stays,
    and the epoch rises. Raises PlacementError, or ConfigError where `previous` is given and SciPy
    (routed-experts[placement]) is missing."""
    if previous is not None:
        check_type("previous", previous, ExpertPlacement)
    most = None if previous is None else previous.logical_to_physical_map.shape[2]
    placement = rebalance(
        _to_load(load),
        num_instances=num_instances,
        num_devices=num_devices,
        num_groups=num_groups,
        num_nodes=num_nodes,
        max_replicas=most,
    )
    if previous is None:
        return placement
    return relabel(placement, previous, num_nodes=num_nodes if int(num_groups) % int(num_nodes) == 0 else 1)


def resident(load: Load, *, per_layer: int, previous: ResidencyMap | None = None) -> ResidencyMap:
    """Keep the `per_layer` most used experts of each layer on the accelerator; with `previous`, those that stay keep
    their slots. Raises PlacementError."""
    return most_used(_to_load(load), per_layer, previous)


def _to_load(load: Load) -> Float[np.ndarray, "M E"]:
    return load.load.astype(np.float64) if isinstance(load, RoutingStats) else load
