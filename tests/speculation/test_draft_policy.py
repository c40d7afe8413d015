"""The policy takes the fastest drafts: all choices tried one by one, none is faster. It stops where nothing pays."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.speculation.acceptance_estimates import AcceptanceEstimates
from routed_experts.speculation.cost_table import CostTable
from routed_experts.speculation.draft_policy import DraftPolicy
from routed_experts.speculation.drafter import Draft

# Seconds of a step by its tokens: 48 layers with 128 experts on an accelerator, where small batches gain little.
TOKENS, SECONDS = [1, 4, 16, 64, 256], [0.00271, 0.0052, 0.01098, 0.01694, 0.0228]


def make_costs(bucket, sizes, seconds=lambda padded, tokens: float(np.interp(tokens, TOKENS, SECONDS))):
    costs = CostTable()
    for padded in sizes:
        for tokens in {bucket, padded}:
            costs.set(bucket, padded, tokens, seconds(padded, tokens))
    return costs


def expected_rate(costs, survivals, chosen, num_requests):
    """Expected tokens per second of a choice, in the smallest of the shapes that hold it."""
    num_tokens = num_requests + sum(chosen)
    emitted = num_requests + sum(float(s[:count].sum()) for s, count in zip(survivals, chosen, strict=True))
    bucket = costs.bucket(num_requests)
    sizes = [n for n in costs.padded_sizes(num_requests) if n >= num_tokens and (n > bucket) == any(chosen)]
    if not sizes:
        return 0
    return emitted / float(costs.estimate_seconds(num_requests, sizes[0], np.array([num_tokens]))[0])


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_other_choice_is_faster(seed):
    rng = np.random.default_rng(seed)
    bucket = int(rng.integers(1, 5))
    num_requests = int(rng.integers(1, bucket + 1))
    sizes = sorted({bucket, *(int(n) for n in rng.integers(bucket, 4 * bucket + 1, 2))})
    costs = make_costs(bucket, sizes, lambda padded, tokens: float(rng.uniform(0.5, 1 + tokens / 3)))
    survivals = [np.cumprod(rng.uniform(0, 1, rng.integers(0, 4))) for _ in range(rng.integers(1, num_requests + 1))]
    chosen = DraftPolicy(costs).choose(survivals, num_requests)
    every = itertools.product(*(range(s.size + 1) for s in survivals))
    rates = {choice: expected_rate(costs, survivals, choice, num_requests) for choice in every}
    assert rates[tuple(chosen)] == pytest.approx(max(rates.values()), rel=1e-12)
    if max(rates.values()) == rates[(0,) * len(survivals)]:
        assert not any(chosen)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_wait_makes_drafts_dearer_and_a_step_ahead_does_not_have_it(seed):
    rng = np.random.default_rng(seed)
    bucket = int(rng.integers(1, 4))
    sizes = sorted({bucket, *(int(n) for n in rng.integers(bucket, 4 * bucket + 1, 2))})
    costs = make_costs(bucket, sizes, lambda padded, tokens: float(rng.uniform(0.5, 1 + tokens / 3)))
    survivals = [np.cumprod(rng.uniform(0, 1, rng.integers(0, 4))) for _ in range(bucket)]
    policy, wait, gain = DraftPolicy(costs), float(rng.uniform(0.01, 1)), float(rng.uniform(0.5, 3))
    without = policy.choose(survivals, bucket)
    assert policy.choose_ahead(survivals, bucket, joined_gain=gain) == without, "no wait is known"
    costs.follow_wait(bucket, wait)

    def rate(counts, factor, waited):
        """Tokens per second of drafts that are accepted `factor` times as often."""
        seconds = (bucket + sum(counts)) / expected_rate(costs, [np.ones(s.size) for s in survivals], counts, bucket)
        accepted = sum(float(s[:count].sum()) for s, count in zip(survivals, counts, strict=True))
        return (bucket + min(factor * accepted, sum(counts))) / (seconds + waited)

    joined = policy.choose(survivals, bucket)
    every = [choice for choice in itertools.product(*(range(s.size + 1) for s in survivals))]
    possible = [c for c in every if expected_rate(costs, survivals, c, bucket)]
    rates = {choice: rate(choice, 1.0, wait * any(choice)) for choice in possible}
    assert rates[tuple(joined)] == pytest.approx(max(rates.values()), rel=1e-12)
    ahead = policy.choose_ahead(survivals, bucket, joined_gain=gain)
    if any(without) and rate(without, gain, wait) > rate(without, 1.0, 0.0) * (1 + 1e-9):
        assert not any(ahead)
    elif rate(without, gain, wait) < rate(without, 1.0, 0.0) * (1 - 1e-9):
        assert ahead == without


def test_drafts_that_a_wait_makes_a_loss_end():
    policy = DraftPolicy(costs := make_costs(1, (1, 8), lambda padded, tokens: 1.0 if padded == 1 else 1.2))
    for is_joined, ends in ((False, False), (True, True)):
        for step in range(100):
            if policy.should_try(step):
                policy.tried(num_requests=1, num_drafts=7, num_emitted=2, is_joined=is_joined)
        assert policy.is_off is ends
        costs.follow_wait(1, 1.0)


def test_drafts_compete_across_requests_and_those_without_drafts_count():
    costs = make_costs(4, (4, 8), lambda padded, tokens: 1.0 if padded == 4 else 1.2)
    sure, unsure, none = np.array([0.95, 0.9, 0.85]), np.array([0.2, 0.1, 0.05]), np.zeros(0)
    assert DraftPolicy(costs).choose([sure, none, unsure], 4) == [3, 0, 1]  # 4 drafts fit
    assert DraftPolicy(costs).choose([unsure, none], 4) == [0, 0]
    assert DraftPolicy(costs).choose([], 4) == []
    assert DraftPolicy(costs).choose([none, none], 2) == [0, 0]
    assert DraftPolicy(costs).choose([sure], 9) == [0]  # no such bucket


def test_without_adaptive_every_draft_that_fits_is_verified():
    costs = make_costs(2, (2, 4, 16), lambda padded, tokens: float(padded**3))
    hopeless = np.full(7, 1e-6)
    policy = DraftPolicy(costs, adaptive=False)
    assert policy.choose([hopeless, hopeless[:3]], 2) == [7, 3]
    assert sum(DraftPolicy(make_costs(2, (2, 4)), adaptive=False).choose([hopeless, hopeless], 2)) == 2
    assert DraftPolicy(costs).choose([hopeless, hopeless], 2) == [0, 0]
    for step in range(2000):
        assert policy.should_try(step) and not policy.is_off
        policy.tried(num_requests=2, num_drafts=14 * (step % 2), num_emitted=2)


@settings(max_examples=100)
@given(data=st.data())
def test_poisoned_costs_and_survivals_give_a_legal_choice(data):
    bucket = data.draw(st.integers(1, 8))
    sizes = {bucket, *(bucket * n for n in data.draw(st.lists(st.integers(1, 8), max_size=2)))}
    seconds = st.sampled_from([1e-300, 1e-12, 1.0, 1e12, 1e300])
    costs = make_costs(bucket, sorted(sizes), lambda padded, tokens: data.draw(seconds))
    num_requests = data.draw(st.integers(1, bucket + 1))
    survival = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=7).map(np.array)
    survivals = data.draw(st.lists(survival, max_size=num_requests))
    policy = DraftPolicy(costs, adaptive=data.draw(st.booleans()))
    for _ in range(3):
        chosen = policy.choose(survivals, num_requests)
        assert len(chosen) == len(survivals)
        assert all(type(k) is int and 0 <= k <= s.size for k, s in zip(chosen, survivals, strict=True))
        assert sum(chosen) <= max(max(sizes) - num_requests, 0)
        costs.follow(num_requests, max(sizes), num_requests + sum(chosen), data.draw(seconds))


def tried_steps(policy, steps, *, emitted=lambda step: 0):
    """The steps that tried drafts. One request; a step verifies 7 drafts at 3 times the seconds of one without, and
    emits `emitted(step)` tokens; with 0 it has no draft."""
    tried = []
    for step in steps:
        if policy.should_try(step):
            tried.append(step)
            num_emitted = emitted(step)
            policy.tried(num_requests=1, num_drafts=7 if num_emitted else 0, num_emitted=num_emitted or 1)
    return tried


@pytest.fixture
def policy():
    return DraftPolicy(make_costs(1, (1, 8), lambda padded, tokens: 1.0 if padded == 1 else 3.0))


def test_probes_come_every_64_steps_and_every_512_after_four_without_use(policy):
    assert not policy.is_off
    assert tried_steps(policy, range(32)) == list(range(32))
    assert policy.is_off
    without_draft_and_without_gain = {95: 0, 159: 1, 223: 3, 287: 0, 799: 2}
    assert tried_steps(policy, range(32, 1500), emitted=lambda step: without_draft_and_without_gain.get(step, 0)) == [
        *without_draft_and_without_gain,
        1311,
    ]


def test_steps_that_gain_now_and_then_keep_drafting_on(policy):
    assert tried_steps(policy, range(1000), emitted=lambda step: 4 if step % 32 == 0 else 0) == list(range(1000))
    assert tried_steps(policy, range(1000, 2000), emitted=lambda step: 8 if step % 3 == 0 else 1) == list(
        range(1000, 2000)
    )


def test_drafting_that_loses_ends_after_four_lost_steps_or_twelve_after_gains(policy):
    assert tried_steps(policy, range(600), emitted=lambda step: 2) == [0, 1, 2, 3, 4, 516]
    policy = DraftPolicy(make_costs(1, (1, 8), lambda padded, tokens: 1.0 if padded == 1 else 3.0))
    tried_steps(policy, range(100), emitted=lambda step: 8)
    assert tried_steps(policy, range(100, 200), emitted=lambda step: 2) == list(range(100, 113))


def test_a_useful_probe_starts_a_trial_and_then_drafting(policy):
    tried_steps(policy, range(32))
    assert tried_steps(policy, range(32, 104), emitted=lambda step: 4 if step == 95 else 0) == [*range(95, 104)]
    assert not policy.is_off  # the probe and eight more
    assert tried_steps(policy, range(104, 300)) == [*range(104, 128), 191, 255]


def test_a_trial_that_loses_ends(policy):
    tried_steps(policy, range(32))
    assert tried_steps(policy, range(32, 700), emitted=lambda step: 4 if step == 95 else 1) == [95, 96, 97, 98, 610]


def test_a_new_request_brings_a_rare_probe_forward_to_64_steps_after_the_last(policy):
    tried_steps(policy, range(288))  # the last probe was at 287, the next is at 799
    policy.renew()
    assert tried_steps(policy, range(288, 800)) == [351]
    policy.renew()
    assert tried_steps(policy, range(800, 801)) == [800]
    fresh = DraftPolicy(CostTable())
    fresh.renew()
    assert tried_steps(fresh, range(3)) == [0, 1, 2]


def test_one_step_in_256_goes_without_drafts_while_drafting_is_on(policy):
    sure = [np.full(3, 0.99)]
    plain = []
    for step in range(1000):
        assert policy.should_try(step)
        (num_drafts,) = policy.choose(sure, 1)
        plain += [] if num_drafts else [step]
        policy.tried(num_requests=1, num_drafts=num_drafts, num_emitted=1 + num_drafts)
    assert plain == [255, 511, 767]


def test_shapes_without_costs_gain_and_lose_nothing():
    policy = DraftPolicy(CostTable())
    assert tried_steps(policy, range(100), emitted=lambda step: 8 if step % 2 else 1) == list(range(100))


class Engine:
    """Steps of B requests whose drafts are accepted with probability alpha; counts tokens and seconds."""

    def __init__(self, num_requests, *, claimed, gap=0.03):
        sizes = (num_requests, 2 * num_requests, 8 * num_requests)
        self.costs = make_costs(num_requests, sizes)
        self.policy, self.estimates = DraftPolicy(self.costs), AcceptanceEstimates()
        self.num_requests, self.gap = num_requests, gap
        self.draft = Draft(np.zeros(7, np.int32), claimed ** np.arange(1, 8))
        self.rng, self.step = np.random.default_rng(0), 0

    def run(self, steps, alpha):
        """Return the throughput over that without drafts, and the steps that verified drafts."""
        plain = float(np.interp(self.num_requests, TOKENS, SECONDS))
        seconds, emitted, verified = 0.0, 0, []
        for step in range(self.step, self.step + steps):
            joined, chosen = self.policy.should_try(step), [0] * self.num_requests
            if joined:
                survivals = [self.estimates.survival(key, self.draft) for key in range(self.num_requests)]
                if self.policy.is_off:
                    survivals = [self.draft.survival] * self.num_requests
                chosen = self.policy.choose(survivals, self.num_requests)
            accepted = [int((self.rng.random(k) < alpha).cumprod().sum()) for k in chosen]
            for key, (proposed, retained) in enumerate(zip(chosen, accepted, strict=True)):
                self.estimates.observe(key, proposed, retained)
            num_drafts, num_emitted = sum(chosen), self.num_requests + sum(accepted)
            num_tokens = self.num_requests + num_drafts
            ran = float(np.interp(num_tokens, TOKENS, SECONDS))
            took = ran * (1 + self.gap * joined)
            padded, _ = self.costs.seconds(self.num_requests, num_tokens)
            self.costs.follow(self.num_requests, padded, num_tokens, took if num_drafts else ran)
            if joined:
                self.policy.tried(num_requests=self.num_requests, num_drafts=num_drafts, num_emitted=num_emitted)
            seconds, emitted = seconds + took, emitted + num_emitted
            verified += [step] if num_drafts else []
        self.step += steps
        return emitted * plain / (self.num_requests * seconds), verified


@pytest.mark.parametrize(
    ("claimed", "num_requests"),
    [
        pytest.param(claimed, number, marks=pytest.mark.thorough if claimed < 1 and number == 16 else [])
        for claimed in (0.5, 0.9, 1.0)
        for number in (1, 4, 16)
    ],
)
def test_drafts_that_are_never_accepted_end_within_200_steps_and_cost_little(claimed, num_requests):
    engine = Engine(num_requests, claimed=claimed)
    engine.run(200, alpha=0.0)
    assert engine.policy.is_off  # off
    gain, verified = engine.run(4000, alpha=0.0)
    assert len(verified) <= 12
    assert gain >= 0.99


@pytest.mark.parametrize(
    ("claimed", "num_requests", "least"),
    [
        (0.7, 1, 1.3),
        (0.7, 4, 1.3),
        pytest.param(0.7, 16, 1.7, marks=pytest.mark.thorough),
        (0.9, 1, 1.3),
        (0.9, 4, 1.3),
        (0.9, 16, 1.7),
    ],
)
def test_drafts_that_are_mostly_accepted_are_found_again_and_pay(claimed, num_requests, least):
    engine = Engine(num_requests, claimed=claimed)
    assert engine.run(1000, alpha=0.8)[0] >= least
    engine.run(1000, alpha=0.0)
    engine.policy.renew()
    engine.run(200, alpha=0.8)
    assert engine.run(1000, alpha=0.8)[0] >= least


def test_costs_that_were_measured_too_low_are_corrected():
    engine = Engine(1, claimed=0.3)
    for padded in (2, 8):
        for tokens in (1, padded):
            engine.costs.set(1, padded, tokens, 1e-6)
    engine.run(800, alpha=0.3)
    assert engine.run(4000, alpha=0.3)[0] >= 0.98
    assert math.isfinite(engine.costs.seconds(1, 8)[1])


def test_drafts_that_would_pay_end_a_rest_by_a_probe():
    policy = DraftPolicy(pay_table())
    step = 0
    while not policy.is_off:  # nothing is drafted
        assert policy.should_try(step)
        policy.tried(num_requests=1, num_drafts=0, num_emitted=1)
        step += 1
    poor, good = np.array([0.01]), np.array([0.95, 0.9, 0.85])
    assert not policy.should_try(step + 1)
    for _ in range(9):
        policy.expect([poor], 1)
        policy.expect([good], 1)  # once in a row is no reason
    assert not policy.should_try(step + 2)
    policy.expect([good], 1)
    policy.expect([good], 1)
    assert policy.should_try(step + 2)
    policy.tried(num_requests=1, num_drafts=3, num_emitted=1)  # the probe lost
    policy.expect([good], 1)
    policy.expect([good], 1)
    assert not policy.should_try(step + 3), "the next probe comes after a rest"
    policy.should_try(step + 70)
    policy.expect([good], 1)
    policy.expect([good], 1)
    assert policy.should_try(step + 71)


@pytest.mark.parametrize(("survival", "probes"), [(0.14, False), (0.17, True)])
def test_drafts_that_would_gain_less_than_a_twentieth_are_not_probed_before_their_time(survival, probes):
    """A verify step takes 1.1 times as long: a survival of 0.155 gains a twentieth, one of 0.1 nothing."""
    policy = DraftPolicy(pay_table())
    step = 0
    while not policy.is_off:
        assert policy.should_try(step)
        policy.tried(num_requests=1, num_drafts=0, num_emitted=1)
        step += 1
    for _ in range(4):
        assert policy.expect([np.array([survival])], 1) is probes
    assert policy.should_try(step + 1) is probes


def pay_table():
    """Drafts are nearly free."""
    costs = CostTable()
    costs.set(1, 1, 1, 1.0)
    costs.set(1, 4, 2, 1.1)
    costs.set(1, 4, 4, 1.2)
    return costs
