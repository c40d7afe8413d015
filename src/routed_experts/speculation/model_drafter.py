"""ModelDrafter: hands on what a draft model has proposed on the device, for the step that it was proposed for.

Dims: S tokens of a sequence, G generated tokens, k drafts."""

from collections.abc import Hashable

import numpy as np
from jaxtyping import Float, Int, Int32

from routed_experts.speculation.drafter import NO_DRAFT, Draft, DraftSample, DraftSequence, DraftSource


class ModelDrafter:
    """A Drafter without an index: `offer` brings the drafts of a sequence, which hold until it grows."""

    nbytes = 0

    def __init__(self) -> None:
        self._lengths: dict[Hashable, int] = {}  # tokens of open sequences
        self._offers: dict[Hashable, tuple[int, Draft]] = {}  # and of how many tokens it is the continuation

    def offer(
        self,
        key: Hashable,
        length: int,
        tokens: Int[np.ndarray, " k"],
        probabilities: Float[np.ndarray, " k"],
    ) -> None:
        """Take the drafts that follow the first `length` tokens of a sequence, open or not. A negative token: there is
        none from there on. `probabilities`: of each draft, given those before it."""
        known = (tokens < 0).tobytes().find(1)
        count = tokens.size if known < 0 else known
        survival = np.cumprod(probabilities[:count].astype(np.float64))
        self._offers[key] = length, Draft(tokens[:count].astype(np.int32), survival, DraftSource.MODEL)

    def is_ready(self, key: Hashable, length: int) -> bool:
        """Whether the draft model was asked for the tokens that follow the first `length` of a sequence."""
        return key in self._offers and self._offers[key][0] == length

    def last_offer(self, key: Hashable) -> tuple[int, Draft]:
        """The last drafts of a sequence, and of how many tokens they are the continuation; -1 without any."""
        return self._offers.get(key, (-1, NO_DRAFT))

    def open(self, key: Hashable, tokens: Int32[np.ndarray, " S"], info: DraftSequence) -> None:
        """Begin a sequence."""
        self._lengths[key] = tokens.size

    def extend(self, key: Hashable, tokens: Int32[np.ndarray, " S"]) -> None:
        """Append tokens."""
        self._lengths[key] += tokens.size

    def propose(self, key: Hashable, most: int) -> Draft:
        """Propose at most `most` tokens of what was offered for this length."""
        length, draft = self.last_offer(key)
        if length != self._lengths[key]:
            return NO_DRAFT
        return Draft(draft.tokens[:most], draft.survival[:most], draft.source)

    def close(self, key: Hashable) -> None:
        """Drop a sequence."""
        self._lengths.pop(key, None)
        self._offers.pop(key, None)

    def remember(self, prompt: Int32[np.ndarray, " S"], output: Int32[np.ndarray, " G"], sample: DraftSample) -> None:
        """Nothing is remembered."""

    def forget(self) -> None:
        """Nothing is remembered."""
