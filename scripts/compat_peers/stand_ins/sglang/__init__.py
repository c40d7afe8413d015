"""Stand-ins for sglang."""

from compat_peers.placeholders import missing

__getattr__ = missing("sglang")
