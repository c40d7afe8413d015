"""merge_turns against a dict: for each token, the first turn that fed it after the same tokens."""

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from replay.records import random_record
from routed_experts import RoutingAlignmentError
from routed_experts.replay import merge_turns


def expected(turns, tokens):
    """{token: (ids, version)}."""
    rows = {}
    for own, record in turns:
        versions = {t: version for low, high, version in record.version_spans for t in range(low, high)}
        for index in range(record.num_rows):
            token = record.start + index
            known = record.valid is None or record.valid[index]
            if known and token < len(tokens) and own[: token + 1].tolist() == tokens[: token + 1].tolist():
                rows.setdefault(token, (record.ids[index].tolist(), versions[token]))
    return rows


@st.composite
def conversations(draw):
    """Turns of one history: each goes on from the one before, from a cut of it, or from something else."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    history, turns = rng.integers(0, 3, draw(st.integers(1, 6))), []
    for version in range(draw(st.integers(1, 4))):
        cut = draw(st.integers(1, history.size))
        history = np.concatenate(
            [history[:cut] if draw(st.booleans()) else history, rng.integers(0, 3, draw(st.integers(0, 5)))]
        )
        last = draw(st.booleans()) or history.size == 1
        start = draw(st.integers(0, history.size - 1))
        rows = history.size - start - (not last)
        valid = rng.random(rows) < 0.7 if draw(st.booleans()) else None
        turns.append((history, random_record(rng, history.size, start=start, last=last, valid=valid, version=version)))
    return turns, history if draw(st.booleans()) else rng.integers(0, 3, draw(st.integers(1, 12)))


@hypothesis.given(conversations())
@hypothesis.settings(max_examples=200, deadline=None)
def test_the_first_writer_of_each_token_wins(conversation):
    turns, tokens = conversation
    merged, rows = merge_turns(turns, tokens), expected(turns, tokens)
    assert merged.num_tokens == tokens.size and merged.start == min(
        tokens.size - 1, *(record.start for _, record in turns)
    )
    valid = np.ones(merged.num_rows, bool) if merged.valid is None else merged.valid
    assert {merged.start + index for index in np.flatnonzero(valid)} == set(rows)
    versions = {t: version for low, high, version in merged.version_spans for t in range(low, high)}
    for token, (ids, version) in rows.items():
        assert merged.ids[token - merged.start].tolist() == ids and versions[token] == version


def test_the_row_that_a_turn_lacks_comes_from_the_next_prefill():
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 300, 20)
    first, second = random_record(rng, 12, version=4), random_record(rng, 20, start=11, version=5)
    merged = merge_turns([(tokens[:12], first), (tokens, second)], tokens)
    assert merged.valid is None and merged.num_rows == 19
    np.testing.assert_array_equal(merged.ids, np.concatenate([first.ids, second.ids]))
    assert merged.version_spans == ((0, 11, 4), (11, 19, 5))
    named = [dataclasses.replace(part, version_labels=((4, "four"), (5, "five"))) for part in (first, second)]
    assert merge_turns([(tokens[:12], named[0]), (tokens, named[1])], tokens).labels == {4: "four", 5: "five"}
    assert merged.labels == {}


def test_an_edited_history_loses_exactly_the_rows_after_the_change():
    rng = np.random.default_rng(4)
    original, edited = rng.integers(0, 300, 12), None
    edited = original.copy()
    edited[7] = (edited[7] + 1) % 300
    merged = merge_turns([(original, random_record(rng, 12))], edited)
    assert merged.valid.tolist() == [True] * 7 + [False] * 4


def test_turns_that_do_not_fit_are_named():
    rng = np.random.default_rng(5)
    tokens, record = np.arange(9), random_record(rng, 9)
    other = dataclasses.replace(record, num_hidden_layers=9)
    for turns, final_tokens, match in (
        ([], tokens, "turns is empty"),
        ([(tokens, record), (tokens[:8], record)], tokens, "turn 1: the record is of 9 tokens, and 8 are given"),
        ([(tokens, record), (tokens, other)], tokens, "turn 1: num_hidden_layers=9, but turn 0 has 4"),
        ([(tokens, record), (tokens, None)], tokens, "turn 1: the record is a NoneType"),
        ([(tokens, record)], [], "tokens are float64"),
        ([(tokens, record)], [[1]], "expected a row of at least one integer"),
        ([(tokens / 2, record)], tokens, "turn 0: tokens are float64"),
        ([([[1], [2, 3]], record)], tokens, "turn 0: tokens are a list of 2 that is no array"),
        ([(tokens, record)], [[1], [2, 3]], "tokens are a list of 2 that is no array"),
        ([record], tokens, r"turn 0 is a RoutedExperts; give a pair"),
        ([(tokens, record), record], tokens, r"turn 1 is a RoutedExperts; give a pair"),
        ((tokens, record), tokens, r"turn 0 is a ndarray of 9; give a pair"),
        (record, tokens, r"turns is a RoutedExperts; give a list"),
        (None, tokens, "turns is None; give a list"),
        (iter([]), tokens, "turns is empty"),
    ):
        with pytest.raises(RoutingAlignmentError, match=match):
            merge_turns(turns, final_tokens)


def test_turns_may_be_an_iterator():
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 300, 20)
    turns = [(tokens[:12], random_record(rng, 12)), (tokens, random_record(rng, 20, start=11))]
    assert merge_turns(iter(turns), tokens) == merge_turns(turns, tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_come_with_the_row_of_their_first_writer(dtype):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, 9)
    first, second = (random_record(rng, size, weights=True) for size in (6, 9))
    first, second = (dataclasses.replace(r, weights=r.weights.astype(dtype)) for r in (first, second))
    assert merge_turns([(tokens[:6], first)], tokens[:6]) == first
    merged = merge_turns([(tokens[:6], first), (tokens, second)], tokens)
    assert merged.weights.dtype == first.weights.dtype
    assert np.array_equal(merged.weights, np.concatenate([first.weights, second.weights[5:]]))


def test_turns_with_weights_of_several_dtypes_or_without_are_refused():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, 9)
    first, second = (random_record(rng, size, weights=True) for size in (6, 9))
    for other in (None, second.weights.astype("bfloat16")):
        turns = [(tokens[:6], first), (tokens, dataclasses.replace(second, weights=other))]
        with pytest.raises(RoutingAlignmentError, match=r"turn 1: weights=.*, but turn 0 has float32"):
            merge_turns(turns, tokens)
