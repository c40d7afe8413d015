"""Residency: the most used experts stay, an adaptive map follows a load that moves, coverage is that of simulated
caches."""

import dataclasses
import re
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.cases import skewed_record
from routed_experts import placement
from routed_experts.core.errors import PlacementError
from routed_experts.core.placement import ResidencyMap
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.placement import (
    AdaptiveResidency,
    ExpertCosts,
    lru_coverage,
    num_promoted,
    resident,
    static_coverage,
)


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=6, max_size=6), min_size=1, max_size=3),
    st.integers(0, 6),
    st.integers(0, 6**4),
)
def test_the_most_used_are_resident_and_those_that_stay_keep_their_slots(load, per_layer, seed):
    before = ResidencyMap.from_experts(
        np.random.default_rng(seed).permuted(np.tile(np.arange(6), (len(load), 1)), axis=1)[:, :per_layer],
        num_experts=6,
        epoch=4,
    )
    anew, follows = (
        resident(np.array(load), per_layer=per_layer),
        resident(np.array(load), per_layer=per_layer, previous=before),
    )
    assert (anew.epoch, follows.epoch) == (0, 5)
    for layer, row in enumerate(load):
        expected = sorted(sorted(range(6), key=lambda e: (-row[e], e))[:per_layer])
        assert anew.experts[layer].tolist() == expected == sorted(follows.experts[layer].tolist())
        for slot, expert in enumerate(before.experts[layer].tolist()):
            assert expert not in expected or follows.experts[layer, slot] == expert
        assert num_promoted(before, follows)[layer] == len({*expected} - {*before.experts[layer].tolist()})


def test_an_adaptive_map_follows_the_load_within_its_limits():
    """From the worst set to the best, at most 8 experts a layer in 8 steps; and then it rests."""
    load = np.tile(np.r_[np.full(32, 9), np.full(32, 1)], (2, 1))  # 32 busy experts, 32 idle ones
    state = AdaptiveResidency.start(ResidencyMap.from_experts(np.tile(np.arange(32, 64), (2, 1)), num_experts=64))
    for step in range(1, 49):
        before, state = state.residency, state.observe(load, 40)
        assert num_promoted(before, state.residency).tolist() == ([8, 8] if step % 8 == 0 and step <= 32 else [0, 0]), (
            step
        )
        assert state.residency.epoch == min(step // 8, 4)
    assert sorted(state.residency.experts[0].tolist()) == list(range(32))


@pytest.mark.parametrize(
    ("counts", "costs", "promoted"),
    [
        ([10, 12], {}, 0),  # busier by 20 %, not by more
        ([10, 13], {}, 1),
        ([10, 13], {"copy_s": 3 / 32 * 4096 * 100e-6}, 0),  # 3 slots in 32 tokens, over 4,096 tokens, at 100 us
        ([10, 13], {"copy_s": 3 / 32 * 4096 * 100e-6 * 0.99}, 1),
        ([10, 20], {"host_s": 1e-6, "device_s": 1e-6}, 0),  # the accelerator is no faster
    ],
)
def test_an_expert_is_promoted_where_it_pays(counts, costs, promoted):
    state = AdaptiveResidency.start(
        ResidencyMap.first_n(1, 2, 1),
        costs=ExpertCosts(**{"host_s": 110e-6, "device_s": 10e-6, "copy_s": 1e-6} | costs),
    )
    for _ in range(8):
        state = state.observe(np.array([counts]), 32)
    assert num_promoted(ResidencyMap.first_n(1, 2, 1), state.residency).tolist() == [promoted]


def test_adaptive_residency_finds_what_a_fixed_set_of_another_text_misses():
    rng = np.random.default_rng(0)
    first, second = rng.normal(0, 1.5, (2, 3, 32))
    learned, other = skewed_record(rng, first, 3000), skewed_record(rng, second, 3000)
    fixed = resident(RoutingStats.from_records([learned]), per_layer=8)
    best = resident(RoutingStats.from_records([other]), per_layer=8)
    hits = {
        name: placement.simulate([other], plan, step_tokens=8)
        for name, plan in {"fixed": fixed, "best": best, "adaptive": AdaptiveResidency.start(fixed)}.items()
    }
    assert (hits["fixed"].hit_ratio < 0.8 * hits["best"].hit_ratio).all()
    assert (hits["adaptive"].hit_ratio > 0.95 * hits["best"].hit_ratio).all()
    begun = AdaptiveResidency.start(fixed, learned=RoutingStats.from_records([learned]))
    stable = placement.simulate([skewed_record(rng, first, 3000)], begun, step_tokens=8)
    assert (stable.hit_ratio > 0.97 * placement.simulate([learned], fixed).hit_ratio).all()
    assert not hits["fixed"].copies.any() and (hits["adaptive"].copies < 0.02 * 3000).all()


def test_coverage_is_that_of_caches_of_every_size():
    record = skewed_record(np.random.default_rng(1), np.random.default_rng(2).normal(0, 1, (3, 32)), 60)
    load = RoutingStats.from_records([record]).load
    lru, static = lru_coverage(record), static_coverage(load)
    for layer in range(3):
        accesses = record.ids[:, layer].ravel().tolist()
        for size in range(33):
            cache, hits = OrderedDict(), 0
            for expert in accesses:
                hits += expert in cache
                cache[expert] = None
                cache.move_to_end(expert)
                if len(cache) > size:
                    cache.popitem(last=False)
            assert lru.hits[layer, size] == pytest.approx(hits / len(accesses))
            assert lru.copies_per_token[layer, size] == pytest.approx((len(accesses) - hits) / 60)
            coverage = np.isin(accesses, resident(load, per_layer=size).experts[layer]).mean()
            assert static[layer, size] == pytest.approx(coverage)


def test_concentration_is_one_where_load_is_even_and_e_where_one_expert_has_all():
    assert placement.concentration(np.array([[5, 5, 5, 5], [0, 7, 0, 0], [0, 0, 0, 0]])).tolist() == [1, 4, 0]


WRONG = {
    "too many": (lambda: resident(np.ones((1, 4)), per_layer=5), "per_layer=5 must be an integer in 0..4"),
    "other slots": (
        lambda: resident(np.ones((1, 4)), per_layer=2, previous=ResidencyMap.first_n(1, 4, 3)),
        "per_layer=2, but previous has 3 slots a layer",
    ),
    "other model": (
        lambda: resident(np.ones((1, 4)), per_layer=2, previous=ResidencyMap.first_n(2, 4, 2)),
        "does not fit a model of 1 x 4",
    ),
    "load": (
        lambda: placement.static_coverage([[10**400, 1]]),
        "load=a list of 1 holds an integer that is too large for a float",
    ),
    "costs": (lambda: ExpertCosts(copy_s=-1.0), "copy_s=-1.0; expected a finite number of seconds"),
    "counts": (
        lambda: AdaptiveResidency.start(ResidencyMap.first_n(1, 4, 2)).observe(np.ones((1, 5), int), 1),
        "a model of 1 x 5",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_refused_by_name(name):
    make, match = WRONG[name]
    with pytest.raises(PlacementError, match=re.escape(match)):
        make()


def test_a_state_is_a_value():
    state = AdaptiveResidency.start(ResidencyMap.first_n(1, 4, 2))
    state.observe(np.array([[0, 0, 9, 9]]), 9)
    assert state.step == 0 and not state.fast.any() and dataclasses.replace(state).residency is state.residency
