"""FollowedText: a text that a sequence is expected to repeat token by token, and how well it does.

Dims: m appended tokens, k drafts, T tokens of the text."""

import numpy as np
from jaxtyping import Int32

from routed_experts.speculation.continuations import latest_draft
from routed_experts.speculation.drafter import Draft, DraftSource


class FollowedText:
    """`place`: where in the text the sequence's next token is expected; `run`: how many tokens before it were as
    expected, and to begin with an estimate of that. After a wrong token the text is followed at the same distance."""

    def __init__(self, text: Int32[np.ndarray, " T"], source: DraftSource, *, place: int = 0, run: int) -> None:
        self.text, self.source = text, source
        self.place, self.run = place, run

    def advance(self, tokens: Int32[np.ndarray, " m"]) -> None:
        """Compare the tokens that were appended."""
        expected = self.text[self.place : self.place + tokens.size]
        self.place += tokens.size
        if expected.size == tokens.size:
            wrong = (expected == tokens).tobytes().rfind(0)
            self.run = tokens.size - 1 - wrong if wrong >= 0 else self.run + tokens.size
        else:
            self.run = 0

    def draft(self, most: int) -> Draft:
        """The next tokens of the text, at most `most`."""
        return latest_draft(self.text[self.place : self.place + most].copy(), self.run, self.source)
