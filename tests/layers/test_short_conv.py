"""A short convolution against a NumPy loop: sequences cut anywhere, several in a step, states, segments, gradients."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.short_conv import ConvInputs, ConvShape

pytestmark = pytest.mark.usefixtures("fast_compilation")

CHANNELS = 5
RAGGED = jax.jit(ConvInputs.ragged)
SEQUENCES = jax.jit(ConvInputs.sequences, static_argnums=2)


def by_hand(tokens, kernel, bias):
    """One sequence [S, Q], token by token."""
    width, out = kernel.shape[1], np.zeros(tokens.shape)
    for token, tap in itertools.product(range(len(tokens)), range(width)):
        if token + tap >= width - 1:
            out[token] += kernel[:, tap] * tokens[token + tap - width + 1]
    return out if bias is None else out + bias


def random_layer(width, *, biased):
    rng = np.random.default_rng(width)
    kernel = rng.standard_normal((CHANNELS, width)).astype(np.float32)
    return rng, kernel, rng.standard_normal(CHANNELS).astype(np.float32) if biased else None


def inputs_of(mixed, kernel, bias):
    shape = ConvShape(channels=CHANNELS, width=kernel.shape[1])
    return ConvInputs(jnp.asarray(mixed), jnp.asarray(kernel), None if bias is None else jnp.asarray(bias), shape)


@pytest.mark.parametrize(("width", "biased"), [(2, False), (3, True), (6, False)])
def test_sequences_cut_into_steps_of_any_sizes_are_those_of_a_loop(width, biased):
    rng, kernel, bias = random_layer(width, biased=biased)
    sequences = [rng.standard_normal((length, CHANNELS)).astype(np.float32) for length in (11, 7, 9)]
    steps = [(4, 1, 0), (1, 0, 2), (1, 6, 1), (5, 0, 6)]  # tokens of each sequence
    state, done, outs = (
        ConvShape(channels=CHANNELS, width=width).zeros(3, jnp.dtype(jnp.float32)),
        [0] * 3,
        [[], [], []],
    )
    for counts in steps:
        parts = [seq[at : at + count] for seq, at, count in zip(sequences, done, counts, strict=True)]
        padding = np.full((2, CHANNELS), np.nan, np.float32)
        starts = jnp.asarray(np.cumsum((0, *counts)), jnp.int32)
        out, state = RAGGED(inputs_of(np.concatenate([*parts, padding]), kernel, bias), state, starts)
        assert not np.any(out[sum(counts) :]), "rows of no sequence give 0"
        for row, part in enumerate(np.split(np.asarray(out)[: sum(counts)], np.cumsum(counts)[:-1])):
            outs[row].append(part)
        done = [at + count for at, count in zip(done, counts, strict=True)]
    for sequence, parts, last in zip(sequences, outs, state, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), by_hand(sequence, kernel, bias), atol=1e-5)
        np.testing.assert_array_equal(last, sequence[len(sequence) - width + 1 :])


def test_a_nonfinite_token_stays_in_its_sequence():
    rng, kernel, bias = random_layer(3, biased=True)
    mixed = rng.standard_normal((6, CHANNELS)).astype(np.float32)
    broken = mixed.copy()
    broken[1] = np.nan
    starts, state = jnp.asarray([0, 2, 6], jnp.int32), ConvShape(channels=CHANNELS, width=3).zeros(2, jnp.float32)
    (out, after), (spoiled, last) = (RAGGED(inputs_of(rows, kernel, bias), state, starts) for rows in (mixed, broken))
    assert np.array_equal(spoiled[2:], out[2:]) and np.array_equal(last[1], after[1])
    assert np.all(np.isnan(spoiled[1])) and np.array_equal(spoiled[0], out[0])


def test_whole_sequences_begin_anew_where_the_segment_changes_and_have_gradients():
    rng, kernel, bias = random_layer(4, biased=True)
    rows = rng.standard_normal((2, 8, CHANNELS)).astype(np.float32)
    segments = np.array([[1, 1, 1, 2, 2, 1, 1, 1], [0] * 8])
    inputs = inputs_of(rows.reshape(-1, CHANNELS), kernel, bias)
    out = np.asarray(SEQUENCES(inputs, jnp.asarray(segments), 2)).reshape(rows.shape)
    for row, cuts in ((0, (0, 3, 5, 8)), (1, (0, 8))):
        expected = [by_hand(rows[row, low:high], kernel, bias) for low, high in itertools.pairwise(cuts)]
        np.testing.assert_allclose(out[row], np.concatenate(expected), atol=1e-5)
    np.testing.assert_allclose(SEQUENCES(inputs, None, 2)[:8], by_hand(rows[0], kernel, bias), atol=1e-5)
    grads = jax.grad(lambda mixed: SEQUENCES(inputs_of(mixed, kernel, bias), jnp.asarray(segments), 2)[2].sum())(
        inputs.mixed
    )
    assert np.array_equal(np.flatnonzero(np.any(grads != 0, axis=1)), [0, 1, 2])
