"""Load metrics of even and uneven loads against worked numbers. Balancedness of placements:
tests/placement/test_match_devices.py; of records: tests/analysis/test_metrics.py.

Balancedness of placements: tests/placement/test_match_devices.py; of records: tests/analysis/test_metrics.py."""

import numpy as np

from routed_experts.core.load_metrics import (
    load_entropy,
    load_gini,
    load_imbalance,
    load_variation,
    num_unused,
)


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
