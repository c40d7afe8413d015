"""What was routed: recording it beside the KV cache, and its wire forms. Knows nothing of models, engines or HTTP.

Reading a record needs NumPy alone, so this door imports the codecs at once, and the capturer, which needs JAX, when it
is asked for."""

from typing import TYPE_CHECKING

from routed_experts.capture.meta_info import (
    extract_routed_experts_from_meta_info,
    record_from_meta_info,
    record_from_response,
)
from routed_experts.capture.wire import (
    decode_routed_experts,
    encode_listed,
    encode_meta_info,
    encode_routed_experts,
    record_from_npy,
)

if TYPE_CHECKING:
    from routed_experts.capture.routed_experts_capturer import (
        RoutedExpertsCapturer,
        get_global_experts_capturer,
        set_global_experts_capturer,
    )

__all__ = [
    "RoutedExpertsCapturer",
    "decode_routed_experts",
    "encode_listed",
    "encode_meta_info",
    "encode_routed_experts",
    "extract_routed_experts_from_meta_info",
    "get_global_experts_capturer",
    "record_from_meta_info",
    "record_from_npy",
    "record_from_response",
    "set_global_experts_capturer",
]


def __getattr__(name: str) -> object:
    """Import the capturer's names on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    from routed_experts.capture import routed_experts_capturer

    return vars(routed_experts_capturer)[name]
