"""Processes of servers that our stand-ins started."""

from compat_peers.placeholders import missing
from compat_peers.serving import end_process

__getattr__ = missing("sglang.srt.utils")


def kill_process_tree(pid: int, *args: object, **kwargs: object) -> None:
    """End a server of ours."""
    end_process(pid)
