"""Balanced selection against the law one slot at a time: bit for bit, every form, every kind of scores, capacity and
order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.selection import Case, num_filled, plain_selection, popular, replica_table, shuffled
from routed_experts.core.errors import ConfigError
from routed_experts.layers.balanced_selection.checks import check_replica_order, expert_capacity
from routed_experts.layers.balanced_selection.reference import sequential_selection
from routed_experts.layers.balanced_selection.selection import balanced_expert_selection

STATIC = ("k", "mode", "on_exhausted", "impl", "renormalize", "num_devices", "num_instances", "axis_name")
SELECT = jax.jit(balanced_expert_selection, static_argnames=STATIC)
IMPLS = ("rounds", "native")
SHAPES = [(8, 6, 3, 9, 3), (16, 24, 4, 36, 4), (12, 40, 2, 44, 5)]  # N, E, K, I, J
VARIANTS = [
    (SHAPES[0], 0, "overflow"),
    (SHAPES[0], 3, "drop"),
    (SHAPES[1], 0, "drop"),
    (SHAPES[1], 3, "overflow"),
    (SHAPES[2], 0, "overflow"),
    (SHAPES[2], 5, "overflow"),
]
FULL = (512, 256, 8, 384, 16)
COUNTS = ("num_rerouted", "num_overflowed", "num_dropped")


def random_case(seed, shape, num_sources=0):
    """Scores that are spread, tied, masked or poisoned; capacities that are scarce, ample, mixed or zero; padding here
    and there."""
    rng = np.random.default_rng(seed)
    num_tokens, num_experts, k, num_instances, width = shape
    scores = rng.standard_normal((num_tokens, num_experts)) + rng.choice([0, 1, 3]) * rng.standard_normal(num_experts)
    if rng.random() < 0.4:
        scores = rng.integers(0, 3, scores.shape).astype(float)
    if rng.random() < 0.4:
        scores[rng.random(scores.shape) < rng.choice([0.3, 0.9])] = -np.inf
    if rng.random() < 0.2:
        scores[rng.random(scores.shape) < 0.1] = np.nan
    even = -(-num_tokens * k // num_instances)
    kinds = [
        np.full(num_instances, even),
        np.full(num_instances, 2 * even),
        rng.integers(0, 2 * even + 2, num_instances),
        rng.integers(0, 2, num_instances),
        np.full(num_instances, 2**31 - 1),
        np.zeros(num_instances),
    ]
    capacity = kinds[rng.choice(len(kinds), p=[0.25, 0.2, 0.25, 0.2, 0.05, 0.05])]
    valid = rng.random(num_tokens) < rng.choice([1.0, 0.7, 0.0], p=[0.6, 0.35, 0.05])
    table = replica_table(rng, num_experts, num_instances, width)
    sources = rng.integers(0, num_sources, num_tokens).astype(np.int32) if num_sources else None
    order = shuffled(rng, table, num_sources) if num_sources else table
    return Case(scores.astype(np.float32), order, capacity.astype(np.int32), valid, sources)


def select(case, k, *, impl="rounds", on_exhausted="overflow", fn=SELECT):
    return fn(
        case.scores,
        case.weights,
        case.order,
        case.capacity,
        k=k,
        source=case.sources,
        valid=case.valid,
        mode="reroute",
        impl=impl,
        on_exhausted=on_exhausted,
    )


def sequential(case, k, on_exhausted="overflow"):
    options = {"k": k, "source": case.sources, "valid": case.valid, "on_exhausted": on_exhausted}
    return sequential_selection(case.scores, case.weights, case.order, case.capacity, **options)


def outcome_counts(result):
    return tuple(int(getattr(result, name)) for name in COUNTS)


def same_bits(left, right):
    left, right = np.asarray(left), np.asarray(right)
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()


@pytest.mark.parametrize(("shape", "num_sources", "on_exhausted"), VARIANTS, ids=str)
def test_every_form_is_the_law_bit_for_bit(shape, num_sources, on_exhausted, is_thorough):
    k = shape[2]

    @settings(max_examples=350 if is_thorough else 150)
    @given(st.integers(0, 2**32 - 1))
    def holds(seed):
        case = random_case(seed, shape, num_sources)
        ids, instances, load, counts = plain_selection(case, k, overflows=on_exhausted == "overflow")
        reference = sequential(case, k, on_exhausted)
        assert np.array_equal(reference.logical_ids, ids) and np.array_equal(reference.instance_ids, instances)
        assert np.array_equal(reference.counts, load) and outcome_counts(reference) == counts
        for impl in IMPLS:
            got = select(case, k, impl=impl, on_exhausted=on_exhausted)
            for name in ("logical_ids", "instance_ids", "weights", "counts"):
                assert same_bits(getattr(got, name), getattr(reference, name)), (impl, name)
            assert outcome_counts(got) == counts, impl
        within = plain_selection(case, k, overflows=False)[0] if on_exhausted == "overflow" else ids
        got = select(case, k, on_exhausted=on_exhausted)
        assert int(got.rounds) <= k + num_filled(case, within)
        assert int(got.replica_rounds) <= (shape[4] + 1 if num_sources else 0)

    holds()


def full_case(seed, spread, factor, num_sources):
    """512 tokens, the last three padding; `spread` is that of the experts' log popularity."""
    rng = np.random.default_rng(seed)
    num_tokens, _, k, num_instances, _ = FULL
    scores, table = popular(seed, spread, num_instances, 32)
    order = shuffled(rng, table, num_sources) if num_sources else table
    sources = rng.integers(0, num_sources, num_tokens).astype(np.int32) if num_sources else None
    capacity = expert_capacity(num_tokens, k, num_instances, factor)
    return Case(scores, order, capacity, np.arange(num_tokens) < num_tokens - 3, sources)


@pytest.mark.parametrize(("spread", "factor", "num_sources"), [(0.5, 2, 0), (0.5, 1.25, 8), (1, 1.25, 0), (2, 0.9, 8)])
def test_512_tokens_of_256_experts_with_16_replicas_are_the_law(spread, factor, num_sources):
    for seed in range(6):
        case, k = full_case(seed, spread, factor, num_sources), FULL[2]
        reference = sequential(case, k)
        for impl in IMPLS:
            got = select(case, k, impl=impl)
            for name in ("logical_ids", "instance_ids", "weights", "counts"):
                assert same_bits(getattr(got, name), getattr(reference, name)), (impl, name)
            assert outcome_counts(got) == outcome_counts(reference)
        beyond = np.maximum(reference.counts - case.capacity, 0).sum()
        assert beyond <= reference.num_overflowed, "capacity is exceeded by counted slots alone"
        assert all(len(set(row)) == k for row in reference.logical_ids[case.valid].tolist()), (
            "an expert at most once a token"
        )


def test_the_full_size_reference_is_the_plain_loop():
    case = full_case(0, 1, 1.25, 0)
    ids, instances, load, counts = plain_selection(case, FULL[2])
    reference = sequential(case, FULL[2])
    assert np.array_equal(reference.logical_ids, ids) and np.array_equal(reference.instance_ids, instances)
    assert np.array_equal(reference.counts, load) and outcome_counts(reference) == counts and counts[0] > 0


def proposal_case():
    """The published proposal's sizes: a map of 257 rows, the last for the shared expert that no router chooses, 16
    replica positions, 384 instances; 512 tokens, top-8; capacity floor(2 * tokens * 8 / 384); the order of replicas is
    that of the token's device, of 4."""
    rng = np.random.default_rng(7)
    scores = np.concatenate([rng.random((512, 256)), np.full((512, 1), -np.inf)], axis=1).astype(np.float32)
    order = shuffled(rng, replica_table(rng, 257, 384, 16), 4)
    return Case(
        scores,
        order,
        expert_capacity(512, 8, 384, 2, rounding="floor"),
        np.ones(512, bool),
        (np.arange(512) // 128).astype(np.int32),
    )


def test_the_proposals_own_example():
    case = proposal_case()
    assert np.array_equal(check_replica_order(case.order, 384), case.order)
    reference = sequential(case, 8)
    for impl in IMPLS:
        got = select(case, 8, impl=impl)
        assert same_bits(got.logical_ids, reference.logical_ids) and same_bits(got.instance_ids, reference.instance_ids)
    assert all(len(set(row)) == 8 and max(row) < 256 for row in reference.logical_ids.tolist()), (
        "an expert once, the shared one never"
    )
    assert reference.num_overflowed == reference.num_dropped == 0 and np.all(reference.counts <= case.capacity)
    firsts = case.order[case.sources[:, None], reference.logical_ids, 0]
    assert np.mean(reference.instance_ids == firsts) > 0.9, "a token's own device says which replica comes first"


def test_the_proposals_map_of_384_rows_is_refused_for_its_rows_without_instance():
    padded = np.full((4, 384, 16), -1, np.int32)
    padded[:, :257] = proposal_case().order
    with pytest.raises(ConfigError, match=r"replica_order\[0\]: expert 257 has no instance \(127 such experts\)"):
        check_replica_order(padded, 384)


def test_the_proposals_floor_starves_small_batches_and_ceil_does_not():
    assert np.all(expert_capacity(16, 8, 384, 2, rounding="floor") == 0)
    assert np.all(expert_capacity(16, 8, 384, 2) == 1)
    assert np.sum(expert_capacity(512, 8, 384, 1, rounding="floor")) == 3840  # for 4,096 requests
    assert np.sum(expert_capacity(512, 8, 384, 1)) >= 4096


@pytest.mark.parametrize("impl", IMPLS)
def test_the_corners(impl):
    rng = np.random.default_rng(0)
    for num_tokens, num_experts, k in ((1, 1, 1), (6, 4, 4), (2, 300, 2)):
        table = replica_table(rng, num_experts, num_experts + 2, 3)
        base = Case(
            rng.standard_normal((num_tokens, num_experts)).astype(np.float32),
            table,
            np.ones(num_experts + 2, np.int32),
            np.ones(num_tokens, bool),
            None,
        )
        poisoned = base.scores.copy()
        poisoned[0] = np.nan
        cases = [
            base,
            dataclasses.replace(base, valid=np.zeros(num_tokens, bool)),
            dataclasses.replace(base, scores=np.full_like(base.scores, -np.inf)),
            dataclasses.replace(base, scores=poisoned),
            dataclasses.replace(base, capacity=np.zeros(num_experts + 2, np.int32)),
            dataclasses.replace(base, capacity=np.full(num_experts + 2, -3, np.int32)),
        ]
        for case in cases:
            got, reference = select(case, k, impl=impl), sequential(case, k)
            assert same_bits(got.logical_ids, reference.logical_ids) and same_bits(
                got.instance_ids, reference.instance_ids
            )
            assert (
                same_bits(got.weights, reference.weights)
                and same_bits(got.counts, reference.counts)
                and outcome_counts(got) == outcome_counts(reference)
            )


@pytest.mark.parametrize("impl", IMPLS)
def test_with_room_for_all_ids_are_those_of_top_k_zeros_of_both_signs_included(impl):
    rng = np.random.default_rng(1)
    scores = rng.choice(np.array([-1.5, -0.0, 0.0, 2.0], np.float32), (16, 24))
    case = Case(scores, replica_table(rng, 24, 36, 4), np.full(36, 2**31 - 1, np.int32), np.ones(16, bool), None)
    _, ids = jax.lax.top_k(scores, 4)
    got = select(case, 4, impl=impl)
    assert same_bits(got.logical_ids, ids) and outcome_counts(got) == (0, 0, 0)
    scarce = dataclasses.replace(case, capacity=np.ones(36, np.int32))
    assert same_bits(select(scarce, 4, impl=impl).logical_ids, sequential(scarce, 4).logical_ids)


def test_half_precision_scores_are_the_same_scores_in_float32():
    case = random_case(3, SHAPES[1])
    half = np.asarray(jnp.asarray(case.scores, jnp.bfloat16))
    wide = dataclasses.replace(case, scores=half.astype(np.float32))
    got, reference = select(dataclasses.replace(case, scores=half), 4, impl="auto"), sequential(wide, 4)
    assert same_bits(got.logical_ids, reference.logical_ids) and same_bits(got.instance_ids, reference.instance_ids)


@pytest.mark.parametrize(("mode", "impl"), [("reroute", "auto"), ("reroute", "rounds"), ("replicas", "auto")])
def test_new_tables_orders_and_capacities_compile_nothing(mode, impl):
    traces = []

    def counted(scores, weights, order, capacity, valid):
        traces.append(order.shape)
        sizes = {"num_devices": 4, "num_instances": 36} if mode == "replicas" else {"capacity": capacity}
        return balanced_expert_selection(scores, weights, order, k=4, valid=valid, mode=mode, impl=impl, **sizes)

    fn = jax.jit(counted)
    for seed in range(4):
        case = random_case(seed, SHAPES[1])
        jax.block_until_ready(fn(case.scores, case.weights, case.order, case.capacity, case.valid))
    assert len(traces) == 1


def test_replicas_mode_leaves_every_id_as_top_k_has_it():
    for seed in range(20):
        case = random_case(seed, SHAPES[1])
        got = SELECT(case.scores, case.weights, case.order, k=4, valid=case.valid, num_devices=6, num_instances=36)
        _, ids = jax.lax.top_k(case.scores, 4)
        ids = np.where(case.valid[:, None], ids, -1)
        assert same_bits(got.logical_ids, ids) and outcome_counts(got) == (0, 0, 0) and int(got.rounds) == 0
        owners = {int(i): e for e, row in enumerate(case.order) for i in row if i >= 0} | {-1: -1}
        instances = np.asarray(got.instance_ids)
        assert np.array_equal(np.vectorize(owners.__getitem__)(instances), ids)
        assert np.array_equal(got.counts, np.bincount(instances[instances >= 0], minlength=36))
        weights = np.where(ids >= 0, np.take_along_axis(case.weights, np.maximum(ids, 0), axis=1), 0)
        total = weights.sum(axis=1, keepdims=True, dtype=np.float64)
        np.testing.assert_allclose(
            got.weights, np.divide(weights, total, where=total > 0, out=np.zeros_like(weights)), rtol=1e-6
        )


@pytest.mark.parametrize(("changed", "match"), [("order", "names an instance"), ("sources", "names a row")])
def test_the_native_kernel_reads_nothing_outside_its_tables(changed, match):
    case = random_case(0, SHAPES[1], 3)
    array = getattr(case, changed).copy()
    array[0] = 99
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        jax.block_until_ready(select(dataclasses.replace(case, **{changed: array}), 4, impl="native"))


def refused(match, **changes):
    case = random_case(0, SHAPES[0])
    arguments = {
        "select_scores": case.scores,
        "weight_scores": case.weights,
        "replica_order": case.order,
        "capacity": case.capacity,
        "k": 3,
        "mode": "reroute",
    } | changes
    with pytest.raises(ConfigError, match=match):
        balanced_expert_selection(**arguments)


def test_arguments_that_do_not_fit_are_refused_by_name():
    case = random_case(0, SHAPES[0])
    refused("mode='best'", mode="best")
    refused("on_exhausted='wait'", on_exhausted="wait")
    refused("impl='fast'", impl="fast")
    refused(r"k=7.*1 to E=6", k=7)
    wide = np.zeros((2048, 256), np.float32)
    refused(
        r"holds 131072 scores .*not \[2048, 256\] with k=3",
        select_scores=wide,
        weight_scores=wide,
        impl="pallas",
        replica_order=np.zeros((256, 3), np.int32),
    )
    refused(r"k=0", k=0)
    refused(r"select_scores is int32\[8, 6\]", select_scores=case.scores.astype(np.int32))
    refused(r"weight_scores is float32\[8, 5\]", weight_scores=case.weights[:, :5])
    refused(r"select_scores is float32\[0, 6\]", select_scores=case.scores[:0], weight_scores=case.weights[:0])
    refused(r"replica_order is int32\[\]", replica_order=np.int32(3))
    refused(r"valid is float32", valid=np.ones(8, np.float32))
    refused(r"valid is bool\[7\]", valid=np.ones(7, bool))
    refused(r"replica_order is int64", replica_order=case.order.astype(np.int64))
    refused(r"replica_order is int32\[5, 3\].*\[6, 3\]", replica_order=case.order[:5])
    refused(r"replica_order has 3 axes and source is None", replica_order=case.order[None])
    refused(r"replica_order has 2 axes and source is given", source=np.zeros(8, np.int32))
    refused(r"source is int32\[7\]", replica_order=case.order[None], source=np.zeros(7, np.int32))
    refused(r"needs capacity", capacity=None)
    refused(r"are of mode='replicas'", num_instances=9)
    refused(r"capacity is float32\[9\]", capacity=case.capacity.astype(np.float32))
    refused(r"capacity is int32\[9, 1\]", capacity=case.capacity[:, None])
    refused(r"without capacity and source", mode="replicas")
    refused(r"needs num_devices and num_instances", mode="replicas", capacity=None, num_devices=3)
    replicas = {"mode": "replicas", "capacity": None, "num_instances": 9}
    refused(r"replica_order is int32\[1, 6, 3\]", **replicas, num_devices=3, replica_order=case.order[None])
    refused(r"num_instances=9 does not divide into num_devices=2", **replicas, num_devices=2)
