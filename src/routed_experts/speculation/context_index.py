"""ContextIndex: where the last tokens of a growing sequence occurred before, at exactly the longest length.

The context of length n at position p is the tokens p-n+1..p. Two parts hold the contexts of all positions:

    positions   0 ........................ num_sorted ........ size-1
                sorted keys, searched          tags by length,    the query
                by bisection                   compared in full

A key is a tag (hash) of length and context in the high bits and a position in the low bits. Only the latest position of
a context has a key. Contexts of length n+1 are entered only where another position shares the context of length n:
elsewhere the tokens at the one position decide. A match is compared by tokens, and where two contexts turn out to share
a tag, the sequence is scanned. Dims: S tokens, R lengths, m appended tokens, X keys."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

MIN_TAIL, MAX_TAIL = 256, 2048  # unsorted positions before they are sorted: S / 8, within these
_NO_TOKEN = -1  # stands before the first token, so that every position has a context of every length


class Match(NamedTuple):
    """An earlier occurrence of the last `length` tokens; `end` is the position after it. Length 0: there is none."""

    length: int
    end: int


NO_MATCH = Match(0, 0)


class ContextIndex:
    """The index of one sequence of token ids >= 0, for lengths min_window..max_window.

    Memory, in bytes: at most 6 a token and 1,072 for the tokens, 4 * (R + 1) a token for the keys, and 8 * R * 2,048
    for the tags. `position_bits`: the sequence has fewer than 2**position_bits tokens; the other bits of 64 are the
    tag."""

    def __init__(
        self, tokens: Int32[np.ndarray, " S"], *, min_window: int, max_window: int, position_bits: int = 24
    ) -> None:
        self._min, self._max = min_window, max_window
        self._position_mask = np.int64((1 << position_bits) - 1)
        self._tag_mask = ~self._position_mask
        noise = np.random.default_rng(0x5EED)
        factors = noise.integers(-(1 << 63), 1 << 63, (2, max_window), np.int64) << position_bits  # so are tags
        self._factors, self._salts = factors[0], factors[1, min_window - 1 :]
        self._buffer = np.full(max_window + MIN_TAIL, _NO_TOKEN, np.int32)  # max_window times _NO_TOKEN, then tokens
        self._size = self._num_sorted = 0
        self._keys = np.zeros(0, np.int64)
        self._tail = np.zeros((max_window - min_window + 1, MIN_TAIL), np.int64)
        self.extend(tokens)

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return self._buffer.nbytes + self._keys.nbytes + self._tail.nbytes

    @property
    def size(self) -> int:
        """Tokens of the sequence."""
        return self._size

    def extend(self, tokens: Int32[np.ndarray, " m"]) -> None:
        """Append tokens. Sorts all positions where the unsorted ones have filled their part: 0.1 to 0.5 us a token of
        the sequence, once in 256 to 2,048 tokens. Raises ValueError for a sequence that is too long."""
        start, size = self._size, self._size + len(tokens)
        if size > self._position_mask:
            raise ValueError(f"a sequence of {size} tokens is too long to index; at most {self._position_mask} are")
        if self._max + size > self._buffer.size:
            grown = np.full(self._max + size + max(size // 2, MIN_TAIL), _NO_TOKEN, np.int32)
            grown[: self._max + start] = self._buffer[: self._max + start]
            self._buffer = grown
        self._buffer[self._max + start : self._max + size] = tokens
        self._size = size
        if size - self._num_sorted > self._tail.shape[1]:
            self._keys = self._sort_contexts(size - 1)
            start = self._num_sorted = size - 1  # the last position is the query, never an answer
            capacity = min(max(size // 8, MIN_TAIL), MAX_TAIL)
            if capacity != self._tail.shape[1]:
                self._tail = np.zeros((self._tail.shape[0], capacity), np.int64)
        if size > start:
            self._tail[:, start - self._num_sorted : size - self._num_sorted] = self._compute_tags(start, size)

    def find_longest(self) -> Match:
        """Return the latest earlier occurrence of the longest suffix that has one, or NO_MATCH."""
        column = self._size - self._num_sorted - 1
        if column < 0:
            return NO_MATCH
        best = NO_MATCH
        if self._keys.size:
            query = self._tail[:, column]
            found = self._keys[self._keys.searchsorted(query | self._position_mask, "right") - 1]
            row = ((found & self._tag_mask) == query).tobytes().rfind(1)  # of the longest; -1: none
            if row >= 0:
                position = int(found[row] & self._position_mask)
                best = Match(self._common_length(position), position + 1)
                if best.length < self._min + row:
                    return self._scan()
        row = max(best.length - self._min, 0)
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
        length = self._common_length(latest)
        return Match(length, latest + 1) if length >= self._min + row else self._scan()

    def tokens_from(self, start: int, most: int) -> Int32[np.ndarray, " m"]:
        """Return a copy of at most `most` tokens from position `start` on."""
        return self._buffer[self._max + start : self._max + min(start + most, self._size)].copy()

    def _compute_tags(self, start: int, end: int) -> Int64[np.ndarray, "R m"]:
        """Return the tags of positions [start, end) for each length."""
        windows = np.ndarray(
            (end - start, self._max), np.int32, self._buffer, offset=4 * (self._max + start), strides=(4, -4)
        )  # [m, max_window]: each position and the tokens before it
        sums = (windows * self._factors).cumsum(axis=1)
        return (sums[:, self._min - 1 :] + self._salts).T

    def _sort_contexts(self, count: int) -> Int64[np.ndarray, " X"]:
        """Return the sorted keys of positions [0, count)."""
        sums = np.zeros(count, np.int64)
        positions = np.arange(count)
        levels: list[Int64[np.ndarray, " X"]] = []
        for length in range(1, self._max + 1):
            read = sums[positions] + self._buffer[positions + (self._max - length + 1)] * self._factors[length - 1]
            sums[positions] = read
            if length < self._min:
                continue
            keys = (read + self._salts[length - self._min]) | positions
            keys.sort()
            tags = keys & self._tag_mask
            same = np.zeros(keys.size + 1, bool)  # same[i]: key i has the tag of key i - 1
            np.equal(tags[1:], tags[:-1], out=same[1:-1])
            levels.append(keys[~same[1:]])
            positions = keys[same[1:] | same[:-1]] & self._position_mask
            if positions.size == 0:
                break
        entered = np.concatenate(levels)
        entered.sort(kind="stable")  # merges the runs, each of which is sorted
        return entered

    def _find_in_tail(self, row: int, column: int) -> int:
        """Return the latest position in the unsorted part with the query's tag of this row, or -1."""
        tags = self._tail[row]
        found = (tags[:column] == tags[column]).tobytes().rfind(1)
        return found + self._num_sorted if found >= 0 else -1

    def _common_length(self, position: int) -> int:
        """Return how many tokens up to `position` equal the last ones of the sequence; at most max_window."""
        stop, end = self._max + position + 1, self._max + self._size
        equal = self._buffer[stop - self._max : stop] == self._buffer[end - self._max : end]
        return self._max - 1 - equal.tobytes().rfind(0)

    def _scan(self) -> Match:
        """Find the longest match by comparing tokens at every position."""
        tokens, last = self._buffer[self._max :], self._size - 1
        best, candidates = NO_MATCH, np.arange(last)
        for length in range(1, self._max + 1):
            shift = self._max - length + 1
            candidates = candidates[self._buffer[candidates + shift] == self._buffer[last + shift]]
            if candidates.size == 0:
                break
            if length >= self._min:
                best = Match(length, int(candidates[-1]) + 1)
        assert best.length == 0 or best.end < self._size, (best, tokens.size)
        return best
