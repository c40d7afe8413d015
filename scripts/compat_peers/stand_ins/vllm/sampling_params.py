"""SamplingParams is ours."""

from compat_peers.placeholders import missing

from routed_experts import SamplingParams

__all__ = ["SamplingParams"]
__getattr__ = missing("vllm.sampling_params")
