"""The accept program against the sampler: each row is what a step of one token would have sampled at its position."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.core.model_worker_batch import ForwardMode, ModelWorkerBatch, SamplingArrays, SamplingMode
from routed_experts.execution.forward_batch import BatchShape, num_sampler_words, pack, to_batch_shape
from routed_experts.execution.row_blocks import map_blocks
from routed_experts.execution.sampler import PenaltyInputs, SamplerSpec, TokenCounts, sample_tokens
from routed_experts.execution.verify import ACCEPTED_COLUMN, VerifySpec, accept_tokens
from routed_experts.layers.logprobs import log_softmax_at
from support.small_runner import NUM_SLOTS, VERIFY, VOCAB_SIZE, Fed, build_step

COUNTS = (4, 1, 3)  # tokens of each request; one padding request, and padding tokens
SAMPLING = (
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=8, min_p=0.05, presence=0.5),
    dict(temperature=1.3, top_p=0.8, frequency=0.2, choice=2),
)
BIAS = (((5, 2.5), (9, -1.0)), (), ((7, 4.0),))


def sampler_spec(mode, rows):
    return SamplerSpec(
        mode=mode, num_requests=rows, row_words=0, raw_logprobs=False, greedy_kernel=None, logprobs=log_softmax_at
    )


def fed_tokens(mode, request, ids, start):
    """One request's part; greedy where the mode is."""
    sampling = {} if mode is SamplingMode.GREEDY else SAMPLING[request]
    own = dict(pages=(1 + 4 * request, 2 + 4 * request, 3 + 4 * request, 4 + 4 * request), slot=1 + request)
    return Fed(**own, ids=tuple(map(int, ids)), start=start, seed=7 + request, bias=BIAS[request], sampling=sampling)


def penalty_inputs(batch, counts):
    if batch.sampling_mode is not SamplingMode.FULL:
        return None
    return PenaltyInputs(counts, jnp.asarray(batch.sampling.bias_ids), jnp.asarray(batch.sampling.bias_values))


def assert_equal_rows(rows, expected, *, bitwise):
    """Equal ids, and logprobs: to the last bit where as many rows are sampled at once, else to rounding."""
    num_top = (expected.shape[1] - 2) // 2
    ids = [0, *range(2, 2 + num_top)]
    np.testing.assert_array_equal(rows[:, ids], expected[:, ids])
    rows, expected = (np.delete(table, ids, axis=1).view(np.float32) for table in (rows, expected))
    np.testing.assert_allclose(rows, expected, rtol=0 if bitwise else 1e-5, atol=0)


@pytest.mark.parametrize("block", [VERIFY.num_tokens, VERIFY.num_requests], ids=["at_once", "in_blocks"])
@pytest.mark.parametrize("mode", list(SamplingMode))
def test_every_row_is_sampled_as_a_step_of_one_token_samples_it(mode, block):
    rng = np.random.default_rng(int(mode))
    starts, num_rows = (5, 3, 8), VERIFY.num_requests
    logits = jnp.asarray(rng.normal(size=(VERIFY.num_tokens, VOCAB_SIZE)) * 3, jnp.float32)
    generated = jnp.asarray(rng.integers(0, 3, (num_rows, VOCAB_SIZE)), jnp.int32)
    counts = TokenCounts(generated, jnp.asarray(rng.random((num_rows, VOCAB_SIZE)) < 0.2))

    def sampled_alone(row, request, place):
        part = fed_tokens(mode, request, [0], starts[request] + place)
        batch = build_step(part, mode=ForwardMode.DECODE, sampling_mode=mode)
        rows = batch.request_slots.size
        words = jnp.asarray(pack(batch))[: num_sampler_words(rows)]
        own = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[request], (rows, VOCAB_SIZE)), counts)
        full = penalty_inputs(batch, own)
        scores = jnp.broadcast_to(logits[row], (rows, VOCAB_SIZE))
        _, table = sample_tokens(scores, jnp.zeros(NUM_SLOTS, jnp.int32), words, full, spec=sampler_spec(mode, rows))
        return np.asarray(table)[0]

    places = [(request, place) for request, count in enumerate(COUNTS) for place in range(count)]
    expected = np.stack([sampled_alone(row, *where) for row, where in enumerate(places)])
    sampled = expected[:, 0]
    # The first request gets two right drafts and a wrong one, the third two right ones.
    ids = ([1, sampled[0], sampled[1], (sampled[2] + 1) % VOCAB_SIZE], [1], [1, sampled[5], sampled[6]])
    parts = [fed_tokens(mode, request, ids[request], starts[request]) for request in range(len(COUNTS))]
    batch = build_step(*parts, mode=ForwardMode.TARGET_VERIFY, sampling_mode=mode)
    shape = to_batch_shape(batch)
    assert shape == VERIFY
    spec = VerifySpec(sampler=sampler_spec(mode, num_rows), shape=shape, num_drafts=3, block=block)
    inputs = (jnp.asarray(pack(batch)), jnp.asarray(batch.token_ids), penalty_inputs(batch, counts))
    last, table, _ = accept_tokens(logits, jnp.zeros(NUM_SLOTS, jnp.int32), *inputs, spec=spec)
    table = np.asarray(table)
    assert table[: len(COUNTS), ACCEPTED_COLUMN].tolist() == [2, 0, 2]
    assert_equal_rows(np.delete(table[: len(places)], ACCEPTED_COLUMN, axis=1), expected, bitwise=block == num_rows)
    assert np.asarray(last)[[1, 2, 3]].tolist() == [sampled[2], sampled[4], sampled[7]]


def test_rows_in_blocks_are_joined_in_order():
    rows = jnp.arange(12.0).reshape(12, 1)
    doubled, flat = map_blocks(lambda x: (x * 2, x[:, 0]), 4, rows)
    np.testing.assert_array_equal(doubled, rows * 2)
    np.testing.assert_array_equal(flat, rows[:, 0])
    sizes: list[int] = []
    map_blocks(lambda x: sizes.append(x.shape[0]) or x, 4, rows)
    assert set(sizes) == {4}, "a function of rows is traced for one block"


def test_bits_of_a_block_do_not_depend_on_how_many_there_are():
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(64, 33)), jnp.float32)
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(32, 64)), jnp.float32)
    few, many = (jax.jit(lambda x: map_blocks(lambda part: part @ weights, 4, x))(rows[:n]) for n in (4, 32))
    np.testing.assert_array_equal(few, many[:4])


LETTERS, SEEDS, STEPS = 9, 64, 24  # tokens with a chance, requests of a step, steps
MANY = BatchShape(mode=ForwardMode.TARGET_VERIFY, num_tokens=SEEDS * 3, num_requests=SEEDS, table_width=1)


def step_of_many(arrays, position, drafts):
    """A verify step of requests at one position, with two drafts each."""
    ids = np.concatenate([np.zeros((SEEDS, 1), np.int32), drafts], axis=1).reshape(-1)
    return ModelWorkerBatch(
        step=0,
        mode=ForwardMode.TARGET_VERIFY,
        sampling_mode=SamplingMode.FULL,
        num_tokens=ids.size,
        num_requests=SEEDS,
        token_ids=ids,
        positions=np.tile(np.arange(position, position + 3, dtype=np.int32), SEEDS),
        token_rows=np.repeat(np.arange(SEEDS, dtype=np.int32), 3),
        kv_slots=np.zeros(ids.size, np.int64),
        query_starts=np.arange(0, ids.size + 1, 3, dtype=np.int32),
        seq_lens=np.full(SEEDS, position + 3, np.int32),
        request_slots=np.arange(SEEDS, dtype=np.int32),
        page_table=np.zeros((SEEDS, 1), np.int32),
        sampling=arrays,
        samples=(True,) * SEEDS,
        prompt_targets=None,
        return_routed_experts=(False,) * SEEDS,
    )


def allowed(probabilities, how):
    """The distribution that is left of a distribution after temperature and filters; float64, by definition."""
    scores = np.log(probabilities) / how.get("temperature", 1.0)
    left = np.exp(scores - scores.max())
    left /= left.sum()
    if "top_k" in how:
        left[np.argsort(-left)[how["top_k"] :]] = 0
    if "top_p" in how:
        order = np.argsort(-left)
        before = np.cumsum(left[order]) - left[order]
        left[order[before >= how["top_p"] * left.sum()]] = 0
    if "min_p" in how:
        left[left < how["min_p"] * left.max()] = 0
    return left / left.sum()


@pytest.mark.parametrize(
    "how",
    [{}, dict(temperature=0.5), dict(temperature=2.0), dict(top_k=3), dict(top_p=0.7), dict(min_p=0.3)],
    ids=["plain", "cold", "hot", "top_k", "top_p", "min_p"],
)
def test_tokens_that_follow_accepted_drafts_have_the_models_distribution(how):
    """Against an adversary that drafts the likeliest tokens: the tokens of each index of a run, accepted or not, and
    those that are emitted."""
    critical = 40.0  # of chi-square with at most 8 degrees of freedom: chance 3e-6
    spec = VerifySpec(sampler=sampler_spec(SamplingMode.FULL, SEEDS), shape=MANY, num_drafts=2, block=MANY.num_tokens)
    run = jax.jit(functools.partial(accept_tokens, spec=spec))
    rng = np.random.default_rng(len(how) + int(10 * sum(how.values())))
    none = PenaltyInputs(
        TokenCounts(jnp.zeros((SEEDS, VOCAB_SIZE), jnp.int32), jnp.zeros((SEEDS, VOCAB_SIZE), bool)),
        jnp.full((SEEDS, 1), VOCAB_SIZE, jnp.int32),
        jnp.zeros((SEEDS, 1), jnp.float32),
    )
    for _ in range(6):
        probabilities = rng.dirichlet(np.full(LETTERS, 0.7)) + 1e-3
        expected = allowed(probabilities / probabilities.sum(), how)
        scores = np.full(VOCAB_SIZE, -1e9, np.float32)
        scores[:LETTERS] = np.log(probabilities)
        logits = jnp.broadcast_to(jnp.asarray(scores), (MANY.num_tokens, VOCAB_SIZE))
        counts, emitted = np.zeros((3, LETTERS)), np.zeros(LETTERS)
        for step in range(STEPS):
            arrays = SamplingArrays(
                temperature=np.full(SEEDS, how.get("temperature", 1.0), np.float32),
                top_k=np.full(SEEDS, how.get("top_k", 0), np.int32),
                top_p=np.full(SEEDS, how.get("top_p", 1.0), np.float32),
                min_p=np.full(SEEDS, how.get("min_p", 0.0), np.float32),
                seed=rng.integers(0, 2**32, (SEEDS, 2), dtype=np.uint32),
                choice=np.zeros(SEEDS, np.int32),
                position=np.zeros(SEEDS, np.int32),
                presence=np.zeros(SEEDS, np.float32),
                frequency=np.zeros(SEEDS, np.float32),
                repetition=np.ones(SEEDS, np.float32),
                prompt_len=np.zeros(SEEDS, np.int32),
                bias_ids=None,
                bias_values=None,
            )
            likely = np.argsort(-probabilities)[:2].astype(np.int32)
            batch = step_of_many(arrays, 5 + step, rng.choice(likely, (SEEDS, 2)).astype(np.int32))
            words, tokens = jnp.asarray(pack(batch)), jnp.asarray(batch.token_ids)
            table = np.asarray(run(logits, jnp.zeros(SEEDS, jnp.int32), words, tokens, none)[1])
            sampled, accepted = table[:, 0].reshape(SEEDS, 3), table[:SEEDS, ACCEPTED_COLUMN]
            for index in range(3):
                counts[index] += np.bincount(sampled[:, index], minlength=LETTERS)
            emitted += np.bincount(sampled[np.arange(3) <= accepted[:, None]], minlength=LETTERS)
        assert emitted.sum() > SEEDS * STEPS, "some drafts were accepted"
        possible = expected > 0
        for observed in (*counts, emitted):
            assert observed[~possible].sum() == 0
            mean = observed.sum() * expected[possible]
            assert np.sum((observed[possible] - mean) ** 2 / mean) < critical
