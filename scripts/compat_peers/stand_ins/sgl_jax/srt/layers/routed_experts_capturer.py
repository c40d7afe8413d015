"""Reading of rows is ours."""

import routed_experts
from routed_experts import extract_routed_experts_from_meta_info, get_global_experts_capturer

__all__ = ["extract_routed_experts_from_meta_info", "get_global_experts_capturer"]


def __getattr__(name: str) -> object:
    return getattr(routed_experts, name)
