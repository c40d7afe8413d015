"""Processes of servers that our stand-ins started."""

from compat_peers.placeholders import missing
from sglang.srt.utils import kill_process_tree

__all__ = ["kill_process_tree"]
__getattr__ = missing("sgl_jax.srt.utils")
