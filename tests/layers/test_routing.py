"""The routing law against a NumPy loop: ties, replayed rows, poison in rows that are not valid, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.balanced_selection.capacity_routing import Capacities, reroute_topk
from routed_experts.layers.gpu.router import route_rows
from routed_experts.layers.native.ops import native_router
from routed_experts.layers.routing import LayerRouting, RouterSpec, replay_topk
from routed_experts.layers.tpu.router import fused_router
from support import fast_compile

ROUTE = jax.jit(replay_topk, static_argnames="spec")
# Where weights are compared with a tolerance.
QUICK_ROUTE = jax.jit(replay_topk, static_argnames="spec", compiler_options=fast_compile.OPTIONS)
SHAPES = [(1, 1, 1), (5, 4, 1), (5, 4, 4), (17, 16, 4), (8, 257, 8), (3, 8, 5)]  # N, E, K


def build_spec(num_experts, top_k, *, renormalize=True):
    return RouterSpec(num_experts=num_experts, top_k=top_k, renormalize=renormalize)


def tied_logits(rng, num_tokens, num_experts):
    """Multiples of 1/4 between -2 and 2: many are equal, and unequal ones differ by far more than rounding."""
    return (rng.integers(-8, 9, (num_tokens, num_experts)) / 4).astype(np.float32)


def oracle(logits, replayed, valid, spec):
    """One token after another, in float64; ids by sorting (score down, id up)."""
    ids, weights = [], []
    for n, row in enumerate(logits.astype(np.float64)):
        scores = [np.exp(z - max(row)) for z in row]
        scores = [s / sum(scores) for s in scores]
        live = sorted(range(spec.num_experts), key=lambda e: (-row[e], e))[: spec.top_k]
        chosen = [int(e) for e in replayed[n]] if valid is not None and valid[n] else live
        chosen_scores = [scores[e] for e in chosen]
        ids.append(chosen)
        weights.append([w / sum(chosen_scores) for w in chosen_scores] if spec.renormalize else chosen_scores)
    return np.array(ids), np.array(weights)


def random_ids(rng, num_tokens, spec):
    """Distinct ids in any order, as a record holds them."""
    dtype = np.uint8 if spec.num_experts <= 256 else np.uint16
    return np.stack([rng.permutation(spec.num_experts)[: spec.top_k] for _ in range(num_tokens)]).astype(dtype)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_live_routing_is_the_law_with_ties_to_the_lower_id(shape, renormalize):
    num_tokens, num_experts, top_k = shape
    spec = build_spec(num_experts, top_k, renormalize=renormalize)
    logits = tied_logits(np.random.default_rng(0), num_tokens, num_experts)
    routing = QUICK_ROUTE(jnp.asarray(logits), None, spec=spec)
    ids, weights = oracle(logits, None, None, spec)
    assert np.array_equal(routing.ids, ids) and np.array_equal(routing.native_ids, ids)
    np.testing.assert_allclose(routing.weights, weights, rtol=2e-6)
    assert not np.any(routing.replaced)
    assert (routing.ids.dtype, routing.weights.dtype) == (jnp.int32, jnp.float32)


ROUTERS = {
    "array code": lambda logits, spec: replay_topk(logits, None, spec=spec),
    "C++": lambda logits, spec: native_router(logits, None, None, jnp.int32(0), spec=spec)[0],
    "GPU": lambda logits, spec: route_rows(logits, None, None, jnp.int32(0), spec, interpret=True)[0],
    "capacities": lambda logits, spec: reroute_topk(
        logits,
        jnp.ones(3, bool),
        Capacities(jnp.arange(4, dtype=jnp.int32)[:, None], jnp.asarray([1, 0], jnp.int32)),
        spec,
        None,
        num_instances=4,
        drops=False,
    )[0],
    "TPU": lambda logits, spec: fused_router(logits, None, None, jnp.int32(0), spec=spec, interpret=True)[0],
}


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("router", ROUTERS)
def test_both_zeros_are_a_tie(router, groups):
    """Also between groups of one expert."""
    spec = RouterSpec(
        num_experts=4, top_k=2, renormalize=True, scoring_func="logits", num_groups=groups, topk_group=min(groups, 2)
    )
    logits = jnp.asarray([[-0.0, 0.0, -1.0, -0.0], [-1.0, -0.0, 0.0, 0.0], [1.0, -0.0, 0.0, -2.0]], jnp.float32)
    routing = jax.jit(lambda logits: ROUTERS[router](logits, spec))(logits)
    assert routing.ids.tolist() == [[0, 1], [1, 2], [0, 1]]


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_replayed_ids_run_in_recorded_order_with_live_weights(shape, renormalize):
    num_tokens, num_experts, top_k = shape
    spec, rng = build_spec(num_experts, top_k, renormalize=renormalize), np.random.default_rng(1)
    logits, replayed, valid = (
        tied_logits(rng, num_tokens, num_experts),
        random_ids(rng, num_tokens, spec),
        rng.random(num_tokens) < 0.5,
    )
    routing = QUICK_ROUTE(jnp.asarray(logits), LayerRouting(jnp.asarray(replayed), jnp.asarray(valid)), spec=spec)
    ids, weights = oracle(logits, replayed, valid, spec)
    assert np.array_equal(routing.ids, ids)
    np.testing.assert_allclose(routing.weights, weights, rtol=2e-6)
    assert np.array_equal(routing.native_ids, oracle(logits, None, None, spec)[0])
    assert np.array_equal(routing.replaced, valid)


@pytest.mark.parametrize("filler", [0, 3, 15, 16, 255])
def test_rows_that_are_not_valid_are_live_bit_for_bit_whatever_they_hold(filler):
    spec, rng = build_spec(16, 4), np.random.default_rng(2)
    logits = jnp.asarray(rng.standard_normal((12, 16)), jnp.float32)
    live = ROUTE(logits, None, spec=spec)
    poison = LayerRouting(jnp.full((12, 4), filler, jnp.uint8), jnp.zeros(12, bool))
    same = ROUTE(logits, poison, spec=spec)
    assert np.array_equal(same.ids, live.ids) and np.array_equal(same.weights, live.weights)
    assert np.array_equal(same.native_ids, live.native_ids)
    half = np.arange(12) % 2 == 0
    ids = np.where(half[:, None], np.asarray(live.ids)[:, ::-1], filler).astype(np.uint8)
    mixed = ROUTE(logits, LayerRouting(jnp.asarray(ids), jnp.asarray(half)), spec=spec)
    assert np.array_equal(mixed.ids[~half], live.ids[~half]) and np.array_equal(
        mixed.weights[~half], live.weights[~half]
    )
    assert np.array_equal(mixed.ids[half], live.ids[half][:, ::-1])


def test_own_ids_replayed_give_the_live_weights_bit_for_bit():
    spec = build_spec(300, 8)
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((40, 300)), jnp.float32)
    live = ROUTE(logits, None, spec=spec)
    again = ROUTE(logits, LayerRouting(live.ids.astype(jnp.uint16), jnp.ones(40, bool)), spec=spec)
    assert np.array_equal(again.ids, live.ids) and np.array_equal(again.weights, live.weights)


def test_one_expert_or_one_slot_gets_weight_one_when_renormalised():
    logits = jnp.asarray(np.random.default_rng(4).standard_normal((6, 9)), jnp.float32)
    assert np.array_equal(ROUTE(logits, None, spec=build_spec(9, 1)).weights, np.ones((6, 1)))
    assert np.array_equal(ROUTE(logits[:, :1], None, spec=build_spec(1, 1, renormalize=False)).weights, np.ones((6, 1)))


@pytest.mark.parametrize("top_k", [1, 3])
def test_drifted_ids_far_below_the_best_score_keep_finite_weights_and_gradients(top_k):
    """Softmax of a logit 200 below the best is 0 in float32; dividing by a sum of such scores would give NaN."""
    logits = np.zeros((2, 8), np.float32)
    logits[:, 0] = 200.0
    replayed = LayerRouting(jnp.asarray(np.arange(1, 1 + top_k, dtype=np.uint8)[None].repeat(2, 0)), jnp.ones(2, bool))

    def total(logits):
        weights = ROUTE(logits, replayed, spec=build_spec(8, top_k)).weights
        return jnp.sum(weights * jnp.arange(1.0, top_k + 1, dtype=jnp.float32)), weights

    (_, weights), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(logits))
    np.testing.assert_allclose(weights, np.full((2, top_k), 1 / top_k), rtol=1e-6)
    assert np.all(np.isfinite(gradient))


def test_the_gradient_reaches_the_logits_of_replayed_experts_and_not_through_the_choice():
    spec, rng = build_spec(12, 3), np.random.default_rng(5)
    logits, mix = jnp.asarray(rng.standard_normal((3, 12)), jnp.float32), rng.standard_normal((3, 3))
    ids = random_ids(rng, 3, spec)
    routed = LayerRouting(jnp.asarray(ids), jnp.ones(3, bool))
    gradient = np.asarray(
        jax.grad(lambda z: jnp.sum(ROUTE(z, routed, spec=spec).weights * mix.astype(np.float32)))(logits)
    )
    step = 1e-5
    for n in range(3):
        for expert in range(12):
            moved = [np.asarray(logits, np.float64) for _ in range(2)]
            moved[0][n, expert] += step
            moved[1][n, expert] -= step
            up, down = (np.sum(oracle(z, ids, np.ones(3, bool), spec)[1] * mix) for z in moved)
            assert gradient[n, expert] == pytest.approx((up - down) / (2 * step), abs=1e-5)
        untouched = np.setdiff1d(np.arange(12), ids[n])
        np.testing.assert_allclose(gradient[n, untouched], 0.0, atol=1e-7)  # renormalised: only the chosen ones count


def test_scores_are_computed_in_float32_whatever_the_logits_are():
    logits = jnp.asarray(np.random.default_rng(6).standard_normal((9, 16)), jnp.bfloat16)
    low = ROUTE(logits, None, spec=build_spec(16, 4))
    wide = ROUTE(logits.astype(jnp.float32), None, spec=build_spec(16, 4))
    assert low.weights.dtype == jnp.float32
    assert np.array_equal(low.ids, wide.ids) and np.array_equal(low.weights, wide.weights)


def test_a_row_of_nan_names_real_and_distinct_experts_and_harms_no_other_row():
    logits = np.random.default_rng(7).standard_normal((3, 16)).astype(np.float32)
    clean = ROUTE(jnp.asarray(logits), None, spec=build_spec(16, 4))
    logits[1] = np.nan
    routing = ROUTE(jnp.asarray(logits), None, spec=build_spec(16, 4))
    row = np.asarray(routing.ids[1])
    assert len(set(row.tolist())) == 4 and row.min() >= 0 and row.max() < 16
    for n in (0, 2):
        assert np.array_equal(routing.ids[n], clean.ids[n]) and np.array_equal(routing.weights[n], clean.weights[n])


@pytest.mark.parametrize("router", ["array code", "GPU", "TPU"])
def test_a_replayed_id_that_is_no_expert_has_a_weight_of_nan(router):
    spec = RouterSpec(num_experts=5, top_k=2, renormalize=True)
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((3, 5)), jnp.float32)
    routed = LayerRouting(jnp.asarray([[1, 5], [0, 2], [7, 9]], jnp.uint8), jnp.asarray([True, True, False]))
    run = {
        "array code": lambda: replay_topk(logits, routed, spec=spec),
        "GPU": lambda: route_rows(logits, routed, None, jnp.int32(0), spec, interpret=True)[0],
        "TPU": lambda: fused_router(logits, routed, None, jnp.int32(0), spec=spec, interpret=True)[0],
    }[router]
    routing = jax.jit(run)()
    assert np.isnan(routing.weights[0, 1]) and np.isfinite(routing.weights[1:]).all()
    assert routing.ids[:2].tolist() == [[1, 5], [0, 2]]
