"""Log probabilities against SciPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from routed_experts.layers.lm_head import LmHead
from routed_experts.layers.logprobs import prompt_logprobs, ranked_logprobs, token_logprobs
from routed_experts.layers.sampling import SamplingBatch, SamplingMode, sample

pytestmark = pytest.mark.usefixtures("fast_compilation")


@functools.partial(jax.jit, static_argnames="top")
def score_prompt(hidden, head, targets, top):
    return prompt_logprobs(hidden, LmHead(matrix=head), targets, top=top)


def top_logprobs(logits, k):
    """The best tokens of each row; the first token's logprob is not read."""
    return ranked_logprobs(logits, jnp.zeros(logits.shape[0], jnp.int32), k)[1:]


def random_logits(rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 4, (rows, vocab)).astype(np.float32)


def test_token_logprobs_are_scipy_s() -> None:
    logits = random_logits(50, 313)
    tokens = np.random.default_rng(1).integers(0, 313, 50).astype(np.int32)
    got = jax.jit(token_logprobs)(jnp.asarray(logits), jnp.asarray(tokens))
    expected = log_softmax(logits.astype(np.float64), axis=-1)[np.arange(50), tokens]
    assert got.dtype == jnp.float32 and got.shape == (50,)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("vocab", "k", "num_finite"), [(313, 20, 20), (7, 20, 7), (313, 1, 1), (313, 0, 0)])
def test_top_logprobs_are_the_best_in_order(vocab: int, k: int, num_finite: int) -> None:
    logits = random_logits(9, vocab)
    values, ids = jax.jit(top_logprobs, static_argnums=1)(jnp.asarray(logits), k)
    expected = log_softmax(logits.astype(np.float64), axis=-1)
    order = np.argsort(-expected, axis=-1, kind="stable")[:, :num_finite]
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(values, np.take_along_axis(expected, order, -1), rtol=1e-6, atol=1e-6)


def test_equal_logprobs_come_in_order_of_their_ids() -> None:
    _, ids = top_logprobs(jnp.asarray([[1.0, 2.0, 2.0, 1.0, 2.0]], jnp.float32), 5)
    assert ids.tolist() == [[1, 2, 4, 0, 3]]


def test_a_dropped_token_has_minus_infinity_and_the_rest_sum_to_one() -> None:
    logits = jnp.asarray(random_logits(1, 10)).at[0, 3].set(-jnp.inf)
    values, ids = top_logprobs(logits, 10)
    assert ids[0, -1] == 3 and values[0, -1] == -np.inf
    assert float(jnp.exp(values).sum()) == pytest.approx(1, abs=1e-6)
    assert token_logprobs(logits, jnp.asarray([3], jnp.int32))[0] == -np.inf


def test_large_logits_and_bfloat16_are_taken_in_float32() -> None:
    logits = np.array([[3e4, 2.99e4, -3e4]], np.float32)
    np.testing.assert_allclose(token_logprobs(jnp.asarray(logits), jnp.asarray([1], jnp.int32)), [-100.0], rtol=1e-6)
    half = jnp.asarray(random_logits(2, 30), jnp.bfloat16)
    assert top_logprobs(half, 3)[0].dtype == jnp.float32


@pytest.mark.parametrize("num_tokens", [1, 64, 200])
@pytest.mark.parametrize("top", [0, 5])
def test_prompt_logprobs_are_those_of_the_whole_product(num_tokens: int, top: int) -> None:
    rng = np.random.default_rng(num_tokens)
    hidden, head = rng.normal(0, 1, (num_tokens, 24)).astype(np.float32), rng.normal(0, 1, (24, 91)).astype(np.float32)
    targets = rng.integers(0, 91, num_tokens).astype(np.int32)
    got = score_prompt(jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(targets), top=top)
    expected = log_softmax(hidden.astype(np.float64) @ head, axis=-1)
    np.testing.assert_allclose(got.target, expected[np.arange(num_tokens), targets], rtol=1e-5, atol=1e-5)
    assert got.top.shape == got.top_ids.shape == (num_tokens, top)
    np.testing.assert_array_equal(got.top_ids, np.argsort(-expected, axis=-1)[:, :top])
    np.testing.assert_allclose(got.top, -np.sort(-expected, axis=-1)[:, :top], rtol=1e-5, atol=1e-5)


def test_a_prompt_row_has_the_same_bits_however_long_the_prompt_is() -> None:
    rng = np.random.default_rng(0)
    hidden, head = (
        jnp.asarray(rng.normal(0, 1, (130, 64)), jnp.float32),
        jnp.asarray(rng.normal(0, 1, (64, 313)), jnp.float32),
    )
    targets = jnp.asarray(rng.integers(0, 313, 130), jnp.int32)
    whole = score_prompt(hidden, head, targets, top=3)
    for length in (1, 100):
        part = score_prompt(hidden[:length], head, targets[:length], top=3)
        jax.tree.map(
            lambda got, expected, length=length: np.testing.assert_array_equal(got, expected[:length]), part, whole
        )


def test_prompt_logprobs_never_hold_a_whole_row_by_vocabulary_array() -> None:
    shapes = jax.ShapeDtypeStruct((4096, 16), jnp.float32), jax.ShapeDtypeStruct((16, 5000), jnp.float32)
    compiled = score_prompt.lower(*shapes, jax.ShapeDtypeStruct((4096,), jnp.int32), top=20).compile()
    whole = 4096 * 5000 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 8


def test_prompt_logprobs_take_bfloat16_weights_and_answer_in_float32() -> None:
    got = score_prompt(jnp.ones((3, 8), jnp.bfloat16), jnp.ones((8, 11), jnp.bfloat16), jnp.zeros(3, jnp.int32), top=2)
    assert got.target.dtype == got.top.dtype == jnp.float32
    np.testing.assert_allclose(got.target, np.full(3, -np.log(11)), rtol=1e-6)


@pytest.mark.parametrize("mode", list(SamplingMode))
def test_raw_and_processed_logprobs_of_a_greedy_row_are_equal_and_of_a_random_row_are_not(mode: SamplingMode) -> None:
    logits = jnp.asarray(random_logits(2, 40))
    temperature = jnp.asarray([0.0, 0.0 if mode is SamplingMode.GREEDY else 0.5], jnp.float32)
    batch = SamplingBatch(
        temperature=temperature,
        top_k=jnp.full(2, 5, jnp.int32),
        top_p=jnp.full(2, 0.9, jnp.float32),
        min_p=jnp.zeros(2, jnp.float32),
        seed=jnp.zeros((2, 2), jnp.uint32),
        choice=jnp.zeros(2, jnp.int32),
        position=jnp.zeros(2, jnp.int32),
    )
    tokens, processed = sample(logits, batch, mode)
    raw, sampled = token_logprobs(logits, tokens), token_logprobs(processed, tokens)
    assert raw[0] == sampled[0]
    if mode is not SamplingMode.GREEDY:
        assert raw[1] != sampled[1]
    if mode is SamplingMode.RANDOM:
        expected = log_softmax(np.asarray(logits[1], np.float64) / 0.5)[int(tokens[1])]
        np.testing.assert_allclose(sampled[1], expected, rtol=1e-6, atol=1e-6)
    assert np.isfinite(np.asarray(sampled)).all(), "a sampled token was not dropped"
