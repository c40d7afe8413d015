"""The gated delta rule against a loop over tokens and heads in float64: ragged steps with states, and whole sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.delta_rule import DeltaInputs, DeltaShape, DeltaState, delta_ragged, delta_whole

SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=3, value_dim=5, width=4)


def random_inputs(rng, num_tokens):
    numbers = {"mixed": rng.standard_normal((num_tokens, SHAPE.channels)), "decay": -rng.random((num_tokens, 4))}
    numbers |= {"beta": rng.random((num_tokens, 4)), "kernel": rng.standard_normal((SHAPE.channels, 4))}
    return DeltaInputs(**{name: jnp.asarray(value, jnp.float32) for name, value in numbers.items()}, shape=SHAPE)


def loop(inputs, rows):
    """A whole sequence, made of these rows of the inputs, from nothing."""
    mixed, decay, beta = (np.asarray(part, np.float64)[rows] for part in (inputs.mixed, inputs.decay, inputs.beta))
    kernel, outputs = np.asarray(inputs.kernel, np.float64), []
    memory = np.zeros((4, 3, 5))
    padded = np.concatenate([np.zeros((3, SHAPE.channels)), mixed])
    for t in range(len(rows)):
        turned = sum(padded[t + w] * kernel[:, w] for w in range(4))
        turned = turned / (1 + np.exp(-turned))
        queries, keys, values = turned[:6].reshape(2, 3), turned[6:12].reshape(2, 3), turned[12:].reshape(4, 5)
        for h in range(4):
            q, k = (x[h // 2] / np.sqrt(x[h // 2] @ x[h // 2] + 1e-6) for x in (queries, keys))
            memory[h] *= np.exp(decay[t, h])
            memory[h] += np.outer(k, beta[t, h] * (values[h] - memory[h].T @ k))
            outputs.append(memory[h].T @ q / np.sqrt(3))
    return np.array(outputs).reshape(-1, 4, 5)


def test_steps_of_any_cut_are_the_loop_and_rows_of_no_sequence_change_no_state():
    rng, lengths = np.random.default_rng(0), (9, 1, 14)
    inputs = random_inputs(rng, sum(lengths))
    first = np.cumsum((0, *lengths))
    whole = [loop(inputs, np.arange(first[i], first[i + 1])) for i in range(3)]
    state, done = DeltaState.zeros(4, SHAPE, jnp.dtype(jnp.float32)), [0, 0, 0]  # the fourth is padding
    run = jax.jit(delta_ragged)
    for step in ((4, 1, 0), (0, 0, 13), (1, 0, 1), (4, 0, 0)):
        rows = [row for i, new in enumerate(step) for row in range(first[i] + done[i], first[i] + done[i] + new)]
        at = np.array(rows + [0] * (16 - len(rows)))
        cut = DeltaInputs(inputs.mixed[at], inputs.decay[at], inputs.beta[at], inputs.kernel, SHAPE)
        starts = jnp.asarray(np.cumsum((0, *step, 0)), jnp.int32)
        read, state = run(cut, state, starts)
        for i, new in enumerate(step):
            np.testing.assert_allclose(read[starts[i] : starts[i] + new], whole[i][done[i] : done[i] + new], atol=1e-5)
            done[i] += new
        assert not np.any(read[len(rows) :]) and not np.any(state.memory[3])
    assert tuple(done) == lengths


@pytest.mark.parametrize("cut", [None, 5])
def test_whole_sequences_start_anew_with_each_segment_and_are_differentiable(cut):
    inputs = random_inputs(np.random.default_rng(1), 2 * 12)
    segments = None if cut is None else jnp.asarray([[0] * cut + [1] * (12 - cut)] * 2)
    read = np.asarray(jax.jit(delta_whole, static_argnums=2)(inputs, segments, 2))
    for row in range(2):
        for part in [np.arange(12)] if cut is None else [np.arange(cut), np.arange(cut, 12)]:
            np.testing.assert_allclose(read[12 * row + part], loop(inputs, 12 * row + part), atol=1e-5)
    gradient = jax.grad(lambda x: jnp.sum(delta_whole(x, segments, 2) ** 2))(inputs)
    assert all(np.all(np.isfinite(leaf)) and np.any(leaf) for leaf in jax.tree.leaves(gradient))
