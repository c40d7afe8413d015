"""SortedContexts: where contexts occur in a fixed text, at exactly the longest length; a search is a bisection.

The context of length n at position p is the tokens p-n+1..p. A key is a tag (hash) of length and context in the high
bits and a position in the low bits. Contexts of length n+1 are entered only where another position shares the context
of length n: elsewhere the tokens at the one position decide. A match is compared by tokens. Dims: S tokens, P
positions, R lengths, X keys, W tokens of the longest context."""

import sys
from array import array
from bisect import bisect_left, bisect_right
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

NO_TOKEN = -1  # stands before the first token, so that every position has a context of every length


class Match(NamedTuple):
    """An occurrence of the last `length` tokens; `end` is the position after it. Length 0: there is none. The positions
    that have this context are keys[start:stop], at length number `row`; stop 0: they are not known."""

    length: int
    end: int
    row: int = 0
    start: int = 0
    stop: int = 0


class Occurrences(NamedTuple):
    """Where a text has the longest suffix of a sequence that occurs in it: `length` tokens, 0 if none occurs.

    `positions`: of the last token, increasing, the latest ones; `following`: the token behind each; `is_complete`:
    there are no others. All of this also holds for the last `known` tokens, at most `length`."""

    positions: list[int]
    following: list[int]
    length: int
    known: int = 0
    is_complete: bool = False


class SearchedText(NamedTuple):
    """A text as compiled code reads it. `addresses`: of the keys, their number, of `padded`, of the positions, their
    number, and the first position without a key, -1 where all have one."""

    addresses: tuple[int, int, int, int, int, int]
    arrays: tuple[object, ...]  # live as long as their addresses


NO_MATCH = Match(0, 0)
NO_OCCURRENCES = Occurrences([], [], 0)
MOST_DRAFTS = 31  # tokens of a continuation
FEW = 4  # positions that are read one by one


class ContextHash:
    """Tags of contexts of min_window..max_window tokens. `position_bits`: texts have fewer than 2**position_bits
    tokens; the other bits of 63 are the tag. Equal parameters give equal tags."""

    def __init__(self, *, min_window: int, max_window: int, position_bits: int = 24) -> None:
        self.min_window, self.max_window = min_window, max_window
        self.position_mask = (1 << position_bits) - 1
        self.tag_mask = (1 << 63) - 1 - self.position_mask
        noise = np.random.default_rng(0x5EED)
        noise = noise.integers(-(1 << 63), 1 << 63, (2, max_window), np.int64) << position_bits  # so are tags
        self.factors, self.salts = noise[0], noise[1, min_window - 1 :]
        self.factor_list, self.salt_list = self.factors.tolist(), self.salts.tolist()


class Query:
    """The end of a sequence, to be found elsewhere. `padded`: W times NO_TOKEN, then the sequence, of which the tokens
    before index `end` are read; they do not change."""

    __slots__ = ("_hash", "_padded", "_sums", "end")

    def __init__(self, contexts: ContextHash, padded: memoryview, end: int) -> None:
        self._hash, self._padded, self.end = contexts, padded, end
        self._sums = list[int]()

    def sums(self, length: int) -> list[int]:
        """Return the sums of the contexts of 1 to `length` tokens or more: a tag is (sum + salt) & tag_mask."""
        if len(self._sums) < length:
            tokens = self._padded[self.end - length : self.end].tolist()
            tokens.reverse()
            self._sums = list(accumulate(map(mul, tokens, self._hash.factor_list)))
        return self._sums

    def common_length(self, padded: memoryview, end: int, length: int = 0) -> int:
        """Return how many tokens before `end` equal the last ones of the query, at most W; 0 where the last `length`
        are not equal. `padded`: W other tokens, then a text."""
        own, own_end, window = self._padded, self.end, self._hash.max_window
        if own[own_end - length : own_end] != padded[end - length : end]:
            return 0
        length += 1
        while length <= window and own[own_end - length] == padded[end - length]:
            length += 1
        return length - 1

    def tokens(self) -> list[int]:
        """Return the last W tokens, the latest first, NO_TOKEN behind the first."""
        return self._padded[self.end - self._hash.max_window : self.end].tolist()[::-1]


class SortedContexts:
    """The contexts that end at `positions` (increasing) of a text. `padded`: W other tokens, then the text; it is read
    while the index is used. `keys`: where they are sorted already. Without `keep_all` only the latest position of a
    context has a key.

    Building takes 0.1 to 0.5 us a position, with `keep_all` 0.1 to 1.3. Memory, in bytes: 8 a position for itself, and
    for its keys at most 4 * (R + 1), with `keep_all` 8 * R."""

    def __init__(
        self,
        contexts: ContextHash,
        padded: Int32[np.ndarray, " WS"],
        positions: Int64[np.ndarray, " P"],
        *,
        keep_all: bool = False,
        keys: "array[int] | None" = None,
    ) -> None:
        self._hash, self._positions, self.keep_all = contexts, positions, keep_all
        self._position_mask = np.array(contexts.position_mask)
        self.read(padded)
        self.keys = array("q") if keys is None else keys
        if keys is None:
            self.keys.frombytes(self._sort(padded).view(np.uint8).data)
        self._key_array = np.frombuffer(self.keys, np.int64)

    @property
    def nbytes(self) -> int:
        """Host memory of the keys and positions, in bytes."""
        return sys.getsizeof(self.keys) + self._positions.nbytes  # `keys` has room for more

    def read(self, padded: Int32[np.ndarray, " WS"]) -> None:
        """Read the text from here on, which begins with the same tokens."""
        self._padded, behind = padded, self._hash.max_window + 1
        self._view, self._behind, self._behind_view = padded.data, padded[behind:], padded.data[behind:]

    def searched_text(self, *, num_sorted: int = -1) -> SearchedText:
        """The text for compiled code."""
        keys, num_keys = self.keys.buffer_info()
        padded, positions = self._padded, self._positions
        addresses = keys, num_keys, padded.ctypes.data, positions.ctypes.data, positions.size, num_sorted
        return SearchedText(addresses, (self.keys, padded, positions))

    def find(self, query: Query, near: int = 0, longest: int = 1 << 30) -> Match:
        """Return the latest occurrence of the longest context that has one, or NO_MATCH. `longest`: no longer one
        has; `near`: the length that is expected. It changes the time of the search, not the result."""
        contexts, keys = self._hash, self.keys
        tag_mask, salts, num_keys, shortest = contexts.tag_mask, contexts.salt_list, len(keys), contexts.min_window
        if num_keys == 0:
            return NO_MATCH
        low, high = 0, min(longest, contexts.max_window) - shortest + 1  # the row is in low-1..high-1
        row, is_near, best, best_start, best_tag = min(max(near - shortest, 0), high - 1), True, -1, 0, 0
        sums = query.sums(min(row + 2, high) + shortest - 1)
        while low < high:  # a context of length n that has a key has one of each shorter length
            tag = (sums[row + shortest - 1] + salts[row]) & tag_mask
            start = bisect_left(keys, tag)
            if start < num_keys and keys[start] & tag_mask == tag:
                best, best_start, best_tag, low = row, start, tag, row + 1
                row = low if is_near else (low + high) // 2
                if len(sums) < row + shortest <= contexts.max_window:
                    sums = query.sums(min(row + shortest + 3, contexts.max_window))
            else:
                high = row
                row = row - 1 if is_near else (low + high) // 2
                is_near = False
        if best < 0:
            return NO_MATCH
        stop = best_start + 1
        if self.keep_all and stop < num_keys and keys[stop] & tag_mask == best_tag:
            stop = bisect_right(keys, best_tag | contexts.position_mask, stop)
        position = keys[stop - 1] & contexts.position_mask
        length = query.common_length(self._view, position + contexts.max_window + 1, shortest + best)
        if length == 0:  # two contexts share a tag
            return scan(contexts, self._padded, self._positions, query)
        return Match(length, position + 1, best, best_start, stop)

    def all_occurrences(self, match: Match, most: int) -> Occurrences:
        """Return the latest `most` occurrences of a match."""
        if match.stop == 0:
            position = match.end - 1
            return Occurrences([position], [self._behind_view[position]], match.length, match.length)
        known = self._hash.min_window + match.row  # a longer match is the only one of `known` tokens
        positions, following = self.occurrences(match, most)
        return Occurrences(
            positions, following, match.length, known, self.keep_all and match.stop - match.start <= most
        )

    def occurrences(self, match: Match, most: int) -> tuple[list[int], list[int]]:
        """Return the latest `most` positions, increasing, whose context is that of the longest match, and the tokens
        behind them; with `keep_all`. Contexts that share a tag, one pair in 2**39, are taken for one."""
        start, stop = match.start, match.stop
        if stop == 0:
            return [match.end - 1], [self._behind_view[match.end - 1]]
        if stop - start > most:
            start = stop - most
        if stop - start <= FEW:
            mask, behind = self._hash.position_mask, self._behind_view
            positions = [key & mask for key in self.keys[start:stop]]
            return positions, [behind[position] for position in positions]
        latest = np.bitwise_and(self._key_array[start:stop], self._position_mask)
        return latest.tolist(), self._behind[latest].tolist()

    def search(self, query: Query, most: int, near: int = 0, longest: int = 1 << 30) -> Occurrences:
        """Find the latest `most` occurrences of the longest context that has one; without `keep_all` the latest one."""
        match = self.find(query, near, longest)
        return self.all_occurrences(match, most) if match.length else NO_OCCURRENCES

    def _sort(self, padded: Int32[np.ndarray, " WS"]) -> Int64[np.ndarray, " X"]:
        contexts, positions = self._hash, self._positions
        sums = np.zeros(0 if positions.size == 0 else int(positions[-1]) + 1, np.int64)
        levels: list[Int64[np.ndarray, " X"]] = [np.zeros(0, np.int64)]
        for length in range(1, contexts.max_window + 1):
            if positions.size == 0:
                break
            tokens = padded[positions + (contexts.max_window - length + 1)]
            read = sums[positions] + tokens * contexts.factors[length - 1]
            sums[positions] = read
            if length < contexts.min_window:
                continue
            keys = ((read + contexts.salts[length - contexts.min_window]) & contexts.tag_mask) | positions
            keys.sort()
            tags = keys & contexts.tag_mask
            same = np.zeros(keys.size + 1, bool)  # same[i]: key i has the tag of key i - 1
            np.equal(tags[1:], tags[:-1], out=same[1:-1])
            levels.append(keys if self.keep_all else keys[~same[1:]])
            positions = keys[same[1:] | same[:-1]] & contexts.position_mask
        entered = np.concatenate(levels)
        entered.sort(kind="stable")  # merges the runs, each of which is sorted
        return entered


def scan(
    contexts: ContextHash, padded: Int32[np.ndarray, " WS"], positions: Int64[np.ndarray, " P"], query: Query
) -> Match:
    """Find the longest match by comparing tokens at every position."""
    best, latest = NO_MATCH, query.tokens()
    for length in range(1, contexts.max_window + 1):
        tokens = padded[positions + (contexts.max_window - length + 1)]
        positions = positions[tokens == latest[length - 1]]
        if positions.size == 0:
            break
        if length >= contexts.min_window:
            best = Match(length, int(positions[-1]) + 1)
    return best
