"""Numbers of routing against loops that follow the formulas of the docstrings letter by letter."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from analysis.records import random_record
from routed_experts import analysis
from routed_experts.analysis import (
    balance,
    coactivation,
    expert_counts,
    layer_flow,
    routing_difference,
    utilization,
)
from routed_experts.core.errors import RoutingAlignmentError, RoutingFormatError
from routed_experts.placement import lru_coverage

VALID = np.array([True, False, True, True, True, False, True, True, True])
RECORDS = {
    "one": [random_record(1)],
    "rows are missing": [random_record(2, valid=VALID)],
    "several": [random_record(3), random_record(4, rows=2, start=5), random_record(5, valid=VALID)],
    "one row": [random_record(6, rows=1)],
    "one layer": [random_record(7, layers=1)],
}


def known_rows(records):
    """Known rows as nested lists: [T][M][K]."""
    return [
        record.ids[row].tolist()
        for record in records
        for row in range(record.num_rows)
        if record.valid is None or record.valid[row]
    ]


def count(records, layer, *experts):
    return sum(all(expert in row[layer] for expert in experts) for row in known_rows(records))


@pytest.fixture(params=RECORDS)
def records(request):
    return RECORDS[request.param]


@pytest.fixture
def shape(records):
    return len(records[0].layer_ids), records[0].num_experts


def test_counts_and_utilization_are_those_of_a_loop(records, shape):
    counts, load = expert_counts(*records), utilization(*records)
    assert counts.shape == load.shape == shape
    for layer, expert in np.ndindex(shape):
        assert counts[layer, expert] == count(records, layer, expert)
        expected = count(records, layer, expert) * shape[1] / (len(known_rows(records)) * records[0].top_k)
        assert load[layer, expert] == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(load.mean(axis=1), 1.0, rtol=1e-12)


def test_balance_is_that_of_a_loop(records, shape):
    metrics, (layers, experts) = balance(*records), shape
    for layer in range(layers):
        c = [count(records, layer, expert) for expert in range(experts)]
        slots = len(known_rows(records)) * records[0].top_k
        assert metrics.max_load[layer] == pytest.approx(max(c) * experts / slots)
        assert metrics.gini[layer] == pytest.approx(
            sum(abs(a - b) for a in c for b in c) / (2 * experts * sum(c)), abs=1e-12
        )
        mean = sum(c) / experts
        assert metrics.variation[layer] == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in c) / experts) / mean)
        assert metrics.entropy[layer] == pytest.approx(
            -sum(x / slots * math.log(x / slots) for x in c if x) / math.log(experts)
        )
        assert metrics.dead[layer] == c.count(0)


def test_coactivation_is_that_of_a_loop(records, shape):
    lift, (layers, experts) = coactivation(*records), shape
    assert lift.shape == (layers, experts, experts)
    for layer, i, j in np.ndindex(lift.shape):
        below = count(records, layer, i) * count(records, layer, j)
        expected = len(known_rows(records)) * count(records, layer, i, j) / below if below else math.nan
        assert lift[layer, i, j] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (6, 3), (5, 1)])
def test_uniform_routing_has_a_lift_below_one(experts, top_k):
    """Rows are drawn without repetition: E(K-1) / (K(E-1)) off the diagonal, T / c_i on it."""
    rng = np.random.default_rng(7)
    ids = rng.random((20_000, 2, experts)).argsort(axis=2)[:, :, :top_k].astype(np.uint8)
    record = dataclasses.replace(random_record(rows=len(ids), layers=2, experts=experts, top_k=top_k), ids=ids)
    lift, others = coactivation(record), ~np.eye(experts, dtype=bool)
    expected = experts * (top_k - 1) / (top_k * (experts - 1))
    assert expected < 1
    np.testing.assert_allclose(lift[:, others], expected, rtol=0.15)  # a pair is counted 700 times or more
    np.testing.assert_allclose(lift[:, others].mean(axis=1), expected, rtol=0.01)
    np.testing.assert_allclose(lift[:, ~others], len(ids) / expert_counts(record), rtol=1e-12)


def test_flow_between_layers_is_that_of_a_loop(records, shape):
    flow, (layers, experts) = layer_flow(*records), shape
    assert flow.shape == (layers - 1, experts, experts)
    for layer, i, j in np.ndindex(flow.shape):
        both = sum(i in row[layer] and j in row[layer + 1] for row in known_rows(records))
        below = records[0].top_k * count(records, layer, i)
        assert flow[layer, i, j] == pytest.approx(both / below if below else math.nan, nan_ok=True)
    assert np.all(np.isnan(flow).all(axis=2) | np.isclose(flow.sum(axis=2), 1.0))


def test_uniform_and_one_sided_loads_have_the_numbers_that_the_docstring_promises():
    pairs = list(itertools.combinations(range(4), 2))  # every expert equally often
    record = random_record(rows=6, layers=1, experts=4, top_k=2)
    metrics = balance(_with_ids(record, np.array(pairs)[:, None]))
    assert [
        float(x[0]) for x in (metrics.max_load, metrics.gini, metrics.variation, metrics.entropy, metrics.dead)
    ] == pytest.approx([1, 0, 0, 1, 0])
    metrics = balance(_with_ids(record, np.tile([3, 1], (6, 1, 1))))
    assert (metrics.max_load[0], metrics.dead[0]) == (2.0, 2)
    assert metrics.entropy[0] == pytest.approx(0.5)


def test_no_known_row_gives_nan_and_no_warning():
    record = random_record(rows=3, valid=np.zeros(3, bool))
    assert np.isnan(utilization(record)).all()
    assert np.isnan(balance(record).gini).all()
    assert np.isnan(coactivation(record)).all()
    assert (expert_counts(record) == 0).all()
    assert np.isnan(utilization(random_record(rows=0, prompt=0))).all()


def test_one_expert_is_balanced():
    metrics = balance(random_record(experts=1, top_k=1))
    assert (metrics.entropy == 1.0).all()
    assert (metrics.gini == 0.0).all()


def test_ids_that_are_no_experts_are_refused():
    record = random_record(rows=4, experts=8, top_k=2)
    ids = record.ids.copy()
    ids[2, 0, 1] = 8
    with pytest.raises(RoutingFormatError, match="expected"):
        expert_counts(dataclasses.replace(record, ids=ids))


def test_what_is_no_record_is_refused_by_its_place():
    record = random_record(rows=4, experts=8, top_k=2)
    with pytest.raises(RoutingFormatError, match="record 1 is NoneType; expected RoutedExperts"):
        analysis.known_rows(record, None)
    with pytest.raises(RoutingFormatError, match="record 0 is ndarray; expected RoutedExperts"):
        lru_coverage(record.ids)


def test_a_difference_of_rows_that_repeat_an_expert_is_the_same_from_both_sides():
    record = random_record(rows=2, experts=8, top_k=2)
    for first, second, overlap in (([3, 3], [3, 5], 0.5), ([3, 3], [3, 3], 1.0), ([3, 5], [5, 3], 1.0)):
        a, b = (
            dataclasses.replace(record, ids=np.broadcast_to(np.array(row, record.ids.dtype), record.ids.shape).copy())
            for row in (first, second)
        )
        for pair in ((a, b), (b, a)):
            assert (routing_difference(*pair).overlap == overlap).all()


def test_difference_is_that_of_a_loop():
    a = random_record(1, rows=12, valid=np.arange(12) % 5 != 0)
    b = random_record(2, rows=8, start=3, valid=np.arange(8) != 2)
    difference = routing_difference(a, b)
    tokens = [t for t in range(3, 11) if t % 5 != 0 and t - 3 != 2]
    assert difference.tokens.tolist() == tokens
    for index, token in enumerate(tokens):
        first = 3
        for layer in reversed(range(3)):
            A, B = set(a.ids[token, layer].tolist()), set(b.ids[token - 3, layer].tolist())
            assert difference.overlap[index, layer] == pytest.approx(len(A & B) / 3)
            assert difference.jaccard[index, layer] == pytest.approx(len(A & B) / len(A | B))
            first = layer if A != B else first
        assert difference.first_difference[index] == first
    for layer in range(3):
        assert difference.flip_rate[layer] == pytest.approx(
            np.mean([set(a.ids[t, layer]) != set(b.ids[t - 3, layer]) for t in tokens])
        )
        assert difference.rank1_agreement[layer] == pytest.approx(
            np.mean([a.ids[t, layer, 0] == b.ids[t - 3, layer, 0] for t in tokens])
        )


def test_a_record_does_not_differ_from_itself_and_order_of_slots_is_no_flip():
    record = random_record(3)
    turned = _with_ids(record, record.ids[:, :, ::-1])
    difference = routing_difference(record, turned)
    assert (difference.flip_rate == 0).all()
    assert (difference.first_difference == 3).all()
    assert (difference.rank1_agreement == 0).all()


def test_records_that_do_not_belong_together_are_refused():
    with pytest.raises(RoutingAlignmentError, match=r"7 experts.*8 experts"):
        utilization(random_record(), random_record(experts=8))
    with pytest.raises(RoutingAlignmentError, match=r"\[0, 9\) and \[20, 29\)"):
        routing_difference(random_record(), random_record(start=20))
    with pytest.raises(RoutingAlignmentError, match="at least one"):
        utilization()


def _with_ids(record, ids):
    return dataclasses.replace(record, ids=np.ascontiguousarray(ids, dtype=record.ids.dtype))
