"""ContextIndex: where the last tokens of a growing sequence occurred before, at exactly the longest length.

    positions   0 ........................ num_sorted ........ size-1
                SortedContexts             a string           the query
                              W characters of it
Dims: S tokens, R lengths, m tokens, W tokens of the longest context, k drafts."""

import sys

import numpy as np
from jaxtyping import Int32

from routed_experts.speculation.compiled_search import CompiledSearch
from routed_experts.speculation.sorted_contexts import (
    NO_OCCURRENCES,
    NO_TOKEN,
    ContextHash,
    Occurrences,
    Query,
    SearchedText,
    SortedContexts,
)

MIN_TAIL, MAX_TAIL = 256, 2048  # unsorted positions before they are sorted: S / 8, within these


class ContextIndex:
    """The index of one sequence of token ids from 0 to 1,114,111 (those of characters), for the lengths of `contexts`.
    `keep_all` is needed to find more than one occurrence. `compiled`: what searches and sorts instead.

    Memory, in bytes: at most 6 a token and 1,072 for the tokens, that of SortedContexts, and 4 for each
    of the at most W + 2,048 tokens of the string."""

    first_tokens = frozenset[int]()  # nothing is before the first position

    def __init__(
        self,
        tokens: Int32[np.ndarray, " S"],
        contexts: ContextHash,
        *,
        keep_all: bool = False,
        compiled: CompiledSearch | None = None,
    ) -> None:
        self._hash, self._keep_all, self._compiled = contexts, keep_all, compiled
        self.min_window, self.max_window = contexts.min_window, contexts.max_window
        self.padded = np.full(contexts.max_window + MIN_TAIL, NO_TOKEN, np.int32)  # W times NO_TOKEN, then tokens
        self.size = self._num_sorted = self._tail_start = 0
        self._tail, self._max_tail = "", MIN_TAIL  # the tokens from position tail_start on
        self._query: Query | None = None
        self._sorted = self._sort(0)
        self._searched_text: SearchedText | None = None
        self._read(self.padded)
        self.extend(tokens)

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return self.padded.nbytes + self._sorted.nbytes + sys.getsizeof(self._tail)

    def extend(self, tokens: Int32[np.ndarray, " m"]) -> None:
        """Append tokens. Sorts positions where the unsorted ones have filled their part, once in 256 to 2,048 tokens:
        0.1 to 1.3 us a token of the sequence; compiled, 0.5 to 3 us an unsorted one. Raises ValueError for a sequence
        that is too long."""
        window, start, size = self.max_window, self.size, self.size + len(tokens)
        if size > self._hash.position_mask:
            most = self._hash.position_mask
            raise ValueError(f"a sequence of {size} tokens is too long to index; at most {most} are")
        if window + size > self.padded.size:
            grown = np.full(window + size + max(size // 2, MIN_TAIL), NO_TOKEN, np.int32)
            grown[: window + start] = self.padded[: window + start]
            self._read(grown)
        self.padded[window + start : window + size] = tokens
        self.size, self._query = size, None
        if size - self._num_sorted <= self._max_tail:
            if self._compiled is None:
                self._tail += _characters(tokens)
            return
        self._sorted, self._searched_text = self._sort(size - 1), None
        self._num_sorted = size - 1  # the last position is the query, never an answer
        self._max_tail = min(max(size // 8, MIN_TAIL), MAX_TAIL)
        self._tail_start = max(self._num_sorted - window, 0)
        if self._compiled is None:
            self._tail = _characters(self.padded[window + self._tail_start : window + size])

    def query(self) -> Query:
        """Return the end of the sequence, which is not empty. It holds until the next `extend`."""
        if self._query is None:
            self._query = Query(self._hash, self._view, self.max_window + self.size)
        return self._query

    def searched_text(self) -> SearchedText:
        """The sequence for compiled code: the same object until another array is read."""
        if self._searched_text is None:
            self._searched_text = self._sorted.searched_text(num_sorted=self._num_sorted)
        return self._searched_text

    def latest(self, count: int) -> list[int]:
        """Return the last `count` tokens; there are as many."""
        end = self.max_window + self.size
        return self._view[end - count : end].tolist()

    def search(self, query: Query, most: int, near: int = 0, longest: int = 1 << 30) -> Occurrences:
        """Find the latest `most` earlier occurrences of the longest suffix that has one. `query`: that of this index;
        `near`, `longest`: as in SortedContexts.find. Without `compiled`: with it there is no string to search."""
        assert self._compiled is None, "compiled code searches this index"
        window, tail, behind = self.max_window, self._tail, self._tail_start
        match = self._sorted.find(query, near, longest)
        longer, length = self.min_window + match.row, 0
        first, last = self._num_sorted - behind, len(tail) - 1  # characters first..last-1 are the unsorted positions
        while longer <= window:
            start = tail.rfind(tail[-longer:], max(first - longer + 1, 0), last)
            if start < 0:
                break
            length = query.common_length(self._view, window + behind + start + longer, longer)
            longer = max(length + 1, match.length)  # an occurrence of length n is one of each shorter length
        if length < match.length:
            occurrences = self._sorted.all_occurrences(match, most)
            return occurrences._replace(known=match.length) if length else occurrences
        if length == 0:
            return NO_OCCURRENCES
        positions = self._all_in_tail(length, most + 1)
        following = [self._behind[position] for position in positions]
        is_complete = len(positions) <= most
        if length == match.length and is_complete:
            is_complete = match.stop > 0 and len(positions) + match.stop - match.start <= most
            if len(positions) < most:
                before, behind_before = self._sorted.occurrences(match, most - len(positions))
                positions, following = before + positions, behind_before + following
        return Occurrences(positions[-most:], following[-most:], length, length, is_complete)

    def tokens_from(self, start: int, most: int) -> Int32[np.ndarray, " m"]:
        """Return a copy of at most `most` tokens from position `start` on."""
        window = self.max_window
        return self.padded[window + start : window + min(start + most, self.size)].copy()

    def behind(self, positions: list[int]) -> list[int]:
        """Return the token behind each position, a negative one behind the last."""
        tokens = self._behind
        return [tokens[position] for position in positions]

    def continuations(self, positions: list[int], most: int) -> list[list[int]]:
        """Return the `most` tokens behind each position, which is not the last. Behind the end of the sequence its copy
        goes on: what follows the position is repeated, as in a text that loops."""
        end, tokens = self.size - 1, self._behind
        if positions[-1] + most <= end:
            return [tokens[position : position + most].tolist() for position in positions]
        rows = [tokens[position : min(position + most, end)].tolist() for position in positions]
        return [row if len(row) == most else (row * most)[:most] for row in rows]

    def _read(self, padded: Int32[np.ndarray, " WS"]) -> None:
        self.padded = padded
        self._view = padded.data
        self._behind = self._view[self.max_window + 1 :]  # the tokens behind positions
        self._sorted.read(padded)
        self._searched_text = None

    def _sort(self, count: int) -> SortedContexts:
        first, has_long_tags = self._num_sorted, self._hash.position_mask < 1 << 32
        if self._compiled is not None and first > 0 and count - first <= 2 * MAX_TAIL and has_long_tags:
            return self._compiled.grow(self._sorted, self.padded, first, count)
        return SortedContexts(self._hash, self.padded, np.arange(count), keep_all=self._keep_all)

    def _all_in_tail(self, length: int, most: int) -> list[int]:
        """Return the latest `most` positions in the unsorted part with the last `length` tokens, increasing."""
        tail, positions = self._tail, list[int]()
        suffix, behind = tail[-length:], self._tail_start + length - 1
        first, end = max(self._num_sorted - behind, 0), len(tail) - 1
        if tail.find(suffix[-1], -length, -1) < 0:  # no two occurrences overlap
            start = end + behind
            for part in tail[first:end].rsplit(suffix, most)[:0:-1]:
                start -= len(part) + length
                positions.append(start)
        else:
            while len(positions) < most and (start := tail.rfind(suffix, first, end)) >= 0:
                positions.append(start + behind)
                end = start + length - 1  # an earlier one may overlap
        positions.reverse()
        return positions


def _characters(tokens: Int32[np.ndarray, " m"]) -> str:
    """Return tokens as a string, which Python searches fast."""
    return "".join(map(chr, tokens.tolist()))
