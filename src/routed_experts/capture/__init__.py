"""Capture of routed experts beside the KV cache.

The capturer needs JAX; its names are imported on first use (PEP 562)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from routed_experts.capture.routed_experts_capturer import (
        RoutedExpertsCapturer,
        get_global_experts_capturer,
        set_global_experts_capturer,
    )

__all__ = ["RoutedExpertsCapturer", "get_global_experts_capturer", "set_global_experts_capturer"]


def __getattr__(name: str) -> object:
    """Import the capturer's names on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    from routed_experts.capture import routed_experts_capturer

    return vars(routed_experts_capturer)[name]
