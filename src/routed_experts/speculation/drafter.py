"""Drafter: proposes the next tokens of a sequence, which the model then verifies; they never change its answer.

Dims: k drafts, S tokens of a sequence."""

import dataclasses
from collections.abc import Hashable
from typing import Protocol

import numpy as np
from jaxtyping import Float64, Int32


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens of one sequence, in their order.

    `survival[j]`: the estimated probability that drafts 0..j are all accepted, in 0..1; it never rises with j."""

    tokens: Int32[np.ndarray, " k"]
    survival: Float64[np.ndarray, " k"]


NO_DRAFT = Draft(np.zeros(0, np.int32), np.zeros(0, np.float64))


class Drafter(Protocol):
    """What proposes drafts. A key names one sequence; sequences share no tokens. One thread uses it."""

    @property
    def nbytes(self) -> int:
        """Host memory of all open sequences, in bytes."""
        ...

    def open(self, key: Hashable, tokens: Int32[np.ndarray, " S"]) -> None:
        """Begin a sequence with its known tokens; a sequence that is open under this key is replaced."""
        ...

    def extend(self, key: Hashable, tokens: Int32[np.ndarray, " S"]) -> None:
        """Append tokens to an open sequence."""
        ...

    def propose(self, key: Hashable, most: int) -> Draft:
        """Propose at most `most` tokens that follow an open sequence; the draft may be empty."""
        ...

    def close(self, key: Hashable) -> None:
        """Drop a sequence and its memory; an unknown key is ignored."""
        ...
