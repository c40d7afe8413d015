"""Processes of this machine that a fleet starts through Ray, and of which Ray may lose hold.

Ray starts its own processes in the process group of the command. A signal to the group (a shell's `kill %1`, a
supervisor) would end Ray before the replicas have drained, and leave HAProxy on its port, which Ray alone would end."""

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Generator
from pathlib import Path

_leading = threading.Event()  # set while processes that are forked lead groups of their own


@functools.cache
def _register() -> None:
    os.register_at_fork(after_in_child=lambda: os.setpgid(0, 0) if _leading.is_set() else None)


@contextlib.contextmanager
def own_process_groups() -> Generator[None, None, None]:
    """Within, processes that are started with a `preexec_fn`, as Ray's are, lead process groups of their own."""
    _register()
    _leading.set()
    try:
        yield
    finally:
        _leading.clear()


def end_users_of(folder: str) -> list[int]:
    """End the processes that have a path in `folder` among their arguments; returns their ids. Where the machine has
    no /proc none is found."""
    ended: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if any(word.startswith(os.fsencode(folder) + b"/") for word in words):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(entry.name), signal.SIGTERM)
                ended.append(int(entry.name))
    return ended
