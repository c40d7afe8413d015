"""SortedContexts: where contexts occur in a fixed text, at exactly the longest length; a search is a bisection.

The context of length n at position p is the tokens p-n+1..p. A key is a tag (hash) of length and context in the high
bits and a position in the low bits. Contexts of length n+1 are entered only where another position shares the context
of length n: elsewhere the tokens at the one position decide. A match is compared by tokens. Dims: S tokens, P
positions, R lengths, X keys, W tokens of the longest context."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

NO_TOKEN = -1  # stands before the first token, so that every position has a context of every length


class Query(NamedTuple):
    """The end of a sequence, to be found elsewhere. `tokens`: the last W, the oldest first, NO_TOKEN before the
    first; `tags`: of its contexts, by length."""

    tokens: Int32[np.ndarray, " W"]
    tags: Int64[np.ndarray, " R"]


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

    `positions`: of the last token, increasing, the latest ones; `is_complete`: there are no others. All of this also
    holds for the last `known` tokens, at most `length`. `row`: near which length number the next search begins."""

    positions: list[int]
    length: int
    known: int = 0
    is_complete: bool = False
    row: int = -1


NO_MATCH = Match(0, 0)
NO_OCCURRENCES = Occurrences([], 0)
MOST_DRAFTS = 31  # tokens of a continuation
NEAR = 2  # lengths on either side of the expected one that a search looks at first


class ContextHash:
    """Tags of contexts of min_window..max_window tokens. `position_bits`: texts have fewer than 2**position_bits
    tokens; the other bits of 64 are the tag. Equal parameters give equal tags."""

    def __init__(self, *, min_window: int, max_window: int, position_bits: int = 24) -> None:
        self.min_window, self.max_window = min_window, max_window
        self.position_mask = (1 << position_bits) - 1
        self.tag_mask = ~self.position_mask
        noise = np.random.default_rng(0x5EED)
        factors = noise.integers(-(1 << 63), 1 << 63, (2, max_window), np.int64) << position_bits  # so are tags
        self.factors, self.salts = factors[0], factors[1, min_window - 1 :]

    @property
    def num_lengths(self) -> int:
        """R."""
        return self.max_window - self.min_window + 1

    def query(self, tokens: Int32[np.ndarray, " W"]) -> Query:
        """Return the query for the end of a sequence: its last W tokens, NO_TOKEN before the first."""
        sums = (tokens[::-1] * self.factors).cumsum()
        return Query(tokens, sums[self.min_window - 1 :] + self.salts)

    def tags(self, padded: Int32[np.ndarray, " WS"], start: int, end: int) -> Int64[np.ndarray, "R m"]:
        """Return the tags of positions [start, end) for each length. `padded`: W other tokens, then the text."""
        windows = np.ndarray(
            (end - start, self.max_window), np.int32, padded, offset=4 * (self.max_window + start), strides=(4, -4)
        )  # [m, W]: each position and the tokens before it
        sums = (windows * self.factors).cumsum(axis=1)
        return (sums[:, self.min_window - 1 :] + self.salts).T


class SortedContexts:
    """The contexts that end at `positions` (increasing) of a text. `padded`: W other tokens, then the text; it is read
    while the index is used, and may be replaced by a longer copy. Without `keep_all` only the latest position of a
    context has a key.

    Building takes 0.1 to 0.5 us a position. Memory, in bytes: at most 4 * (R + 1) a position, with `keep_all` 8 * R."""

    def __init__(
        self,
        contexts: ContextHash,
        padded: Int32[np.ndarray, " WS"],
        positions: Int64[np.ndarray, " P"],
        *,
        keep_all: bool = False,
    ) -> None:
        self._hash, self.padded, self._positions, self._keep_all = contexts, padded, positions, keep_all
        self._keys = self._sort()

    @property
    def nbytes(self) -> int:
        """Host memory of the keys, in bytes."""
        return self._keys.nbytes

    def find(self, query: Query, near: int = 0) -> Match:
        """Return the latest occurrence of the longest context that has one, or NO_MATCH. `near`: the length number
        that is expected. It changes the time of the search, not the result: lengths around it are looked up first, and
        the others only where the longest may be among them."""
        contexts, num_lengths = self._hash, query.tags.size
        if self._keys.size == 0:
            return NO_MATCH
        low = max(min(near, num_lengths) - NEAR, 0)
        high = min(low + 2 * NEAR, num_lengths)
        row, start = self._find_tag(query, low, high)
        if row == high - 1 and high < num_lengths:
            longer = self._find_tag(query, high, num_lengths)
            row, start = longer if longer[0] >= 0 else (row, start)
        elif row < 0 and low > 0:  # a context of length n that has a key has one of each shorter length
            row, start = self._find_tag(query, 0, low)
        if row < 0:
            return NO_MATCH
        last_key = query.tags.item(row) | contexts.position_mask
        stop = int(self._keys.searchsorted(last_key, "right")) if self._keep_all else start + 1
        position = self._keys.item(stop - 1) & contexts.position_mask
        length = common_length(contexts, self.padded, position, query)
        if length < contexts.min_window + row:  # two contexts share a tag
            return scan(contexts, self.padded, self._positions, query)
        return Match(length, position + 1, row, start, stop)

    def occurrences(self, match: Match, most: int) -> list[int]:
        """Return the latest `most` positions, increasing, whose context is that of the longest match; with `keep_all`.
        Contexts that share a tag, of which there is one pair in 2**40, are taken for one."""
        if match.stop == 0:
            return [match.end - 1]
        keys = self._keys[max(match.start, match.stop - most) : match.stop]
        return (keys & self._hash.position_mask).tolist()

    def search(self, query: Query, most: int, near: int = 0) -> Occurrences:
        """Find the latest `most` occurrences of the longest context that has one; without `keep_all` the latest one."""
        match = self.find(query, near)
        return self.all_occurrences(match, most) if match.length else NO_OCCURRENCES

    def all_occurrences(self, match: Match, most: int) -> Occurrences:
        """Return the latest `most` occurrences of a match."""
        positions = self.occurrences(match, most + 1)
        if match.stop == 0:
            return Occurrences(positions, match.length, match.length)
        known = self._hash.min_window + match.row  # a longer match is the only one of `known` tokens
        return Occurrences(positions[-most:], match.length, known, len(positions) <= most, match.row)

    def _find_tag(self, query: Query, low: int, high: int) -> tuple[int, int]:
        """Return the highest length number in low..high-1 whose tag has a key, and its first key; (-1, 0) if none."""
        keys, tag_mask = self._keys, self._hash.tag_mask
        starts = keys.searchsorted(query.tags[low:high]).tolist()
        for row in range(high - 1, low - 1, -1):
            start = starts[row - low]
            if start < keys.size and keys.item(start) & tag_mask == query.tags.item(row):
                return row, start
        return -1, 0

    def _sort(self) -> Int64[np.ndarray, " X"]:
        contexts, positions = self._hash, self._positions
        sums = np.zeros(0 if positions.size == 0 else int(positions[-1]) + 1, np.int64)
        levels: list[Int64[np.ndarray, " X"]] = [np.zeros(0, np.int64)]
        for length in range(1, contexts.max_window + 1):
            if positions.size == 0:
                break
            tokens = self.padded[positions + (contexts.max_window - length + 1)]
            read = sums[positions] + tokens * contexts.factors[length - 1]
            sums[positions] = read
            if length < contexts.min_window:
                continue
            keys = (read + contexts.salts[length - contexts.min_window]) | positions
            keys.sort()
            tags = keys & contexts.tag_mask
            same = np.zeros(keys.size + 1, bool)  # same[i]: key i has the tag of key i - 1
            np.equal(tags[1:], tags[:-1], out=same[1:-1])
            levels.append(keys if self._keep_all else keys[~same[1:]])
            positions = keys[same[1:] | same[:-1]] & contexts.position_mask
        entered = np.concatenate(levels)
        entered.sort(kind="stable")  # merges the runs, each of which is sorted
        return entered


def common_length(contexts: ContextHash, padded: Int32[np.ndarray, " WS"], position: int, query: Query) -> int:
    """Return how many tokens up to `position` equal the last ones of the query; at most W."""
    stop = contexts.max_window + position + 1
    equal = padded[stop - contexts.max_window : stop] == query.tokens
    return contexts.max_window - 1 - equal.tobytes().rfind(0)


def scan(
    contexts: ContextHash, padded: Int32[np.ndarray, " WS"], positions: Int64[np.ndarray, " P"], query: Query
) -> Match:
    """Find the longest match by comparing tokens at every position."""
    best = NO_MATCH
    for length in range(1, contexts.max_window + 1):
        tokens = padded[positions + (contexts.max_window - length + 1)]
        positions = positions[tokens == query.tokens[contexts.max_window - length]]
        if positions.size == 0:
            break
        if length >= contexts.min_window:
            best = Match(length, int(positions[-1]) + 1)
    return best
