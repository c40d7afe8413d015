"""Continuations: which tokens to draft from the places where the end of a sequence occurred before.

Dims: m places (the oldest first), k drafts."""

import dataclasses
import functools
import operator
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from jaxtyping import Float64

from routed_experts.speculation.drafter import Draft, DraftSource
from routed_experts.speculation.sorted_contexts import MOST_DRAFTS, Occurrences

MOST_OCCURRENCES = 16  # of a context, the latest: so many continuations are counted


def prior_survival(max_window: int, most: int) -> Float64[np.ndarray, "W k"]:
    """Return the survival of drafts by match length (row) and index in the draft (column), before anything was
    observed; read-only.

    A draft after n matching tokens is accepted with probability (n + 1) / (n + 3), and an accepted one makes the match
    longer by one, so that drafts 0..j survive with (n + 1)(n + 2) / ((n + j + 2)(n + j + 3)):

        n = 1:   0.50 0.30 0.20 0.14        n = 4:  0.71 0.54 0.42 0.33        n = 12:  0.87 0.76 0.67 0.59"""
    length, index = np.arange(max_window + 1)[:, None], np.arange(most)
    survival = (length + 1) * (length + 2) / ((length + index + 2) * (length + index + 3))
    survival.flags.writeable = False
    return survival


def _total(values: Iterable[float]) -> float:
    """The sum in this order, each addition rounded, as compiled code has it: `sum` compensates from Python 3.12 on."""
    return functools.reduce(operator.add, values, 0.0)


LONGEST_MATCH = 64  # tokens; a longer match counts as this one
PRIOR_SURVIVAL = prior_survival(LONGEST_MATCH, MOST_DRAFTS)
_SURVIVAL = PRIOR_SURVIVAL.tolist()
_EXPECTED = [[_total(survival[:most]) for most in range(MOST_DRAFTS + 1)] for survival in _SURVIVAL]


class CopiedText(Protocol):
    """A text that drafts are copied from."""

    def continuations(self, positions: list[int], most: int) -> list[list[int]]:
        """Return the `most` tokens behind each position, which increase; a negative one ends them."""
        ...


@dataclasses.dataclass(slots=True)
class Continuation:
    """A draft as lists: several are compared, and one becomes a Draft. `expected`: the sum of `survival`, how many
    tokens are expected to be accepted; `position`: the latest one that it is copied from, -1 where that is not
    known."""

    tokens: list[int]
    survival: list[float]
    source: DraftSource
    expected: float = 0.0
    position: int = -1

    def draft(self) -> Draft:
        """The draft."""
        return Draft(np.array(self.tokens, np.int32), np.array(self.survival, np.float64), self.source)


NO_CONTINUATION = Continuation([], [], DraftSource.CONTEXT)


def most_expected(length: int, most: int, probability: float = 1.0) -> float:
    """Return how many of `most` drafts after a match of `length` tokens are expected to be accepted at most, where the
    first one has a probability. Summed as Continuation.expected, so that rounding makes no difference."""
    length = min(length, LONGEST_MATCH)
    if probability == 1.0:
        return _EXPECTED[length][most]
    return _total(probability * survival for survival in _SURVIVAL[length][:most])


def most_frequent(tokens: list[int]) -> tuple[int, int]:
    """Return the most frequent token, the last of equals, and how often it occurs."""
    last = tokens[-1]
    count, num_tokens = tokens.count(last), len(tokens)
    if 2 * count >= num_tokens or len(set(tokens)) == num_tokens:
        return last, count
    counts: dict[int, int] = {}
    for token in reversed(tokens):  # a dict keeps its order: max takes the first of equals
        counts[token] = counts.get(token, 0) + 1
    token = max(counts, key=counts.__getitem__)
    return token, counts[token]


def follow_most(rows: list[list[int]], probability: float, min_probability: float) -> tuple[list[int], list[float]]:
    """Follow the most frequent token among the rows that agree so far. A row is what follows an occurrence; a negative
    token ends it. All begin with one token, of this probability. Returns tokens and their probabilities: products of
    relative frequencies, at least `min_probability`."""
    tokens, probabilities = list[int](), list[float]()
    for column in range(len(rows[0])):
        if rows.count(rows[-1]) == len(rows):  # nothing is left to choose
            rest = _until_end(rows[-1][column:])
            return tokens + rest, probabilities + [probability] * len(rest)
        following = [row[column] for row in rows if row[column] >= 0]
        if not following:
            break
        token, count = most_frequent(following)
        if probability * (count / len(following)) < min_probability:
            break
        probability *= count / len(following)
        tokens.append(token)
        probabilities.append(probability)
        rows = [row for row in rows if row[column] == token]
    return tokens, probabilities


def latest_continuation(tokens: list[int], length: int, source: DraftSource, position: int = -1) -> Continuation:
    """The tokens that follow one match of `length` tokens."""
    length, count = min(length, LONGEST_MATCH), len(tokens)
    return Continuation(tokens, _SURVIVAL[length][:count], source, _EXPECTED[length][count], position)


def frequent_continuation(
    text: CopiedText,
    occurrences: Occurrences,
    most: int,
    source: DraftSource,
    min_probability: float,
    *,
    to_exceed: float = 0.0,
) -> Continuation:
    """The at most `most` tokens that most places of a match agree on; the first of them alone where no more than
    `to_exceed` accepted tokens can be expected."""
    positions, following = occurrences.positions, occurrences.following
    if len(positions) == 1:
        tokens = _until_end(text.continuations(positions, most)[0])
        return latest_continuation(tokens, occurrences.length, source, positions[0])
    first, count = most_frequent(following)
    probability = count / len(following)
    if probability < min_probability:
        return NO_CONTINUATION
    if count < len(following):
        positions = [position for position, token in zip(positions, following, strict=True) if token == first]
    if most > 1 and most_expected(occurrences.length, most, probability) <= to_exceed:
        most = 1
    survival = _SURVIVAL[min(occurrences.length, LONGEST_MATCH)]
    if most == 1:
        expected = probability * survival[0]
        return Continuation([first], [expected], source, expected, positions[-1])
    rows = text.continuations(positions, most)
    tokens, probabilities = follow_most(rows, probability, min_probability)
    survival = list(map(operator.mul, probabilities, survival))
    return Continuation(tokens, survival, source, _total(survival), positions[-1])


def _until_end(row: list[int]) -> list[int]:
    """Return the tokens before the first negative one."""
    return row if min(row, default=0) >= 0 else row[: next(index for index, token in enumerate(row) if token < 0)]
