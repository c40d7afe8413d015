"""TextIndex: the contexts of several finished texts, searched for the end of another sequence.

    padded    W times NO_TEXT | NO_TEXT, context, text | NO_TEXT, context, text | ..
Dims: m positions, k drafts, T tokens of a text, W tokens of the longest context."""

import bisect
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int32

from routed_experts.speculation.sorted_contexts import (
    MOST_DRAFTS,
    ContextHash,
    Match,
    Occurrences,
    Query,
    SearchedText,
    SortedContexts,
)

NO_TEXT = -2  # between two texts; no sequence holds it
OVERHEAD = 3072  # bytes of an index beside its arrays; 2,600 were measured
TEXT_OVERHEAD = 192  # bytes of a text in an index beside its tokens; 110 were measured


class TextIndex:
    """The index of texts, each with the tokens before it. A context ends at the last token of those, or in the text;
    a token of the text follows it. Memory: 4 bytes a token, that of SortedContexts with `keep_all`, and OVERHEAD."""

    def __init__(
        self, contexts: ContextHash, texts: Iterable[tuple[Int32[np.ndarray, " S"], Int32[np.ndarray, " T"]]]
    ) -> None:
        self._hash = contexts
        window = contexts.max_window
        separator = np.full(1, NO_TEXT, np.int32)
        parts, positions = [np.full(window, NO_TEXT, np.int32)], [np.zeros(0, np.int64)]
        self._starts, size = list[int](), 0  # of the texts, as positions
        first_tokens = set[int]()
        for before, text in texts:
            before = before[-window:]
            start = size + 1 + before.size
            parts += [separator, before, text]
            first = start - 1 if before.size else start
            positions.append(np.arange(first, start + text.size - 1))
            self._starts.append(start)
            first_tokens.update(before[-1:].tolist())
            size = start + text.size
        self.padded = np.concatenate([*parts, np.full(MOST_DRAFTS, NO_TEXT, np.int32)])
        self.first_tokens = frozenset(first_tokens)
        self._behind = self.padded.data[window + 1 :]  # the tokens behind positions
        self._sorted = SortedContexts(contexts, self.padded, np.concatenate(positions), keep_all=True)

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return OVERHEAD + TEXT_OVERHEAD * len(self._starts) + self.padded.nbytes + self._sorted.nbytes

    def searched_text(self) -> SearchedText:
        """The texts for compiled code."""
        return self._sorted.searched_text()

    def find(self, query: Query, near: int = 0) -> Match:
        """Return the latest occurrence of the longest context of the query that has one, or NO_MATCH."""
        return self._sorted.find(query, near)

    def search(self, query: Query, most: int, near: int = 0, longest: int = 1 << 30) -> Occurrences:
        """Find the latest `most` occurrences of the longest context of the query that has one."""
        return self._sorted.search(query, most, near, longest)

    def behind(self, positions: list[int]) -> list[int]:
        """Return the token behind each position."""
        tokens = self._behind
        return [tokens[position] for position in positions]

    def continuations(self, positions: list[int], most: int) -> list[list[int]]:
        """Return the `most` tokens behind each position; the first negative one ends the text."""
        tokens = self._behind
        return [tokens[position : position + most].tolist() for position in positions]

    def locate(self, position: int) -> tuple[int, int]:
        """Return the number of the text that a position with a continuation is in, and the place of the token behind it
        in that text."""
        number = bisect.bisect_right(self._starts, position + 1) - 1
        return number, position + 1 - self._starts[number]
