"""Stand-ins for vllm.entrypoints."""

from compat_peers.placeholders import missing

__getattr__ = missing("vllm.entrypoints")
