"""How the slots of a recorded step choose among the instances of their expert. Knows no trace.

"even": every instance takes the same share of its expert's slots, as over many steps.
Dims: N tokens of a step, M MoE layers, K experts per token, V devices."""

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64, UInt

from routed_experts.core.errors import PlacementError
from routed_experts.core.placement import Placement
from routed_experts.placement.balance import device_load

Dispatch = Literal["even"]
Send = Callable[[UInt[np.ndarray, "N M K"]], Float64[np.ndarray, "M V"]]


def dispatcher(placement: Placement, dispatch: Dispatch) -> Send:
    """The function that gives the slots on each device of one step. Raises PlacementError for a way that there is not."""
    if dispatch not in get_args(Dispatch):
        raise PlacementError(f"dispatch={dispatch!r}; choose one of {', '.join(get_args(Dispatch))}")
    return lambda rows: device_load(count_experts(rows, placement.num_experts), placement)


def count_experts(rows: UInt[np.ndarray, "N M K"], num_experts: int) -> np.ndarray:
    """How often each layer's rows name each expert, int64 [M, E]."""
    num_layers = rows.shape[1]
    keys = rows + (np.arange(num_layers) * num_experts)[:, None]
    return np.bincount(keys.ravel(), minlength=num_layers * num_experts).reshape(num_layers, num_experts)
