"""The chain of drafts: where it ends, and what is fed where."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.core.model_worker_batch import SamplingMode
from routed_experts.execution.draft_chain import CHAIN_MODES, Bias, DraftChain, DraftStep, chain_mode
from routed_experts.layers.attention import PagedBatch
from routed_experts.layers.sampling import SamplingBatch

pytestmark = pytest.mark.usefixtures("fast_compilation")

PAGE_SIZE, V, K = 4, 10, 4
POSITIONS = [5, 6, 2, 3]  # of the last token of each request; the last one is padding
PAGES = [[3, 4, 5], [6, 7, 0], [8, 0, 0], [0, 0, 0]]


def greedy_step(mode=SamplingMode.GREEDY, bias=None):
    requests = len(POSITIONS)
    ids, values = (np.full((requests, 2), V), np.zeros((requests, 2))) if bias is None else bias
    bias = Bias(jnp.asarray(ids, jnp.int32), jnp.asarray(values, jnp.float32))
    positions = jnp.array(POSITIONS, jnp.int32)
    zeros = jnp.zeros(requests, jnp.int32)
    paged = PagedBatch(
        positions=positions,
        token_rows=jnp.arange(requests, dtype=jnp.int32),
        valid=jnp.arange(requests) < requests - 1,
        query_starts=jnp.arange(requests + 1, dtype=jnp.int32),
        seq_lens=jnp.where(jnp.arange(requests) < requests - 1, positions + 1, 0),
        page_table=jnp.array(PAGES, jnp.int32),
        decode=True,
    )
    sampling = SamplingBatch(
        temperature=jnp.zeros(requests),
        top_k=zeros,
        top_p=jnp.ones(requests),
        min_p=jnp.zeros(requests),
        seed=jnp.zeros((requests, 2), jnp.uint32),
        choice=zeros,
        position=zeros,
    )
    mode = jnp.asarray(mode, jnp.int32)
    return DraftStep(paged=paged, last=zeros, after=zeros, sampling=sampling, mode=mode, bias=bias)


def run(lag, *, context_length=None, nan_at=None):
    """Drafts of a model that says position modulo V, and the positions at which it is fed."""
    chain = DraftChain(
        step=greedy_step(),
        num_drafts=K,
        page_size=PAGE_SIZE,
        vocab_size=V,
        lag=lag,
        context_length=context_length,
    )
    fed = []

    def scores(position):
        logits = jnp.where(jnp.arange(V)[None] == position[:, None] % V, 5.0, 0.0)
        return jnp.where((position == nan_at)[:, None], jnp.nan, logits) if nan_at is not None else logits

    def advance(place, drafted, single, carry):
        fed.append(single.positions.tolist())
        assert place == len(fed) - 1
        assert single.seq_lens.tolist() == [*(single.positions[:-1] + 1).tolist(), 0]
        return scores(single.positions + lag + 1), carry + 1

    first = jnp.array(POSITIONS, jnp.int32) + 2
    calls, table = chain.run(scores(first), first, None, advance, 0)
    assert calls == K - 1
    drafts, probabilities = np.asarray(table[:, :K]), np.asarray(table[:, K:]).view(np.float32)
    assert drafts.shape == probabilities.shape == (len(POSITIONS), K)
    return drafts[:-1].tolist(), fed


def test_drafts_end_where_the_pages_of_a_request_end():
    drafts, fed = run(lag=0)  # a draft at position 7 needs a page for position 7 to be followed
    assert fed == [[position + 2 + place for position in POSITIONS] for place in range(K - 1)]
    assert drafts == [[7, 8, 9, 0], [8, -1, -1, -1], [4, -1, -1, -1]]
    drafts, fed = run(lag=1)
    assert fed == [[position + 1 + place for position in POSITIONS] for place in range(K - 1)]
    assert drafts == [[7, 8, 9, 0], [8, 9, -1, -1], [4, 5, -1, -1]]


def test_drafts_end_with_the_context_of_the_draft_model():
    drafts, _ = run(lag=0, context_length=8)
    assert drafts == [[7, 8, -1, -1], [8, -1, -1, -1], [4, -1, -1, -1]]


def test_drafts_end_at_scores_that_are_no_numbers():
    drafts, _ = run(lag=0, nan_at=8)
    assert [row[: row.index(-1)] for row in drafts] == [[7], [], [4]]


@pytest.mark.parametrize("ids", [None, [1, 3, 4, 8]], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize("mode", [SamplingMode.GREEDY, SamplingMode.FULL])
def test_the_bias_is_added_to_the_scores_of_its_tokens_in_the_full_mode(ids, mode):
    rng, columns = np.random.default_rng(2), list(range(V)) if ids is None else ids
    logits = rng.normal(size=(len(POSITIONS), len(columns))).astype(np.float32)
    bias_ids = np.array([[3, 8], [4, V], [1, 1], [V, V]])
    bias_values = np.array([[-9.0, 5.0], [9.0, 7.0], [4.0, 4.0], [1.0, 1.0]])
    chain = DraftChain(
        step=greedy_step(mode, (bias_ids, bias_values)),
        num_drafts=1,
        page_size=PAGE_SIZE,
        vocab_size=V,
        lag=0,
        token_ids=None if ids is None else jnp.asarray(ids, jnp.int32),
    )
    _, table = chain.run(jnp.asarray(logits), jnp.array(POSITIONS, jnp.int32), None, lambda *_: None, None)
    for row, scores in enumerate(logits.astype(np.float64)):
        expected = dict(zip(columns, scores, strict=True))
        for token, value in zip(bias_ids[row], bias_values[row], strict=True):
            if mode is SamplingMode.FULL and token in expected:
                expected[token] += value
        best = max(expected, key=expected.get)
        total = sum(np.exp(score) for score in expected.values())
        assert int(table[row, 0]) == best
        probability = np.asarray(table[row, 1:]).view(np.float32)[0]
        assert probability == pytest.approx(np.exp(expected[best]) / total, rel=1e-4)


@pytest.mark.parametrize("mode", list(SamplingMode))
def test_a_program_of_one_mode_drafts_what_the_one_of_all_modes_drafts(mode):
    """Where a step has no bias, its padding is zeros for token 0."""
    assert chain_mode(mode) in CHAIN_MODES and mode <= chain_mode(mode)
    rng, requests = np.random.default_rng(3), len(POSITIONS)
    has_bias = mode is SamplingMode.FULL
    bias = (np.array([[3, 8]] * requests), rng.normal(size=(requests, 2))) if has_bias else np.zeros((2, requests, 2))
    step = greedy_step(mode, bias)
    if mode is not SamplingMode.GREEDY:
        warm = dataclasses.replace(step.sampling, temperature=jnp.array([0.0, 0.7, 1.0, 0.0]))
        if mode is not SamplingMode.RANDOM:
            warm = dataclasses.replace(warm, top_k=jnp.array([0, 3, 0, 0]), top_p=jnp.array([1.0, 1.0, 0.7, 1.0]))
        step = dataclasses.replace(step, sampling=warm)
    table = [jnp.asarray(rng.normal(size=(requests, V)), jnp.float32) for _ in range(K)]

    def drafts(step):
        chain = DraftChain(step=step, num_drafts=K, page_size=PAGE_SIZE, vocab_size=V, lag=0)
        at = jnp.array(POSITIONS, jnp.int32)
        return np.asarray(chain.run(table[0], at, None, lambda place, *_: (table[place + 1], None), None)[1])

    of_all, own = drafts(step), drafts(dataclasses.replace(step, mode=chain_mode(mode)))
    assert (own == of_all)[:, :K].all() and (of_all[:-1, 0] >= 0).all()
    np.testing.assert_allclose(own[:, K:].view(np.float32), of_all[:, K:].view(np.float32), rtol=1e-6)
