"""LLGrammarState: where one sequence stands in its grammar, by a matcher of llguidance. Engine thread only."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import UInt32

MAX_FORCED = 1 << 16  # tokens of a forced run, which are computed at once
_MAX_RETURNED = 1 << 12  # of them by one call
_MAX_ERROR_CHARS = 300
_T = TypeVar("_T")


class LLGrammarState:
    """A GrammarState. `matcher` may share its lexer with other sequences; `renew` makes one at the start of the grammar
    with a lexer of its own, for the case that they have used up the states of the shared one. `forced`: the run that
    the output begins with, where it is known. A forced run is computed once, and returned as it is used up."""

    def __init__(
        self,
        matcher: Any,
        eos_token_ids: frozenset[int],
        *,
        renew: Callable[[], Any],
        forced: Sequence[int] = (),
    ) -> None:
        self._matcher, self._eos_token_ids = matcher, eos_token_ids
        self._renew: Callable[[], Any] | None = renew  # None: the lexer is its own
        self._tokens: list[int] = []  # that the matcher has taken
        self._forced = deque(forced)  # that follow them
        self._is_complete, self._error = False, error_of(matcher)
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
        if self._forced and self._forced.popleft() != token:
            self._forced.clear()
        if token in self._eos_token_ids:
            self._is_complete = True
        elif self._run(lambda matcher: matcher.consume_token(token)):
            self._tokens.append(token)
        else:
            self._error = self._error or f"token {token} does not fit"

    @property
    def forced_run(self) -> tuple[int, ...]:
        """The rest of the forced run that was computed last."""
        return tuple(self._forced)

    def forced_tokens(self) -> tuple[int, ...]:
        """The tokens that follow whatever is sampled, or the first of them; empty where there is a choice."""
        if self._is_complete or self._error is not None:
            return ()
        if not self._forced:
            tokens = self._run(
                lambda matcher: matcher.compute_ff_tokens()
            )  # an error: for example, text without an end
            if not tokens or self._error is not None:
                return ()
            if len(tokens) > MAX_FORCED:
                self._error = f"more than {MAX_FORCED} tokens follow one another without a choice"
                return ()
            self._forced.extend(tokens[: self._matcher.validate_tokens(tokens)])
        return tuple(itertools.islice(self._forced, _MAX_RETURNED))

    def fill(self, words: UInt32[np.ndarray, " W"], *, keep_end: bool) -> None:
        """Write the bits of the tokens that may follow. `keep_end` False: without end tokens, unless nothing else may
        follow."""
        if self._error is not None:
            return
        words[:] = 0
        self._run(lambda matcher: matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes))
        if not keep_end:
            before = {word: words[word] for word in self._end_words}
            for word, bits in self._end_words.items():
                words[word] &= ~np.uint32(bits)
            if not words.any():
                for word, value in before.items():
                    words[word] = value
        if self._error is None and not words.any():
            self._error = "no token of the vocabulary may follow"

    def _run(self, ask: Callable[[Any], _T]) -> _T:
        """Ask the matcher; where it fails with a lexer that others use, once more with one of its own."""
        result = ask(self._matcher)
        self._error = error_of(self._matcher)
        if self._error is None or self._renew is None:
            return result
        matcher, self._renew = self._renew(), None
        for token in self._tokens:
            matcher.consume_token(token)
        result = ask(matcher)
        self._matcher, self._error = matcher, error_of(matcher)
        return result


def error_of(matcher: Any) -> str | None:
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
