"""TextAhead: what is learned of drafts that are proposed while a step is in flight, against loops over positions."""

import numpy as np
import pytest

from routed_experts.engine.loop.text_ahead import HALF_LIFE, PRIOR, TextAhead
from routed_experts.speculation.drafter import NO_DRAFT, Draft

NUM_DRAFTS = 3
DECAY = 0.5 ** (1 / HALF_LIFE)


def draft(tokens):
    return Draft(np.array(tokens, np.int32), 0.9 ** np.arange(1, len(tokens) + 1))


def leading(drafted, emitted):
    """[2, k]: by index, whether a draft was accepted, and whether it was compared with a token behind accepted ones."""
    counts = np.zeros((2, NUM_DRAFTS))
    for index, (ours, theirs) in enumerate(zip(drafted[:NUM_DRAFTS], emitted, strict=False)):
        counts[1, index] = 1
        if ours != theirs:
            break
        counts[0, index] = 1
    return counts


@pytest.mark.parametrize("seed", range(6))
def test_both_kinds_of_drafts_are_compared_with_the_tokens_that_come(seed):
    """A request is proposed for before each step is read; a step adds 1 to 4 tokens."""
    rng = np.random.default_rng(seed)
    text, ahead = rng.integers(0, 3, 400), TextAhead(NUM_DRAFTS)
    joined = behind = np.zeros((2, NUM_DRAFTS))
    known, before, num_compared = 5, None, 0
    while known + 20 < text.size:
        count = int(rng.integers(0, 2 * NUM_DRAFTS + 2))
        proposed = np.where(rng.random(count) < 0.3, rng.integers(0, 3, count), text[known : known + count]).tolist()
        ahead.propose("a", known, draft(proposed), int(rng.integers(1, NUM_DRAFTS + 2)))
        emitted = text[known : known + int(rng.integers(1, NUM_DRAFTS + 2))].tolist()
        ahead.observe("a", known, np.array(emitted))
        joined = joined + leading(proposed, emitted)
        if before is not None:
            first, older = before
            behind = behind + leading(older[known - first :], emitted)
            num_compared += bool(older[known - first :])
        ahead.end_step()
        joined, behind = joined * DECAY, behind * DECAY
        before, known = (known, proposed), known + len(emitted)
    assert num_compared > 20
    expected = [np.cumprod((accepted + PRIOR) / (reached + PRIOR)).sum() for accepted, reached in (joined, behind)]
    assert ahead.joined_gain == pytest.approx(expected[0] / expected[1])


def test_drafts_of_both_kinds_begin_equal():
    assert TextAhead(NUM_DRAFTS).joined_gain == pytest.approx(1.0)


def test_texts_that_are_right_at_first_alone_make_joined_steps_better_and_are_expected_to_be_wrong():
    ahead = TextAhead(NUM_DRAFTS)
    for step in range(40):
        known = 10 + 4 * step
        survival = ahead.propose("a", known, draft([1, 1, 1, 1, 9, 9, 9]), 4)
        ahead.observe("a", known, np.ones(4, np.int32))
        ahead.end_step()
    assert ahead.joined_gain > 5
    assert survival[0] < 0.2 < 0.9**5


def test_text_that_ends_is_seen_by_a_step_without_drafts_and_once():
    ahead = TextAhead(NUM_DRAFTS)
    for step in range(40):
        known = 10 + 7 * step
        ahead.propose("a", known, draft([1] * 7), 4)
        ahead.observe("a", known, np.ones(4, np.int32))
        for later in range(known + 4, known + 7):  # steps of one token that nothing is proposed for
            ahead.observe("a", later, np.array([2]))
        ahead.end_step()
    assert ahead.joined_gain > 5, "each text went on for one step, and was wrong in the next"


def test_the_survival_of_drafts_behind_a_step_is_that_of_their_place_in_the_text():
    claims = draft(range(7)).survival
    assert TextAhead(NUM_DRAFTS).propose("a", 5, draft(range(7)), 2).tolist() == pytest.approx(claims[2:5])
    assert TextAhead(NUM_DRAFTS).propose("a", 5, draft(range(3)), 2).tolist() == pytest.approx(claims[2:3])
    assert TextAhead(NUM_DRAFTS).propose("a", 5, NO_DRAFT, 2).size == 0


def test_what_was_never_compared_counts_as_accepted_however_long_ago_the_first_step_was():
    ahead = TextAhead(NUM_DRAFTS)
    for step in range(3000):
        known = 10 + step
        ahead.propose("a", known, draft([9] * 7), 1)
        ahead.observe("a", known, np.array([1]))
        ahead.end_step()
    assert ahead.joined_gain == pytest.approx(1.0), "the first draft is wrong in both"
    ahead.close("a")
    ahead.close("unknown")
    assert not ahead._proposed
