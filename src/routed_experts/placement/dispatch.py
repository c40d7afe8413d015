"""How the slots of a recorded step are dispatched to the instances of their expert.

"even": every instance takes the same share of its expert's slots, as over many steps. "waterfill": by the load that
this step brings to the devices, with the serving operator; no token's experts change. "reroute": each instance has room
for 1.25 times its mean share, and a slot that finds no instance of its expert with room goes to another expert, which
changes the model. A record does not hold the next expert: such slots are counted and sent nowhere. Dims: N tokens of a
step, M MoE layers, E experts, J replica positions, K experts per token, I instances, V devices."""

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64, Int64, UInt

from routed_experts.core.errors import PlacementError
from routed_experts.core.load_metrics import count_experts, device_load
from routed_experts.core.placement import ExpertPlacement

Dispatch = Literal["even", "waterfill", "reroute"]
DISPATCHES: tuple[str, ...] = get_args(Dispatch)
DispatchResult = tuple[Float64[np.ndarray, "M V"], Int64[np.ndarray, " M"]]
DispatchFn = Callable[[UInt[np.ndarray, "N M K"]], DispatchResult]


def dispatcher(placement: ExpertPlacement, dispatch: Dispatch, *, step_tokens: int) -> DispatchFn:
    """Return the function that computes, for a step of at most `step_tokens` tokens, the slots on each device and the
    slots of each layer without room. Raises PlacementError for an unknown `dispatch`."""
    if dispatch not in DISPATCHES:
        raise PlacementError(f"dispatch={dispatch!r}; choose one of {', '.join(DISPATCHES)}")
    none = np.zeros(placement.num_layers, np.int64)
    if dispatch == "even":
        return lambda rows: (device_load(count_experts(rows, placement.num_experts), placement), none)
    # Here, because it imports JAX, which a plan does not need.
    from routed_experts.placement.operators import choose_by_load, dispatch_with_capacity

    choose = choose_by_load(placement) if dispatch == "waterfill" else dispatch_with_capacity(placement)

    def send(rows: UInt[np.ndarray, "N M K"]) -> DispatchResult:
        padded = np.full((step_tokens, *rows.shape[1:]), -1, np.int32)  # one shape, so one program
        padded[: len(rows)] = rows
        instances = choose(padded.transpose(1, 0, 2), len(rows))[:, : len(rows)].reshape(
            placement.num_layers, -1
        )  # [M, N * K]
        counts = count_experts(
            instances[:, :, None].transpose(1, 0, 2) + 1, placement.num_instances + 1
        )  # the first: not sent
        devices = counts[:, 1:].reshape(placement.num_layers, placement.num_devices, -1).sum(axis=2)
        return devices.astype(np.float64), counts[:, 0]

    return send
