"""Where experts should live: plans from captured routing, and what a plan would do, before a server is touched.

stats = RoutingStats.from_records(records)                       # or engine.routing_stats()
plan = placement.eplb(stats, num_instances=288, num_devices=32)  # or placement.resident(stats, per_layer=32)
report = placement.simulate(records, plan)"""

from routed_experts.core.load_metrics import device_load, eplb_balancedness, eplb_balancedness_weighted
from routed_experts.placement.cost_model import MoveEstimate, estimate_move
from routed_experts.placement.eplb import rebalance
from routed_experts.placement.match_devices import num_copies, relabel
from routed_experts.placement.plan import eplb, resident
from routed_experts.placement.residency import (
    AdaptiveResidency,
    ExpertCosts,
    concentration,
    lru_coverage,
    num_promoted,
    static_coverage,
)
from routed_experts.placement.simulate import PlacementReport, ResidencyReport, simulate

__all__ = [
    "AdaptiveResidency",
    "ExpertCosts",
    "MoveEstimate",
    "PlacementReport",
    "ResidencyReport",
    "concentration",
    "device_load",
    "eplb",
    "eplb_balancedness",
    "eplb_balancedness_weighted",
    "estimate_move",
    "lru_coverage",
    "num_copies",
    "num_promoted",
    "rebalance",
    "relabel",
    "resident",
    "simulate",
    "static_coverage",
]
