"""Compiles the C++ of this package for this machine and loads the libraries: the kernels, and the search for drafts.

A library is in the user's cache folder under a checksum of everything it was made of: sources, jaxlib's
headers, compiler and processor. A machine without a compiler has no native kernels: see `unavailable_reason`."""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jax

logger = logging.getLogger(__name__)
HERE = Path(__file__).parent
KERNELS, TEXT_DRAFTS = HERE / "kernels.cpp", HERE / "text_drafts.cpp"  # a library each
# Where GCC takes a processor (AMD's Zen 1 to 3, in GCC 12) to be faster so, it splits some chains of fused products and
# sums again, and others not: two kernels that add up the same numbers would round them differently. Clang ignores this.
ALWAYS_FUSE = "--param=avoid-fma-max-bits=0"
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", ALWAYS_FUSE, "-fno-math-errno"),
    *("-fPIC", "-shared", "-w"),
)
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 600
COMPILING = "compiling the C++ kernels (once) ..."


def compiler() -> tuple[str, ...] | None:
    """The command that compiles C++: the system's, or the one that `pip install ziglang` brings; None where there is
    none."""
    for name in _COMPILERS:
        if path := shutil.which(name):
            return (path,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    return None


@functools.cache
def cache_folder() -> Path:
    """Where compiled libraries are kept; a fresh folder of this process alone where the user's cache cannot be
    written."""
    try:
        folder = Path.home() / ".cache" / "routed-experts" / "native"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return Path(tempfile.mkdtemp(prefix="routed-experts-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="routed-experts-"))


def is_compiled() -> bool:
    """Whether the library is there, or no compiler is: then the first use compiles nothing."""
    command = compiler()
    return command is None or library_file(command).exists()


@functools.cache
def unavailable_reason() -> str | None:
    """None where native kernels run; else the reason, with its remedy."""
    try:
        library()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return str(error)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled library, made if it is not there. Raises OSError where it cannot be made or loaded."""
    loaded = ctypes.CDLL(str(_compiled_file(KERNELS)))
    use_bf16(loaded, own_bf16_gains(loaded))
    return loaded


@functools.cache
def text_drafts_library() -> ctypes.CDLL:
    """The compiled search for drafts, made in a second if it is not there. Raises OSError where it cannot be made or
    loaded."""
    return ctypes.CDLL(str(_compiled_file(TEXT_DRAFTS)))


class Bf16Gains(NamedTuple):
    """What products of rows that are rounded to bfloat16 gain over products of floats: in pairs of neighbours, and in
    tiles (0 where the processor has none, NaN where the system refuses them to this process)."""

    pairs: float
    tiles: float


def measured_bf16_gains(loaded: ctypes.CDLL) -> Bf16Gains:
    """Measure the gains, for some milliseconds."""
    pairs, tiles = ctypes.c_double(), ctypes.c_double()
    loaded.RexBf16Gains(ctypes.byref(pairs), ctypes.byref(tiles))
    return Bf16Gains(pairs.value, tiles.value)


def own_bf16_gains(loaded: ctypes.CDLL) -> Bf16Gains:
    """The gains that decide how the library multiplies: those that are stored, or measured now."""
    return bf16_gains(_compiled_file(KERNELS), lambda: measured_bf16_gains(loaded))


def use_bf16(loaded: ctypes.CDLL, gains: Bf16Gains) -> None:
    """Multiply rows by weights of bfloat16, and by codes, the way that gains most; no product may run meanwhile. Warns
    where the system refuses tiles."""
    wants_tiles = gains.tiles > max(1.0, gains.pairs)
    loaded.RexUseBf16.restype = ctypes.c_bool
    uses_tiles = loaded.RexUseBf16(ctypes.c_bool(gains.pairs > 1.0), ctypes.c_bool(wants_tiles))
    if math.isnan(gains.tiles) or (wants_tiles and not uses_tiles):
        logger.warning(
            "the system refuses this process the AMX tiles of the processor: products of bfloat16 are slower, and"
            " rounded differently from those of processes that have them"
        )


def bf16_gains(file: Path, measure: Callable[[], Bf16Gains]) -> Bf16Gains:
    """The gains on this processor. They are measured once and stored beside the library `file` under the processor's
    name, unless the system refuses tiles. All processes read what the first one stored, and round alike where all are
    granted tiles."""
    gains_file = file.with_name(f"{file.stem}-{hashlib.sha256(_processor_name().encode()).hexdigest()[:8]}.gains")
    if not gains_file.exists():
        gains = measure()
        if math.isnan(gains.tiles):
            return gains
        with tempfile.NamedTemporaryFile("w", dir=file.parent) as fresh:
            fresh.write(" ".join(f"{gain:.3f}" for gain in gains))
            fresh.flush()
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(fresh.name, gains_file)
    return Bf16Gains(*map(float, gains_file.read_text().split()))


def _compiled_file(source: Path) -> Path:
    """Return the library of a source, made if it is not there."""
    command = compiler()
    if command is None:
        raise OSError("no C++ compiler was found (looked for c++, g++, clang++); install one, or `pip install ziglang`")
    file = library_file(command, source)
    if not file.exists():
        compile_once(command, file, source)
    return file


def compile_once(command: tuple[str, ...], file: Path, source: Path = KERNELS) -> None:
    """Compile, or wait for another process that does. Where there are no locks, each process compiles."""
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(ImportError, OSError):
            import fcntl  # of Unix alone

            lock = opened.enter_context(file.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            compile_library(command, file, source)


def compile_library(command: tuple[str, ...], file: Path, source: Path = KERNELS) -> None:
    """Compile to a temporary file and rename it: a process that loads the file never meets half of it."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / "library.so"
        arguments = [
            *command,
            *FLAGS,
            *simd_flags(),
            f"-I{jax.ffi.include_dir()}",
            str(source),
            "-o",
            str(made),
        ]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)} could not compile the native kernels: {done.stderr.strip()[-500:]}")
        os.replace(made, file)


def simd_flags() -> tuple[str, ...]:
    return ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()


def library_file(command: tuple[str, ...], source: Path = KERNELS) -> Path:
    """Where the library that `command` makes of a source and its headers is kept."""
    return cache_folder() / f"{_checksum(command, source)}.so"


def _checksum(command: tuple[str, ...], source: Path) -> str:
    version_text = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    ).stdout
    headers = sorted(HERE.glob("*.h")) if source == KERNELS else []
    sources = [file.read_text() for file in [*headers, source]]
    parts = [*sources, *FLAGS, version("jaxlib"), version_text, platform.machine(), processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def processor() -> str:
    """The instructions that this processor knows: -march=native compiles for them."""
    return _cpuinfo("flags", "features")


def _processor_name() -> str:
    return _cpuinfo("model name", "cpu part")


def _cpuinfo(*keys: str) -> str:
    """The first line of /proc/cpuinfo that begins with one of `keys`, in lower case."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text().splitlines()
    return next((line for line in lines if line.lower().startswith(keys)), platform.processor())
