"""Base64 of the wire: RFC 4648 section 4, padded, without line breaks."""

import pybase64

from routed_experts.core.errors import RoutingFormatError


def decode_base64(payload: object) -> bytes:
    """Decode padded base64 without line breaks; anything else is a RoutingFormatError."""
    if not isinstance(payload, str | bytes | memoryview):
        raise RoutingFormatError(f"payload is a {type(payload).__name__}; expected base64 text")
    try:
        return pybase64.b64decode(payload, validate=True)
    except ValueError as cause:
        raise RoutingFormatError(
            f"payload of {len(payload)} characters is no base64: {cause}; expected RFC 4648 §4, padded"
        ) from cause
