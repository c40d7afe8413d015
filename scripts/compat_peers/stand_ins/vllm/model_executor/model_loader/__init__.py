"""Stand-ins for vllm.model_executor.model_loader."""

from compat_peers.placeholders import missing

__getattr__ = missing("vllm.model_executor.model_loader")
