"""Load metrics of even and uneven loads against worked numbers.

Balancedness of placements: tests/placement/test_match_devices.py; of records: tests/analysis/test_metrics.py."""

import re

import numpy as np
import pytest

from routed_experts.core.errors import PlacementError
from routed_experts.core.load_metrics import (
    device_load,
    eplb_balancedness,
    eplb_balancedness_weighted,
    load_entropy,
    load_gini,
    load_imbalance,
    load_variation,
    num_unused,
)
from routed_experts.core.placement import ExpertPlacement


def test_even_and_lopsided_loads():
    load = np.array([[3, 3, 3, 3], [12, 0, 0, 0], [6, 6, 0, 0]])
    assert load_imbalance(load).tolist() == [1, 4, 2]
    np.testing.assert_allclose(load_entropy(load), [1, 0, 0.5], atol=1e-12)
    np.testing.assert_allclose(load_gini(load), [0, 0.75, 0.5])
    np.testing.assert_allclose(load_variation(load), [0, np.sqrt(3), 1])
    assert num_unused(load).tolist() == [0, 3, 2]


def test_without_load_a_ratio_is_not_a_number():
    load = np.zeros((1, 4), np.int64)
    for metric in (load_imbalance, load_entropy, load_gini, load_variation):
        assert np.isnan(metric(load)).all()
    assert num_unused(load).tolist() == [4]
    assert load_entropy(np.array([[5]])).tolist() == [1]


@pytest.mark.parametrize(
    ("load", "received"),
    [
        (np.ones(4), "float64[4]"),
        ([1, 2], "int64[2]"),
        ([[1], [1, 2]], "a list of 2"),
        ([["a", "b"]], "<U1[1, 2]"),
        (None, "object[]"),
        (np.ones((0, 2)), "float64[0, 2]"),
    ],
)
def test_a_load_of_other_dims_is_refused_by_name(load, received):
    placement = ExpertPlacement.identity(1, 2, 2)
    for name, metric in (
        ("load", lambda each: device_load(each, placement)),
        ("devices", eplb_balancedness),
        ("devices", eplb_balancedness_weighted),
    ):
        with pytest.raises(PlacementError, match=re.escape(f"{name} is {received}; expected [M, ")):
            metric(load)


def test_a_load_may_be_a_nested_list():
    placement = ExpertPlacement.identity(1, 2, 2)
    assert device_load([[1, 2]], placement).tolist() == [[1, 2]] and eplb_balancedness_weighted([[1, 3]]) == 2 / 3
    with pytest.raises(PlacementError, match="does not fit a model of 1 x 3"):
        device_load([[1, 2, 3]], placement)
