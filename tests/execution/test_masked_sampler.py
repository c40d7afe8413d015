"""The sampler with a mask, judged by NumPy: the scores that are not allowed are dropped, then the same choice is made
with the same noise. Rows without a grammar have the bits that they have without a mask."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.core.model_worker_batch import SamplingMode
from routed_experts.execution.forward_batch import SamplerBatch
from routed_experts.execution.sampler import PenaltyInputs, SamplerSpec, TokenCounts, choose_tokens
from routed_experts.layers.logprobs import log_softmax_at
from routed_experts.layers.sampling import SamplingBatch, gumbel_noise

ROWS, V, X = 6, 333, 4
MODES = tuple(SamplingMode)


def bits_of(allowed, num_words=-(-V // 32)):
    """The packed mask of sets of ids; None: every bit."""
    mask = np.zeros((len(allowed), num_words), np.uint32)
    for row, ids in enumerate(allowed):
        for token in range(32 * num_words) if ids is None else ids:
            mask[row, token // 32] |= np.uint32(1 << token % 32)
    return mask


def case(seed, mode):
    """Scores, sampling parameters and penalties of ROWS rows; rows 0 and 3 have no grammar, row 1 has no choice."""
    rng = np.random.default_rng(seed)
    raw = rng.normal(0, 2.5, (ROWS, V)).astype(np.float32)
    allowed = [set(rng.choice(V, rng.integers(2, 40), replace=False).tolist()) for _ in range(ROWS)]
    allowed[0] = allowed[3] = None
    allowed[1] = {int(rng.integers(V))}
    allowed[5] = {0, 31, 32, V - 1}
    greedy = mode is SamplingMode.GREEDY
    temperature = np.zeros(ROWS) if greedy else rng.choice([0, 0.7, 1.3], ROWS)
    filtered = mode >= SamplingMode.FILTERED
    sampling = SamplingBatch(
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.asarray([0, 0, 3, 5, 2, 0] if filtered else [0] * ROWS, jnp.int32),
        top_p=jnp.asarray([0.9, 1, 1, 0.5, 0.8, 1] if filtered else [1] * ROWS, jnp.float32),
        min_p=jnp.zeros(ROWS, jnp.float32),
        seed=jnp.asarray(rng.integers(0, 2**32, (ROWS, 2)), jnp.uint32),
        choice=jnp.arange(ROWS, dtype=jnp.int32),
        position=jnp.asarray(rng.integers(0, 900, ROWS), jnp.int32),
    )
    full = mode is SamplingMode.FULL
    values = rng.choice([0.0, 0.4, 1.5], ROWS).astype(np.float32) * full
    batch = SamplerBatch(
        request_slots=jnp.arange(ROWS, dtype=jnp.int32),
        sampling=sampling,
        presence=jnp.asarray(values),
        frequency=jnp.asarray(values[::-1].copy()),
        repetition=jnp.full(ROWS, 1.2 if full else 1.0, jnp.float32),
    )
    counts = TokenCounts(
        jnp.asarray(rng.integers(0, 3, (ROWS, V)), jnp.int32), jnp.asarray(rng.random((ROWS, V)) < 0.2)
    )
    bias_ids = rng.choice(V, (ROWS, X)).astype(np.int32)
    bias_values = rng.normal(0, 3, (ROWS, X)).astype(np.float32)
    inputs = PenaltyInputs(counts, jnp.asarray(bias_ids), jnp.asarray(bias_values)) if full else None
    return raw, batch, inputs, allowed


def spec_of(mode, *, masked, raw_logprobs=False, kernel=None):
    return SamplerSpec(
        mode=mode,
        num_requests=ROWS,
        row_words=0,
        raw_logprobs=raw_logprobs,
        greedy_kernel=kernel,
        logprobs=log_softmax_at,
        masked=masked,
    )


@functools.cache
def program(spec):
    return jax.jit(functools.partial(choose_tokens, spec=spec))


def choose(spec, raw, batch, inputs, mask=None):
    return program(spec)(raw, batch, inputs, mask)


def penalized(raw, batch, inputs):
    """OpenAI's formulas, as loops."""
    scores = raw.astype(np.float32).copy()
    if inputs is None:
        return scores
    generated, prompt = np.asarray(inputs.counts.generated), np.asarray(inputs.counts.prompt)
    for row in range(ROWS):
        repetition = np.float32(batch.repetition[row])
        for token in np.flatnonzero((generated[row] > 0) | prompt[row]):
            scores[row, token] = (
                scores[row, token] / repetition if scores[row, token] > 0 else scores[row, token] * repetition
            )
        scores[row] -= np.float32(batch.frequency[row]) * generated[row].astype(np.float32)
        scores[row] -= np.float32(batch.presence[row]) * (generated[row] > 0)
        for token, value in zip(np.asarray(inputs.bias_ids)[row], np.asarray(inputs.bias_values)[row], strict=True):
            scores[row, token] += value
    return scores


def filtered(scores, top_k, top_p):
    """Leave the k best scores, and of these the fewest whose mass reaches top_p."""
    order = np.argsort(-scores, kind="stable")
    retained = order[np.isfinite(scores[order])]
    if top_k:
        retained = retained[: int(top_k)]
    mass = np.exp(scores[retained].astype(np.float64) - scores[retained].max())
    reached = np.cumsum(mass) >= top_p * mass.sum() - 1e-12
    retained = retained[: int(np.argmax(reached)) + 1] if top_p < 1 else retained
    return np.where(np.isin(np.arange(V), retained), scores, -np.inf)


def log_softmax(scores):
    shifted = scores.astype(np.float64) - scores.max()
    return shifted - np.log(np.exp(shifted).sum())


@pytest.mark.parametrize("raw_logprobs", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_masked_rows_are_sampled_as_numpy_samples_them(mode, seed, raw_logprobs):
    raw, batch, inputs, allowed = case(seed, mode)
    spec = spec_of(mode, masked=True, raw_logprobs=raw_logprobs)
    choices = choose(spec, raw, batch, inputs, bits_of(allowed))
    noise = np.asarray(gumbel_noise(batch.sampling, V))
    scores = penalized(raw, batch, inputs)
    for row in range(ROWS):
        masked = scores[row].copy()
        if allowed[row] is not None:
            masked[[token for token in range(V) if token not in allowed[row]]] = -np.inf
        temperature = float(batch.sampling.temperature[row])
        processed = masked
        if temperature:
            processed = filtered(
                (masked - masked.max()) / np.float32(temperature), batch.sampling.top_k[row], batch.sampling.top_p[row]
            )
        token = int(np.argmax(processed + (noise[row] if temperature else 0)))
        assert int(choices.tokens[row]) == token, (row, allowed[row])
        has_choice = allowed[row] is None or len(allowed[row]) > 1
        source = processed if has_choice and not raw_logprobs else raw[row]
        np.testing.assert_allclose(choices.logprobs[row], log_softmax(source)[token], atol=2e-5)
        if choices.top and has_choice and not raw_logprobs and allowed[row] is not None:
            ids, values = np.asarray(choices.top[0][row]), np.asarray(choices.top[1][row]).view(np.float32)
            assert {int(i) for i, value in zip(ids, values, strict=True) if np.isfinite(value)} <= allowed[row]


@pytest.mark.parametrize("mode", MODES)
def test_rows_without_a_grammar_have_the_bits_that_they_have_without_a_mask(mode):
    raw, batch, inputs, allowed = case(3, mode)
    for raw_logprobs in (False, True):
        plain = choose(spec_of(mode, masked=False, raw_logprobs=raw_logprobs), raw, batch, inputs)
        masked = choose(spec_of(mode, masked=True, raw_logprobs=raw_logprobs), raw, batch, inputs, bits_of(allowed))
        for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(masked), strict=True):
            assert np.array_equal(np.asarray(one)[[0, 3]], np.asarray(other)[[0, 3]])


def greedy(logits):
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return tokens, jnp.float32(100) + log_softmax_at(logits, tokens[:, None])[:, 0]  # its own bits


@pytest.mark.parametrize("raw_logprobs", [False, True])
def test_a_greedy_kernel_sees_the_allowed_tokens_and_keeps_the_bits_of_other_rows(raw_logprobs):
    raw, batch, _, allowed = case(5, SamplingMode.GREEDY)
    mode = SamplingMode.GREEDY
    plain = choose(spec_of(mode, masked=False, raw_logprobs=raw_logprobs, kernel=greedy), raw, batch, None)
    spec = spec_of(mode, masked=True, raw_logprobs=raw_logprobs, kernel=greedy)
    masked = choose(spec, raw, batch, None, bits_of(allowed))
    for row in range(ROWS):
        if allowed[row] is None:
            assert masked.tokens[row] == plain.tokens[row] and masked.logprobs[row] == plain.logprobs[row]
            continue
        best = max(sorted(allowed[row]), key=lambda token: raw[row, token])
        assert int(masked.tokens[row]) == best
        takes_raw = raw_logprobs or len(allowed[row]) == 1
        scores = raw[row] if takes_raw else np.where(np.isin(np.arange(V), list(allowed[row])), raw[row], -np.inf)
        expected = log_softmax(scores)[best] + (0 if takes_raw else 100)
        np.testing.assert_allclose(masked.logprobs[row], expected, atol=2e-5)


def test_a_bias_that_bans_all_that_is_allowed_gives_way():
    """min_tokens bans the end, and the output is complete."""
    raw, batch, inputs, allowed = case(6, SamplingMode.FULL)
    allowed[2] = {7}
    allowed[4] = {7, 9}
    ids, values = np.array(inputs.bias_ids), np.array(inputs.bias_values)
    ids[:, :2], values[:, :2] = (7, 9), -np.inf
    inputs = dataclasses.replace(inputs, bias_ids=jnp.asarray(ids), bias_values=jnp.asarray(values))
    choices = choose(spec_of(SamplingMode.FULL, masked=True), raw, batch, inputs, bits_of(allowed))
    assert int(choices.tokens[2]) == 7 and int(choices.tokens[4]) in (7, 9)
    assert np.isfinite(np.asarray(choices.logprobs)).all()
    assert int(choices.tokens[0]) not in (7, 9), "without a grammar a ban holds"
