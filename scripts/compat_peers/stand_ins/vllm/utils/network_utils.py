"""A free port."""

from compat_peers.placeholders import missing
from compat_peers.serving import free_port as get_open_port

__all__ = ["get_open_port"]
__getattr__ = missing("vllm.utils.network_utils")
