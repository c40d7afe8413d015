"""The search for drafts in texts, in C++: what routed_experts/speculation/compiled_search.py calls."""

import ctypes
import dataclasses
import functools
import logging
import subprocess
from collections.abc import Callable

from routed_experts.layers.native import toolchain

logger = logging.getLogger(__name__)

_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int64


@dataclasses.dataclass(frozen=True, slots=True)
class TextDraftFunctions:
    """The functions of text_drafts.cpp, which take addresses and numbers in the order of their parameters."""

    search: Callable[[int, int, int, int, int, int, int], None]
    enter_contexts: Callable[[int, int, int, int, int, int, int], int]
    take_keys: Callable[[int], None]
    layout: Callable[[int], None]


@functools.cache
def text_draft_functions() -> TextDraftFunctions | None:
    """Return the functions, compiled at first use; None where they cannot be."""
    try:
        library = toolchain.text_drafts_library()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.info("drafts are searched in Python: %s", error)
        return None
    # A search takes microseconds and retains the interpreter's lock. Entering contexts takes up to 6 ms, without it.
    search = ctypes.PYFUNCTYPE(None, _ADDRESS, _ADDRESS, _NUMBER, _ADDRESS, _NUMBER, _NUMBER, _ADDRESS)
    enter = ctypes.CFUNCTYPE(_NUMBER, _ADDRESS, _ADDRESS, _NUMBER, _NUMBER, _ADDRESS, _NUMBER, _NUMBER)
    take, layout = ctypes.CFUNCTYPE(None, _ADDRESS), ctypes.PYFUNCTYPE(None, _ADDRESS)
    return TextDraftFunctions(
        search(("RexTextDrafts", library)),
        enter(("RexEnterContexts", library)),
        take(("RexTakeKeys", library)),
        layout(("RexDraftLayout", library)),
    )
