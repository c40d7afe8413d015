"""Estimate whether a new placement is worth its copies, from a load, both placements and what a copy costs."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from routed_experts.core.load_metrics import device_load, eplb_balancedness_weighted
from routed_experts.core.placement import ExpertPlacement
from routed_experts.placement.arguments import check_number, check_type
from routed_experts.placement.eplb import checked_load
from routed_experts.placement.match_devices import num_copies

MIN_STEP = 0.05  # least rise of balancedness that is worth the disturbance


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEstimate:
    """What a change of placement gains and costs, in seconds of the window. Apply it where `pays_off` is true."""

    balancedness_now: float
    balancedness_new: float
    copies: int
    gain_s: float
    cost_s: float

    @property
    def pays_off(self) -> bool:
        """Whether the gain is above the cost and the balance rises by 0.05 or more."""
        return self.gain_s > self.cost_s and self.balancedness_new - self.balancedness_now >= MIN_STEP


def estimate_move(
    load: Float[np.ndarray, "M E"],
    now: ExpertPlacement,
    new: ExpertPlacement,
    *,
    expert_time_s: float,
    expert_bytes: int,
    link_bytes_per_s: float,
) -> MoveEstimate:
    """Weigh the time that better balance saves of `expert_time_s`, the seconds that experts take in a window of this
    load, against sending `expert_bytes` a copy over a link of `link_bytes_per_s`: gain = T (1 - b_now / b_new), cost =
    copies * bytes / rate.

    Balancedness is the weighted one, which is the share of time that devices do not wait. Raises PlacementError."""
    expected = "a finite number of at least 0"
    time_s = check_number("expert_time_s", expert_time_s, expected)
    num_bytes = check_number("expert_bytes", expert_bytes, expected)
    rate = check_number("link_bytes_per_s", link_bytes_per_s, "a finite number above 0", is_positive=True)
    for name, placement in (("now", now), ("new", new)):
        check_type(name, placement, ExpertPlacement)
    load = checked_load(load)
    b_now, b_new = (eplb_balancedness_weighted(device_load(load, placement)) for placement in (now, new))
    copies = int(num_copies(now, new).sum())
    return MoveEstimate(
        balancedness_now=b_now,
        balancedness_new=b_new,
        copies=copies,
        gain_s=time_s * (1 - b_now / b_new),
        cost_s=copies * num_bytes / rate,
    )
