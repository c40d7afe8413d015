"""The accept program against the sampler: each row is what a step of one token would have sampled at its position."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.core.model_worker_batch import ForwardMode, ModelWorkerBatch, SamplingArrays, SamplingMode
from routed_experts.execution.forward_batch import BatchShape, num_sampler_words, pack, to_batch_shape
from routed_experts.execution.row_blocks import map_blocks
from routed_experts.execution.sampler import (
    PenaltyInputs,
    SamplerSpec,
    TokenCounts,
    sample_tokens,
    update_token_counts,
)
from routed_experts.execution.verify import ACCEPTED_COLUMN, VerifySpec, accept_tokens, add_accepted
from routed_experts.layers.logprobs import MAX_TOP_LOGPROBS, log_softmax_at
from support.small_runner import EXTEND, NUM_SLOTS, VERIFY, VOCAB_SIZE, Fed, build_step

COUNTS = (4, 1, 3)  # tokens of each request; one padding request, and padding tokens
SAMPLING = (
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=8, min_p=0.05, presence=0.5),
    dict(temperature=1.3, top_p=0.8, frequency=0.7, repetition=1.4, choice=2),
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


STARTS = (5, 3, 8)  # positions of the first tokens of the requests


@functools.cache
def sampled_one_by_one(mode):
    """Logits and counts, the tokens of each request, and what steps of one token sample from each row in turn."""
    rng = np.random.default_rng(int(mode))
    logits = jnp.asarray(rng.normal(size=(VERIFY.num_tokens, VOCAB_SIZE)) * 3, jnp.float32)
    generated = jnp.asarray(rng.integers(0, 3, (NUM_SLOTS, VOCAB_SIZE)), jnp.int32)
    counts = TokenCounts(generated, jnp.asarray(rng.random((NUM_SLOTS, VOCAB_SIZE)) < 0.2))

    def sampled_alone(row, request, fed):
        part = fed_tokens(mode, request, [0], STARTS[request] + len(fed) - 1)
        batch = build_step(part, mode=ForwardMode.DECODE, sampling_mode=mode)
        rows = batch.request_slots.size
        words = jnp.asarray(pack(batch))[: num_sampler_words(rows)]
        own = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[part.slot], (rows, VOCAB_SIZE)), counts)
        own = TokenCounts(own.generated + jnp.bincount(jnp.asarray(fed), length=VOCAB_SIZE), own.prompt)
        full = penalty_inputs(batch, own)
        scores = jnp.broadcast_to(logits[row], (rows, VOCAB_SIZE))
        _, table = sample_tokens(scores, jnp.zeros(NUM_SLOTS, jnp.int32), words, full, spec=sampler_spec(mode, rows))
        return np.asarray(table)[0]

    # The first request gets two right drafts and a wrong one, the third two right ones.
    ids, expected = ([1], [1], [1]), []
    for request, count in enumerate(COUNTS):
        for place in range(count):
            expected.append(sampled_alone(len(expected), request, ids[request]))
            ids[request].append((int(expected[-1][0]) + (request == 0 and place == 2)) % VOCAB_SIZE)
        del ids[request][-1]  # no row feeds the token that is sampled last
    return logits, counts, ids, np.stack(expected)


@pytest.mark.parametrize("block", [VERIFY.num_tokens, VERIFY.num_requests], ids=["at_once", "in_blocks"])
@pytest.mark.parametrize(
    "mode",
    [
        mode if mode in (SamplingMode.GREEDY, SamplingMode.FULL) else pytest.param(mode, marks=pytest.mark.thorough)
        for mode in SamplingMode
    ],
)
def test_every_row_is_sampled_as_a_step_of_one_token_samples_it(mode, block):
    num_rows, (logits, counts, ids, expected) = VERIFY.num_requests, sampled_one_by_one(mode)
    sampled = expected[:, 0]
    parts = [fed_tokens(mode, request, ids[request], STARTS[request]) for request in range(len(COUNTS))]
    batch = build_step(*parts, mode=ForwardMode.TARGET_VERIFY, sampling_mode=mode)
    shape = to_batch_shape(batch)
    assert shape == VERIFY
    spec = VerifySpec(sampler=sampler_spec(mode, num_rows), shape=shape, num_drafts=3, block=block)
    inputs = (jnp.asarray(pack(batch)), jnp.asarray(batch.token_ids), penalty_inputs(batch, counts))
    last, table, _ = accept_tokens(logits, jnp.zeros(NUM_SLOTS, jnp.int32), *inputs, spec=spec)
    table = np.asarray(table)
    assert table[: len(COUNTS), ACCEPTED_COLUMN].tolist() == [2, 0, 2]
    assert_equal_rows(np.delete(table[: sum(COUNTS)], ACCEPTED_COLUMN, axis=1), expected, bitwise=block == num_rows)
    assert np.asarray(last)[[1, 2, 3]].tolist() == [sampled[2], sampled[4], sampled[7]]


def recounted_scores(logits, prompt, generated, how, bias):
    """The scores of one token list, in float64: each token of the vocabulary in turn."""
    scores = logits.astype(np.float64)
    for token in range(scores.size):
        count = generated.count(token)
        if count or token in prompt:
            scores[token] *= 1 / how["repetition"] if scores[token] > 0 else how["repetition"]
        scores[token] -= how["frequency"] * count + (how["presence"] if count else 0.0)
    for token, value in bias:
        scores[token] += value
    return scores


def kept_logprobs(scores, how):
    """Logprobs after temperature and min-p; a greedy row has those of the scores."""
    scores = scores / (how["temperature"] or 1.0)
    if how["temperature"]:
        scores[scores < scores.max() + np.log(how["min_p"])] = -np.inf
    return scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())


@dataclasses.dataclass
class Penalised:
    """A request of the test below, as its token lists."""

    slot: int
    prompt: list
    how: dict
    bias: tuple
    generated: list = dataclasses.field(default_factory=list)
    next: int = 0  # sampled, and not fed


def few_ids(rng, count):
    """Ids of which some occur twice."""
    return rng.integers(0, 6, count).tolist()


def random_request(rng, slot):
    how = {name: float(rng.uniform(-1, 2)) for name in ("presence", "frequency")}
    how |= dict(repetition=float(rng.uniform(0.6, 1.8)), temperature=float(rng.choice([0, 0, 0.8])), min_p=0.02)
    bias = tuple((int(token), float(rng.uniform(-3, 3))) for token in rng.choice(9, rng.integers(0, 4), replace=False))
    return Penalised(slot, few_ids(rng, rng.integers(1, 7)), how, bias, next=int(rng.integers(0, 6)))


def fed_by(request, ids, start):
    pages = tuple(range(1 + 8 * request.slot, 9 + 8 * request.slot))
    where = dict(slot=request.slot, pages=pages, start=start, prompt_len=len(request.prompt))
    return Fed(**where, ids=tuple(ids), seed=request.slot, bias=request.bias, sampling=request.how)


@functools.cache
def jitted_programs(block):
    spec = VerifySpec(sampler=sampler_spec(SamplingMode.FULL, 4), shape=VERIFY, num_drafts=3, block=block)
    accept = jax.jit(functools.partial(accept_tokens, spec=spec))
    return accept, jax.jit(functools.partial(add_accepted, shape=VERIFY))


@pytest.mark.parametrize("block", [VERIFY.num_tokens, VERIFY.num_requests], ids=["at_once", "in_blocks"])
@pytest.mark.parametrize("seed", range(4))
def test_penalties_of_each_row_are_those_of_a_loop_that_recounts_its_tokens(seed, block):
    """Requests that share slots one after the other; drafts repeat ids, those of greedy requests are right at first."""
    rng, (accept, add) = np.random.default_rng(seed), jitted_programs(block)
    counts = TokenCounts(jnp.full((NUM_SLOTS, VOCAB_SIZE), 7, jnp.int32), jnp.ones((NUM_SLOTS, VOCAB_SIZE), bool))
    num_accepted = 0
    for _ in range(2):  # the second requests find the counts of the first ones
        requests = [random_request(rng, slot) for slot in rng.permutation(np.arange(1, NUM_SLOTS))[:3].tolist()]
        prefill = build_step(*(fed_by(request, request.prompt, 0) for request in requests))
        counts, _ = update_token_counts(
            counts, jnp.asarray(prefill.token_ids), jnp.asarray(pack(prefill)), shape=EXTEND
        )
        for _ in range(6):
            logits = rng.normal(size=(VERIFY.num_tokens, VOCAB_SIZE)).astype(np.float32)
            logits[:, :9] += 4
            parts, expected = [], []
            for request in requests:
                drafts, num_right = few_ids(rng, rng.integers(0, 4)), int(rng.integers(0, 4))
                ids = [request.next]
                for place in range(1 + len(drafts)):
                    seen = [*request.generated, *ids]
                    scores = recounted_scores(logits[len(expected)], request.prompt, seen, request.how, request.bias)
                    expected.append(kept_logprobs(scores, request.how))
                    if place < len(drafts):
                        is_right = place < num_right and not request.how["temperature"]
                        ids.append(int(scores.argmax()) if is_right else drafts[place])
                parts.append(fed_by(request, ids, len(request.prompt) + len(request.generated)))
            batch = build_step(*parts, mode=ForwardMode.TARGET_VERIFY, sampling_mode=SamplingMode.FULL)
            words, tokens = jnp.asarray(pack(batch)), jnp.asarray(batch.token_ids)
            last, table, of_requests = accept(
                jnp.asarray(logits), jnp.zeros(NUM_SLOTS, jnp.int32), words, tokens, penalty_inputs(batch, counts)
            )
            counts = TokenCounts(add(counts.generated, tokens, words, of_requests), counts.prompt)
            table = np.asarray(table)
            logprobs, top = table[:, 1].view(np.float32), table[:, 3 + MAX_TOP_LOGPROBS :].copy().view(np.float32)
            for row, own in enumerate(expected):
                ranked = table[row, 3 : 3 + MAX_TOP_LOGPROBS]
                np.testing.assert_allclose(top[row], np.sort(own)[::-1][:MAX_TOP_LOGPROBS], rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose(top[row], own[ranked], rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose(logprobs[row], own[table[row, 0]], rtol=1e-4, atol=1e-4)
            for index, (request, part) in enumerate(zip(requests, parts, strict=True)):
                first = int(batch.query_starts[index])
                sampled = table[first : first + len(part.ids), 0].tolist()
                matches = [*(draft == token for draft, token in zip(part.ids[1:], sampled, strict=False)), False]
                accepted = matches.index(False)
                num_accepted += accepted
                if not request.how["temperature"]:
                    assert sampled == [int(own.argmax()) for own in expected[first : first + len(part.ids)]]
                assert table[index, ACCEPTED_COLUMN] == accepted
                assert int(last[request.slot]) == sampled[accepted]
                request.generated += part.ids[: 1 + accepted]
                request.next = sampled[accepted]
                of_slot = np.bincount(request.generated, minlength=VOCAB_SIZE)
                np.testing.assert_array_equal(counts.generated[request.slot], of_slot)
                in_prompt = np.isin(np.arange(VOCAB_SIZE), request.prompt)
                np.testing.assert_array_equal(counts.prompt[request.slot], in_prompt)
    assert num_accepted > 5


def test_a_step_of_one_token_a_request_counts_as_a_step_without_drafts():
    rng = np.random.default_rng(3)
    counts = TokenCounts(
        jnp.asarray(rng.integers(0, 3, (NUM_SLOTS, VOCAB_SIZE)), jnp.int32),
        jnp.asarray(rng.random((NUM_SLOTS, VOCAB_SIZE)) < 0.2),
    )
    parts = [fed_tokens(SamplingMode.FULL, request, [5 * request], 6) for request in range(3)]
    batch = build_step(*parts, mode=ForwardMode.TARGET_VERIFY)
    words, tokens = jnp.asarray(pack(batch)), jnp.asarray(batch.token_ids)
    added = add_accepted(counts.generated, tokens, words, jnp.zeros(VERIFY.num_requests, jnp.int32), shape=VERIFY)
    plain, _ = update_token_counts(counts, tokens, words, shape=VERIFY)
    np.testing.assert_array_equal(added[1:], plain.generated[1:])  # slot 0 is padding
    np.testing.assert_array_equal(counts.prompt[1:], plain.prompt[1:])


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


def allowed(probabilities, how, fed):
    """The distribution that is left of a distribution after penalties of the tokens `fed`, bias, temperature and
    filters; float64, by definition. At temperature 0 the best token has it all."""
    scores, counts = np.log(probabilities), np.bincount(fed, minlength=LETTERS)  # below 0, so repetition multiplies
    scores = np.where(counts > 0, scores * how.get("repetition", 1.0) - how.get("presence", 0.0), scores)
    scores = scores - how.get("frequency", 0.0) * counts
    for token, value in how.get("bias", ()):
        scores[token] += value
    if how.get("temperature") == 0:
        return (np.arange(LETTERS) == scores.argmax()).astype(float)
    scores = scores / how.get("temperature", 1.0)
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


def chi_square(observed, mean):
    """Of the tokens with a chance, at least five expected in a bin: rare ones share one."""
    order = np.argsort(mean)[np.count_nonzero(mean == 0) :]
    num_rare = np.count_nonzero(mean[order] < 5)
    num_rare += mean[order[:num_rare]].sum() < 5  # with the next, where they are too few
    rare, rest = order[:num_rare], order[num_rare:]
    bins = [(observed[rare].sum(), mean[rare].sum()), *zip(observed[rest], mean[rest], strict=True)]
    return sum((count - expected) ** 2 / expected for count, expected in bins)


@functools.cache
def jitted_step_of_many():
    spec = VerifySpec(sampler=sampler_spec(SamplingMode.FULL, SEEDS), shape=MANY, num_drafts=2, block=MANY.num_tokens)
    return jax.jit(functools.partial(accept_tokens, spec=spec))


@pytest.mark.parametrize(
    "how",
    [
        {},
        dict(temperature=0.5),
        dict(temperature=2.0),
        dict(top_k=3),
        dict(top_p=0.7),
        dict(min_p=0.3),
        dict(presence=0.6, frequency=0.5, repetition=1.5),
        dict(bias=((0, 1.5), (3, -2.0), (7, 0.8))),
        dict(temperature=0.0),
        dict(temperature=0.0, bias=((0, 1.5), (3, -2.0), (7, 0.8))),
    ],
    ids=["plain", "cold", "hot", "top_k", "top_p", "min_p", "penalties", "bias", "greedy", "greedy with a bias"],
)
def test_tokens_that_follow_accepted_drafts_have_the_models_distribution(how, is_thorough):
    """Against an adversary that drafts the likeliest tokens: the tokens of each index of a run, accepted or not, and
    those that are emitted. With penalties all requests have the same drafts, the likeliest token twice. Where one token
    has all, it is sampled always."""
    critical = 45.0  # of chi-square with at most 8 degrees of freedom: chance 4e-7
    numbers = [value for name, value in how.items() if name != "bias"]
    run, rng = jitted_step_of_many(), np.random.default_rng(len(how) + int(10 * sum(numbers)))
    bias = how.get("bias", ((VOCAB_SIZE, 0.0),))
    penalties = PenaltyInputs(
        TokenCounts(jnp.zeros((SEEDS, VOCAB_SIZE), jnp.int32), jnp.zeros((SEEDS, VOCAB_SIZE), bool)),
        jnp.tile(jnp.asarray([[token for token, _ in bias]], jnp.int32), (SEEDS, 1)),
        jnp.tile(jnp.asarray([[value for _, value in bias]], jnp.float32), (SEEDS, 1)),
    )
    for _ in range(200 if is_thorough else 6):
        probabilities = rng.dirichlet(np.full(LETTERS, 0.7)) + 1e-3
        probabilities /= probabilities.sum()
        likely = np.argsort(-allowed(probabilities, {"bias": how.get("bias", ())}, [0]))[:2].astype(np.int32)
        fixed = np.broadcast_to(likely[:1], (SEEDS, 2)) if "presence" in how else None
        fed = [0, likely[0], likely[0]]
        expected = [allowed(probabilities, how, fed[: 1 + index]) for index in range(3)]
        scores = np.full(VOCAB_SIZE, -1e9, np.float32)
        scores[:LETTERS] = np.log(probabilities)
        logits = jnp.broadcast_to(jnp.asarray(scores), (MANY.num_tokens, VOCAB_SIZE))
        counts, emitted, expected_emitted = np.zeros((3, LETTERS)), np.zeros(LETTERS), np.zeros(LETTERS)
        for step in range(STEPS):
            arrays = SamplingArrays(
                temperature=np.full(SEEDS, how.get("temperature", 1.0), np.float32),
                top_k=np.full(SEEDS, how.get("top_k", 0), np.int32),
                top_p=np.full(SEEDS, how.get("top_p", 1.0), np.float32),
                min_p=np.full(SEEDS, how.get("min_p", 0.0), np.float32),
                seed=rng.integers(0, 2**32, (SEEDS, 2), dtype=np.uint32),
                choice=np.zeros(SEEDS, np.int32),
                position=np.zeros(SEEDS, np.int32),
                presence=np.full(SEEDS, how.get("presence", 0.0), np.float32),
                frequency=np.full(SEEDS, how.get("frequency", 0.0), np.float32),
                repetition=np.full(SEEDS, how.get("repetition", 1.0), np.float32),
                prompt_len=np.zeros(SEEDS, np.int32),
                bias_ids=None,
                bias_values=None,
            )
            drafts = rng.choice(likely, (SEEDS, 2)).astype(np.int32) if fixed is None else fixed
            batch = step_of_many(arrays, 5 + step, drafts)
            words, tokens = jnp.asarray(pack(batch)), jnp.asarray(batch.token_ids)
            table = np.asarray(run(logits, jnp.zeros(SEEDS, jnp.int32), words, tokens, penalties)[1])
            sampled, accepted = table[:, 0].reshape(SEEDS, 3), table[:SEEDS, ACCEPTED_COLUMN]
            for index in range(3):
                counts[index] += np.bincount(sampled[:, index], minlength=LETTERS)
            is_emitted = np.arange(3) <= accepted[:, None]
            emitted += np.bincount(sampled[is_emitted], minlength=LETTERS)
            expected_emitted += is_emitted.sum(axis=0) @ np.stack(expected)
        assert emitted.sum() > SEEDS * STEPS, "some drafts were accepted"
        means = [observed.sum() * own for observed, own in zip(counts, expected, strict=True)]
        for observed, mean in zip((*counts, emitted), (*means, expected_emitted), strict=True):
            assert observed[mean == 0].sum() == 0
            assert chi_square(observed, mean) < critical
