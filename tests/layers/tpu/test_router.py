"""The fused TPU router, interpreted, against the law as a loop: ids equal, ties to the lower id, and the block written
in its place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.routing import LayerRouting, RouterSpec, RoutingBlock, replay_topk
from routed_experts.layers.tpu.router import TOKEN_TILE, fused_router, window_rows

pytestmark = pytest.mark.usefixtures("fast_compilation")

_KERNEL = jax.jit(functools.partial(fused_router, interpret=True), static_argnames="spec")
PLAIN = jax.jit(replay_topk, static_argnames="spec")
LAYERS = 5
# N, E, K: a block row of 8 ids, parts of one, several, and K that fit no window; two tiles of tokens, the second ragged
SHAPES = [(1, 4, 1), (5, 4, 4), (17, 61, 8), (9, 257, 6), (3, 32, 16), (TOKEN_TILE + 37, 20, 2)]


def route(logits, routed, ids, layer, *, spec, bias=None):
    """The routing, and the block of ids after it; weights are written at the same rows."""
    block = None if ids is None else RoutingBlock(jnp.asarray(ids), jnp.zeros(ids.shape, jnp.float32))
    routing, written = _KERNEL(jnp.asarray(logits), routed, block, jnp.asarray(layer, jnp.int32), spec=spec, bias=bias)
    if written is None:
        return routing, None
    expected = np.zeros(ids.shape, np.float32)
    expected[layer * spec.top_k : (layer + 1) * spec.top_k] = routing.weights.T
    assert np.array_equal(written.weights, expected)
    return routing, written.ids


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
        routing, written = route(logits, None, block, layer, spec=spec)
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
    routing, written = route(logits, routed, block, 2, spec=spec)
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
    alone, nothing = route(logits, None, None, 0, spec=spec)
    beside, _ = route(logits, None, numbered_block(spec, 17), 1, spec=spec)
    assert nothing is None
    assert np.array_equal(alone.ids, beside.ids) and np.array_equal(alone.weights, beside.weights)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 40.0])
def test_ids_are_those_of_the_plain_law_also_where_scores_vanish_or_crowd(spread):
    """Scores that are 0 in float32, or equal after rounding although their logits are not, are ties by score, as in
    replay_topk."""
    spec = build_spec(64, 8)
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((200, 64)) * spread, jnp.float32)
    routing, _ = route(logits, None, None, 0, spec=spec)
    plain = PLAIN(logits, None, spec=spec)
    assert np.array_equal(routing.ids, plain.ids)
    np.testing.assert_allclose(routing.weights, plain.weights, rtol=2e-6, atol=1e-12)


def test_drifted_ids_far_below_the_best_score_keep_finite_weights():
    logits = np.zeros((2, 8), np.float32)
    logits[:, 0] = 200.0
    routed = LayerRouting(jnp.asarray([[1, 2, 3]] * 2, jnp.uint8), jnp.ones(2, bool))
    routing, _ = route(logits, routed, None, 0, spec=build_spec(8, 3))
    np.testing.assert_allclose(routing.weights, np.full((2, 3), 1 / 3), rtol=1e-6)


def test_a_row_of_nan_names_the_first_experts_as_the_plain_law_does_and_harms_no_other_row():
    spec = build_spec(16, 4)
    logits = np.random.default_rng(4).standard_normal((3, 16)).astype(np.float32)
    clean = PLAIN(jnp.asarray(logits), None, spec=spec)
    logits[1] = np.nan
    routing, _ = route(logits, None, None, 0, spec=spec)
    assert np.array_equal(routing.ids[1], PLAIN(jnp.asarray(logits), None, spec=spec).ids[1])
    for n in (0, 2):
        assert np.array_equal(routing.ids[n], clean.ids[n])


def law(num_experts, top_k, **fields):
    return RouterSpec(num_experts=num_experts, top_k=top_k, **fields)


GROUPS = dict(num_groups=8, topk_group=4, group_score_topk=2)
LAWS = {
    "DeepSeek-V3": law(
        64, 8, renormalize=True, scoring_func="sigmoid", biased=True, epsilon=1e-20, scale=2.5, **GROUPS
    ),
    "DeepSeek-V2": law(60, 6, renormalize=False, scale=16.0, num_groups=3, topk_group=2),
    "GLM-4, MiniMax-M2": law(32, 4, renormalize=True, scoring_func="sigmoid", biased=True, epsilon=1e-20),
    "Ernie 4.5": law(24, 6, renormalize=True, biased=True, epsilon=1e-12),
    "GPT-OSS, Granite": law(32, 4, renormalize=True, scoring_func="logits"),
    "Llama 4": law(16, 1, renormalize=False, scoring_func="sigmoid"),
    "PhiMoE": law(16, 2, renormalize=False, scoring_func="sparsemixer", jitter_eps=0.05),
}


def law_of_one_token(row, bias, spec, replayed=None):
    """The oracle: one token in float64; ids by sorting (what is chosen by down, id up), groups as lists of experts."""
    exponents = np.exp(row - row.max())
    scores = {"softmax": exponents / exponents.sum(), "sigmoid": 1 / (1 + np.exp(-row))}.get(spec.scoring_func, row)
    chosen_by, size = scores + bias, spec.num_experts // spec.num_groups
    groups = [list(range(first, first + size)) for first in range(0, spec.num_experts, size)]

    def rank(group):
        return sum(sorted((chosen_by[expert] for expert in group), reverse=True)[: spec.group_score_topk])

    best = sorted(groups, key=rank, reverse=True)[: spec.topk_group]
    inside = sorted((expert for group in best for expert in group), key=lambda expert: (-chosen_by[expert], expert))
    ids = np.array(inside[: spec.top_k]) if replayed is None else replayed.astype(int)
    if spec.scoring_func == "sparsemixer":
        weights, left = [], row.copy()
        for expert in ids:
            top = left.max()
            near = (top - row) / np.maximum(np.abs(row), top) <= 2 * spec.jitter_eps
            near[expert] = True
            shares = np.where(near, np.exp(left - top), 0.0)
            weights.append(shares[expert] / shares.sum())
            left[expert] = -np.inf
        return ids, np.array(weights) * spec.scale
    weights = np.exp(row[ids] - row[ids].max()) if spec.scoring_func == "logits" else scores[ids]
    if spec.renormalize:
        weights = weights / (weights.sum() + spec.epsilon)
    return ids, weights * spec.scale


@pytest.mark.parametrize("spec", LAWS.values(), ids=LAWS)
def test_every_law_is_that_of_one_token_live_and_replayed_and_is_written_in_its_place(spec):
    rng, num_tokens = np.random.default_rng(5), 37
    logits = rng.standard_normal((num_tokens, spec.num_experts)).astype(np.float32)
    bias = rng.standard_normal(spec.num_experts).astype(np.float32) / 4 if spec.biased else None
    valid = rng.random(num_tokens) < 0.4
    replayed = np.stack([rng.permutation(spec.num_experts)[: spec.top_k] for _ in range(num_tokens)]).astype(np.uint8)
    block, layer = numbered_block(spec, num_tokens), 3
    rows = [
        law_of_one_token(
            row.astype(np.float64),
            np.zeros(spec.num_experts) if bias is None else bias.astype(np.float64),
            spec,
            replayed[n] if valid[n] else None,
        )
        for n, row in enumerate(logits)
    ]
    ids, weights = (np.stack(part) for part in zip(*rows, strict=True))
    routed = LayerRouting(jnp.asarray(replayed), jnp.asarray(valid))
    selection_bias = None if bias is None else jnp.asarray(bias)
    routing, written = route(logits, routed, block, layer, spec=spec, bias=selection_bias)
    assert np.array_equal(routing.ids, ids) and np.array_equal(routing.replaced, valid)
    np.testing.assert_allclose(routing.weights, weights, rtol=1e-5)
    block[3 * spec.top_k : 4 * spec.top_k] = ids.T
    assert np.array_equal(written, block)
    live, _ = route(logits, None, block, layer, spec=spec, bias=selection_bias)
    assert np.array_equal(live.ids, routing.native_ids) and np.array_equal(live.ids[~valid], ids[~valid])


@pytest.mark.parametrize("spec", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf], ids=str)
def test_ties_are_those_of_the_plain_law_and_a_broken_row_names_experts_and_harms_no_other(spec, poison):
    rng = np.random.default_rng(6)
    logits = tied_logits(rng, 40, spec.num_experts)
    logits[7], logits[11, 3], logits[13] = poison, poison, 0.0
    bias = jnp.asarray(rng.integers(-2, 3, spec.num_experts) / 4, jnp.float32) if spec.biased else None
    routing, _ = route(logits, None, None, 0, spec=spec, bias=bias)
    plain = PLAIN(jnp.asarray(logits), None, spec=spec, bias=bias)
    others = ~np.isin(np.arange(40), (7, 11))  # how array code orders NaN depends on its sign
    assert np.array_equal(routing.ids[others], plain.ids[others])
    np.testing.assert_allclose(routing.weights[others], plain.weights[others], rtol=1e-5, atol=1e-12)
    for ids in np.asarray(routing.ids)[~others]:
        assert len(set(ids)) == spec.top_k and np.all((ids >= 0) & (ids < spec.num_experts))


@pytest.mark.parametrize(
    ("rows", "top_k", "expected"), [(384, 8, 8), (40, 4, 8), (4, 4, 4), (30, 6, 0), (80, 16, 16), (5, 1, 5)]
)
def test_a_window_is_whole_tiles_that_hold_a_layers_ids(rows, top_k, expected):
    assert window_rows(rows, top_k) == expected
