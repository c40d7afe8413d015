"""Every form in which a routing record leaves or enters the engine. NumPy only."""

from routed_experts.formats.meta_info import (
    extract_routed_experts_from_meta_info,
    record_from_meta_info,
    record_from_response,
)
from routed_experts.formats.wire import (
    decode_routed_experts,
    encode_as_lists,
    encode_meta_info,
    encode_routed_experts,
    record_from_npy,
)

__all__ = [
    "decode_routed_experts",
    "encode_as_lists",
    "encode_meta_info",
    "encode_routed_experts",
    "extract_routed_experts_from_meta_info",
    "record_from_meta_info",
    "record_from_npy",
    "record_from_response",
]
