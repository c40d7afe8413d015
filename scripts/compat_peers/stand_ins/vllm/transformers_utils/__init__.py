"""Stand-ins for vllm.transformers_utils."""

from compat_peers.placeholders import missing

__getattr__ = missing("vllm.transformers_utils")
