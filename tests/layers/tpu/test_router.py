"""The fused TPU router, interpreted, against the law as a loop: ids equal, ties to the lower id, and the block written
in its place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.routing import LayerRouting, RouterSpec, replay_topk
from routed_experts.layers.tpu.router import TOKEN_TILE, fused_router, window_rows

pytestmark = pytest.mark.usefixtures("fast_compilation")

ROUTE = jax.jit(functools.partial(fused_router, interpret=True), static_argnames="spec")
PLAIN = jax.jit(replay_topk, static_argnames="spec")
LAYERS = 5
# N, E, K: a block row of 8 ids, parts of one, several, and K that fit no window; two tiles of tokens, the second ragged
SHAPES = [(1, 4, 1), (5, 4, 4), (17, 61, 8), (9, 257, 6), (3, 32, 16), (TOKEN_TILE + 37, 20, 2)]


def build_spec(num_experts, top_k, *, renormalize=True):
    return RouterSpec(num_experts=num_experts, top_k=top_k, renormalize=renormalize)


def tied_logits(rng, num_tokens, num_experts):
    """Multiples of 1/4: many are equal, unequal ones differ by far more than rounding."""
    return (rng.integers(-8, 9, (num_tokens, num_experts)) / 4).astype(np.float32)


def oracle(logits, spec, replayed=None, valid=None):
    """One token after another, in float64; ids by sorting (score down, id up)."""
    ids, weights = [], []
    for n, row in enumerate(logits.astype(np.float64)):
        scores = np.exp(row - row.max()) / np.sum(np.exp(row - row.max()))
        live = sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[: spec.top_k]
        chosen = [int(expert) for expert in replayed[n]] if valid is not None and valid[n] else live
        chosen_scores = scores[chosen]
        ids.append(chosen)
        weights.append(chosen_scores / chosen_scores.sum() if spec.renormalize else chosen_scores)
    return np.array(ids), np.array(weights)


def numbered_block(spec, num_tokens):
    """A block in which every entry is its own index."""
    rows = LAYERS * spec.top_k
    return np.arange(1000, 1000 + rows * num_tokens, dtype=np.int32).reshape(rows, num_tokens)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_live_routing_is_the_law_and_is_written_at_its_layer_alone(shape):
    num_tokens, num_experts, top_k = shape
    renormalize = num_tokens % 3 != 0
    spec = build_spec(num_experts, top_k, renormalize=renormalize)
    logits = tied_logits(np.random.default_rng(0), num_tokens, num_experts)
    ids, weights = oracle(logits, spec)
    for layer in (0, 3, LAYERS - 1):
        block = numbered_block(spec, num_tokens)
        routing, written = ROUTE(
            jnp.asarray(logits), None, jnp.asarray(block), jnp.asarray(layer, jnp.int32), spec=spec
        )
        assert np.array_equal(routing.ids, ids) and np.array_equal(routing.native_ids, ids)
        np.testing.assert_allclose(routing.weights, weights, rtol=2e-6)
        assert not np.any(routing.replaced)
        assert (routing.ids.dtype, routing.weights.dtype) == (jnp.int32, jnp.float32)
        block[layer * top_k : (layer + 1) * top_k] = ids.T
        assert np.array_equal(written, block)


@pytest.mark.parametrize("shape", [(17, 61, 8), (6, 9, 3)], ids=str)
def test_replayed_rows_run_and_are_written_as_recorded(shape):
    num_tokens, num_experts, top_k = shape
    spec, rng = build_spec(num_experts, top_k), np.random.default_rng(1)
    logits, valid = tied_logits(rng, num_tokens, num_experts), rng.random(num_tokens) < 0.5
    replayed = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)]).astype(np.uint8)
    replayed[~valid] = 255  # rows that are not valid are never read
    routed, block = LayerRouting(jnp.asarray(replayed), jnp.asarray(valid)), numbered_block(spec, num_tokens)
    routing, written = ROUTE(jnp.asarray(logits), routed, jnp.asarray(block), jnp.asarray(2, jnp.int32), spec=spec)
    ids, weights = oracle(logits, spec, replayed, valid)
    assert np.array_equal(routing.ids, ids)
    assert np.array_equal(routing.native_ids, oracle(logits, spec)[0])
    assert np.array_equal(routing.replaced, valid)
    np.testing.assert_allclose(routing.weights, weights, rtol=2e-6)
    block[2 * top_k : 3 * top_k] = ids.T
    assert np.array_equal(written, block)


def test_the_router_is_the_same_without_a_block():
    spec = build_spec(61, 8)
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((17, 61)), jnp.float32)
    alone, nothing = ROUTE(logits, None, None, jnp.asarray(0, jnp.int32), spec=spec)
    beside, _ = ROUTE(logits, None, jnp.asarray(numbered_block(spec, 17)), jnp.asarray(1, jnp.int32), spec=spec)
    assert nothing is None
    assert np.array_equal(alone.ids, beside.ids) and np.array_equal(alone.weights, beside.weights)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 40.0])
def test_ids_are_those_of_the_plain_law_also_where_scores_vanish_or_crowd(spread):
    """Scores that are 0 in float32, or equal after rounding although their logits are not, are ties by score, as in
    replay_topk."""
    spec = build_spec(64, 8)
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((200, 64)) * spread, jnp.float32)
    routing, _ = ROUTE(logits, None, None, jnp.asarray(0, jnp.int32), spec=spec)
    plain = PLAIN(logits, None, spec=spec)
    assert np.array_equal(routing.ids, plain.ids)
    np.testing.assert_allclose(routing.weights, plain.weights, rtol=2e-6, atol=1e-12)


def test_drifted_ids_far_below_the_best_score_keep_finite_weights():
    logits = np.zeros((2, 8), np.float32)
    logits[:, 0] = 200.0
    routed = LayerRouting(jnp.asarray([[1, 2, 3]] * 2, jnp.uint8), jnp.ones(2, bool))
    routing, _ = ROUTE(jnp.asarray(logits), routed, None, jnp.asarray(0, jnp.int32), spec=build_spec(8, 3))
    np.testing.assert_allclose(routing.weights, np.full((2, 3), 1 / 3), rtol=1e-6)


def test_a_row_of_nan_names_the_first_experts_as_the_plain_law_does_and_harms_no_other_row():
    spec = build_spec(16, 4)
    logits = np.random.default_rng(4).standard_normal((3, 16)).astype(np.float32)
    clean = PLAIN(jnp.asarray(logits), None, spec=spec)
    logits[1] = np.nan
    routing, _ = ROUTE(jnp.asarray(logits), None, None, jnp.asarray(0, jnp.int32), spec=spec)
    assert np.array_equal(routing.ids[1], PLAIN(jnp.asarray(logits), None, spec=spec).ids[1])
    for n in (0, 2):
        assert np.array_equal(routing.ids[n], clean.ids[n])


@pytest.mark.parametrize(
    ("rows", "top_k", "expected"), [(384, 8, 8), (40, 4, 8), (4, 4, 4), (30, 6, 0), (80, 16, 16), (5, 1, 5)]
)
def test_a_window_is_whole_tiles_that_hold_a_layers_ids(rows, top_k, expected):
    assert window_rows(rows, top_k) == expected
