"""Stand-ins for vllm.model_executor."""

from compat_peers.placeholders import missing

__getattr__ = missing("vllm.model_executor")
