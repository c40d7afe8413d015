"""Atomic file writes: a temporary file beside the target, synced and renamed at the end."""

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Generator
from pathlib import Path

from routed_experts.core.errors import WriteError

_DEVICES = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))
_DISK = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free some of your quota there",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EIO: "look after that disk",
}
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)  # this user may create no file there


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], *, keep: bool = False) -> Generator[Path, None, None]:
    """Yield a temporary path beside `path`, of the same suffix; at the end the file is synced and renamed to `path`.
    After an error the file at `path` is unchanged and the new file is removed; `keep` leaves it, unless empty, under
    its temporary name.

    For a device or a pipe, and for a file whose folder takes no new file, the path itself is yielded. Where the rename
    is impossible (a file that is its own mount), the bytes are copied into the existing file; if that fails too, the
    WriteError names the file that holds them. Raises WriteError for an OSError of these calls, one that names the
    temporary path, or one of a full or broken disk that names no file; other errors pass unchanged."""
    target, part = _open_part(Path(path))
    is_own_error = complete = False
    try:
        yield part
        if part != target:
            is_own_error = True
            _sync(part)
            keep = complete = True  # from here on the file is left if the rename fails
            _rename(part, target)
        keep = False
    except OSError as error:
        if isinstance(error, WriteError | BrokenPipeError) or not (is_own_error or _concerns(part, error)):
            raise
        size = os.path.getsize(part) if part.is_file() else 0
        if part != target and keep and size:
            left = f"{'all of it' if complete else 'what was written'} is kept in {part}"
        elif part != target or not part.is_file():
            left = "the old content is unchanged" if target.is_file() else "nothing is left of it"
        else:
            left = "the content there is incomplete"
        raise _write_error(
            path,
            error,
            f"after {size:,} bytes; {left}",
            "move that to its place" if complete else "look after that disk",
        ) from error
    finally:
        if part != target and not (keep and part.is_file() and os.path.getsize(part)):
            _remove(part)


def _open_part(path: Path) -> tuple[Path, Path]:
    """Return the final path and the temporary one, created empty, so that an unwritable target fails before the work.
    Links are followed and stay links; the suffix is that of the link."""
    if os.path.isdir(path):
        raise WriteError(f"{path} is a folder; name a file")
    if path.parent in _DEVICES or (os.path.exists(path) and not os.path.isfile(path)):
        return path, path
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{uuid.uuid4().hex[:12]}.part{path.suffix}")
    exists = os.path.exists(target)
    try:
        if exists:
            os.close(os.open(target, os.O_WRONLY))
    except OSError as error:
        raise _write_error(path, error, "the old content is unchanged", "make the file writable") from error
    try:
        part.touch(mode=0o600 if exists else 0o666, exist_ok=False)
        if exists:
            shutil.copymode(target, part)
    except OSError as error:
        if exists and error.errno in _CLOSED:
            return target, target
        _remove(part)
        fix = {errno.ENOENT: "make the folder", errno.ENOTDIR: "its folder is a file"}.get(
            error.errno or 0, "make the folder writable"
        )
        raise _write_error(
            path, error, "the old content is unchanged" if exists else "nothing is left of it", fix
        ) from error
    return target, part


def _sync(part: Path) -> None:
    """Flush the file to the disk, which may turn out to be full only now."""
    written = os.open(part, os.O_WRONLY)
    try:
        os.fsync(written)
    finally:
        os.close(written)


def _rename(part: Path, target: Path) -> None:
    """Rename the file, or else copy its bytes. Raises the error of the rename, unless the disk fails the copy."""
    try:
        os.replace(part, target)
    except OSError as refused:
        try:
            # Into the existing file: a sticky folder would refuse a new one too.
            with part.open("rb") as complete, target.open("rb+") as stream:
                stream.truncate()
                shutil.copyfileobj(complete, stream)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise (error if error.errno in _DISK else refused) from error


def _remove(part: Path) -> None:
    """Remove the temporary file, if it exists; a failure here is not reported."""
    with contextlib.suppress(OSError):
        part.unlink()


def _concerns(part: Path, error: OSError) -> bool:
    """Whether an error names this file, or is of a full or broken disk and names none."""
    names = (error.filename, error.filename2)
    return str(part) in map(str, names) or (names == (None, None) and error.errno in _DISK)


def _write_error(path: str | os.PathLike[str], error: OSError, left: str, fix: str) -> WriteError:
    """Build the error: the cause, what is left, and the fix; the disk's own fix if the disk is the cause."""
    cause, fix = error.strerror or str(error), _DISK.get(error.errno or 0, fix)
    return WriteError(f"{os.fspath(path)} could not be written: {cause}, {left}; {fix}, or name a file elsewhere")
