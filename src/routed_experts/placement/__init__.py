"""Where experts should live: plans from captured routing, and what a plan would do, before a server is touched. Knows
no engine.

stats = RoutingStats.from_records(records)                       # or engine.routing_stats()
plan = placement.eplb(stats, num_instances=288, num_devices=32)  # or placement.resident(stats, per_layer=32)
report = placement.replay(records, plan)"""

from routed_experts.placement.balance import device_load, eplb_balancedness, eplb_balancedness_weighted, num_copies
from routed_experts.placement.cost_model import Verdict, judge
from routed_experts.placement.coverage import concentration, lru_coverage, static_coverage
from routed_experts.placement.eplb import rebalance
from routed_experts.placement.match_devices import relabel
from routed_experts.placement.plan import eplb, resident
from routed_experts.placement.residency import AdaptiveResidency, ExpertCosts, num_promoted
from routed_experts.placement.simulate import PlacementReport, ResidencyReport, replay

__all__ = [
    "AdaptiveResidency",
    "ExpertCosts",
    "PlacementReport",
    "ResidencyReport",
    "Verdict",
    "concentration",
    "device_load",
    "eplb",
    "eplb_balancedness",
    "eplb_balancedness_weighted",
    "judge",
    "lru_coverage",
    "num_copies",
    "num_promoted",
    "rebalance",
    "relabel",
    "replay",
    "resident",
    "static_coverage",
]
