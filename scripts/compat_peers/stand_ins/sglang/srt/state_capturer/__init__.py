"""Stand-ins for sglang.srt.state_capturer."""

from compat_peers.placeholders import missing

__getattr__ = missing("sglang.srt.state_capturer")
