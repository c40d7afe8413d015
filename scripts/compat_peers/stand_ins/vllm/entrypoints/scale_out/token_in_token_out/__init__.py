"""Stand-ins for vllm.entrypoints.scale_out.token_in_token_out."""

from compat_peers.placeholders import missing

__getattr__ = missing("vllm.entrypoints.scale_out.token_in_token_out")
