"""LLGrammarState: where one sequence stands in its grammar, by a matcher of llguidance. Engine thread only."""

from typing import Any

import numpy as np
from jaxtyping import UInt32

_MAX_ERROR_CHARS = 300


class LLGrammarState:
    """A GrammarState."""

    def __init__(self, matcher: Any, eos_token_ids: frozenset[int]) -> None:
        self._matcher, self._eos_token_ids = matcher, eos_token_ids
        self._is_complete, self._error = False, _error_of(matcher)
        self._end_words = _bits(eos_token_ids)

    @property
    def is_complete(self) -> bool:
        """Whether the output has ended with an end token that the grammar allowed."""
        return self._is_complete

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further; None while it can."""
        return self._error

    def accept(self, token: int) -> None:
        """Move on by one token of the output."""
        if self._is_complete or self._error is not None:
            return
        if token in self._eos_token_ids:
            self._is_complete = True
        elif not self._matcher.consume_token(token):
            self._error = _error_of(self._matcher) or f"token {token} does not fit"

    def forced_tokens(self) -> tuple[int, ...]:
        """The tokens that follow whatever is sampled; empty where there is a choice."""
        if self._is_complete or self._error is not None:
            return ()
        tokens = self._matcher.compute_ff_tokens()
        self._error = _error_of(self._matcher)  # for example forced text without an end
        if not tokens or self._error is not None:
            return ()
        return tuple(tokens[: self._matcher.validate_tokens(tokens)])

    def fill(self, words: UInt32[np.ndarray, " W"], *, keep_end: bool) -> None:
        """Write the bits of the tokens that may follow. `keep_end` False: without end tokens, unless nothing else may
        follow."""
        if self._error is not None:
            return
        words[:] = 0
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._error = _error_of(self._matcher)
        if not keep_end:
            before = {word: words[word] for word in self._end_words}
            for word, bits in self._end_words.items():
                words[word] &= ~np.uint32(bits)
            if not words.any():
                for word, value in before.items():
                    words[word] = value
        if self._error is None and not words.any():
            self._error = "no token of the vocabulary may follow"


def _error_of(matcher: Any) -> str | None:
    """The error of a matcher, in one short line."""
    if not matcher.is_error():
        return None
    text = " ".join(str(matcher.get_error()).split()) or "unknown"
    return text if len(text) <= _MAX_ERROR_CHARS else text[: _MAX_ERROR_CHARS - 3] + "..."


def _bits(tokens: frozenset[int]) -> dict[int, int]:
    """The bits of tokens, by word."""
    words: dict[int, int] = {}
    for token in tokens:
        words[token // 32] = words.get(token // 32, 0) | 1 << token % 32
    return words
