"""What commands share: starting JAX, the progress bar of loading, the version.

JAX is imported by the commands that compute, not by --help."""

import contextlib
import importlib.metadata
import os
import signal
import sys
import threading
import types
from collections.abc import Generator
from pathlib import Path
from typing import NoReturn

from routed_experts.core.errors import MachineError
from routed_experts.core.interrupts import hold_interrupts
from routed_experts.core.server_args import ServerArgs

PROGRAM = "routed-experts"


class LoadBar:
    """Draws a progress bar of loading `total` bytes on standard error, over the previous one."""

    def __init__(self) -> None:
        self._drawn = ""

    def __call__(self, done: int, total: int) -> None:
        """Draw the bar unless it would look the same."""
        width = 30
        filled = width * done // max(total, 1)
        unit, size = ("GB", 1e9) if total >= 1e9 else ("MB", 1e6)
        text = f"loading [{'#' * filled}{'.' * (width - filled)}] {done / size:.2f} of {total / size:.2f} {unit}"
        text += "\n" if done >= total else ""
        if text != self._drawn:
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
            self._drawn = text


def start_jax(*, default_platform: str | None, find_devices: bool = True) -> Path | None:
    """Import JAX, enable its compilation cache, and find its devices; returns the cache folder, or None.
    `find_devices` False: not now, because a process group must be joined before."""
    cache = _cache_folder()
    with hold_interrupts():
        import jax

        from routed_experts.execution.absent_tpu import has_tpu, skip_absent_tpu

    if not has_tpu():  # beside a GPU, JAX starts the TPU runtime all the same: with these it fails silently
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    if default_platform is not None and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", default_platform)
    skip_absent_tpu()
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if not find_devices:
        return cache
    try:
        jax.devices()
    except RuntimeError as error:
        raise MachineError(
            f"JAX finds no device ({error}); set JAX_PLATFORMS to a platform of this machine, such as cpu"
        ) from error
    return cache


@contextlib.contextmanager
def interrupt_on_sigterm() -> Generator[None]:
    """Let SIGTERM end the command as Ctrl-C does. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: types.FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def announce_compilation(args: ServerArgs, *, offloads: bool = False) -> None:
    """Say on standard error, in one line, that an engine of `args` will compile C++ kernels; after `start_jax`.
    `offloads`: experts run on the host, with these kernels."""
    import jax

    from routed_experts.engine.build.backends import DEFAULT_BACKENDS
    from routed_experts.layers.native import toolchain

    used = offloads or DEFAULT_BACKENDS.may_compile(args, jax.default_backend())
    if used and not toolchain.is_compiled():
        print(toolchain.COMPILING, file=sys.stderr, flush=True)


def _cache_folder() -> Path | None:
    """JAX_COMPILATION_CACHE_DIR, else routed-experts/jax in the user's cache folder (XDG_CACHE_HOME, ~/.cache), created
    if it does not exist."""
    chosen, xdg = os.environ.get("JAX_COMPILATION_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path(os.path.expanduser("~")) / ".cache"
    folder = Path(chosen) if chosen else base / "routed-experts" / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"compiled programs are not cached: {error}", file=sys.stderr)
        return None
    return folder if os.access(folder, os.W_OK) else None


def version() -> str:
    """The version of the installed distribution."""
    try:
        return importlib.metadata.version(PROGRAM)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
