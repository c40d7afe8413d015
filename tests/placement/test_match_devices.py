"""Renaming devices moves the fewest experts and changes no balance; the gate weighs what is left."""

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.core.errors import ConfigError, PlacementError
from routed_experts.core.load_metrics import device_load, eplb_balancedness, eplb_balancedness_weighted
from routed_experts.core.placement import ExpertPlacement
from routed_experts.placement.cost_model import estimate_move
from routed_experts.placement.eplb import rebalance
from routed_experts.placement.match_devices import num_copies, relabel


def drifted(seed, *, num_experts=10, num_instances=16, num_devices=4):
    """Placements of a load and of what it has become."""
    rng = np.random.default_rng(seed)
    load = rng.gamma(0.7, size=(2, num_experts))
    new_load = load * np.exp(0.6 * rng.standard_normal(load.shape))
    sizes = {"num_instances": num_instances, "num_devices": num_devices}
    return rebalance(load, **sizes), rebalance(new_load, **sizes), new_load


def num_copied(old_devices, new_devices):
    """Experts that come to a device which did not have them, one device after the other."""
    return sum(sum(expert not in old for expert in new) for old, new in zip(old_devices, new_devices, strict=True))


def by_device(placement, layer):
    return placement.physical_to_logical_map[layer].reshape(placement.num_devices, -1).tolist()


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from([1, 2]))
def test_no_other_names_for_the_devices_move_fewer_experts(seed, num_nodes):
    """With few experts a device has several instances of one."""
    old, new, load = drifted(seed, num_experts=10 if seed % 2 else 3)
    named = relabel(new, old, num_nodes=num_nodes)
    width = 4 // num_nodes
    node_orders = [itertools.permutations(range(low, low + width)) for low in range(0, 4, width)]
    orders = [[v for node in order for v in node] for order in itertools.product(*node_orders)]
    for layer in range(2):
        before, after = by_device(old, layer), by_device(new, layer)
        copies = [num_copied(before, [after[v] for v in order]) for order in orders]
        assert num_copies(old, named)[layer] == num_copied(before, by_device(named, layer)) == min(copies)
        assert sorted(map(sorted, by_device(named, layer))) == sorted(map(sorted, after))
    assert np.allclose(np.sort(device_load(load, named)), np.sort(device_load(load, new)))
    assert named.epoch == old.epoch + 1


@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_an_expert_that_stays_on_its_device_stays_in_its_slot(seed):
    old, new, _ = drifted(seed)
    named = relabel(new, old)
    for layer in range(2):
        for before, after in zip(by_device(old, layer), by_device(named, layer), strict=True):
            for expert in {*before} & {*after}:
                still = sum(a == b == expert for a, b in zip(before, after, strict=True))
                assert still == min(before.count(expert), after.count(expert))


def test_the_same_placement_under_other_names_moves_nothing():
    old = drifted(0)[0]
    devices = old.physical_to_logical_map.reshape(2, 4, -1)
    shuffled = ExpertPlacement.from_instances(
        devices[:, [2, 0, 3, 1], ::-1].reshape(2, -1), num_experts=10, num_devices=4
    )
    assert num_copies(old, shuffled).sum() > 0
    assert (relabel(shuffled, old).physical_to_logical_map == old.physical_to_logical_map).all()
    assert num_copies(old, relabel(shuffled, old)).tolist() == [0, 0]


def test_names_are_matched_only_between_placements_of_one_size():
    old, new, _ = drifted(0)
    with pytest.raises(
        PlacementError, match="a placement of 2 MoE layers, 10 experts, 12 instances, 4 devices cannot follow one of"
    ):
        relabel(drifted(0, num_instances=12)[0], old)
    with pytest.raises(PlacementError, match="num_nodes=3 does not divide num_devices=4"):
        relabel(new, old, num_nodes=3)


def test_a_missing_scipy_is_named_with_its_extra(monkeypatch):
    old, new, _ = drifted(0)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ConfigError, match=r"scipy is not installed; run .*\[placement\]"):
        relabel(new, old)


def test_balance_is_that_of_a_loop_over_instances():
    _, new, load = drifted(1)
    devices = np.zeros((2, 4))
    for layer, device in itertools.product(range(2), range(4)):
        for expert in by_device(new, layer)[device]:
            devices[layer, device] += load[layer, expert] / np.count_nonzero(
                new.physical_to_logical_map[layer] == expert
            )
    assert np.allclose(device_load(load, new), devices)
    ratios = [(sum(row) / 4 + 1e-5) / (max(row) + 1e-5) for row in devices.tolist()]
    assert eplb_balancedness(devices) == pytest.approx(sum(ratios) / 2)
    weighted = sum(sum(row) / 4 for row in devices.tolist()) / sum(max(row) for row in devices.tolist())
    assert eplb_balancedness_weighted(devices) == pytest.approx(weighted)
    assert eplb_balancedness(np.zeros((1, 2))) == eplb_balancedness_weighted(np.zeros((1, 2))) == 1
    with pytest.raises(PlacementError, match="2 MoE layers x 10 experts does not fit a model of 3 x 10"):
        device_load(np.ones((3, 10)), new)


def test_a_placement_is_applied_when_its_gain_pays_for_its_copies():
    now = ExpertPlacement.identity(1, 8, 4)
    same = estimate_move(np.ones((1, 8)), now, now, expert_time_s=1.0, expert_bytes=1, link_bytes_per_s=1)
    assert (same.copies, same.gain_s, same.cost_s, same.pays_off) == (0, 0, 0, False)
    skewed = np.array([[4.0, 4, 1, 1, 1, 1, 1, 3]])  # devices 8 2 2 4: balance 16 / 4 / 8 = 1 / 2
    new = rebalance(skewed, num_instances=8, num_devices=4)  # 5 5 4 2: 4 / 5
    moved = int(num_copies(now, new).sum())
    estimate = estimate_move(skewed, now, new, expert_time_s=2.0, expert_bytes=10, link_bytes_per_s=1000)
    assert (estimate.balancedness_now, estimate.balancedness_new) == (pytest.approx(1 / 2), pytest.approx(4 / 5))
    assert (estimate.gain_s, estimate.cost_s) == (
        pytest.approx(2 * (1 - 5 / 8)),
        pytest.approx(moved / 100),
    ) and estimate.pays_off
    assert not estimate_move(skewed, now, new, expert_time_s=2.0, expert_bytes=10**6, link_bytes_per_s=1000).pays_off
    level = np.array([[1.06, 1, 1, 1, 1, 1, 1, 1]])  # nothing to gain worth a change, were it free
    best = rebalance(level, num_instances=8, num_devices=4)
    assert not estimate_move(level, now, best, expert_time_s=1e9, expert_bytes=0, link_bytes_per_s=1).pays_off
    for wrong in (np.nan, -1.0):
        broken = skewed.copy()
        broken[0, 3] = wrong
        with pytest.raises(PlacementError, match="load of MoE layer 0, expert 3 is"):
            estimate_move(broken, now, new, expert_time_s=1, expert_bytes=1, link_bytes_per_s=1)
    with pytest.raises(PlacementError, match="expert_time_s=-1; expected a finite number of at least 0"):
        estimate_move(skewed, now, new, expert_time_s=-1, expert_bytes=1, link_bytes_per_s=1)
    with pytest.raises(PlacementError, match="link_bytes_per_s=0; expected a finite number above 0"):
        estimate_move(skewed, now, new, expert_time_s=1, expert_bytes=1, link_bytes_per_s=0)
