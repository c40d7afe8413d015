"""Continuations: which tokens to draft from the places where the end of a sequence occurred before.

Dims: m places (the oldest first), k drafts."""

import numpy as np
from jaxtyping import Float64, Int32

from routed_experts.speculation.drafter import Draft, DraftSource
from routed_experts.speculation.sorted_contexts import MOST_DRAFTS

MOST_OCCURRENCES = 16  # of a context, the latest: so many continuations are counted


def prior_survival(max_window: int, most: int) -> Float64[np.ndarray, "W k"]:
    """Return the survival of drafts by match length (row) and place (column), before anything was observed; read-only.

    A draft after n matching tokens is accepted with probability (n + 1) / (n + 3), and an accepted one makes the match
    longer by one, so that drafts 0..j survive with (n + 1)(n + 2) / ((n + j + 2)(n + j + 3)):

        n = 1:   0.50 0.30 0.20 0.14        n = 4:  0.71 0.54 0.42 0.33        n = 12:  0.87 0.76 0.67 0.59"""
    length, place = np.arange(max_window + 1)[:, None], np.arange(most)
    survival = (length + 1) * (length + 2) / ((length + place + 2) * (length + place + 3))
    survival.flags.writeable = False
    return survival


LONGEST_MATCH = 64  # tokens; a longer match counts as this one
PRIOR_SURVIVAL = prior_survival(LONGEST_MATCH, MOST_DRAFTS)
_CERTAIN = np.ones(MOST_DRAFTS)


def most_frequent(
    continuations: Int32[np.ndarray, "m k"], min_probability: float
) -> tuple[Int32[np.ndarray, " j"], Float64[np.ndarray, " j"]]:
    """Follow the most frequent token, and of equals the latest, among the places that agree so far. A negative token
    ends a place. Returns tokens and their probabilities given the context: products of relative frequencies, at least
    `min_probability`."""
    last = continuations[-1]
    if len(continuations) == 1 or (continuations == last).all():
        end = (last < 0).tobytes().find(1)
        tokens = last.copy() if end < 0 else last[:end].copy()
        return tokens, _CERTAIN[: tokens.size]
    tokens, probabilities = list[int](), list[float]()
    active, probability = range(len(continuations)), 1.0
    for column in continuations.T.tolist():
        known = [place for place in active if column[place] >= 0]
        if not known:
            break
        counts: dict[int, int] = {}
        for place in reversed(known):  # a dict keeps its order: max takes the latest of equals
            counts[column[place]] = counts.get(column[place], 0) + 1
        token = max(counts, key=lambda token: counts[token])
        probability *= counts[token] / len(known)
        if probability < min_probability:
            break
        tokens.append(token)
        probabilities.append(probability)
        active = [place for place in known if column[place] == token]
    return np.array(tokens, np.int32), np.array(probabilities, np.float64)


def latest_draft(tokens: Int32[np.ndarray, " k"], length: int, source: DraftSource) -> Draft:
    """The draft that follows one match of `length` tokens."""
    return Draft(tokens, PRIOR_SURVIVAL[min(length, LONGEST_MATCH), : tokens.size], source)


def frequent_draft(
    continuations: Int32[np.ndarray, "m k"], length: int, source: DraftSource, min_probability: float
) -> Draft:
    """The draft that most places of a match of `length` tokens agree on."""
    tokens, probabilities = most_frequent(continuations, min_probability)
    return Draft(tokens, probabilities * PRIOR_SURVIVAL[min(length, LONGEST_MATCH), : tokens.size], source)
