"""Estimates begin with the drafter's claims and follow what is accepted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.speculation.acceptance_estimates import AcceptanceEstimates
from routed_experts.speculation.drafter import NO_DRAFT, Draft


def make_draft(*survival):
    return Draft(np.arange(len(survival), dtype=np.int32), np.array(survival, np.float64))


CLAIM = make_draft(0.8, 0.6, 0.3)


def verify(estimates, key, draft, accepted, times=1):
    for _ in range(times):
        estimates.survival(key, draft)
        estimates.observe(key, draft.tokens.size, accepted)
    return estimates.survival(key, draft)


def test_the_first_estimate_is_the_drafters_own():
    estimates = AcceptanceEstimates()
    assert estimates.survival("a", CLAIM).tolist() == pytest.approx([0.8, 0.6, 0.3])
    assert estimates.survival("b", NO_DRAFT).size == 0


def test_what_is_always_rejected_falls_and_what_is_always_accepted_rises():
    estimates = AcceptanceEstimates()
    assert verify(estimates, "a", CLAIM, 0, times=64)[0] < 0.12
    estimates = AcceptanceEstimates()
    assert verify(estimates, "a", CLAIM, 3, times=64) == pytest.approx(1, abs=0.05)


def test_places_are_learned_apart():
    estimates = AcceptanceEstimates()
    first, second, third = verify(estimates, "a", CLAIM, 1, times=64)
    assert first > 0.95 and second < 0.1 and third <= second


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("claimed", [0.3, 0.7, 0.99])
def test_estimates_approach_the_rate_whatever_is_claimed(rate, claimed):
    rng, estimates = np.random.default_rng(0), AcceptanceEstimates()
    draft = make_draft(*claimed ** np.arange(1, 4))
    seen = []
    for step in range(1000):
        survival = estimates.survival("a", draft)
        estimates.observe("a", 3, int((rng.random(3) < rate).cumprod().sum()))
        seen += [survival] if step >= 200 else []
    assert np.mean(seen, axis=0) == pytest.approx(rate ** np.arange(1, 4), abs=0.06)


def test_a_new_request_begins_with_what_others_have_shown():
    estimates = AcceptanceEstimates()
    verify(estimates, "a", CLAIM, 0, times=100)
    assert estimates.survival("new", CLAIM)[0] < 0.2
    verify(estimates, "b", CLAIM, 3, times=300)
    assert estimates.survival("newer", CLAIM)[0] > 0.7


def test_one_request_moves_another_less_than_itself():
    estimates = AcceptanceEstimates()
    estimates.survival("b", CLAIM)
    own = verify(estimates, "a", CLAIM, 0, times=4)
    assert own[0] < 0.8 * estimates.survival("b", CLAIM)[0]


def test_after_idle_steps_a_request_is_as_the_others():
    estimates = AcceptanceEstimates()
    for _ in range(100):
        verify(estimates, "good", CLAIM, 3)
        verify(estimates, "bad", CLAIM, 0)
    low = estimates.survival("bad", CLAIM)[0]
    for _ in range(600):
        estimates.survival("bad", CLAIM)
    assert low < 0.2
    assert estimates.survival("bad", CLAIM) == pytest.approx(estimates.survival("new", CLAIM), abs=0.02)


def test_a_forgotten_request_begins_anew_and_unknown_ones_are_ignored():
    estimates = AcceptanceEstimates()
    estimates.observe("never", 3, 1)
    estimates.forget("never")
    verify(estimates, "a", CLAIM, 0, times=3)
    estimates.forget("a")
    assert estimates.survival("a", CLAIM).tolist() == estimates.survival("b", CLAIM).tolist()
    estimates.observe("a", 3, 0)
    once = estimates.survival("b", CLAIM).tolist()
    estimates.observe("a", 3, 0)  # the draft was observed already
    assert estimates.survival("c", CLAIM).tolist() == once


@settings(max_examples=100)
@given(data=st.data())
def test_estimates_are_probabilities_that_never_rise(data):
    estimates = AcceptanceEstimates()
    claims = st.lists(st.floats(allow_nan=True, allow_infinity=True, width=64), max_size=5)
    for _ in range(data.draw(st.integers(1, 20))):
        draft = make_draft(*data.draw(claims))
        survival = estimates.survival("a", draft)
        assert survival.size == draft.tokens.size
        assert ((survival >= 0) & (survival <= 1)).all() and (np.diff(survival) <= 0).all()
        proposed = data.draw(st.integers(0, survival.size))
        estimates.observe("a", proposed, data.draw(st.integers(0, proposed)))


def test_a_draft_is_foreseen_as_it_would_be_estimated_and_changes_nothing():
    estimates = AcceptanceEstimates()
    assert estimates.foresee("a", CLAIM).tolist() == CLAIM.survival.tolist(), "of a request that nothing is known of"
    verify(estimates, "a", CLAIM, 1, times=5)
    estimates.observe("a", 3, 1)
    foreseen = estimates.foresee("a", CLAIM)
    assert foreseen.tolist() == estimates.foresee("a", CLAIM).tolist()
    assert foreseen.tolist() == estimates.survival("a", CLAIM).tolist()
    longer = make_draft(*CLAIM.survival, 0.25)
    known, unknown = foreseen.size, foreseen[-1] * longer.survival[-1] / longer.survival[-2]
    ahead = estimates.foresee("a", longer)
    assert ahead[:known].tolist() == foreseen.tolist()
    assert ahead[known] == pytest.approx(unknown, rel=0.3), "its own drafts say nothing of one behind all of them"
    estimates.observe("a", 3, 0)
    assert estimates.foresee("a", CLAIM)[0] < foreseen[0]
