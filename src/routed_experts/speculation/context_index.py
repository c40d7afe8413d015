"""ContextIndex: where the last tokens of a growing sequence occurred before, at exactly the longest length.

    positions   0 ........................ num_sorted ........ size-1
                SortedContexts             a string           the query
                              W characters of it
Dims: S tokens, R lengths, m tokens, W tokens of the longest context, k drafts."""

import sys

import numpy as np
from jaxtyping import Int32

from routed_experts.speculation.sorted_contexts import (
    NO_OCCURRENCES,
    NO_TOKEN,
    ContextHash,
    Occurrences,
    Query,
    SortedContexts,
    common_length,
)

MIN_TAIL, MAX_TAIL = 256, 2048  # unsorted positions before they are sorted: S / 8, within these


class ContextIndex:
    """The index of one sequence of token ids from 0 to 1,114,111 (those of characters), for the lengths of `contexts`.
    `keep_all` is needed to find more than one occurrence.

    Memory, in bytes: at most 6 a token and 1,072 for the tokens, that of SortedContexts for the keys, and 4 for each
    of the at most W + 2,048 tokens of the string."""

    first_tokens = frozenset[int]()  # nothing is before the first position

    def __init__(self, tokens: Int32[np.ndarray, " S"], contexts: ContextHash, *, keep_all: bool = False) -> None:
        self._hash, self._keep_all = contexts, keep_all
        self.padded = np.full(contexts.max_window + MIN_TAIL, NO_TOKEN, np.int32)  # W times NO_TOKEN, then tokens
        self._size = self._num_sorted = self._tail_start = 0
        self._tail, self._max_tail = "", MIN_TAIL  # the tokens from position tail_start on
        self._query: Query | None = None
        self._sorted = self._sort(0)
        self.extend(tokens)

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return self.padded.nbytes + self._sorted.nbytes + sys.getsizeof(self._tail)

    @property
    def size(self) -> int:
        """Tokens of the sequence."""
        return self._size

    @property
    def min_window(self) -> int:
        """Tokens of the shortest context."""
        return self._hash.min_window

    @property
    def max_window(self) -> int:
        """W."""
        return self._hash.max_window

    def extend(self, tokens: Int32[np.ndarray, " m"]) -> None:
        """Append tokens. Sorts all positions where the unsorted ones have filled their part: 0.1 to 0.5 us a token of
        the sequence, once in 256 to 2,048 tokens. Raises ValueError for a sequence that is too long."""
        window, start, size = self._hash.max_window, self._size, self._size + len(tokens)
        if size > self._hash.position_mask:
            most = self._hash.position_mask
            raise ValueError(f"a sequence of {size} tokens is too long to index; at most {most} are")
        if window + size > self.padded.size:
            grown = np.full(window + size + max(size // 2, MIN_TAIL), NO_TOKEN, np.int32)
            grown[: window + start] = self.padded[: window + start]
            self.padded = self._sorted.padded = grown
        self.padded[window + start : window + size] = tokens
        self._size, self._query = size, None
        if size - self._num_sorted <= self._max_tail:
            self._tail += _characters(tokens)
            return
        self._num_sorted = size - 1  # the last position is the query, never an answer
        self._sorted = self._sort(self._num_sorted)
        self._max_tail = min(max(size // 8, MIN_TAIL), MAX_TAIL)
        self._tail_start = max(self._num_sorted - window, 0)
        self._tail = _characters(self.padded[window + self._tail_start : window + size])

    def query(self) -> Query:
        """Return the end of the sequence, which is not empty. It holds until the next `extend`."""
        if self._query is None:
            self._query = self._hash.query(self.padded[self._size : self._size + self._hash.max_window])
        return self._query

    def search(self, query: Query, most: int, near: int = 0) -> Occurrences:
        """Find the latest `most` earlier occurrences of the longest suffix that has one. `query`: that of this index;
        `near`: as in SortedContexts.find."""
        window, min_window = self._hash.max_window, self._hash.min_window
        match = self._sorted.find(query, near)
        position, length = self._find_in_tail(min_window + match.row), 0
        if position < 0 and match.length:
            return self._sorted.all_occurrences(match, most)
        while position >= 0:  # an occurrence of length n is one of each shorter length
            length = common_length(self._hash, self.padded, position, query)
            longer = max(length + 1, match.length)
            position = self._find_in_tail(longer) if longer <= window else -1
        if length < match.length:
            return self._sorted.all_occurrences(match, most)._replace(known=match.length)
        if length == 0:
            return NO_OCCURRENCES
        positions = self._all_in_tail(length, most + 1)
        if length == match.length and len(positions) <= most:
            positions = self._sorted.occurrences(match, most + 1 - len(positions)) + positions
        is_complete = len(positions) <= most and (match.stop > 0 or length > match.length)
        return Occurrences(positions[-most:], length, length, is_complete, match.row)

    def tokens_from(self, start: int, most: int) -> Int32[np.ndarray, " m"]:
        """Return a copy of at most `most` tokens from position `start` on."""
        window = self._hash.max_window
        return self.padded[window + start : window + min(start + most, self._size)].copy()

    def tokens_behind(self, positions: list[int]) -> list[int]:
        """Return the token behind each position."""
        behind = self._hash.max_window + 1
        return [self.padded.item(behind + position) for position in positions]

    def continuations(self, positions: list[int], most: int) -> list[list[int]]:
        """Return the `most` tokens behind each position, which is not the last. Behind the end of the sequence its copy
        goes on: what follows the position is repeated, as in a text that loops."""
        behind, end = self._hash.max_window + 1, self._hash.max_window + self._size
        text = self.padded[:end]
        rows = [text[behind + position : behind + position + most].tolist() for position in positions]
        if behind + positions[-1] + most > end:
            rows = [row if len(row) == most else (row * most)[:most] for row in rows]
        return rows

    def _sort(self, count: int) -> SortedContexts:
        return SortedContexts(self._hash, self.padded, np.arange(count), keep_all=self._keep_all)

    def _find_in_tail(self, length: int) -> int:
        """Return the latest position in the unsorted part with the last `length` tokens, or -1."""
        positions = self._all_in_tail(length, 1)
        return positions[0] if positions else -1

    def _all_in_tail(self, length: int, most: int) -> list[int]:
        """Return the latest `most` positions in the unsorted part with the last `length` tokens, increasing."""
        tail, size, positions = self._tail, len(self._tail), list[int]()
        suffix, behind = tail[-length:], self._tail_start + length - 1
        first, end = max(self._num_sorted - behind, 0), size - 1
        while len(positions) < most and (start := tail.rfind(suffix, first, end)) >= 0:
            positions.append(start + behind)
            end = start + length - 1  # an earlier one may overlap
        positions.reverse()
        return positions


def _characters(tokens: Int32[np.ndarray, " m"]) -> str:
    """Return tokens as a string, which Python searches fast."""
    return "".join(map(chr, tokens.tolist()))
