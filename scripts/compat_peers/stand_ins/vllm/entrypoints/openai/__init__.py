"""Stand-ins for vllm.entrypoints.openai."""

from compat_peers.placeholders import missing

__getattr__ = missing("vllm.entrypoints.openai")
