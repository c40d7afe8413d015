"""Reading of rows is ours."""

from compat_peers.placeholders import missing

from routed_experts import extract_routed_experts_from_meta_info

__all__ = ["extract_routed_experts_from_meta_info"]
__getattr__ = missing("sglang.srt.state_capturer.routed_experts")
