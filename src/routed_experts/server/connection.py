"""What the application may do to the connection of a request, where the protocol of the server offers it."""

from starlette.types import Scope


def abort_connection(scope: Scope) -> bool:
    """Drop the connection with all unsent bytes; returns whether the protocol offers a way to."""
    abort = scope.get("extensions", {}).get("routed_experts.abort")
    if abort is None:
        return False
    abort["call"]()
    return True
