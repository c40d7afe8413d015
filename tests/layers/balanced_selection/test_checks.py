"""Replica tables and capacities: what is sound passes unchanged, what is not is refused with its place."""

from fractions import Fraction

import numpy as np
import pytest

from oracles.selection import replica_table, shuffled
from routed_experts.core.errors import ConfigError, PlacementError
from routed_experts.core.placement import ExpertPlacement
from routed_experts.layers.balanced_selection.checks import check_capacity, check_replica_order, expert_capacity

TABLE = [[0, 3, -1], [1, -1, -1], [2, 4, 5]]


def test_sound_tables_pass_as_int32():
    rng = np.random.default_rng(0)
    for _ in range(50):
        table = replica_table(rng, 12, 20, 5)
        for order in (table, shuffled(rng, table, 3)):
            checked = check_replica_order(order.astype(np.int64), 20)
            assert checked.dtype == np.int32 and np.array_equal(checked, order)


def test_a_layer_of_a_placement_is_a_sound_table():
    rng = np.random.default_rng(1)
    instances = np.stack([rng.permutation(np.concatenate([np.arange(12), rng.integers(0, 12, 8)])) for _ in range(3)])
    placement = ExpertPlacement.from_instances(instances, num_experts=12, num_devices=5)
    for table, owners in zip(placement.logical_to_physical_map, instances, strict=True):
        checked = check_replica_order(table, 20)
        assert all(owners[i] == e for e, row in enumerate(checked) for i in row if i >= 0)


@pytest.mark.parametrize(
    ("index", "value", "match"),
    [
        ((2, 1), -1, r"replica_order\[2\] has a gap at position 1: \[2, -1, 5\]"),
        ((1, 0), -1, r"expert 1 has no instance \(1 such experts\)"),
        ((1, 0), 4, r"instance 1 of num_instances=6 is in 0 positions"),
        ((1, 1), 4, r"instance 4 .* is in 2 positions \(experts \[1, 2\]\)"),
        ((2, 2), 2, r"instance 2 .* is in 2 positions \(experts \[2\]\)"),
        ((0, 1), 6, r"replica_order\[0, 1\] = 6; instances are 0 .. 5"),
        ((0, 1), -2, r"replica_order\[0, 1\] = -2"),
    ],
)
def test_unsound_tables_are_refused_with_their_place(index, value, match):
    table = np.array(TABLE)
    table[index] = value
    with pytest.raises(PlacementError, match=match):
        check_replica_order(table, 6)


def test_sources_must_list_the_same_instances():
    other = np.array([[3, 0, -1], [2, -1, -1], [1, 4, 5]])
    with pytest.raises(PlacementError, match=r"replica_order\[1\]: expert 1 has instances \[2\], source 0 has \[1\]"):
        check_replica_order(np.stack([TABLE, other]), 6)


@pytest.mark.parametrize(
    "table", [[0, 1], np.zeros((2, 2, 2, 2), int), np.zeros((0, 3), int), np.zeros((2, 2)), [["a"]]]
)
def test_tables_of_another_form_are_refused(table):
    with pytest.raises(PlacementError, match="replica_order is"):
        check_replica_order(table, 2)


@pytest.mark.parametrize(
    ("capacity", "match"),
    [
        ([1, -1, 2], r"capacity\[1\] = -1"),
        ([0, 0, 0], r"0 for all 3 instances"),
        ([1, 1], r"int64\[2\]; give 3 integers"),
        ([1.0, 1.0, 1.0], r"float64\[3\]"),
        ([1, 2**31, 1], r"capacity\[1\] = 2147483648"),
    ],
)
def test_capacities_that_cannot_work_are_refused(capacity, match):
    with pytest.raises(ConfigError, match=match):
        check_capacity(capacity, 3)


def test_sound_capacities_pass_as_int32():
    checked = check_capacity(np.array([0, 5, 2**31 - 1]), 3)
    assert checked.dtype == np.int32 and checked.tolist() == [0, 5, 2**31 - 1]


@pytest.mark.parametrize("factor", [1, 2, 1.25, 1.1, "5/4", Fraction(7, 3)])
def test_capacity_is_the_smallest_whole_number_that_holds_the_factor(factor):
    exact = Fraction(str(factor))
    for num_valid in (0, 1, 3, 16, 512, 513):
        slots = expert_capacity(num_valid, 8, 384, factor)
        assert slots.shape == (384,) and slots.dtype == np.int32 and len(set(slots.tolist())) == 1
        expected = exact * num_valid * 8 / 384
        assert slots[0] >= max(1, expected) and (slots[0] == 1 or slots[0] - 1 < expected)
        floor = expert_capacity(num_valid, 8, 384, factor, rounding="floor")
        assert floor[0] <= expected < floor[0] + 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((-1, 8, 384, 2), "num_valid=-1"),
        ((1, 0, 384, 2), "k=0"),
        ((1, 8, 0, 2), "num_instances=0"),
        ((1, 8, 384, 0), "factor=0"),
        ((1, 8, 384, -1.5), "factor=-1.5"),
        ((1, 8, 384, float("nan")), "factor=nan"),
        ((1, 8, 384, float("inf")), "factor=inf"),
        ((1, 8, 384, "many"), "factor='many'"),
        ((1, 8, 384, "1/0"), "factor='1/0'"),
        ((1, 8, 384, "1e99999999"), "factor='1e99999999'"),
        ((1, 8, 384, 2, "round"), "rounding='round'"),
    ],
)
def test_capacity_factors_that_cannot_work_are_refused(arguments, match):
    with pytest.raises(ConfigError, match=match):
        expert_capacity(*arguments)
