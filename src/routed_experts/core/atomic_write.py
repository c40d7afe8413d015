"""Files that come whole or not at all: written under another name beside the one they are meant for, which they take at
the end.

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
_DISK = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free some of your quota there",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EIO: "look after that disk",
}
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)  # nobody may make a file there, or not this user


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], *, keep: bool = False) -> Generator[Path, None, None]:
    """Lend a path in the folder of `path`, of the same suffix, to write a file to; at the end the file is synced and
    renamed to `path`. After an error what stood at `path` still stands, and nothing is left of the new file; `keep`
    leaves it, unless empty, under the name that was lent.

    A device or a pipe is lent itself, and so is a file whose folder takes no other. Where the name cannot be given (a
    file that is a mount of its own), the bytes are copied into the file that stands there; if that fails too, they are
    kept where the WriteError says. Raises WriteError for an OSError of these calls, one that names the lent path, or
    one of a full or broken disk that names no file; others pass as they are."""
    target, part = _begin(Path(path))
    ours = whole = False
    try:
        yield part
        if part != target:
            ours = True
            _sync(part)
            keep = whole = True  # worth more now than a tidy folder
            _give_name(part, target)
        keep = False
    except OSError as error:
        if isinstance(error, WriteError | BrokenPipeError) or not (ours or _is_of(part, error)):
            raise
        size = os.path.getsize(part) if part.is_file() else 0
        if part != target and keep and size:
            left = f"{'all of it' if whole else 'what was written'} is kept in {part}"
        elif part != target or not part.is_file():
            left = "what stood there still stands" if target.is_file() else "nothing is left of it"
        else:
            left = "what stands there now is not whole"
        raise _told(
            path, error, f"after {size:,} bytes; {left}", "move that to its place" if whole else "look after that disk"
        ) from error
    finally:
        if part != target and not (keep and part.is_file() and os.path.getsize(part)):
            _drop(part)


def _begin(path: Path) -> tuple[Path, Path]:
    """Where the file is to be at the end, and until then, made empty: what cannot be written is told before the work.
    Links are followed, so that they stay links; the suffix is that of the link."""
    if os.path.isdir(path):
        raise WriteError(f"{path} is a folder; name a file")
    if path.parent in _DEVICES or (os.path.exists(path) and not os.path.isfile(path)):
        return path, path
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{uuid.uuid4().hex[:12]}.part{path.suffix}")
    there = os.path.exists(target)
    try:
        if there:
            os.close(os.open(target, os.O_WRONLY))
    except OSError as error:
        raise _told(path, error, "what stood there still stands", "make the file writable") from error
    try:
        part.touch(mode=0o600 if there else 0o666, exist_ok=False)
        if there:
            shutil.copymode(target, part)
    except OSError as error:
        if there and error.errno in _CLOSED:
            return target, target
        _drop(part)
        fix = {errno.ENOENT: "make the folder", errno.ENOTDIR: "its folder is a file"}.get(
            error.errno or 0, "make the folder writable"
        )
        raise _told(path, error, "what stood there still stands" if there else "nothing is left of it", fix) from error
    return target, part


def _sync(part: Path) -> None:
    """Bring the file to the disk, which may be full only now."""
    written = os.open(part, os.O_WRONLY)
    try:
        os.fsync(written)
    finally:
        os.close(written)


def _give_name(part: Path, target: Path) -> None:
    """Rename the file, or else copy its bytes. Raises what the rename met, unless the disk fails the copy."""
    try:
        os.replace(part, target)
    except OSError as refused:
        try:
            with (
                part.open("rb") as whole,
                target.open("rb+") as stream,
            ):  # no new file: a sticky folder would refuse that too
                stream.truncate()
                shutil.copyfileobj(whole, stream)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise (error if error.errno in _DISK else refused) from error


def _drop(part: Path) -> None:
    """Remove what was lent, if it is there; that it cannot be removed is not what the user must hear of."""
    with contextlib.suppress(OSError):
        part.unlink()


def _is_of(part: Path, error: OSError) -> bool:
    """Whether an error is of this file, as far as it says."""
    names = (error.filename, error.filename2)
    return str(part) in map(str, names) or (names == (None, None) and error.errno in _DISK)


def _told(path: str | os.PathLike[str], error: OSError, left: str, fix: str) -> WriteError:
    """Say what happened, what is left, and what to do: that of the disk if it is the disk."""
    cause, fix = error.strerror or str(error), _DISK.get(error.errno or 0, fix)
    return WriteError(f"{os.fspath(path)} could not be written: {cause}, {left}; {fix}, or name a file elsewhere")
