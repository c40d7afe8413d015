"""A match that is carried on from step to step, and a search that is left out, change no draft: brute force agrees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import copying
from routed_experts.speculation.context_index import ContextIndex
from routed_experts.speculation.continuations import PRIOR_SURVIVAL
from routed_experts.speculation.drafter import DraftSample, DraftSequence, DraftSource
from routed_experts.speculation.matcher import Matcher
from routed_experts.speculation.namespace_texts import NamespaceTexts
from routed_experts.speculation.text_drafter import CopyRule, TextDrafter, context_hash
from routed_experts.speculation.text_index import TextIndex

SEEDS = st.integers(0, 2**32 - 1)


def ids(tokens):
    return np.asarray(tokens, np.int32)


class CountedIndex(TextIndex):
    """A TextIndex that counts how often it is searched."""

    num_searches = 0

    def search(self, query, most, near=0, longest=64):
        self.num_searches += 1
        return super().search(query, most, near, longest)


def copied(rng, texts, alphabet, length):
    """Tokens that are copied from the texts and their contexts, with an error in some places."""
    tokens = []
    while len(tokens) < length:
        before, text = texts[int(rng.integers(len(texts)))]
        text = before + text
        start = int(rng.integers(len(text)))
        tokens += text[start : start + int(rng.integers(1, 12))]
        if rng.random() < 0.3:
            tokens.append(int(rng.integers(alphabet)))
    return tokens[:length]


def draw_texts(rng, alphabet):
    return [
        (
            rng.integers(0, alphabet, int(rng.integers(0, 8))).tolist(),
            rng.integers(0, alphabet, int(rng.integers(1, 60))).tolist(),
        )
        for _ in range(3)
    ]


@pytest.mark.parametrize("alphabet", [2, 4, 40])
@settings(max_examples=25)
@given(seed=SEEDS)
def test_a_match_that_is_carried_on_is_the_one_that_brute_force_finds(alphabet, seed):
    rng = np.random.default_rng(seed)
    rule = CopyRule(min_window=int(rng.integers(1, 4)), max_window=int(rng.integers(4, 13)), counts=True)
    contexts, texts, most = context_hash(rule), draw_texts(rng, alphabet), int(rng.choice([2, 16]))
    index = TextIndex(contexts, [(ids(before), ids(text)) for before, text in texts])
    places, tokens = copying.places_of(texts, rule.max_window), copied(rng, texts, alphabet, 120)
    sequence = ContextIndex(ids(tokens[:1]), contexts, keep_all=True)
    matcher, size = Matcher(sequence, index, most=most), 1
    while size < len(tokens):
        length, behind = copying.longest_match(tokens[:size], places, rule.max_window)
        if length < rule.min_window:
            length, behind = 0, []
        longest = matcher.longest_possible
        actual = matcher.match()
        assert actual.length == length <= longest
        assert matcher.match() == actual
        rows = index.continuations(actual.positions, 1)
        assert [row[0] for row in rows] == [rest[0] for rest in behind[-most:]]
        assert len(behind) == len(rows) or not actual.is_complete
        added = int(rng.choice([1, 1, 1, 2, 5, 20]))
        sequence.extend(ids(tokens[size : size + added]))
        size = min(size + added, len(tokens))


@settings(max_examples=4)
@given(seed=SEEDS)
def test_a_match_in_the_own_text_is_carried_on_over_its_sorted_and_its_unsorted_part(seed):
    rng = np.random.default_rng(seed)
    rule = CopyRule(max_window=int(rng.integers(3, 9)), counts=True)
    tokens = copied(rng, draw_texts(rng, 40), 40, 500)
    sequence = ContextIndex(ids(tokens[:300]), context_hash(rule), keep_all=True)
    matcher = Matcher(sequence, sequence, most=16)
    for size in range(300, 500):
        length, behind = copying.longest_match(tokens[:size], copying.own_places(tokens[:size]), rule.max_window)
        actual = matcher.match()
        assert actual.length == length
        rows = sequence.continuations(actual.positions, 8) if length else []
        assert rows == [rest[:8] for rest in behind[-16:]]
        sequence.extend(ids(tokens[size : size + 1]))


def test_a_text_that_is_copied_is_searched_once_in_a_window():
    contexts, text = context_hash(CopyRule(max_window=12, counts=True)), list(range(100, 200))
    index = CountedIndex(contexts, [(ids([7]), ids(text))])
    sequence = ContextIndex(ids([1, 2, text[0]]), contexts, keep_all=True)
    matcher = Matcher(sequence, index, most=16)
    for place in range(1, 49):
        assert (matcher.match().length, matcher.match().positions) == (min(place, 12), [1 + place])
        sequence.extend(ids(text[place : place + 1]))
    assert index.num_searches == 4
    sequence.extend(ids([7]))  # the context of the text: nothing before it has a position
    assert matcher.match().length == 1
    assert index.num_searches == 5


@settings(max_examples=40)
@given(seed=SEEDS)
def test_the_draft_is_the_best_one_of_the_sequence_and_its_namespace(functions, seed):
    rng = np.random.default_rng(seed)
    alphabet, most = int(rng.choice([3, 20])), int(rng.integers(1, 9))
    rule = CopyRule(max_window=int(rng.integers(2, 25)), counts=True, max_factor=float(rng.choice([0.5, 1.0, 2.5])))
    contexts, size = context_hash(rule), int(rng.integers(0, 8))
    texts = [(rng.integers(0, alphabet, size).tolist(), rng.integers(0, alphabet, 60).tolist()) for _ in range(3)]
    namespace = NamespaceTexts(contexts, max_bytes=1 << 20)
    drafter = TextDrafter(rule, texts=namespace, contexts=contexts, compiled=functions)
    for before, text in texts:
        drafter.remember(ids(before), ids(text), DraftSample())  # of equal lengths: each is indexed at once
    others = copying.places_of([(before[-rule.max_window :], text) for before, text in texts], rule.max_window)
    tokens, size = copied(rng, texts, alphabet, 100), int(rng.integers(1, 50))
    drafter.open("a", ids(tokens[:size]), DraftSequence(prompt_len=size))
    while size < len(tokens):
        expected, best = 0.0, ([], DraftSource.CONTEXT)
        for places, source in ((copying.own_places(tokens[:size]), best[1]), (others, DraftSource.NAMESPACE)):
            length, behind = copying.longest_match(tokens[:size], places, rule.max_window)
            count = min(most, int(rule.max_factor * length))
            drafts, probabilities = copying.most_frequent(behind, count, rule.min_probability)
            survival = np.array(probabilities) * PRIOR_SURVIVAL[length, : len(drafts)]
            if drafts and (not best[0] or sum(survival) > expected):
                expected, best = sum(survival), (drafts, source)
        draft = drafter.propose("a", most)
        assert (draft.tokens.tolist(), draft.source) == best
        added = int(rng.choice([1, 1, 2, 7]))
        drafter.extend("a", ids(tokens[size : size + added]))
        size = min(size + added, len(tokens))
