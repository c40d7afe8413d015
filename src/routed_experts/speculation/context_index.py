"""ContextIndex: where the last tokens of a growing sequence occurred before, at exactly the longest length.

    positions   0 ........................ num_sorted ........ size-1
                SortedContexts             tags by length,    the query
                                           compared in full
Dims: S tokens, R lengths, m appended tokens, W tokens of the longest context."""

import numpy as np
from jaxtyping import Int32, Int64

from routed_experts.speculation.sorted_contexts import (
    NO_TOKEN,
    ContextHash,
    Match,
    Query,
    SortedContexts,
    common_length,
    scan,
)

MIN_TAIL, MAX_TAIL = 256, 2048  # unsorted positions before they are sorted: S / 8, within these


class ContextIndex:
    """The index of one sequence of token ids >= 0, for the lengths of `contexts`. `keep_all` is needed for
    `occurrences`.

    Memory, in bytes: at most 6 a token and 1,072 for the tokens, that of SortedContexts for the keys, and 8 * R * 2,048
    for the tags."""

    def __init__(self, tokens: Int32[np.ndarray, " S"], contexts: ContextHash, *, keep_all: bool = False) -> None:
        self._hash, self._keep_all = contexts, keep_all
        self._buffer = np.full(contexts.max_window + MIN_TAIL, NO_TOKEN, np.int32)  # W times NO_TOKEN, then tokens
        self._size = self._num_sorted = 0
        self._sorted = self._sort(0)
        self._tail = np.zeros((contexts.num_lengths, MIN_TAIL), np.int64)
        self.extend(tokens)

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return self._buffer.nbytes + self._sorted.nbytes + self._tail.nbytes

    @property
    def size(self) -> int:
        """Tokens of the sequence."""
        return self._size

    def extend(self, tokens: Int32[np.ndarray, " m"]) -> None:
        """Append tokens. Sorts all positions where the unsorted ones have filled their part: 0.1 to 0.5 us a token of
        the sequence, once in 256 to 2,048 tokens. Raises ValueError for a sequence that is too long."""
        window, start, size = self._hash.max_window, self._size, self._size + len(tokens)
        if size > self._hash.position_mask:
            most = int(self._hash.position_mask)
            raise ValueError(f"a sequence of {size} tokens is too long to index; at most {most} are")
        if window + size > self._buffer.size:
            grown = np.full(window + size + max(size // 2, MIN_TAIL), NO_TOKEN, np.int32)
            grown[: window + start] = self._buffer[: window + start]
            self._buffer = self._sorted.padded = grown
        self._buffer[window + start : window + size] = tokens
        self._size = size
        if size - self._num_sorted > self._tail.shape[1]:
            start = self._num_sorted = size - 1  # the last position is the query, never an answer
            self._sorted = self._sort(start)
            capacity = min(max(size // 8, MIN_TAIL), MAX_TAIL)
            if capacity != self._tail.shape[1]:
                self._tail = np.zeros((self._tail.shape[0], capacity), np.int64)
        if size > start:
            self._tail[:, start - self._num_sorted : size - self._num_sorted] = self._hash.tags(
                self._buffer, start, size
            )

    def query(self) -> Query | None:
        """Return the end of the sequence, None while it is empty. It holds until the next `extend`."""
        column = self._size - self._num_sorted - 1
        if column < 0:
            return None
        return Query(self._buffer[self._size : self._size + self._hash.max_window], self._tail[:, column])

    def find_longest(self, query: Query) -> Match:
        """Return the latest earlier occurrence of the longest suffix that has one, or NO_MATCH. `query`: that of this
        index."""
        min_window, column = self._hash.min_window, self._size - self._num_sorted - 1
        best = in_sorted = self._sorted.find(query)
        row = max(best.length - min_window, 0)
        latest = self._find_in_tail(row, column)
        if latest < 0:
            return best
        longest = len(self._tail) - 1
        while row < longest:  # an occurrence of length n is one of each shorter length
            middle = (row + longest + 1) // 2
            found_at = self._find_in_tail(middle, column)
            if found_at < 0:
                longest = middle - 1
            else:
                row, latest = middle, found_at
        length = common_length(self._hash, self._buffer, latest, query)
        if length < min_window + row:  # two contexts share a tag
            return scan(self._hash, self._buffer, np.arange(self._size - 1), query)
        return in_sorted._replace(end=latest + 1) if length == in_sorted.length else Match(length, latest + 1)

    def occurrences(self, query: Query, match: Match, most: int) -> Int64[np.ndarray, " m"]:
        """Return the latest `most` earlier positions, increasing, whose context is that of the longest match, which
        `find_longest` has returned."""
        column = self._size - self._num_sorted - 1
        tags = self._tail[match.length - self._hash.min_window]
        is_same = tags[:column] == tags[column]
        if not is_same.any():
            return self._sorted.occurrences(query, match, most)
        positions = is_same.nonzero()[0][-most:] + self._num_sorted
        if match.stop == 0 or positions.size == most:
            return positions
        return np.concatenate([self._sorted.occurrences(query, match, most - positions.size), positions])

    def tokens_from(self, start: int, most: int) -> Int32[np.ndarray, " m"]:
        """Return a copy of at most `most` tokens from position `start` on."""
        window = self._hash.max_window
        return self._buffer[window + start : window + min(start + most, self._size)].copy()

    def continuations(self, positions: Int64[np.ndarray, " m"], most: int) -> Int32[np.ndarray, "m k"]:
        """Return the `most` tokens behind each position, none of which is the last. Behind the end of the sequence its
        copy goes on: what follows the position is repeated, as in a text that loops."""
        following = positions[:, None] + 1
        steps = np.arange(most) % (self._size - following)
        return self._buffer[self._hash.max_window + following + steps]

    def _sort(self, count: int) -> SortedContexts:
        return SortedContexts(self._hash, self._buffer, np.arange(count), keep_all=self._keep_all)

    def _find_in_tail(self, row: int, column: int) -> int:
        """Return the latest position in the unsorted part with the query's tag of this row, or -1."""
        tags = self._tail[row]
        last = (tags[:column] == tags[column]).tobytes().rfind(1)
        return last + self._num_sorted if last >= 0 else -1
