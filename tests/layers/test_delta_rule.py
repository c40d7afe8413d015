"""The gated delta rule, a chunk of tokens at once, against a loop over tokens and heads in float64: ragged steps with
states, and whole sequences."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.delta_rule import CHUNK, DeltaInputs, DeltaShape, delta_ragged, delta_sequence

pytestmark = pytest.mark.usefixtures("fast_compilation")

SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=3, value_dim=5, width=4)
SHAPES = {"by head": SHAPE, "by channel": dataclasses.replace(SHAPE, by_channel=True)}


RUN = jax.jit(delta_ragged)


def random_inputs(rng, num_tokens, *, forgets=1.0, shape=SHAPE):
    numbers = {
        "mixed": rng.standard_normal((num_tokens, SHAPE.channels)),
        "decay": -forgets * rng.random((num_tokens, shape.num_decays)),
    }
    numbers |= {"beta": rng.random((num_tokens, 4)), "kernel": rng.standard_normal((SHAPE.channels, 4))}
    return DeltaInputs(**{name: jnp.asarray(value, jnp.float32) for name, value in numbers.items()}, shape=shape)


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
            memory[h] *= np.exp(decay[t].reshape(4, -1, 1)[h])
            memory[h] += np.outer(k, beta[t, h] * (values[h] - memory[h].T @ k))
            outputs.append(memory[h].T @ q / np.sqrt(3))
    return np.array(outputs).reshape(-1, 4, 5)


def steps(inputs, lengths, cuts, state, *, width):
    """Feed sequences in these cuts, padded to `width` rows; gives what each sequence read, and the state."""
    first, done, reads = np.cumsum((0, *lengths)), [0] * len(lengths), [[] for _ in lengths]
    for step in cuts:
        rows = [row for i, new in enumerate(step) for row in range(first[i] + done[i], first[i] + done[i] + new)]
        at = np.array(rows + [0] * (width - len(rows)))
        cut = DeltaInputs(inputs.mixed[at], inputs.decay[at], inputs.beta[at], inputs.kernel, inputs.shape)
        starts = np.cumsum((0, *step, 0))
        read, state = RUN(cut, state, jnp.asarray(starts, jnp.int32))
        for i, new in enumerate(step):
            reads[i].append(np.asarray(read[starts[i] : starts[i] + new]))
            done[i] += new
        assert not np.any(read[len(rows) :]) and not np.any(state.recurrent[len(lengths)]), "a row of no sequence"
    assert tuple(done) == lengths
    return [np.concatenate(parts) for parts in reads], state


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("forgets", [0.01, 1.0, 40.0])
@pytest.mark.parametrize(
    ("lengths", "cuts", "width"),
    [
        ((9, 1, 14), ((4, 1, 0), (0, 0, 13), (1, 0, 1), (4, 0, 0)), 16),
        ((190, 130, 3), ((1, 127, 1), (100, 1, 1), (0, 2, 1), (65, 0, 0), (24, 0, 0)), 3 * CHUNK),
        ((64, 65, 63), ((64, 65, 63),), 3 * CHUNK),
        ((192,), ((192,),), 3 * CHUNK),
    ],
)
def test_steps_of_any_cut_are_the_loop_and_rows_of_no_sequence_change_no_state(lengths, cuts, width, forgets, shape):
    inputs = random_inputs(np.random.default_rng(0), sum(lengths), forgets=forgets, shape=shape)
    first = np.cumsum((0, *lengths))
    state = SHAPE.zeros(len(lengths) + 1, jnp.dtype(jnp.float32))
    reads, _ = steps(inputs, lengths, cuts, state, width=width)
    for i, read in enumerate(reads):
        np.testing.assert_allclose(read, loop(inputs, np.arange(first[i], first[i + 1])), atol=2e-5)


@pytest.mark.parametrize("part", ["mixed", "decay", "beta"])
@pytest.mark.parametrize("at", [0, 40, 70, 99])
def test_a_token_that_is_no_number_spoils_those_after_it_in_its_sequence_alone(part, at):
    lengths, cuts = (100, 100), ((80, 80), (20, 1), (0, 19))
    inputs = random_inputs(np.random.default_rng(2), 200)
    state = SHAPE.zeros(3, jnp.dtype(jnp.float32))
    expected, whole = steps(inputs, lengths, cuts, state, width=3 * CHUNK)
    numbers = {name: getattr(inputs, name) for name in ("mixed", "decay", "beta")}
    numbers[part] = numbers[part].at[at].set(jnp.nan)
    reads, left = steps(
        DeltaInputs(**numbers, kernel=inputs.kernel, shape=SHAPE), lengths, cuts, state, width=3 * CHUNK
    )
    assert np.array_equal(reads[0][:at], expected[0][:at]) and np.array_equal(reads[1], expected[1])
    assert np.all(np.isnan(reads[0][at:]))
    assert np.array_equal(left.recurrent[1], whole.recurrent[1]) and not np.any(np.isfinite(left.recurrent[0]))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("length", "cuts"), [(12, ()), (12, (5,)), (150, (3, 4, 63, 64, 128)), (129, ())])
def test_whole_sequences_start_anew_with_each_segment_and_are_differentiable(length, cuts, shape):
    inputs = random_inputs(np.random.default_rng(1), 2 * length, shape=shape)
    bounds = (0, *cuts, length)
    segments = None if not cuts else jnp.asarray([np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))] * 2)
    read = np.asarray(jax.jit(delta_sequence, static_argnums=2)(inputs, segments, 2))
    for row in range(2):
        for low, high in itertools.pairwise(bounds):
            part = length * row + np.arange(low, high)
            np.testing.assert_allclose(read[part], loop(inputs, part), atol=2e-5)
    gradient = jax.grad(lambda x: jnp.sum(delta_sequence(x, segments, 2) ** 2))(inputs)
    assert all(np.all(np.isfinite(leaf)) and np.any(leaf) for leaf in jax.tree.leaves(gradient))
