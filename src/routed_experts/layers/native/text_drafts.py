"""The search for drafts in texts, in C++: what routed_experts/speculation/compiled_search.py calls."""

import ctypes
import functools
import logging
import subprocess
from collections.abc import Callable

from routed_experts.layers.native import toolchain

logger = logging.getLogger(__name__)

_SIGNATURE = ctypes.PYFUNCTYPE(  # a call takes microseconds, so it retains the interpreter's lock
    None,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_void_p,
)


@functools.cache
def text_drafts_function() -> Callable[[int, int, int, int, int, int, int], None] | None:
    """Return RexTextDrafts of text_drafts.cpp, which takes addresses and numbers; None where it cannot be compiled."""
    try:
        library = toolchain.text_drafts_library()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.info("drafts are searched in Python: %s", error)
        return None
    return _SIGNATURE(("RexTextDrafts", library))
