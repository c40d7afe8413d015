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
    try:
        return stat.S_ISDIR(Path(path).stat().st_mode)
    except ValueError:  # a zero byte
        return False
    except OSError as error:
        if error.errno in _NO_PATH:
            return False
        raise


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path as an error shows it: whole, but a very long one by its beginning and its length."""
    text = os.fspath(path)
    return text if len(text) <= _MAX_CHARS else short_repr(text)
