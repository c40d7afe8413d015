"""PromptBalancer: how many prompts of a call each engine of a group gets."""

import contextlib
import itertools
import threading
from collections.abc import Generator, Sequence
from typing import TypeVar

_T = TypeVar("_T")


class PromptBalancer:
    """Divides prompts evenly, in runs of the order of the engines. Those that are left over go to the engines with the
    fewest open prompts, of equal ones to the first: calls of threads spread, and calls one after another with as many
    prompts meet the same engines. Thread-safe."""

    def __init__(self, num_engines: int) -> None:
        self._open = [0] * num_engines  # assigned, and not answered
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def assign(self, num_prompts: int) -> Generator[list[int]]:
        """The number of prompts of each engine; they are open until the context ends."""
        with self._lock:
            share, left = divmod(num_prompts, len(self._open))
            idlest = sorted(range(len(self._open)), key=self._open.__getitem__)[:left]
            shares = [share + (index in idlest) for index in range(len(self._open))]
            self._open = [number + taken for number, taken in zip(self._open, shares, strict=True)]
        try:
            yield shares
        finally:
            with self._lock:
                self._open = [number - taken for number, taken in zip(self._open, shares, strict=True)]


def split(values: Sequence[_T], shares: Sequence[int]) -> list[list[_T]]:
    """Split into runs of these lengths, in order."""
    bounds = itertools.accumulate(shares, initial=0)
    return [list(values[low:high]) for low, high in itertools.pairwise(bounds)]
