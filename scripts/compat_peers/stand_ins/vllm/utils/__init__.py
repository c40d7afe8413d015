"""Stand-ins for vLLM's helpers."""

from compat_peers.placeholders import missing

__getattr__ = missing("vllm.utils")
