"""Paths that users give."""

import errno
import os
import stat
from pathlib import Path

from routed_experts.core.error_text import short_repr

_MAX_CHARS = 255  # of a path in an error
_NO_PATH = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is there. A path that the system cannot have, such as one of 5,000 characters, is none. Raises
    OSError where the system does not say, as for a folder below one that this user may not enter."""
    return stat.S_ISDIR(_mode(path))


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file is there, as `is_folder` tells of a folder."""
    return stat.S_ISREG(_mode(path))


def _mode(path: str | os.PathLike[str]) -> int:
    """The mode of what is there; 0 where nothing is."""
    try:
        return Path(path).stat().st_mode
    except ValueError:  # a zero byte
        return 0
    except OSError as error:
        if error.errno in _NO_PATH:
            return 0
        raise


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path as an error shows it: whole, but a very long one by its beginning and its length."""
    text = os.fspath(path)
    return text if len(text) <= _MAX_CHARS else short_repr(text)
