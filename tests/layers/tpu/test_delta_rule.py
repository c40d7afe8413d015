"""The gated delta rule on TPU, interpreted, against a NumPy loop over tokens; states of other layers and slots stay as
they were, NaN included."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.delta_rule import DeltaInputs, DeltaShape, DeltaState
from routed_experts.layers.tpu.delta_rule import recur

pytestmark = pytest.mark.usefixtures("fast_compilation")

RUN = jax.jit(functools.partial(recur, interpret=True))
SHAPES = {
    "odd": DeltaShape(key_heads=1, value_heads=3, key_dim=5, value_dim=7, width=4),
    "two groups of heads": DeltaShape(key_heads=8, value_heads=16, key_dim=8, value_dim=8, width=3),
}
SHAPES |= {f"{name}, by channel": dataclasses.replace(shape, by_channel=True) for name, shape in SHAPES.items()}
SLOTS, LAYER = 6, 1


def loop(inputs, lengths, states):
    """Each token of each sequence in float64, from these states (conv, recurrent); what it reads, and the states."""
    shape, at, reads, ends = inputs.shape, 0, [], []
    mixed, decay, beta, kernel = (
        np.asarray(part, np.float64) for part in (inputs.mixed, inputs.decay, inputs.beta, inputs.kernel)
    )
    splits = np.cumsum([shape.key_heads * shape.key_dim] * 2)
    for length, (conv, memory) in zip(lengths, states, strict=True):
        for n in range(at, at + length):
            window = np.concatenate([conv, mixed[n : n + 1]])
            summed = np.sum(window * kernel.T, axis=0)
            queries, keys, values = np.split(summed / (1 + np.exp(-summed)), splits)
            queries, keys = (
                np.repeat(part.reshape(shape.key_heads, -1), shape.value_heads // shape.key_heads, axis=0)
                for part in (queries, keys)
            )
            queries, keys = (part / np.sqrt(np.sum(part**2, axis=1, keepdims=True) + 1e-6) for part in (queries, keys))
            memory = memory * np.exp(decay[n]).reshape(shape.value_heads, -1, 1)
            for head, value in enumerate(values.reshape(shape.value_heads, -1)):
                wrong = beta[n, head] * (value - memory[head].T @ keys[head])
                memory[head] += np.outer(keys[head], wrong)
            reads.append(np.stack([memory[h].T @ queries[h] for h in range(shape.value_heads)]) / shape.key_dim**0.5)
            conv = window[1:]
        ends.append((conv, memory))
        at += length
    return np.array(reads), ends


CASES = {
    "decode, one starts anew": ((1, 1, 1), (False, True, False)),
    "chunks of two requests, one token, none": ((70, 1, 5, 0), (True, False, False, False)),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("lengths", "fresh"), CASES.values(), ids=CASES)
def test_reads_and_states_are_those_of_the_loop_and_other_states_stay(shape, lengths, fresh):
    rng, total = np.random.default_rng(0), sum(lengths)
    padded = total + 3
    inputs = DeltaInputs(
        jnp.asarray(rng.standard_normal((padded, shape.channels)), jnp.float32),
        jnp.asarray(-rng.random((padded, shape.num_decays)), jnp.float32),
        jnp.asarray(rng.random((padded, shape.value_heads)), jnp.float32),
        jnp.asarray(rng.standard_normal((shape.channels, shape.width)), jnp.float32),
        shape,
    )
    slots = np.array([3, 1, 5, 2][: len(lengths)])
    conv = np.full((2, SLOTS, shape.width - 1, shape.channels), np.nan, np.float32)
    recurrent = np.full((2, SLOTS, shape.value_heads, shape.key_dim, shape.value_dim), np.nan, np.float32)
    starts = []
    for slot, begins in zip(slots, fresh, strict=True):
        own = rng.standard_normal(conv.shape[2:]), rng.standard_normal(recurrent.shape[2:])
        if not begins:  # else what was there before is NaN
            conv[LAYER, slot], recurrent[LAYER, slot] = own
        starts.append((np.zeros_like(own[0]), np.zeros_like(own[1])) if begins else own)
    reads, ends = loop(inputs, lengths, starts)
    bounds = jnp.asarray(np.cumsum([0, *lengths, 0]), jnp.int32)  # the last row is padding, of slot 0
    states = DeltaState(jnp.asarray(conv), jnp.asarray(recurrent))
    named, begins = jnp.asarray([*slots, 0], jnp.int32), jnp.asarray([*fresh, True])
    read, after = RUN(inputs, states, jnp.asarray(LAYER, jnp.int32), named, begins, bounds)
    np.testing.assert_allclose(read[:total], reads, atol=3e-5)
    assert not np.any(read[total:])
    for slot, (own_conv, own_memory) in zip(slots, ends, strict=True):
        conv[LAYER, slot], recurrent[LAYER, slot] = own_conv, own_memory
    np.testing.assert_allclose(after.conv, conv, atol=3e-5)
    np.testing.assert_allclose(after.recurrent, recurrent, atol=3e-5)
