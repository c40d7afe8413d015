"""Routing under capacities: ids and instances are the sequence's, weights are the law's at those ids, and without bound
nothing changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracles.selection import Case, plain_selection, replica_table
from routed_experts.capture.device_cache import _RoutedExpertsDeviceCache
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import ConfigError
from routed_experts.layers.balanced_selection.capacity_routing import instance_capacity, reroute_topk
from routed_experts.layers.balanced_selection.checks import expert_capacity
from routed_experts.layers.parallel import Capacities
from routed_experts.layers.routing import RouterSpec, replay_topk, selection_scores
from support.tpu_aot import compile_tpu, tpu_mesh

EXPERTS, INSTANCES, TOKENS = 16, 20, 24
PLAIN = dict(num_experts=EXPERTS, top_k=4, renormalize=True)
SPECS = {
    "Qwen3": RouterSpec(**PLAIN),
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
    "DeepSeek-V2": RouterSpec(**(PLAIN | dict(renormalize=False)), scale=16.0),
    "GPT-OSS": RouterSpec(**PLAIN, scoring_func="logits"),
    "Llama 4": RouterSpec(num_experts=EXPERTS, top_k=1, renormalize=False, scoring_func="sigmoid"),
    "PhiMoE": RouterSpec(num_experts=EXPERTS, top_k=2, renormalize=False, scoring_func="sparsemixer", jitter_eps=0.1),
}


@functools.cache
def program(name, drops):
    spec = SPECS[name]
    return jax.jit(
        lambda z, valid, room, bias: reroute_topk(z, valid, room, spec, bias, num_instances=INSTANCES, drops=drops)
    )


def batch(name, seed):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(TOKENS, EXPERTS)) + 2 * rng.normal(size=EXPERTS)).astype(np.float32)
    # ties, zeros of either sign, and many tokens that prefer the same experts
    logits[rng.random(TOKENS) < 0.2] = np.round(logits[0])
    valid = np.arange(TOKENS) < TOKENS - seed % 5
    bias = rng.normal(size=EXPERTS).astype(np.float32) * 0.1 if SPECS[name].biased else None
    return logits, valid, bias, replica_table(rng, EXPERTS, INSTANCES, 3)


def run(name, logits, valid, bias, table, factor, *, drops):
    room = Capacities(jnp.asarray(table), jnp.asarray(factor, jnp.int32))
    routing, changed = program(name, drops)(
        jnp.asarray(logits), jnp.asarray(valid), room, None if bias is None else jnp.asarray(bias)
    )
    return *(
        np.asarray(part) for part in (routing.ids, routing.instances, routing.weights, routing.native_ids)
    ), np.asarray(changed)


def expected_weights(spec, logits, ids):
    """The law's at these ids, in float64; -1 is no slot."""
    z = logits.astype(np.float64)
    scores = (
        1 / (1 + np.exp(-z)) if spec.scoring_func == "sigmoid" else np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    )
    filled = ids >= 0
    weights = np.where(filled, np.take_along_axis(scores, np.maximum(ids, 0), axis=1), 0.0)
    if spec.renormalize or spec.scoring_func == "logits":
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-30)
    return weights * spec.scale


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_what_finds_no_room_is_what_the_sequence_says(name, drops):
    spec, emptied, moved = SPECS[name], 0, 0
    for seed in range(6):
        logits, valid, bias, table = batch(name, seed)
        ids, instances, weights, _, changed = run(name, logits, valid, bias, table, (3, 4), drops=drops)
        scores = np.asarray(
            selection_scores(jnp.asarray(logits), spec=spec, bias=None if bias is None else jnp.asarray(bias))
        )
        room = expert_capacity(int(valid.sum()), spec.top_k, INSTANCES, "3/4")
        expected = plain_selection(Case(scores, table, room, valid, None), spec.top_k, overflows=not drops)
        np.testing.assert_array_equal(ids[valid], expected[0][valid])
        np.testing.assert_array_equal(instances[valid], expected[1][valid])
        assert (instances[~valid] == -1).all() and (ids[~valid] >= 0).all() and not changed[~valid].any()
        assert ((ids >= 0) == (instances >= 0))[valid].all() and (weights[ids < 0] == 0).all()
        if spec.scoring_func != "sparsemixer":
            np.testing.assert_allclose(weights[valid], expected_weights(spec, logits, ids)[valid], rtol=2e-5, atol=1e-7)
        emptied, moved = emptied + changed[:, 1].sum(), moved + changed[:, 0].sum()
        np.testing.assert_array_equal(changed[:, 1], np.where(valid, (ids < 0).sum(axis=1), 0))
    assert moved > 0 and (emptied > 0) == drops


@pytest.mark.parametrize("name", SPECS)
def test_without_bound_nothing_changes(name):
    logits, valid, bias, table = batch(name, 7)
    ids, instances, weights, native, changed = run(name, logits, valid, bias, table, (1, 0), drops=False)
    live = jax.jit(functools.partial(replay_topk, routed=None, spec=SPECS[name]))
    plain = live(jnp.asarray(logits), bias=None if bias is None else jnp.asarray(bias))
    np.testing.assert_array_equal(ids, plain.ids)
    np.testing.assert_array_equal(native, plain.ids)
    np.testing.assert_array_equal(weights, plain.weights)
    assert not changed.any() and (instances[valid] == table[ids[valid], 0]).all()


def test_numbers_that_are_none_run_somewhere():
    """A token without a finite score runs what an unbounded router takes, and no other token notices."""
    logits, valid, bias, table = batch("Qwen3", 1)
    logits[3] = np.nan
    ids, instances, _, native, changed = run("Qwen3", logits, valid, bias, table, (1, 1), drops=False)
    assert (ids[3] == native[3]).all() and (instances[3] == table[ids[3], 0]).all() and not changed[3].any()
    others = np.delete(np.arange(TOKENS), 3)
    room = expert_capacity(int(valid.sum()), 4, INSTANCES, 1)
    scores = np.asarray(selection_scores(jnp.asarray(logits), spec=SPECS["Qwen3"]))
    expected = plain_selection(Case(scores, table, room, valid, None), 4)
    np.testing.assert_array_equal(ids[others][valid[others]], expected[0][others][valid[others]])


def test_room_on_the_device_is_that_of_the_host():
    for valid, factor in ((0, (1, 1)), (1, (1, 7)), (17, (5, 4)), (24, (4096, 4095))):
        mask = jnp.arange(TOKENS) < valid
        room = instance_capacity(jnp.asarray(factor, jnp.int32), mask, top_k=4, num_instances=INSTANCES)
        np.testing.assert_array_equal(room, expert_capacity(valid, 4, INSTANCES, f"{factor[0]}/{factor[1]}"))
    with pytest.raises(ConfigError, match="counted in int32; lower precompile_token_paddings"):
        instance_capacity(jnp.array([1, 1], jnp.int32), jnp.ones(1 << 19, bool), top_k=8, num_instances=INSTANCES)


@pytest.mark.tpu_aot
def test_the_tpu_compiler_takes_it_and_counts_in_registers():
    """Rerouting is the Pallas kernel there; what is compared to count a step is nowhere in memory, where it would be 8
    MiB."""

    def step(logits, valid, replicas, factor, ids, counts):
        room = Capacities(replicas, factor)
        routing, changed = reroute_topk(logits, valid, room, spec, None, num_instances=160, drops=False)
        cache = _RoutedExpertsDeviceCache(ids=ids, spec=capture, rerouting=changed)
        return (
            routing.ids,
            routing.instances,
            routing.weights,
            cache.rerouting,
            cache.count_experts(counts, valid, valid),
        )

    spec = RouterSpec(num_experts=128, top_k=8, renormalize=True)
    capture = CaptureSpec(num_hidden_layers=4, layer_ids=(0, 1, 2, 3), num_experts=128, top_k=8)
    whole = dict.fromkeys(((128, 2), (2,), (32, 256), (2, 4, 128)), jnp.int32)
    shapes = {(256, 128): jnp.float32, (256,): jnp.bool_, **whole}
    program = compile_tpu(step, *(jax.ShapeDtypeStruct(*shape) for shape in shapes.items()), mesh=tpu_mesh("v5e"))
    assert "choose_experts" in (program.as_text() or "")
    assert program.memory_analysis().temp_size_in_bytes < 4 << 20
