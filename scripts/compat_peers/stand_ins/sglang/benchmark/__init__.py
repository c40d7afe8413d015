"""Stand-ins for sglang.benchmark."""

from compat_peers.placeholders import missing

__getattr__ = missing("sglang.benchmark")
