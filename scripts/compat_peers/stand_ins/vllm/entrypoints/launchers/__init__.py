"""Stand-ins for vllm.entrypoints.launchers."""

from compat_peers.placeholders import missing

__getattr__ = missing("vllm.entrypoints.launchers")
