"""Collections of garbage: one of all objects stops the threads of Python for over 0.1 s."""

import contextlib
import gc
from collections.abc import Generator


def freeze_gc() -> None:
    """Exclude the objects of start-up from full garbage collections, which would stop the process for over 0.1 s.

    Objects without references are still freed. Cycles are not, so those that exist are collected first."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def frozen_gc() -> Generator[None]:
    """`freeze_gc` until the end; what others have frozen before stays so."""
    was_frozen = gc.get_freeze_count() > 0
    freeze_gc()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
