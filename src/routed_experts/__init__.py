"""routed_experts: serve Mixture-of-Experts models and know exactly which experts every token was routed to.

Names are imported when they are first used: reading a record needs NumPy alone, and importing the package starts no
device."""

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routed_experts.capture.routed_experts_capturer import (
        RoutedExpertsCapturer,
        get_global_experts_capturer,
        set_global_experts_capturer,
    )
    from routed_experts.core.dist_config import DistConfig
    from routed_experts.core.editable_sampling_params import EditableSamplingParams
    from routed_experts.core.errors import (
        CaptureDisabledError,
        CaptureUnsupportedError,
        CheckpointError,
        ConfigError,
        EngineDeadError,
        InvalidRequestError,
        MachineError,
        MemoryPlanError,
        PeerLostError,
        PlacementError,
        ProcessMismatchError,
        PromptTooLongError,
        QueueFullError,
        ReplicaLostError,
        RoutedExpertsError,
        RoutingAlignmentError,
        RoutingFormatError,
        RoutingIncompleteError,
        RoutingReplayError,
        UpdateInProgressError,
        WeightsMismatchError,
        WriteError,
    )
    from routed_experts.core.expert_offload_config import ExpertOffloadConfig
    from routed_experts.core.integrity import Violation
    from routed_experts.core.placement import ExpertPlacement, ResidencyMap
    from routed_experts.core.placement_config import PlacementConfig
    from routed_experts.core.routed_experts import RoutedExperts
    from routed_experts.core.routing_stats import RoutingStats
    from routed_experts.core.sampling_params import SamplingParams
    from routed_experts.core.server_args import ServerArgs
    from routed_experts.core.speculative_config import SpeculativeConfig
    from routed_experts.core.speculative_stats import SpeculativeCounts, SpeculativeTotals
    from routed_experts.core.weight_version import WeightVersion
    from routed_experts.engine.control.score import ScoreOutput
    from routed_experts.engine.control.stats import EngineStats, PlacementStats
    from routed_experts.engine.engine import Engine
    from routed_experts.engine.follower import follow
    from routed_experts.engine.llm import LLM
    from routed_experts.engine.requests.outputs import CompletionOutput, RequestOutput
    from routed_experts.formats.meta_info import extract_routed_experts_from_meta_info

_ERRORS = (
    "CaptureDisabledError CaptureUnsupportedError CheckpointError ConfigError EngineDeadError InvalidRequestError "
    "MachineError MemoryPlanError PeerLostError PlacementError ProcessMismatchError PromptTooLongError QueueFullError "
    "ReplicaLostError RoutedExpertsError RoutingAlignmentError RoutingFormatError RoutingIncompleteError "
    "RoutingReplayError UpdateInProgressError WeightsMismatchError WriteError"
)
_HOMES = MappingProxyType(
    {
        "CompletionOutput": "engine.requests.outputs",
        "DistConfig": "core.dist_config",
        "Engine": "engine.engine",
        "EngineStats": "engine.control.stats",
        "ExpertOffloadConfig": "core.expert_offload_config",
        "LLM": "engine.llm",
        "ExpertPlacement": "core.placement",
        "PlacementConfig": "core.placement_config",
        "PlacementStats": "engine.control.stats",
        "RequestOutput": "engine.requests.outputs",
        "ResidencyMap": "core.placement",
        "RoutedExperts": "core.routed_experts",
        "RoutedExpertsCapturer": "capture.routed_experts_capturer",
        "RoutingStats": "core.routing_stats",
        "ScoreOutput": "engine.control.score",
        "EditableSamplingParams": "core.editable_sampling_params",
        "SamplingParams": "core.sampling_params",
        "ServerArgs": "core.server_args",
        "SpeculativeConfig": "core.speculative_config",
        "SpeculativeCounts": "core.speculative_stats",
        "SpeculativeTotals": "core.speculative_stats",
        "Violation": "core.integrity",
        "WeightVersion": "core.weight_version",
        "follow": "engine.follower",
        "extract_routed_experts_from_meta_info": "formats.meta_info",
        "get_global_experts_capturer": "capture.routed_experts_capturer",
        "set_global_experts_capturer": "capture.routed_experts_capturer",
        **dict.fromkeys(_ERRORS.split(), "core.errors"),
    }
)

__all__ = [
    "LLM",
    "CaptureDisabledError",
    "CaptureUnsupportedError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DistConfig",
    "EditableSamplingParams",
    "Engine",
    "EngineDeadError",
    "EngineStats",
    "ExpertOffloadConfig",
    "ExpertPlacement",
    "InvalidRequestError",
    "MachineError",
    "MemoryPlanError",
    "PeerLostError",
    "PlacementConfig",
    "PlacementError",
    "PlacementStats",
    "ProcessMismatchError",
    "PromptTooLongError",
    "QueueFullError",
    "ReplicaLostError",
    "RequestOutput",
    "ResidencyMap",
    "RoutedExperts",
    "RoutedExpertsCapturer",
    "RoutedExpertsError",
    "RoutingAlignmentError",
    "RoutingFormatError",
    "RoutingIncompleteError",
    "RoutingReplayError",
    "RoutingStats",
    "SamplingParams",
    "ScoreOutput",
    "ServerArgs",
    "SpeculativeConfig",
    "SpeculativeCounts",
    "SpeculativeTotals",
    "UpdateInProgressError",
    "Violation",
    "WeightVersion",
    "WeightsMismatchError",
    "WriteError",
    "extract_routed_experts_from_meta_info",
    "follow",
    "get_global_experts_capturer",
    "set_global_experts_capturer",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its room."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """All public names."""
    return __all__
