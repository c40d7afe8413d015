"""What the placement of experts changed in an answer: fields of `meta_info` and of `routed_experts_info`."""

import dataclasses

from routed_experts.core.io_struct import ReroutingCounts, TokenIDOut


def exactness_fields(out: TokenIDOut) -> dict[str, object]:
    """`exact` and `placement_fields`, in every answer of an engine that may change numbers; of another one nothing."""
    changes = placement_fields(out)
    return {} if changes is None else {"exact": out.exact, **changes}


def placement_fields(out: TokenIDOut) -> dict[str, object] | None:
    """`mode`, counts of expert slots so far and `placement_epoch`; None where the engine changes no answer. With `mode`
    "reroute" capacities move slots; with "defer" outputs of experts on the host are added one layer late, which is not
    counted by request: `deferred_slots` is None. `placement_epoch` is that of the last step of the request."""
    is_deferred = out.rerouting is None
    if is_deferred and not out.defers_experts:
        return None
    counts = out.rerouting or ReroutingCounts(rerouted_slots=0, dropped_slots=0)
    return {
        "mode": "defer" if is_deferred else "reroute",
        **dataclasses.asdict(counts),
        "deferred_slots": None if is_deferred else 0,
        "placement_epoch": out.placement_epoch,
    }
