"""Files that come whole or not at all: written under another name beside the one they are meant for, which they take at the end.

Knows nothing of what is written."""

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Generator
from pathlib import Path

from routed_experts.core.errors import WriteError

_DEVICES = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))
_FIXES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free some of your quota there",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.ENOENT: "make the folder",
    errno.EACCES: "make the folder writable",
    errno.EPERM: "make the folder writable",
}


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str]) -> Generator[Path, None, None]:
    """Lend a path in the folder of `path`, of the same suffix, to write a file to; at the end the file is synced and renamed to `path`.
    After an error nothing is left of it, and what stood at `path` still stands. A device or a pipe is lent itself.

    An OSError of the writing is raised as WriteError; one that names another file, or a reader that has left, passes as it is."""
    target, part = _places(Path(path))
    try:
        part.touch()  # what cannot be written is told before the work
        yield part
        if part != target:
            _settle(part, target)
    except OSError as error:
        if isinstance(error, WriteError | BrokenPipeError) or (error.filename and str(part) not in (error.filename, error.filename2)):
            raise
        raise _told(path, part, error) from error
    finally:
        if part != target:
            part.unlink(missing_ok=True)


def _places(path: Path) -> tuple[Path, Path]:
    """Where the file is to be at the end, and until then. Links are followed, so that they stay links."""
    if path.is_dir():
        raise WriteError(f"{path} is a folder; name a file")
    if path.parent in _DEVICES or (path.exists() and not path.is_file()):
        return path, path
    target = Path(os.path.realpath(path))
    return target, target.with_name(f".{uuid.uuid4().hex[:12]}.part{target.suffix}")


def _settle(part: Path, target: Path) -> None:
    """Bring the file to the disk, which may be full only now, and give it its name."""
    with part.open("rb+") as written:
        os.fsync(written.fileno())
    if target.exists():
        shutil.copymode(target, part)
    os.replace(part, target)


def _told(path: str | os.PathLike[str], part: Path, error: OSError) -> WriteError:
    size = part.stat().st_size if part.is_file() else 0
    cause = error.strerror or str(error)
    left = "what stood there still stands" if Path(path).is_file() else "nothing is left of it"
    fix = _FIXES.get(error.errno or 0, "look after that disk")
    return WriteError(f"{os.fspath(path)} could not be written: {cause}, after {size:,} bytes; {left}; {fix}, or name a file elsewhere")
