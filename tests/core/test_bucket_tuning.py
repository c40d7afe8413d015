"""The list of buckets with the least expected cost: all lists tried, one by one, know none better."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.core.bucket_tuning import StepCosts, choose_buckets, expected_cost, parse_load
from routed_experts.core.errors import ConfigError
from routed_experts.core.server_args import ServerArgs

BUCKETS = st.lists(st.integers(1, 24), min_size=1, max_size=6, unique=True).map(sorted)
SECONDS = st.floats(1e-4, 10, allow_nan=False)


def by_hand(buckets, seconds, load):
    """Mean cost of the load: each size in the smallest bucket, at a cost that is read off the two measured sizes around
    it."""
    total = 0.0
    for size, weight in load.items():
        measured = sorted(seconds[min(b for b in buckets if b >= size)].items())
        right = next(i for i, (n, _) in enumerate(measured) if n >= size)
        (n1, c1), (n0, c0) = measured[right], measured[max(right - 1, 0)]
        cost = c1 if n1 == size or right == 0 else c0 + (c1 - c0) * (size - n0) / (n1 - n0)
        total += weight * cost
    return total / sum(load.values())


@settings(max_examples=150, deadline=None)
@given(buckets=BUCKETS, most=st.integers(1, 7), data=st.data())
def test_no_other_list_of_buckets_is_cheaper(buckets, most, data):
    seconds = {
        b: {n: data.draw(SECONDS) for n in {b, *data.draw(st.sets(st.integers(1, b), max_size=2))}} for b in buckets
    }
    load = data.draw(st.dictionaries(st.integers(1, buckets[-1]), st.floats(0.01, 9), min_size=1, max_size=8))
    costs = StepCosts(seconds)
    chosen = choose_buckets(costs, load, most=most)
    lists = [
        (*some, buckets[-1])
        for count in range(min(most, len(buckets)))
        for some in itertools.combinations(buckets[:-1], count)
    ]
    cheapest = min(by_hand(paddings, seconds, load) for paddings in lists)
    assert chosen in lists
    assert by_hand(chosen, seconds, load) == pytest.approx(cheapest, rel=1e-9)
    assert expected_cost(chosen, costs, load) == pytest.approx(cheapest, rel=1e-9)
    ServerArgs(precompile_bs_paddings=chosen, precompile_token_paddings=(chosen[-1],))  # a list that an engine takes


def test_padding_that_costs_nothing_needs_one_bucket_and_padding_that_costs_all_needs_one_a_size():
    free = StepCosts({b: {n: 1.0 + n for n in range(1, b + 1)} for b in (1, 2, 4, 8)})
    dear = StepCosts({b: {n: float(b) for n in range(1, b + 1)} for b in (1, 2, 4, 8)})
    load = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}
    assert choose_buckets(free, load, most=4) == (8,)
    assert choose_buckets(dear, load, most=4) == (1, 2, 4, 8)
    assert choose_buckets(dear, {8: 1.0}, most=4) == (8,)


@pytest.mark.parametrize("largest", [1, 7, 1024])
def test_loads_are_shares_and_the_harmonic_one_gives_every_doubling_as_much(largest):
    uniform, harmonic = parse_load("uniform", largest), parse_load("harmonic", largest)
    assert sum(uniform.values()) == pytest.approx(1) == pytest.approx(sum(harmonic.values()))
    assert len(set(uniform.values())) == 1 and all(
        n * weight == pytest.approx(harmonic[1]) for n, weight in harmonic.items()
    )


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda: StepCosts({}), "no bucket"),
        (lambda: StepCosts({4: {1: 1.0}}), r"bucket 4 was measured at \[1\]; expected sizes in 1\.\.4, that one"),
        (lambda: StepCosts({4: {4: 1.0, 5: 1.0}}), r"measured at \[4, 5\]"),
        (lambda: StepCosts({4: {4: 0.0}}), "positive seconds"),
        (lambda: StepCosts({4: {4: float("nan")}}), "positive seconds"),
        (lambda: choose_buckets(StepCosts({4: {4: 1.0}}), {1: 1.0}, most=0), "at most 0 buckets"),
        (
            lambda: choose_buckets(StepCosts({4: {4: 1.0}}), {5: 1.0}, most=1),
            r"sizes 5\.\.5; expected shares of sizes in 1\.\.4",
        ),
        (lambda: choose_buckets(StepCosts({4: {4: 1.0}}), {}, most=1), "no size"),
        (lambda: choose_buckets(StepCosts({4: {4: 1.0}}), {4: 0.0}, most=1), "expected shares"),
        (lambda: parse_load("gaussian", 4), "load 'gaussian' is unknown; choose one of uniform, harmonic"),
    ],
)
def test_invalid_candidates_raise(wrong, match):
    with pytest.raises(ConfigError, match=match):
        wrong()
