"""Paths that users give."""

import os
from pathlib import Path

from routed_experts.core.error_text import short_repr

_MAX_CHARS = 255  # of a path in an error


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is there. A path that the system cannot have, such as one of 5,000 characters, is none."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path as an error shows it: whole, but a very long one by its beginning and its length."""
    text = os.fspath(path)
    return text if len(text) <= _MAX_CHARS else short_repr(text)
