"""Drafter: proposes the next tokens of a sequence, which the model then verifies; they never change its answer.

Dims: k drafts, S tokens of a sequence, G generated tokens."""

import dataclasses
import enum
import hashlib
from collections.abc import Hashable
from typing import Protocol

import numpy as np
from jaxtyping import Float64, Int32


class DraftSource(enum.Enum):
    """Where a draft is from."""

    CONTEXT = "context"  # the sequence itself
    ROLLOUT = "rollout"  # an earlier answer to the same prompt, or another choice of it
    NAMESPACE = "namespace"  # earlier answers of the namespace
    PREDICTION = "prediction"  # what the caller expects
    MODEL = "model"  # sampled by a draft model


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens of one sequence, in their order.

    `survival[j]`: the estimated probability that drafts 0..j are all accepted, in 0..1; it never rises with j."""

    tokens: Int32[np.ndarray, " k"]
    survival: Float64[np.ndarray, " k"]
    source: DraftSource = DraftSource.CONTEXT


NO_DRAFT = Draft(np.zeros(0, np.int32), np.zeros(0, np.float64))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftSample:
    """Which of the answers to a prompt a sequence is. `namespace`: sequences of equal namespaces may share text where
    the engine allows that. `noise`: equal for answers that are sampled with the same noise (seed and choice, None
    without noise)."""

    namespace: str | None = None
    noise: Hashable = None


def namespace_digest(namespace: str | None) -> bytes:
    """Return 16 bytes by which stores know a namespace, however long it is; none for that without a name."""
    if namespace is None:
        return b""
    return hashlib.blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftSequence:
    """What a drafter may know of a sequence besides its tokens. `group`: shared by the choices of one prompt, None for
    a single one; `prediction`: the answer that the caller expects."""

    prompt_len: int
    sample: DraftSample = DraftSample()
    group: Hashable = None
    prediction: Int32[np.ndarray, " G"] | None = None


class Drafter(Protocol):
    """What proposes drafts. A key names one sequence. One thread uses it."""

    @property
    def nbytes(self) -> int:
        """Host memory of all open sequences and of what is remembered, in bytes."""
        ...

    def open(self, key: Hashable, tokens: Int32[np.ndarray, " S"], info: DraftSequence) -> None:
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

    def remember(self, prompt: Int32[np.ndarray, " S"], output: Int32[np.ndarray, " G"], sample: DraftSample) -> None:
        """Take an answer for later sequences of its namespace; a drafter without a store ignores it."""
        ...

    def forget(self) -> None:
        """Drop all that is remembered, also for open sequences."""
        ...
