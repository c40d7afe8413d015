"""Stand-ins for sgl_jax.srt.entrypoints."""

from compat_peers.placeholders import missing

__getattr__ = missing("sgl_jax.srt.entrypoints")
