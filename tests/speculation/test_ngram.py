"""The n-gram drafter equals a search by brute force, however its sequence grew and whatever contexts share a tag."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.core.errors import ConfigError
from routed_experts.speculation.context_index import ContextIndex
from routed_experts.speculation.continuations import LONGEST_MATCH, PRIOR_SURVIVAL, most_expected, prior_survival
from routed_experts.speculation.drafter import DraftSequence
from routed_experts.speculation.sorted_contexts import ContextHash
from routed_experts.speculation.text_drafter import CopyRule, TextDrafter, context_hash

SEEDS = st.integers(0, 2**32 - 1)
POSITION_BITS = (24, 24, 60, 62)  # with 60 and 62 many contexts share a tag


def ngram_drafter(functions, *, min_window=1, max_window=12, position_bits=24):
    rule = CopyRule(min_window=min_window, max_window=max_window)
    return TextDrafter(rule, contexts=context_hash(rule, position_bits=position_bits), compiled=functions)


def open_text(drafter, key, tokens):
    tokens = np.asarray(tokens, np.int32)
    drafter.open(key, tokens, DraftSequence(prompt_len=tokens.size))


def search(text, min_window, max_window):
    """Length and end of the latest earlier occurrence of the longest suffix; (0, 0) if none occurs."""
    letters = "".join(map(chr, text))
    for length in range(min(max_window, len(letters) - 1), min_window - 1, -1):
        start = letters.rfind(letters[-length:], 0, len(letters) - 1)
        if start >= 0:
            return length, start + length
    return 0, 0


def continued(text, end, most):
    """`most` tokens from `end` on, token by token: behind the end of the text they are copied from the copy."""
    text, first = list(text), len(text)
    for place in range(most):
        text.append(text[end + place])
    return text[first:]


def check_draft(drafter, key, text, windows, most):
    length, end = search(text, *windows)
    draft = drafter.propose(key, most)
    assert draft.tokens.tolist() == (continued(text, end, most) if length else []), (text, windows, most)
    assert draft.tokens.dtype == np.int32
    assert draft.survival.tolist() == PRIOR_SURVIVAL[length, : draft.tokens.size].tolist()


def draw_windows(rng):
    min_window = int(rng.integers(1, 4))
    return min_window, min_window + int(rng.integers(0, 12))


def draw_text(rng, alphabet, length):
    """Random tokens; in every second text, spans of earlier tokens are repeated, some of them with an error."""
    text = rng.integers(0, alphabet, length)
    for _ in range(int(rng.integers(0, 2)) * length // 8):
        start, target = sorted(rng.integers(0, length, 2))
        span = min(int(rng.integers(1, 30)), length - target)
        text[target : target + span] = text[start : start + span].copy()
    return text.tolist()


def check_texts(functions, alphabet, seed):
    """Drafts of five hundred texts."""
    rng = np.random.default_rng(seed)
    for number in range(500):
        text = draw_text(rng, alphabet, int(rng.integers(257, 900) if number % 50 == 0 else rng.integers(0, 80)))
        windows = draw_windows(rng)
        drafter = ngram_drafter(
            functions, min_window=windows[0], max_window=windows[1], position_bits=POSITION_BITS[int(rng.integers(4))]
        )
        open_text(drafter, number, text)
        check_draft(drafter, number, text, windows, int(rng.integers(1, 9)))


@pytest.mark.parametrize("alphabet", [3, 300])
@settings(max_examples=5)
@given(seed=SEEDS)
def test_ten_thousand_drafts_are_those_of_brute_force(functions, alphabet, seed):
    """In all cases together."""
    check_texts(functions, alphabet, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("alphabet", [3, 300])
def test_drafts_of_twenty_thousand_texts_are_those_of_brute_force(functions, alphabet):
    for seed in range(40):
        check_texts(functions, alphabet, seed)


@settings(max_examples=20)
@given(seed=SEEDS)
def test_a_sequence_that_grew_drafts_as_one_that_was_opened_whole(functions, seed):
    rng = np.random.default_rng(seed)
    text, windows = draw_text(rng, int(rng.choice([1, 2, 3, 300])), int(rng.integers(600, 1500))), draw_windows(rng)
    bits = POSITION_BITS[seed % 4]
    drafter = ngram_drafter(functions, min_window=windows[0], max_window=windows[1], position_bits=bits)
    size = int(rng.integers(0, 400))
    open_text(drafter, "grown", text[:size])
    while size < len(text):
        check_draft(drafter, "grown", text[:size], windows, 5)
        added = int(rng.choice([0, 1, 2, 5, 300]))
        drafter.extend("grown", np.array(text[size : size + added], np.int32))
        size = min(size + added, len(text))
    open_text(drafter, "whole", text)
    grown, whole = drafter.propose("grown", 9), drafter.propose("whole", 9)
    assert grown.tokens.tolist() == whole.tokens.tolist()
    assert grown.survival.tolist() == whole.survival.tolist()
    check_draft(drafter, "grown", text, windows, 9)


@settings(max_examples=30)
@given(data=st.data())
def test_sequences_never_see_each_others_tokens(functions, data):
    drafter, texts, windows = ngram_drafter(functions), {}, (1, 12)
    for _ in range(data.draw(st.integers(1, 25))):
        key = data.draw(st.sampled_from(["a", ("b", 1), 2]))
        added = [3 * len(str(key)) + token for token in data.draw(st.lists(st.integers(0, 4), max_size=40))]
        action = data.draw(st.sampled_from(["open", "extend", "close"]))
        if action == "close":
            drafter.close(key)
            texts.pop(key, None)
        elif action == "open" or key not in texts:
            open_text(drafter, key, added)
            texts[key] = added
        else:
            drafter.extend(key, np.array(added, np.int32))
            texts[key] = texts[key] + added
        for other, text in texts.items():
            check_draft(drafter, other, text, windows, 7)


def test_the_draft_goes_on_behind_the_end_of_the_sequence_and_later_matches_win(functions):
    drafter = ngram_drafter(functions, max_window=3)
    open_text(drafter, "periodic", [1, 2, 1, 2, 1])
    assert drafter.propose("periodic", 5).tokens.tolist() == [2, 1, 2, 1, 2]
    open_text(drafter, "latest", [7, 1, 9, 7, 2, 9, 7])
    assert drafter.propose("latest", 5).tokens.tolist() == [2, 9, 7, 2, 9]
    open_text(drafter, "longest", [5, 7, 1, 9, 7, 2, 5, 7])
    assert drafter.propose("longest", 2).tokens.tolist() == [1, 9]


def test_no_draft_where_nothing_is_repeated_or_nothing_is_asked(functions):
    drafter = ngram_drafter(functions, min_window=2)
    for text in ([], [1], [1, 2, 3], [1, 2, 1]):
        open_text(drafter, "a", text)
        assert drafter.propose("a", 4).tokens.size == drafter.propose("a", 4).survival.size == 0
    open_text(drafter, "a", [1, 2, 1, 2])
    assert drafter.propose("a", 0).tokens.size == 0
    assert drafter.propose("a", 4).tokens.tolist() == [1, 2, 1, 2]


def test_a_draft_is_the_callers_own(functions):
    drafter = ngram_drafter(functions)
    open_text(drafter, "a", [1, 2, 3, 1])
    drafter.propose("a", 2).tokens[:] = 99
    assert drafter.propose("a", 2).tokens.tolist() == [2, 3]


def test_prior_survival_never_rises_and_grows_with_the_match():
    survival = prior_survival(12, 16)
    assert (np.diff(survival, axis=1) < 0).all()
    assert (np.diff(survival, axis=0) > 0).all()
    assert survival.min() > 0 and survival.max() < 1
    assert survival[1, :3] == pytest.approx([0.5, 0.3, 0.2])


@pytest.mark.parametrize("probability", [1.0, 0.3])
def test_expected_tokens_are_added_in_order_and_each_addition_is_rounded(probability):
    expected = [
        [most_expected(length, most, probability) for most in range(1, PRIOR_SURVIVAL.shape[1] + 1)]
        for length in range(LONGEST_MATCH + 1)
    ]
    np.testing.assert_array_equal(expected, np.cumsum(probability * PRIOR_SURVIVAL, axis=1))


@pytest.mark.parametrize("text", ["random", "letters", "same", "pairs"])
def test_memory_is_bounded_and_returned(functions, text):
    size, rng = 100_000, np.random.default_rng(0)
    if text == "pairs":  # nearly every context of 11 tokens occurs twice, and then goes on in two ways
        half = rng.integers(0, 50_000, size // 2)
        tokens = np.concatenate([half, np.where(np.arange(size // 2) % 12 == 11, 50_000 + np.arange(size // 2), half)])
    else:
        tokens = rng.integers(0, {"random": 50_000, "letters": 3, "same": 1}[text], size)
    drafter = ngram_drafter(functions)
    for key in range(2):
        open_text(drafter, key, tokens[: size - 5000].astype(np.int32))
    for start in range(size - 5000, size, 500):
        drafter.extend(1, tokens[start : start + 500].astype(np.int32))
    assert 2 * 12 * size - 8 * 2048 < drafter.nbytes <= 2 * (66 * size + 8 * 12 * 2048 + 1072)
    drafter.close(0)
    drafter.close(1)
    drafter.close("never opened")
    assert drafter.nbytes == 0


def test_a_million_tokens_stay_in_their_bound(functions):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 300, 1_000_000).astype(np.int32)
    drafter = ngram_drafter(functions)
    open_text(drafter, "long", tokens[:990_000])
    drafter.extend("long", tokens[990_000:])
    assert drafter.nbytes <= 66 * tokens.size + 8 * 12 * 2048 + 1072
    check_draft(drafter, "long", tokens.tolist(), (1, 12), 7)


def test_a_sequence_that_is_too_long_is_refused_and_stays_as_it_was():
    contexts = ContextHash(min_window=1, max_window=2, position_bits=4)
    index = ContextIndex(np.zeros(15, np.int32), contexts)
    with pytest.raises(ValueError, match="16 tokens is too long"):
        index.extend(np.zeros(1, np.int32))
    actual = index.search(index.query(), 1)
    assert (index.size, actual.length, actual.positions) == (15, 2, [13])


@pytest.mark.parametrize("windows", [(0, 3), (4, 3), (1, 65)])
def test_wrong_windows_are_refused(windows):
    with pytest.raises(ConfigError, match=f"{windows[0]} to {windows[1]}"):
        CopyRule(min_window=windows[0], max_window=windows[1])
