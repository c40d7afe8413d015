"""Metrics and figures of routing, from records alone; the metrics need NumPy only.

`draw_routing` needs routed-experts[plot], `routing_page` nothing."""

from routed_experts.analysis.figures import draw_routing
from routed_experts.analysis.html import routing_page
from routed_experts.analysis.metrics import (
    Balance,
    RoutingDifference,
    balance,
    coactivation,
    expert_counts,
    known_rows,
    layer_flow,
    routing_difference,
    utilization,
)
from routed_experts.analysis.routed_text import RoutedText, printable, token_texts

__all__ = [
    "Balance",
    "RoutedText",
    "RoutingDifference",
    "balance",
    "coactivation",
    "draw_routing",
    "expert_counts",
    "known_rows",
    "layer_flow",
    "printable",
    "routing_difference",
    "routing_page",
    "token_texts",
    "utilization",
]
