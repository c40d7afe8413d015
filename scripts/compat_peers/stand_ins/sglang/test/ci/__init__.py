"""Stand-ins for sglang.test.ci."""

from compat_peers.placeholders import missing

__getattr__ = missing("sglang.test.ci")
