"""Numbers and pictures of routing, from records alone. Knows no model and no engine; NumPy is enough for the numbers.

Pictures: `draw_routing` needs routed-experts[plot], `routing_page` nothing."""

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
from routed_experts.analysis.routed_text import RoutedText, pieces_of, printable

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
    "pieces_of",
    "printable",
    "routing_difference",
    "routing_page",
    "utilization",
]
