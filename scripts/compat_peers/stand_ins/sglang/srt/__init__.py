"""Stand-ins for sglang.srt."""

from compat_peers.placeholders import missing

__getattr__ = missing("sglang.srt")
