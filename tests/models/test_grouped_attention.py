"""Queries and keys of grouped-query attention as they reach the scores, against a NumPy loop over heads."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.layers.rotary import RotarySpec
from routed_experts.models.base.interface import SequenceOps
from routed_experts.models.decoder.grouped_attention import GroupedAttention
from routed_experts.models.decoder.layer_params import LayerParams
from routed_experts.models.decoder.layer_parts import LayerContext

HEADS, GROUPS, DIM, HIDDEN, TOKENS, EPS = 4, 2, 6, 10, 5, 1e-5
ROTARY = RotarySpec(inverse=(1.0, 0.3, 0.05))
LAYER = GroupedAttention(num_heads=HEADS, num_kv_heads=GROUPS, head_dim=DIM, rotary=ROTARY, eps=EPS)
KERNELS = Kernels(moe=MOE_BACKENDS["reference"])


def by_hand(head, position, scale, *, last):
    """One head of one token: normalised and rotated, in this order or, `last`, in the other."""

    def normed(x):
        return x / np.sqrt(np.mean(x * x) + EPS) * (1.0 if scale is None else scale)

    x, half, turned = head if last else normed(head), DIM // 2, np.empty(DIM)
    for i in range(half):
        cos, sin = np.cos(position * ROTARY.inverse[i]), np.sin(position * ROTARY.inverse[i])
        turned[i], turned[i + half] = x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin
    return normed(turned) if last else turned


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", ["head", "bare"])
def test_a_norm_of_heads_stands_before_or_after_the_rotary_positions(kind, last):
    rng = np.random.default_rng(0)
    layer, reached = dataclasses.replace(LAYER, qk_norm=kind, norm_after_rope=last), {}

    def attend(queries, keys, values, cache, index):
        reached.update(q=np.asarray(queries), k=np.asarray(keys))
        return queries, cache

    arrays = {
        spec.name: jnp.asarray(rng.standard_normal((1, *spec.shape)), jnp.float32) for spec in layer.weights(HIDDEN)
    }
    assert ("q_norm" in arrays) == (kind == "head")
    params = LayerParams({name: array[0] for name, array in arrays.items()}, {}, jnp.zeros((), jnp.int32), KERNELS)
    positions = np.array([3, 0, 41, 7, 100])
    step = LayerContext.create(jnp.asarray(positions), jnp.ones(TOKENS, bool), SequenceOps(attend), KERNELS, [ROTARY])
    x = jnp.asarray(rng.standard_normal((TOKENS, HIDDEN)), jnp.float32)
    layer.run(x, params, step, None, jnp.zeros((), jnp.int32))
    mixed = (np.asarray(x, np.float64) @ np.asarray(arrays["qkv"][0])).reshape(TOKENS, -1, DIM)
    for name, first, count in (("q", 0, HEADS), ("k", HEADS, GROUPS)):
        scale = np.asarray(arrays[f"{name}_norm"][0]) if kind == "head" else None
        for token, position in enumerate(positions):
            for head in range(count):
                expected = by_hand(mixed[token, first + head], position, scale, last=last)
                np.testing.assert_allclose(reached[name][token, head], expected, atol=2e-5)


@pytest.mark.parametrize("normed", [False, True])
def test_values_may_be_the_projected_keys_and_normed(normed):
    """Before the norm of keys and their rotary positions; a projection of values has no columns then."""
    rng = np.random.default_rng(1)
    layer = dataclasses.replace(LAYER, qk_norm="head", keys_are_values=True, value_norm=normed)
    reached = {}

    def attend(queries, keys, values, cache, index):
        reached.update(v=np.asarray(values))
        return queries, cache

    arrays = {
        spec.name: jnp.asarray(rng.standard_normal((1, *spec.shape)), jnp.float32) for spec in layer.weights(HIDDEN)
    }
    assert arrays["qkv"].shape == (1, HIDDEN, (HEADS + GROUPS) * DIM)
    params = LayerParams({name: array[0] for name, array in arrays.items()}, {}, jnp.zeros((), jnp.int32), KERNELS)
    step = LayerContext.create(jnp.arange(TOKENS), jnp.ones(TOKENS, bool), SequenceOps(attend), KERNELS, [ROTARY])
    x = jnp.asarray(rng.standard_normal((TOKENS, HIDDEN)), jnp.float32)
    layer.run(x, params, step, None, jnp.zeros((), jnp.int32))
    mixed = (np.asarray(x, np.float64) @ np.asarray(arrays["qkv"][0])).reshape(TOKENS, -1, DIM)
    for token in range(TOKENS):
        for head in range(GROUPS):
            key = mixed[token, HEADS + head]
            expected = key / np.sqrt(np.mean(key * key) + EPS) if normed else key
            np.testing.assert_allclose(reached["v"][token, head], expected, atol=2e-5)
