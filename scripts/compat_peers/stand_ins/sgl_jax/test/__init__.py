"""Stand-ins for sgl_jax.test."""

from compat_peers.placeholders import missing

__getattr__ = missing("sgl_jax.test")
