"""Penalties and logit bias against a loop in float64, one token at a time."""

import jax
import jax.numpy as jnp
import numpy as np

from routed_experts.layers.sampling import Penalties, penalize


def penalised_by_loop(logits, presence, frequency, repetition, counts, seen, bias) -> np.ndarray:
    result = logits.astype(np.float64)
    for row in range(len(result)):
        for token in range(result.shape[1]):
            value, count = result[row, token], counts[row, token]
            if count or seen[row, token]:
                value = value / repetition[row] if value > 0 else value * repetition[row]
            result[row, token] = value - frequency[row] * count - (presence[row] if count else 0.0)
        for token, amount in bias[row].items():
            result[row, token] += amount
    return result


def test_penalties_and_bias_are_those_of_the_loop() -> None:
    rng = np.random.default_rng(6)
    rows, vocab, width = 9, 23, 5
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    logits[:, 4] = -np.inf
    counts, seen = (
        rng.integers(0, 4, (rows, vocab)) * (rng.random((rows, vocab)) < 0.4),
        rng.random((rows, vocab)) < 0.3,
    )
    presence, frequency, repetition = rng.uniform(-2, 2, rows), rng.uniform(-2, 2, rows), rng.uniform(0.5, 2, rows)
    chosen = [rng.choice(vocab, rng.integers(0, width + 1), replace=False) for _ in range(rows)]
    bias = [{int(token): float(rng.choice([-100, 2.5, -np.inf])) for token in tokens} for tokens in chosen]
    ids, values = np.full((rows, width), vocab, np.int32), np.full((rows, width), 7.0, np.float32)
    for row, entries in enumerate(bias):
        ids[row, : len(entries)], values[row, : len(entries)] = list(entries), list(entries.values())
    penalties = Penalties(
        presence=jnp.asarray(presence, jnp.float32),
        frequency=jnp.asarray(frequency, jnp.float32),
        repetition=jnp.asarray(repetition, jnp.float32),
        generated_counts=jnp.asarray(counts, jnp.int32),
        prompt_seen=jnp.asarray(seen),
    )
    got = np.asarray(jax.jit(penalize)(jnp.asarray(logits), penalties, jnp.asarray(ids), jnp.asarray(values)))
    np.testing.assert_allclose(
        got, penalised_by_loop(logits, presence, frequency, repetition, counts, seen, bias), rtol=1e-5, atol=1e-5
    )


def test_neutral_penalties_change_no_bit_and_none_is_off() -> None:
    logits = jnp.asarray(np.random.default_rng(9).normal(0, 3, (3, 11)).astype(np.float32))
    neutral = Penalties(
        presence=jnp.zeros(3, jnp.float32),
        frequency=jnp.zeros(3, jnp.float32),
        repetition=jnp.ones(3, jnp.float32),
        generated_counts=jnp.ones((3, 11), jnp.int32),
        prompt_seen=jnp.ones((3, 11), bool),
    )
    np.testing.assert_array_equal(jax.jit(penalize)(logits, neutral), logits)
    assert penalize(logits, None) is logits
