"""SortedContexts: where contexts occur in a fixed text, at exactly the longest length; a search is a bisection.

The context of length n at position p is the tokens p-n+1..p. A key is a tag (hash) of length and context in the high
bits and a position in the low bits. Contexts of length n+1 are entered only where another position shares the context
of length n: elsewhere the tokens at the one position decide. A match is compared by tokens. Dims: S tokens, P
positions, R lengths, X keys, W tokens of the longest context."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

NO_TOKEN = -1  # stands before the first token, so that every position has a context of every length


class Query(NamedTuple):
    """The end of a sequence, to be found elsewhere. `tokens`: the last W, the oldest first, NO_TOKEN before the
    first; `tags`: of its contexts, by length."""

    tokens: Int32[np.ndarray, " W"]
    tags: Int64[np.ndarray, " R"]


class Match(NamedTuple):
    """An occurrence of the last `length` tokens; `end` is the position after it. Length 0: there is none."""

    length: int
    end: int


NO_MATCH = Match(0, 0)


class ContextHash:
    """Tags of contexts of min_window..max_window tokens. `position_bits`: texts have fewer than 2**position_bits
    tokens; the other bits of 64 are the tag. Equal parameters give equal tags."""

    def __init__(self, *, min_window: int, max_window: int, position_bits: int = 24) -> None:
        self.min_window, self.max_window = min_window, max_window
        self.position_mask = np.int64((1 << position_bits) - 1)
        self.tag_mask = ~self.position_mask
        noise = np.random.default_rng(0x5EED)
        factors = noise.integers(-(1 << 63), 1 << 63, (2, max_window), np.int64) << position_bits  # so are tags
        self.factors, self.salts = factors[0], factors[1, min_window - 1 :]

    @property
    def num_lengths(self) -> int:
        """R."""
        return self.max_window - self.min_window + 1

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

    def find(self, query: Query) -> Match:
        """Return the latest occurrence of the longest context that has one, or NO_MATCH."""
        contexts = self._hash
        if self._keys.size == 0:
            return NO_MATCH
        found = self._keys[self._keys.searchsorted(query.tags | contexts.position_mask, "right") - 1]
        row = ((found & contexts.tag_mask) == query.tags).tobytes().rfind(1)  # of the longest; -1: none
        if row < 0:
            return NO_MATCH
        position = int(found[row] & contexts.position_mask)
        length = common_length(contexts, self.padded, position, query)
        if length < contexts.min_window + row:  # two contexts share a tag
            return scan(contexts, self.padded, self._positions, query)
        return Match(length, position + 1)

    def occurrences(self, query: Query, length: int, most: int) -> Int64[np.ndarray, " m"]:
        """Return the latest `most` positions, increasing, whose context of `length` tokens is that of the query; with
        `keep_all`, and for the length of the longest match alone."""
        contexts = self._hash
        tags = query.tags[: length - contexts.min_window + 1]
        ends = self._keys.searchsorted(tags | contexts.position_mask, "right").tolist()
        for row in range(len(ends) - 1, -1, -1):  # a context that one position has is not entered at all lengths
            start = int(self._keys.searchsorted(tags[row]))
            if start < ends[row]:
                found = self._keys[max(start, ends[row] - most) : ends[row]] & contexts.position_mask
                is_equal = equal_contexts(contexts, self.padded, found, query, length)
                if is_equal.all() and (found[1:] > found[:-1]).all():
                    return found
                break  # two contexts share a tag
        return self._positions[equal_contexts(contexts, self.padded, self._positions, query, length)][-most:]

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


def equal_contexts(
    contexts: ContextHash,
    padded: Int32[np.ndarray, " WS"],
    positions: Int64[np.ndarray, " P"],
    query: Query,
    length: int,
) -> Bool[np.ndarray, " P"]:
    """Return at which positions the last `length` tokens are those of the query."""
    offsets = np.arange(contexts.max_window - length + 1, contexts.max_window + 1)
    return (padded[positions[:, None] + offsets] == query.tokens[contexts.max_window - length :]).all(axis=1)


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
