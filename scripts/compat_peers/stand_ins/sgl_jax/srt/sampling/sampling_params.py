"""SamplingParams is ours."""

from routed_experts import SamplingParams

__all__ = ["SamplingParams"]
