"""Stand-ins for sglang.test."""

from compat_peers.placeholders import missing

__getattr__ = missing("sglang.test")
