"""The sampler against NumPy loops in float64, and against its own law: noise is (seed, choice, position), nothing
else."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from routed_experts.layers.sampling import SamplingBatch, SamplingMode, gumbel_noise, processed_logits, sample
from support.tpu_aot import compile_tpu, tpu_mesh

pytestmark = pytest.mark.usefixtures("fast_compilation")

NUM_DRAWS = 2000
DRAWS = jax.jit(sample, static_argnames="mode")
PROCESSED = jax.jit(processed_logits, static_argnames="mode")
RANDOM_MODES = [SamplingMode.RANDOM, SamplingMode.FILTERED]


def build_batch(
    rows: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, choice=0, position=0
) -> SamplingBatch:
    def column(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (rows,)))

    seeds = np.broadcast_to(np.asarray(seed, np.int64), (rows,)).astype(np.uint64)
    words = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)
    return SamplingBatch(
        temperature=column(temperature, np.float32),
        top_k=column(top_k, np.int32),
        top_p=column(top_p, np.float32),
        min_p=column(min_p, np.float32),
        seed=jnp.asarray(words),
        choice=column(choice, np.int32),
        position=column(position, np.int32),
    )


def take(batch: SamplingBatch, rows) -> SamplingBatch:
    return jax.tree.map(lambda leaf: leaf[rows], batch)


def mask_by_loop(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """One row, float64, one token at a time: the order of the docstring, ties retained or dropped together."""
    scaled = logits.astype(np.float64) / temperature
    mask = np.isfinite(scaled)
    if 0 < top_k < len(scaled):
        mask &= scaled >= sorted(scaled, reverse=True)[top_k - 1]
    weights = np.where(mask, np.exp(scaled - scaled.max()), 0.0)
    probabilities = weights / weights.sum()
    if top_p < 1:
        nucleus, mass = np.zeros(len(scaled), bool), 0.0
        for value in sorted(set(scaled[mask]), reverse=True):
            group = mask & (scaled == value)
            nucleus |= group
            mass += probabilities[group].sum()
            if mass >= top_p:
                break
        mask = nucleus
    if min_p > 0:
        mask &= probabilities >= min_p * probabilities.max() * (1 - 1e-12)
    return mask


def expected_distribution(logits, temperature, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    mask = mask_by_loop(logits, temperature, top_k, top_p, min_p)
    weights = np.where(mask, np.exp((logits.astype(np.float64) - logits.max()) / temperature), 0.0)
    return weights / weights.sum()


def p_value(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square with rare tokens pooled; a token of probability 0 that was drawn is refuted at once."""
    counts = np.bincount(tokens, minlength=len(expected))
    if counts[expected == 0].any():
        return 0.0
    expected_counts = expected * len(tokens)
    rare = expected_counts < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected_counts = np.append(expected_counts[~rare], expected_counts[rare].sum())
    if expected_counts[-1] < 5:  # the pool itself is rare: fold it into the most likely token
        best = int(np.argmax(expected_counts[:-1]))
        observed[best] += observed[-1]
        expected_counts[best] += expected_counts[-1]
        observed, expected_counts = observed[:-1], expected_counts[:-1]
    return (
        1.0
        if len(expected_counts) < 2
        else float(stats.chisquare(observed, expected_counts * observed.sum() / expected_counts.sum()).pvalue)
    )


def draw(logits: np.ndarray, seed: int, mode: SamplingMode, **values) -> np.ndarray:
    rows = jnp.asarray(np.broadcast_to(logits, (NUM_DRAWS, len(logits))))
    batch = build_batch(NUM_DRAWS, seed=seed, position=np.arange(NUM_DRAWS), **values)
    return np.asarray(DRAWS(rows, batch, mode)[0])


def random_case(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, float]]:
    logits = rng.normal(0, rng.choice([0.5, 1.5, 4.0]), 12).astype(np.float32)
    if rng.random() < 0.3:
        logits[rng.integers(12, size=3)] = -np.inf
    if rng.random() < 0.3:
        logits = np.round(logits)  # ties
    return logits, {"temperature": float(rng.choice([0.3, 0.7, 1.0, 1.6]))}


def test_two_hundred_and_forty_distributions_are_drawn_as_they_should_be() -> None:
    rng = np.random.default_rng(7)
    values = []
    for case in range(240):
        logits, settings = random_case(rng)
        mode = RANDOM_MODES[case % 2]
        if mode is SamplingMode.FILTERED:
            settings |= {
                "top_k": int(rng.choice([0, 2, 5, 40])),
                "top_p": rng.choice([1.0, 0.9, 0.55]),
                "min_p": rng.choice([0, 0.08]),
            }
        values.append(p_value(draw(logits, case, mode, **settings), expected_distribution(logits, **settings)))
    assert min(values) > 0.001 / len(values)
    informative = [value for value in values if value < 1.0]
    assert len(informative) > 200
    assert stats.kstest(informative, "uniform").pvalue > 1e-4, (
        "p-values of a right sampler are uniform: neither too bad nor too good"
    )


def test_the_bar_sees_a_temperature_that_is_wrong_by_a_fifth() -> None:
    logits = np.linspace(-3, 3, 12, dtype=np.float32)
    tokens = draw(logits, 5, SamplingMode.RANDOM, temperature=1.2)
    assert p_value(tokens, expected_distribution(logits, 1.0)) < 1e-5
    assert p_value(tokens, expected_distribution(logits, 1.2)) > 1e-3


@pytest.mark.parametrize("varied", ["seed", "choice"])
def test_draws_over_seeds_and_over_choices_are_independent_too(varied: str) -> None:
    logits = np.array([0.3, -1.0, 1.2, 0.0], np.float32)
    rows = jnp.asarray(np.broadcast_to(logits, (NUM_DRAWS, 4)))
    tokens = np.asarray(DRAWS(rows, build_batch(NUM_DRAWS, **{varied: np.arange(NUM_DRAWS)}), SamplingMode.RANDOM)[0])
    assert p_value(tokens, expected_distribution(logits, 1.0)) > 1e-3
    pairs = tokens[:-1] * 4 + tokens[1:]  # neighbours in seed or choice
    distribution = expected_distribution(logits, 1.0)
    assert p_value(pairs, np.outer(distribution, distribution).ravel()) > 1e-3


def filter_cases() -> Iterator[tuple[np.ndarray, float, int, float, float]]:
    rng = np.random.default_rng(3)
    for _ in range(300):
        logits = rng.normal(0, 3, 37).astype(np.float32)
        if rng.random() < 0.5:
            logits = (np.round(logits * 2) / 2).astype(np.float32)  # many ties, also at the best
        if rng.random() < 0.3:
            logits[rng.integers(37, size=20)] = -np.inf
        top_k, top_p = (
            int(rng.choice([-1, 0, 1, 2, 7, 36, 37, 38, 2**31 - 1])),
            float(rng.choice([1.0, 0.95, 0.5, 1e-3, 1e-30])),
        )
        yield (
            logits,
            float(rng.choice([0.25, 0.5, 1.0, 2.0])),
            top_k,
            top_p,
            float(rng.choice([0.0, 1e-30, 0.05, 0.5, 1.0])),
        )


def test_filters_keep_what_the_loop_keeps() -> None:
    cases = list(filter_cases())
    logits = np.stack([case[0] for case in cases])
    temperature, top_k, top_p, min_p = (np.array(column) for column in list(zip(*cases, strict=True))[1:])
    batch = build_batch(len(cases), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    mask = np.isfinite(np.asarray(PROCESSED(jnp.asarray(logits), batch, SamplingMode.FILTERED)))
    expected = np.stack([mask_by_loop(*case) for case in cases])
    np.testing.assert_array_equal(mask, expected)
    assert 300 < expected.sum() < 0.7 * expected.size


def test_filtered_scores_are_the_scaled_logits_up_to_a_constant() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (4, 30)).astype(np.float32)
    filtered = np.asarray(
        PROCESSED(jnp.asarray(logits), build_batch(4, temperature=0.7, top_k=9), SamplingMode.FILTERED)
    )
    finite = np.isfinite(filtered)
    assert (finite.sum(-1) == 9).all()
    np.testing.assert_allclose(
        filtered[finite], ((logits - logits.max(-1, keepdims=True)) / 0.7)[finite], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "values", [{"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 1e-30}, {"temperature": 1e-7}]
)
def test_the_tightest_values_leave_the_best_token(values: dict[str, float]) -> None:
    logits = np.random.default_rng(2).normal(0, 30, (8, 50)).astype(np.float32)
    tokens, processed = DRAWS(
        jnp.asarray(logits), build_batch(8, position=np.arange(8), **values), SamplingMode.FILTERED
    )
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    assert not np.isnan(np.asarray(processed)).any()


def test_equal_scores_at_the_top_k_border_all_pass() -> None:
    logits = jnp.asarray([[3.0, 1.0, 2.0, 2.0, 0.0, 2.0]], jnp.float32)
    mask = np.isfinite(np.asarray(PROCESSED(logits, build_batch(1, top_k=2), SamplingMode.FILTERED)))
    np.testing.assert_array_equal(mask, [[True, False, True, True, False, True]])


def test_negative_zero_ties_with_zero() -> None:
    logits = jnp.asarray([[-0.0, 0.0, -1.0]], jnp.float32)
    assert np.isfinite(np.asarray(PROCESSED(logits, build_batch(1, top_k=1), SamplingMode.FILTERED))).tolist() == [
        [True, True, False]
    ]
    assert int(DRAWS(logits, build_batch(1, temperature=0), SamplingMode.GREEDY)[0][0]) == 0


@pytest.mark.parametrize("mode", list(SamplingMode))
def test_temperature_zero_takes_the_best_token_and_the_lower_id_of_a_tie(mode: SamplingMode) -> None:
    logits = np.random.default_rng(4).integers(-3, 3, (64, 40)).astype(np.float32)
    batch = build_batch(64, temperature=0, top_k=3, top_p=0.5, min_p=0.5, position=np.arange(64), seed=np.arange(64))
    tokens, processed = DRAWS(jnp.asarray(logits), batch, mode)
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    np.testing.assert_array_equal(processed, logits)


@pytest.mark.parametrize("mode", RANDOM_MODES)
def test_a_row_does_not_see_its_neighbours_or_its_place(mode: SamplingMode) -> None:
    rng = np.random.default_rng(8)
    rows, vocab = 16, 313
    logits = jnp.asarray(rng.normal(0, 2, (rows, vocab)).astype(np.float32))
    batch = build_batch(
        rows,
        temperature=rng.choice([0, 0.7, 1.0], rows),
        top_k=rng.choice([0, 20], rows),
        top_p=rng.choice([1.0, 0.9], rows),
        min_p=rng.choice([0, 0.01], rows),
        seed=rng.integers(0, 2**63, rows),
        choice=rng.integers(0, 4, rows),
        position=rng.integers(0, 1000, rows),
    )
    tokens, processed = DRAWS(logits, batch, mode)
    order = rng.permutation(rows)
    shuffled_tokens, shuffled = DRAWS(logits[order], take(batch, order), mode)
    np.testing.assert_array_equal(shuffled_tokens, tokens[order])
    np.testing.assert_array_equal(shuffled, processed[order])
    company = logits.at[1:].set(jnp.float32(0)), jax.tree.map(lambda leaf: leaf.at[1:].set(leaf[0]), batch)
    other_tokens, other = DRAWS(*company, mode)
    assert other_tokens[0] == tokens[0]
    np.testing.assert_array_equal(other[0], processed[0])
    for size in (1, 5):
        np.testing.assert_array_equal(DRAWS(logits[:size], take(batch, np.arange(size)), mode)[0], tokens[:size])


def test_noise_is_the_documented_function_of_seed_choice_and_position() -> None:
    """Written again from the seed's words, in float64: folded choice first, then position, also for choice 0."""
    seeds, choices, positions = [0, 1, 2**31, 2**63 - 1], [0, 0, 3, 1], [0, 17, 17, 2**20]
    noise = np.asarray(gumbel_noise(build_batch(4, seed=seeds, choice=choices, position=positions), 100))
    for row, (seed, choice, position) in enumerate(zip(seeds, choices, positions, strict=True)):
        key = jax.random.wrap_key_data(jnp.asarray([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32), impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, choice), position)
        uniform = (np.asarray(jax.random.bits(key, (100,), jnp.uint32)).astype(np.float64) + 0.5) / 2**32
        np.testing.assert_allclose(noise[row], -np.log(-np.log1p(-uniform)), rtol=1e-4, atol=1e-5)


def test_noise_is_gumbel_far_into_its_tail() -> None:
    noise = np.asarray(jax.jit(gumbel_noise, static_argnums=1)(build_batch(64, position=np.arange(64)), 2**15)).ravel()
    assert np.isfinite(noise).all()
    assert stats.kstest(noise[:20000], "gumbel_r").pvalue > 1e-3
    above = (noise > 11).sum()  # 35 expected of 2 million
    assert stats.poisson.sf(above, len(noise) * np.exp(-11)) > 1e-4
    assert stats.poisson.cdf(above, len(noise) * np.exp(-11)) > 1e-4


def test_seed_choice_and_position_each_change_the_draw_and_nothing_else_does() -> None:
    logits = jnp.zeros((1, 5000), jnp.float32)
    base = {"seed": 2**40 + 5, "choice": 1, "position": 9}
    variants = [base, {**base, "seed": 5}, {**base, "seed": 2**40 + 6}, {**base, "choice": 0}, {**base, "position": 10}]
    variants.append({**base, "choice": 9, "position": 1})  # swapped
    tokens = [int(DRAWS(logits, build_batch(1, **values), SamplingMode.RANDOM)[0][0]) for values in variants]
    assert len(set(tokens)) == len(tokens)
    assert int(DRAWS(logits, build_batch(1, **base), SamplingMode.FILTERED)[0][0]) == tokens[0]


def test_no_program_sorts_or_branches_on_the_batch() -> None:
    logits = jnp.zeros((4, 100), jnp.float32)
    text = DRAWS.lower(logits, build_batch(4), SamplingMode.FILTERED).as_text()
    assert "stablehlo.sort" not in text and "chlo.top_k" not in text
    assert "stablehlo.case" not in text and "stablehlo.if" not in text
    rotates = "stablehlo.shift_right_logical"  # as random bits do
    assert rotates in text and rotates not in DRAWS.lower(logits, build_batch(4), SamplingMode.GREEDY).as_text()


@pytest.mark.tpu_aot
@pytest.mark.parametrize("chip", ["v5e", pytest.param("v6e", marks=pytest.mark.thorough)])
def test_the_tpu_compiler_takes_the_widest_program_without_a_sort(chip: str) -> None:
    logits = jax.ShapeDtypeStruct((32, 151_936), jnp.float32)
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), build_batch(32))
    compiled = compile_tpu(lambda x, rows: sample(x, rows, SamplingMode.FILTERED), logits, batch, mesh=tpu_mesh(chip))
    assert " sort(" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * logits.size * 4
