"""EPLB against the published example, a serial oracle, and the best of all placements."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cases import GOLDEN_LOAD, GOLDEN_MAP, GOLDEN_SIZES, greedy_row, least_peak
from routed_experts.core.errors import PlacementError
from routed_experts.core.load_metrics import device_load
from routed_experts.placement import eplb
from routed_experts.placement.eplb import rebalance

SMALL = (  # experts, instances, devices: few enough to enumerate
    (3, 6, 3),
    (3, 9, 3),
    (4, 6, 2),
    (4, 6, 3),
    (4, 8, 4),
    (5, 8, 2),
    (5, 8, 4),
    (5, 10, 2),
    (6, 6, 2),
    (6, 8, 2),
    (6, 8, 4),
    (6, 9, 3),
    (7, 9, 3),
    (7, 10, 2),
    (8, 8, 2),
    (8, 9, 3),
    (8, 10, 5),
    (9, 9, 3),
)


@st.composite
def placement_cases(draw):
    """Loads with ties and zeros, and sizes that fit each other."""
    num_nodes, num_groups, group_size = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_experts = num_groups * group_size
    num_devices = num_nodes * draw(st.integers(1, 3))
    least = -(-num_experts // num_devices)
    num_instances = num_devices * draw(st.integers(least, least + 2))
    loads = draw(
        st.lists(st.lists(st.integers(0, 12), min_size=num_experts, max_size=num_experts), min_size=1, max_size=3)
    )
    sizes = {
        "num_instances": num_instances,
        "num_groups": num_groups,
        "num_nodes": num_nodes,
        "num_devices": num_devices,
    }
    return np.array(loads), sizes | {"max_replicas": draw(st.integers(-(-num_instances // num_experts), num_instances))}


@pytest.mark.parametrize("refined", [True, False])
def test_the_published_example_comes_out_exactly(refined):
    placement = rebalance(GOLDEN_LOAD, **GOLDEN_SIZES, refined=refined)
    assert placement.physical_to_logical_map.tolist() == GOLDEN_MAP
    assert placement.logical_to_physical_map.shape == (2, 12, 5)  # J = min(16, I - E + 1)


@given(placement_cases())
def test_the_placement_is_that_of_the_serial_algorithm(case):
    loads, sizes = case
    layout = rebalance(loads, **sizes, refined=False).physical_to_logical_map
    for load, row in zip(loads, layout.tolist(), strict=True):
        assert row == greedy_row(load.tolist(), **sizes)


@settings(max_examples=30)
@given(placement_cases())
def test_a_refined_placement_is_whole_within_its_limits_and_no_worse(case):
    loads, sizes = case
    placement, plain = rebalance(loads, **sizes, epoch=3), rebalance(loads, **sizes, refined=False)
    counts = placement.logical_replica_count
    assert counts.min() >= 1 and counts.max() <= sizes["max_replicas"] and placement.epoch == 3
    assert (
        counts.sum(axis=1) == sizes["num_instances"]
    ).all()  # and the maps are inverses, or ExpertPlacement had refused them
    assert (device_load(loads, placement).max(axis=1) <= device_load(loads, plain).max(axis=1) * (1 + 1e-9)).all()
    if sizes["num_groups"] % sizes["num_nodes"] == 0:  # an expert's instances stay on the node of its group
        node = placement.physical_to_logical_map.reshape(len(loads), sizes["num_nodes"], -1)
        published = plain.physical_to_logical_map.reshape(node.shape)
        assert [[set(group) for group in layer] for layer in node.tolist()] == [
            [set(group) for group in layer] for layer in published.tolist()
        ]


def test_balancedness_is_within_one_percent_of_the_best_placement():
    """216 cases: all placements, for loads of three distributions."""
    rng, ratios = np.random.default_rng(0), {True: [], False: []}
    for num_experts, num_instances, num_devices in SMALL:
        popular = rng.permuted(np.tile(np.arange(1, num_experts + 1) ** -1.2, (4, 1)), axis=1)
        loads = np.concatenate([rng.gamma(shape, size=(4, num_experts)) for shape in (0.4, 1.0)] + [popular])
        sizes = {
            "num_instances": num_instances,
            "num_devices": num_devices,
            "max_replicas": num_instances - num_experts + 1,
        }
        best = np.array([least_peak(load, **sizes) for load in loads])
        for refined, ratio in ratios.items():
            ratio.append(best / device_load(loads, rebalance(loads, **sizes, refined=refined)).max(axis=1))
    refined, greedy = np.array(ratios[True]), np.array(ratios[False])
    assert (
        refined.size == 216 and max(refined.max(), greedy.max()) < 1 + 1e-9
    )  # the oracle is no weaker than what it judges
    assert refined.min() >= 0.99, refined.min(axis=1)
    assert np.count_nonzero(greedy < 0.99) > 80 and greedy.min() < 0.75  # the cases are hard enough to distinguish


def test_a_layer_without_load_is_placed_as_if_all_experts_had_the_same():
    silent = rebalance(np.zeros((1, 4)), num_instances=8, num_devices=4)
    assert silent.logical_replica_count.tolist() == [[2, 2, 2, 2]]


@pytest.mark.parametrize("nodes", [1, 2])
def test_loads_times_a_power_of_two_are_placed_alike_up_to_the_largest_float(nodes):
    load = np.random.default_rng(8).gamma(0.5, 1, (5, 12)) * 100
    sizes = {"num_instances": 16, "num_devices": 4, "num_groups": 2, "num_nodes": nodes}
    usual = rebalance(load, **sizes)
    with np.errstate(all="raise", under="ignore"):
        for power in (900, 1000, 1024 - np.frexp(load.sum(axis=1).max())[1]):
            scaled = rebalance(np.ldexp(load, power), **sizes)
            assert np.array_equal(scaled.physical_to_logical_map, usual.physical_to_logical_map)
        largest = np.array([[1e308, 1e307, 0]])
        small = rebalance(np.ldexp(largest, -1000), num_instances=4, num_devices=2)
        assert np.array_equal(
            rebalance(largest, num_instances=4, num_devices=2).physical_to_logical_map, small.physical_to_logical_map
        )


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64])
def test_sizes_may_be_integers_of_numpy_of_any_width(dtype):
    load = np.random.default_rng(9).gamma(0.5, 1, (2, 100))
    sizes = {"num_instances": 120, "num_devices": 4, "num_groups": 2, "num_nodes": 2, "max_replicas": 16}
    usual = rebalance(load, **sizes)
    narrow = rebalance(load, **{name: dtype(size) for name, size in sizes.items()})
    assert np.array_equal(narrow.physical_to_logical_map, usual.physical_to_logical_map)
    del sizes["max_replicas"]
    before = eplb(load, **sizes)
    narrow = {name: dtype(size) for name, size in sizes.items()}
    for previous in (None, before):
        wide, planned = (eplb(load[::-1], previous=previous, **each) for each in (sizes, narrow))
        assert np.array_equal(planned.physical_to_logical_map, wide.physical_to_logical_map)
    with pytest.raises(PlacementError, match="num_instances=200 is above 100 experts x max_replicas=1"):
        rebalance(load, num_instances=200, num_devices=2, max_replicas=dtype(1))


WRONG = {
    "larger than a float": (
        [[10**400, 1, 0, 0]],
        {},
        "holds an integer that is too large for a float; expected [M, E]",
    ),
    "shape": (np.ones(4), {}, "load has shape [4]; expected [M, E]"),
    "negative": (np.array([[1, -1, 0, 0]]), {}, "load of MoE layer 0, expert 1 is -1.0"),
    "no number": (np.array([[1, 0, np.nan, 0]]), {}, "load of MoE layer 0, expert 2 is nan"),
    "too few instances": (np.ones((1, 4)), {"num_instances": 3}, "num_instances=3 for 4 experts"),
    "too many for the cap": (
        np.ones((1, 4)),
        {"max_replicas": 1},
        "num_instances=6 is above 4 experts x max_replicas=1",
    ),
    "devices": (np.ones((1, 4)), {"num_devices": 4}, "num_devices=4 does not divide num_instances=6"),
    "nodes": (np.ones((1, 4)), {"num_nodes": 3}, "num_nodes=3 does not divide num_devices=2"),
    "groups": (np.ones((1, 4)), {"num_groups": 3}, "num_groups=3 does not divide the number of experts=4"),
    "none": (np.ones((1, 4)), {"num_nodes": 0}, "num_nodes=0 must be an integer of at least 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_refused_by_name(name):
    load, sizes, match = WRONG[name]
    with pytest.raises(PlacementError, match=re.escape(match)):
        rebalance(load, **{"num_instances": 6, "num_devices": 2} | sizes)
