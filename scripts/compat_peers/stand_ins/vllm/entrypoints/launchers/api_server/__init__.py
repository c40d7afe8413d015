"""Stand-ins for vllm.entrypoints.launchers.api_server."""

from compat_peers.placeholders import missing

__getattr__ = missing("vllm.entrypoints.launchers.api_server")
