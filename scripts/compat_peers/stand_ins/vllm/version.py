"""A version of vLLM that none of ours is."""

__version__ = "0.0"


def _prev_minor_version() -> str:
    return "0.0"
