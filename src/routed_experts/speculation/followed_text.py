"""FollowedText: a text that a sequence is expected to repeat token by token, and how well it does.

Dims: m appended tokens, k drafts, T tokens of the text."""

import numpy as np
from jaxtyping import Int32

from routed_experts.speculation.continuations import Continuation, latest_continuation
from routed_experts.speculation.drafter import DraftSource


class FollowedText:
    """`offset`: where in the text the sequence's next token is expected; `run`: how many tokens before it were as
    expected, and to begin with an estimate of that. After a wrong token the text is followed at the same distance."""

    def __init__(self, text: Int32[np.ndarray, " T"], source: DraftSource, *, offset: int = 0, run: int) -> None:
        self.text, self.source = text, source
        self.offset, self.run = offset, run

    def advance(self, tokens: list[int]) -> None:
        """Compare the tokens that were appended."""
        if len(tokens) == 1:
            is_expected = self.offset < self.text.size and self.text.item(self.offset) == tokens[0]
            self.run = self.run + 1 if is_expected else 0
            self.offset += 1
            return
        expected = self.text[self.offset : self.offset + len(tokens)].tolist()
        self.offset += len(tokens)
        if expected == tokens:
            self.run += len(tokens)
        elif len(expected) < len(tokens):
            self.run = 0
        else:
            pairs = zip(reversed(expected), reversed(tokens), strict=True)
            self.run = next(number for number, pair in enumerate(pairs) if pair[0] != pair[1])

    def continuation(self, most: int) -> Continuation:
        """The next tokens of the text, at most `most`."""
        return latest_continuation(self.text[self.offset : self.offset + most].tolist(), self.run, self.source)
