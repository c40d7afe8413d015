"""Each routing law against a loop over tokens and slots in float64, written from its source; live, replayed and mixed
rows."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.routing import LayerRouting, RouterSpec, replay_topk
from support import fast_compile

ROUTE = jax.jit(replay_topk, static_argnames="spec")
PLAIN = dict(num_experts=16, top_k=4, renormalize=True)
SPECS = {
    "DeepSeek-V3": RouterSpec(
        **PLAIN,
        scoring_func="sigmoid",
        scale=2.5,
        epsilon=1e-20,
        num_groups=4,
        topk_group=2,
        group_score_topk=2,
        biased=True,
    ),
    "Moonlight, GLM-4.5": RouterSpec(**PLAIN, scoring_func="sigmoid", scale=1.0, epsilon=1e-20, biased=True),
    "V3, not renormalised": RouterSpec(
        **(PLAIN | dict(renormalize=False)), scoring_func="sigmoid", scale=2.0, biased=True
    ),
    "DeepSeek-V2": RouterSpec(**(PLAIN | dict(renormalize=False)), scale=16.0, num_groups=8, topk_group=3),
    "DeepSeek-V2-Lite": RouterSpec(**(PLAIN | dict(renormalize=False)), scale=1.0),
    "Ernie 4.5": RouterSpec(**PLAIN, biased=True),
    "MiniMax-M2": RouterSpec(**PLAIN, scoring_func="sigmoid", biased=True),
    "Llama 4": RouterSpec(num_experts=16, top_k=1, renormalize=False, scoring_func="sigmoid"),
    "GPT-OSS, Granite": RouterSpec(**PLAIN, scoring_func="logits"),
    "PhiMoE": RouterSpec(num_experts=16, top_k=2, renormalize=False, scoring_func="sparsemixer", jitter_eps=0.1),
}


def ranked(values, among):
    return sorted(among, key=lambda e: (-values[e], e))


def live_ids(z, bias, spec):
    """Which experts one token runs on."""
    if spec.scoring_func == "softmax":
        total = sum(math.exp(x - max(z)) for x in z)
        scores = [math.exp(x - max(z)) / total for x in z]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in z] if spec.scoring_func == "sigmoid" else list(z)
    chosen_by = [s + b for s, b in zip(scores, bias, strict=True)]
    size = spec.num_experts // spec.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(spec.num_groups)]
    worth = [sum(sorted((chosen_by[e] for e in group), reverse=True)[: spec.group_score_topk]) for group in groups]
    candidates = [e for g in ranked(worth, range(spec.num_groups))[: spec.topk_group] for e in groups[g]]
    return scores, ranked(chosen_by, candidates)[: spec.top_k]


def expected_weights(z, scores, ids, spec):
    """Combine weights at ids."""
    if spec.scoring_func == "sparsemixer":
        left, weights = list(range(len(z))), []
        for e in ids:
            best = max(z[i] for i in left)
            near = [i for i in left if i == e or not (best - z[i]) / max(abs(z[i]), best) > 2 * spec.jitter_eps]
            weights.append(math.exp(z[e] - best) / sum(math.exp(z[i] - best) for i in near))
            left.remove(e)
        return weights
    if spec.scoring_func == "logits":
        top = max(z[e] for e in ids)
        return [math.exp(z[e] - top) / sum(math.exp(z[i] - top) for i in ids) for e in ids]
    total = sum(scores[e] for e in ids) + spec.epsilon if spec.renormalize else 1.0
    return [scores[e] / total * spec.scale for e in ids]


def oracle(logits, bias, replayed, valid, spec):
    ids, weights = [], []
    for n, z in enumerate(logits.astype(np.float64).tolist()):
        scores, chosen = live_ids(z, bias, spec)
        chosen = replayed[n].tolist() if valid[n] else chosen
        ids.append(chosen)
        weights.append(expected_weights(z, scores, chosen, spec))
    return np.array(ids), np.array(weights)


def inputs(spec, seed=0, rows=40):
    rng = np.random.default_rng(seed)
    logits = (rng.integers(-60, 61, (rows, spec.num_experts)) / 16).astype(
        np.float32
    )  # ties, and gaps far above rounding
    bias = rng.integers(-4, 5, spec.num_experts) / 8 if spec.biased else np.zeros(spec.num_experts)
    replayed = np.stack([rng.permutation(spec.num_experts)[: spec.top_k] for _ in range(rows)]).astype(np.uint8)
    return logits, bias, replayed, rng.random(rows) < 0.5


def run(spec, logits, bias, routed):
    return ROUTE(jnp.asarray(logits), routed, spec=spec, bias=jnp.asarray(bias, jnp.float32) if spec.biased else None)


@pytest.mark.parametrize("name", SPECS)
def test_a_law_is_its_loop_live_and_replayed(name):
    spec = SPECS[name]
    logits, bias, replayed, valid = inputs(spec)
    for mask in (np.zeros_like(valid), valid, np.ones_like(valid)):
        routing = run(spec, logits, bias, LayerRouting(jnp.asarray(replayed), jnp.asarray(mask)))
        ids, weights = oracle(logits, bias, replayed, mask, spec)
        assert np.array_equal(routing.ids, ids)
        np.testing.assert_allclose(routing.weights, weights, rtol=5e-6)
    live = run(spec, logits, bias, None)
    assert np.array_equal(live.ids, oracle(logits, bias, replayed, np.zeros_like(valid), spec)[0])


@pytest.mark.parametrize("name", SPECS)
def test_own_ids_replayed_are_the_live_routing_bit_for_bit_and_poison_is_never_read(name):
    spec = SPECS[name]
    logits, bias, replayed, valid = inputs(spec, seed=1)
    live = run(spec, logits, bias, None)
    own = np.asarray(live.ids, replayed.dtype)
    for ids, mask in ((own, np.ones_like(valid)), (np.full_like(replayed, 255), np.zeros_like(valid))):
        same = run(spec, logits, bias, LayerRouting(jnp.asarray(ids), jnp.asarray(mask)))
        assert np.array_equal(same.ids, live.ids) and np.array_equal(same.weights, live.weights)


@pytest.mark.parametrize("name", SPECS)
def test_the_gradient_is_finite_on_any_ids_and_reaches_the_replayed_logits(name):
    spec = SPECS[name]
    logits, bias, replayed, valid = inputs(spec, seed=2)
    routed = LayerRouting(jnp.asarray(replayed), jnp.ones(len(valid), bool))
    mix = jnp.asarray(np.random.default_rng(3).standard_normal((len(valid), spec.top_k)), jnp.float32)
    compute = jax.grad(lambda z: jnp.sum(run(spec, z, bias, routed).weights * mix))
    gradient = np.asarray(jax.jit(compute, compiler_options=fast_compile.OPTIONS)(jnp.asarray(logits)))
    assert np.all(np.isfinite(gradient))
    assert np.all(np.abs(np.take_along_axis(gradient, replayed.astype(int), axis=1)).sum(axis=0) > 0)


def test_a_selection_bias_moves_the_choice_and_never_a_weight():
    spec = SPECS["Moonlight, GLM-4.5"]
    logits, bias, replayed, valid = inputs(spec, seed=4)
    routed = LayerRouting(jnp.asarray(replayed), jnp.ones(len(valid), bool))
    left, right = (run(spec, logits, b, routed).weights for b in (bias, -bias))
    assert np.array_equal(left, right)
    assert not np.array_equal(run(spec, logits, bias, None).ids, run(spec, logits, -bias, None).ids)


def test_unselected_groups_give_no_expert_even_where_all_selected_scores_are_negative():
    spec = RouterSpec(
        num_experts=4,
        top_k=2,
        renormalize=False,
        scoring_func="sigmoid",
        num_groups=2,
        topk_group=1,
        group_score_topk=1,
        biased=True,
    )
    routing = run(spec, np.zeros((1, 4), np.float32), np.array([-9.0, -9.0, -8.0, -9.0]), None)
    assert np.asarray(routing.ids).tolist() == [[2, 3]]


def test_a_fused_router_serves_the_plain_rule_only():
    assert RouterSpec(**PLAIN).is_plain and SPECS["DeepSeek-V2-Lite"].is_plain
    assert not any(spec.is_plain for name, spec in SPECS.items() if name != "DeepSeek-V2-Lite")
