"""SUFFIX drafts, and indices of other texts, equal a count by brute force, however their texts grew."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import copying
from routed_experts.speculation.continuations import PRIOR_SURVIVAL
from routed_experts.speculation.drafter import DraftSample, DraftSequence, DraftSource
from routed_experts.speculation.namespace_texts import BLOCK_TOKENS, NamespaceTexts
from routed_experts.speculation.rollouts import RolloutStore
from routed_experts.speculation.sorted_contexts import Query
from routed_experts.speculation.text_drafter import CopyRule, TextDrafter, context_hash
from routed_experts.speculation.text_index import TextIndex

SEEDS = st.integers(0, 2**32 - 1)


def ids(tokens):
    return np.asarray(tokens, np.int32)


def draw_text(rng, alphabet, length):
    """Random tokens; in every second text, spans of earlier tokens are repeated."""
    text = rng.integers(0, alphabet, length)
    for _ in range(int(rng.integers(0, 2)) * length // 8):
        start, target = sorted(rng.integers(0, length, 2))
        span = min(int(rng.integers(1, 30)), length - target)
        text[target : target + span] = text[start : start + span].copy()
    return text.tolist()


def draw_rule(rng):
    return CopyRule(
        max_window=int(rng.integers(1, 25)),
        counts=True,
        max_factor=float(rng.choice([0.5, 1.0, 2.5])),
        min_probability=float(rng.choice([0.0, 0.1, 0.5])),
    )


def check(draft, places, text, rule, most):
    length, behind = copying.longest_match(text, places, rule.max_window)
    tokens, probabilities = copying.most_frequent(behind, most, rule.min_probability) if length else ([], [])
    assert draft.tokens.tolist() == tokens, (text, rule, most)
    assert draft.tokens.dtype == np.int32
    expected = np.array(probabilities) * PRIOR_SURVIVAL[length, : len(tokens)]
    assert draft.survival == pytest.approx(expected)


def check_texts(functions, alphabet, seed):
    """Drafts of two hundred texts."""
    rng = np.random.default_rng(seed)
    for number in range(200):
        text, rule = draw_text(rng, alphabet, int(rng.integers(0, 60))), draw_rule(rng)
        drafter = TextDrafter(rule, compiled=functions)
        size, most = int(rng.integers(0, len(text) + 1)), int(rng.integers(1, 9))
        drafter.open(number, ids(text[:size]), DraftSequence(prompt_len=size))
        drafter.extend(number, ids(text[size:]))
        length, _ = copying.longest_match(text, copying.own_places(text), rule.max_window)
        check(
            drafter.propose(number, most),
            copying.own_places(text),
            text,
            rule,
            min(most, int(rule.max_factor * length)),
        )


@pytest.mark.parametrize("alphabet", [2, 3, 300])
@settings(max_examples=4)
@given(seed=SEEDS)
def test_drafts_of_a_sequence_are_counted_as_by_brute_force(functions, alphabet, seed):
    check_texts(functions, alphabet, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("alphabet", [3, 300])
def test_drafts_of_twenty_thousand_texts_are_counted_as_by_brute_force(functions, alphabet):
    for seed in range(100):
        check_texts(functions, alphabet, seed)


@settings(max_examples=12)
@given(seed=SEEDS)
def test_a_long_sequence_is_counted_over_its_sorted_and_its_unsorted_part(functions, seed):
    rng = np.random.default_rng(seed)
    rule = CopyRule(max_window=int(rng.choice([3, 7, 24])), counts=True, max_factor=9.0)
    text = draw_text(rng, int(rng.choice([2, 3, 40])), 900)
    drafter = TextDrafter(rule, compiled=functions)
    size = int(rng.integers(200, 400))
    drafter.open("grown", ids(text[:size]), DraftSequence(prompt_len=size))
    while size < len(text):
        added = int(rng.choice([1, 1, 1, 1, 2, 2, 3, 60, 300]))
        drafter.extend("grown", ids(text[size : size + added]))
        size = min(size + added, len(text))
        check(drafter.propose("grown", 7), copying.own_places(text[:size]), text[:size], rule, 7)


@settings(max_examples=12)
@given(seed=SEEDS)
def test_an_index_of_texts_finds_what_brute_force_finds(seed):
    rng = np.random.default_rng(seed)
    alphabet = int(rng.choice([2, 3, 300]))
    for _ in range(30):
        rule = draw_rule(rng)
        contexts = context_hash(rule)
        texts = [
            (draw_text(rng, alphabet, int(rng.integers(0, 30))), draw_text(rng, alphabet, int(rng.integers(1, 40))))
            for _ in range(int(rng.integers(1, 5)))
        ]
        index = TextIndex(contexts, [(ids(before), ids(text)) for before, text in texts])
        text = draw_text(rng, alphabet, int(rng.integers(1, 50)))
        if rng.random() < 0.5:
            before, copied = texts[int(rng.integers(len(texts)))]
            text += (before + copied)[: int(rng.integers(1, len(before + copied) + 1))]
        padded = ids([-1] * rule.max_window + text)
        query = Query(contexts, padded.data, padded.size)
        places = copying.places_of(texts, rule.max_window)
        length, behind = copying.longest_match(text, places, rule.max_window)
        match = index.find(query)
        assert match.length == length
        for bits in (58, 60):  # many contexts share a tag: the match is the same
            narrow = context_hash(rule, position_bits=bits)
            other = TextIndex(narrow, [(ids(before), ids(text)) for before, text in texts])
            for near in (0, 5, rule.max_window):
                assert other.find(Query(narrow, padded.data, padded.size), near)[:2] == match[:2]
        if not length:
            continue
        for near in range(rule.max_window + 3):
            assert index.find(query, near) == match
        actual = index.search(query, 16)
        assert (actual.length, actual.positions[-1] + 1) == match[:2]
        assert actual.is_complete == (len(behind) <= 16)
        rows = [_until_negative(row) for row in index.continuations(actual.positions, 6)]
        assert rows == [rest[:6] for rest in behind[-16:]]
        number, place = index.locate(actual.positions[-1])
        assert texts[number][1][place:] == behind[-1]


def _until_negative(row):
    return row[: next((place for place, token in enumerate(row) if token < 0), len(row))]


def test_the_source_with_more_expected_tokens_wins(functions):
    rule = CopyRule(max_window=24, counts=True, max_factor=9.0)
    contexts = context_hash(rule)
    store, texts = RolloutStore(max_bytes=1 << 20), NamespaceTexts(contexts, max_bytes=1 << 20)
    drafter = TextDrafter(rule, store=store, texts=texts, contexts=contexts, compiled=functions)
    drafter.remember(ids([9, 8]), ids([1, 2, 3, 4, 5, 6]), DraftSample())
    drafter.open("own", ids([3, 50, 51, 52, 7, 3]), DraftSequence(prompt_len=6))
    draft = drafter.propose("own", 3)  # both have seen one token of context; the first of equals
    assert (draft.tokens.tolist(), draft.source) == ([50, 51, 52], DraftSource.CONTEXT)
    drafter.open("other", ids([3, 50, 51, 52, 2, 3]), DraftSequence(prompt_len=6))
    draft = drafter.propose("other", 3)
    assert (draft.tokens.tolist(), draft.source) == ([4, 5, 6], DraftSource.NAMESPACE)


def test_text_of_a_namespace_becomes_visible_and_stays_bounded():
    rule = CopyRule(max_window=8, counts=True)
    contexts = context_hash(rule)
    texts, rng = NamespaceTexts(contexts, max_bytes=16 << 20), np.random.default_rng(0)
    for number in range(300):
        texts.add(ids([1, 2, 3]), ids(rng.integers(0, 50_000, 1000)), f"space {number % 3}")
        held = sum(space.nbytes for space in texts._namespaces.values())
        assert texts.nbytes == held <= 16 << 20
    tokens = rng.integers(0, 50_000, BLOCK_TOKENS)
    texts.add(ids([4]), ids(tokens), "space 0")
    index = texts.indices("space 0")[0]
    padded = ids([-1] * 8 + [*tokens[500:520]])
    match = index.find(Query(contexts, padded.data, padded.size))
    assert match.length == 8
    assert texts.indices("never used") == ()
    texts.clear()
    assert texts.nbytes == 0 and texts.indices("space 0") == ()
