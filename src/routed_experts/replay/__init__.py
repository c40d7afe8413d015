"""Training on recorded routing: the serving module on whole sequences, with live or replayed routing.

Replay is an argument, never a mode."""

from routed_experts.layers.routing import replay_topk
from routed_experts.replay.align import Sample, align, zigzag_order
from routed_experts.replay.balance import RouterBalance, balance_loss
from routed_experts.replay.batch import RoutedBatch
from routed_experts.replay.forward import ForwardOutput, forward
from routed_experts.replay.metrics import CanaryGate, MismatchReport, canary, mismatch_report
from routed_experts.replay.quantised import quantised
from routed_experts.replay.turns import merge_turns

__all__ = [
    "CanaryGate",
    "ForwardOutput",
    "MismatchReport",
    "RoutedBatch",
    "RouterBalance",
    "Sample",
    "align",
    "balance_loss",
    "canary",
    "forward",
    "merge_turns",
    "mismatch_report",
    "quantised",
    "replay_topk",
    "zigzag_order",
]
