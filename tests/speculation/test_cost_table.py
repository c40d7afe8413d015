"""The table of costs: what was measured, interpolated, and followed."""

import math

import numpy as np
import pytest

from routed_experts.speculation.cost_table import CostTable


def make_table():
    table = CostTable()
    for bucket, padded, tokens, seconds in (
        (4, 4, 4, 0.010),
        (4, 32, 32, 0.050),
        (4, 32, 4, 0.022),
        (4, 8, 8, 0.016),
        (1, 1, 1, 0.004),
    ):
        table.set(bucket, padded, tokens, seconds)
    return table


def test_shapes_are_those_of_the_smallest_bucket_that_holds_the_requests():
    table = make_table()
    assert [table.bucket(n) for n in (1, 2, 4, 5)] == [1, 4, 4, 0]
    assert table.padded_sizes(3) == (4, 8, 32)
    assert table.padded_sizes(5) == ()
    assert table.seconds(1, 1) == (1, pytest.approx(0.004))
    assert table.seconds(1, 2) == (0, math.inf)
    assert table.seconds(5, 5) == (0, math.inf)


def test_seconds_are_interpolated_between_what_was_measured_and_constant_beyond():
    table = make_table()
    assert table.seconds(3, 3) == (4, pytest.approx(0.010))
    assert table.seconds(3, 6) == (8, pytest.approx(0.016))
    assert table.seconds(3, 18) == (32, pytest.approx(0.036))
    assert table.estimate_seconds(2, 32, np.array([2, 4, 11, 32])) == pytest.approx([0.022, 0.022, 0.029, 0.050])
    table.set(4, 32, 18, 0.040)
    assert table.seconds(3, 25) == (32, pytest.approx(0.045))
    table.set(4, 32, 18, 0.030)
    assert table.seconds(3, 25) == (32, pytest.approx(0.040))


def test_points_are_interpolated_as_numpy_does_at_measured_ones_too():
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens = np.sort(rng.choice(np.arange(1, 200), rng.integers(1, 6), replace=False))
        seconds = rng.uniform(1e-3, 1e-1, len(tokens))
        table = CostTable()
        for count, value in zip(tokens, seconds, strict=True):
            table.set(1, 200, int(count), float(value))
        for count in range(1, 201):
            assert table.seconds(1, count) == (200, np.interp(count, tokens, seconds))


def test_half_of_an_error_is_gone_after_a_half_life():
    table = make_table()
    for _ in range(16):
        table.follow(4, 8, 8, 0.032)
    assert table.seconds(4, 8)[1] == pytest.approx(0.016 * math.sqrt(2), rel=1e-6)
    for _ in range(400):
        table.follow(3, 8, 8, 0.032)
    assert table.seconds(4, 8)[1] == pytest.approx(0.032, rel=1e-3)


def test_other_shapes_take_half_of_a_slow_change_and_little_of_a_large_error():
    table = make_table()
    for step in range(2000):  # contexts grow
        table.follow(4, 8, 8, 0.016 * (1 + step / 1000))
    assert table.seconds(1, 1)[1] == pytest.approx(0.004 * math.sqrt(3), rel=0.02)
    table = make_table()
    for _ in range(400):
        table.follow(4, 8, 8, 0.4)
    assert table.seconds(4, 8)[1] == pytest.approx(0.4, rel=1e-2)
    assert table.seconds(1, 1)[1] < 0.004 * 1.3


def test_the_first_step_of_a_shape_after_a_half_life_counts_half_and_moves_others_little():
    table = make_table()
    for _ in range(20):
        table.follow(4, 8, 8, 0.016)
    table.follow(4, 4, 4, 0.020)
    assert table.seconds(4, 4)[1] == pytest.approx(0.010 * math.sqrt(2), rel=1e-6)
    assert table.seconds(4, 8)[1] == pytest.approx(0.016, rel=0.02)


def test_a_report_counts_once_and_the_steps_before_it_as_absence_of_other_shapes():
    """Two reports for eight steps each, against the same steps reported one by one: those between took what the table
    expects, which moves nothing."""
    few, all_ = make_table(), make_table()
    bucket, size = 4, 4
    for _ in range(2):
        few.follow(bucket, size, size, 0.02, steps=8)
        for _ in range(7):
            all_.follow(bucket, size, size, all_.seconds(bucket, size)[1])
        all_.follow(bucket, size, size, 0.02)
    assert few.seconds(bucket, size)[1] == pytest.approx(all_.seconds(bucket, size)[1], rel=1e-9)
    larger = few.padded_sizes(bucket)[-1]
    for table in (few, all_):
        table.follow(bucket, larger, larger, 0.5)
    assert few.seconds(bucket, larger)[1] == pytest.approx(all_.seconds(bucket, larger)[1], rel=1e-9)


def test_points_between_and_beyond_the_measured_ones_are_followed():
    table = make_table()
    for tokens in (2, 11, 32):
        for _ in range(400):
            table.follow(4, 32, tokens, 0.1)
        assert table.estimate_seconds(4, 32, np.array([tokens])) == pytest.approx(0.1, rel=1e-2)


def test_noise_does_not_drive_other_shapes_away():
    table, rng = make_table(), np.random.default_rng(0)
    for _ in range(5000):
        table.follow(4, 8, 8, 0.016 * math.exp(0.05 * rng.normal()))
    assert table.seconds(4, 4)[1] == pytest.approx(0.010, rel=0.03)


def test_one_step_that_stalls_moves_the_table_little():
    table = make_table()
    table.follow(4, 8, 8, 100.0)
    assert table.seconds(4, 8)[1] < 0.016 * 1.07


def test_a_measurement_after_the_table_has_moved_counts_as_it_is():
    table = make_table()
    for _ in range(50):
        table.follow(4, 4, 4, 0.02)
    before = table.seconds(4, 8)[1]
    table.set(4, 32, 32, 0.5)
    assert table.seconds(4, 32) == (32, pytest.approx(0.5))
    assert table.seconds(4, 8)[1] == pytest.approx(before)


def test_waits_are_those_of_a_bucket_and_followed():
    table = make_table()
    assert table.wait(3) == 0.0, "none was measured"
    table.follow_wait(3, 0.002)
    assert table.wait(4) == table.wait(2) == 0.002 and table.wait(1) == table.wait(5) == 0.0
    for _ in range(16):
        table.follow_wait(4, 0.004)
    assert table.wait(3) == pytest.approx(0.003)
    table.follow_wait(4, 100.0)  # a stall
    assert table.wait(4) < 0.004
    before = table.wait(4)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        table.follow_wait(4, seconds)
    table.follow_wait(5, 1.0)
    assert table.wait(4) == before and table.wait(5) == 0.0
    assert table.seconds(3, 3) == (4, pytest.approx(0.010)), "a wait is no part of a step"


def test_what_cannot_be_is_ignored_or_refused():
    table = make_table()
    for requests, padded, seconds in ((5, 5, 1.0), (4, 64, 1.0), (4, 8, 0.0), (4, 8, math.nan), (4, 8, math.inf)):
        table.follow(requests, padded, 4, seconds)
    assert table.seconds(4, 8)[1] == pytest.approx(0.016)
    for wrong in ((0, 4, 4, 1.0), (4, 2, 2, 1.0), (4, 8, 9, 1.0), (4, 8, 0, 1.0)):
        with pytest.raises(ValueError, match="are no step"):
            table.set(*wrong)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="positive seconds"):
            table.set(4, 8, 8, seconds)
