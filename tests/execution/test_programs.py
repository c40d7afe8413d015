"""The programs of a step against loops and the model in NumPy: which arrays they give away, where they write, what they
count. What they look like as compiled code: test_capture_off_is_free.py and test_tpu_programs.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracles.testbeds import build_model, random_prompt
from routed_experts.core.model_worker_batch import ForwardMode, SamplingMode
from routed_experts.execution.aot_programs import abstract_inputs, lowerings, sampler_key
from routed_experts.execution.forward_batch import pack
from routed_experts.execution.programs import forward
from routed_experts.execution.sampler import TokenCounts, sampler_program, update_token_counts
from support.small_runner import (
    DECODE,
    EXTEND,
    NUM_PAGES,
    NUM_SLOTS,
    PAGE_SIZE,
    Fed,
    build,
    build_step,
    compiled,
    oracle,
    run,
)
from support.tiny_checkpoint import VOCAB_SIZE, tiny_config, tiny_tensors

pytestmark = pytest.mark.usefixtures("fast_compilation")

TOLERANCE = {"rtol": 0, "atol": 2e-4}
PROMPT = tuple(random_prompt(np.random.default_rng(11), 24).tolist())
PAGES = (6, 2, 17, 9, 12, 3)


def donated(lowered):
    """Names of the arguments that a program may overwrite."""
    flat = jax.tree_util.tree_flatten_with_path(lowered.args_info)[0]
    return {jax.tree_util.keystr(path) for path, info in flat if info.donated}


def test_only_pools_counts_and_last_tokens_are_donated():
    runner = build()
    jobs = lowerings(runner.state, runner.spec, runner.config)
    for shape in (EXTEND, DECODE):
        assert donated(jobs["forward", shape]()) == {"[0][1]"}
        assert donated(jobs["count", shape]()) == {"[0][0].generated", "[0][0].prompt"}
        for form in SamplingMode:
            assert donated(jobs[sampler_key(runner.spec, shape, form)]()) == {"[0][1]"}
    assert donated(jobs["score", EXTEND.num_tokens]()) == set()


def test_models_of_one_vocabulary_share_their_samplers():
    """By the text, which is what the compilation cache goes by: neither a model, nor its pool, nor the tokens of a step
    are in it."""
    wide = tiny_config(hidden_size=96, num_hidden_layers=2, num_experts=8, mlp_only_layers=[], tie_word_embeddings=True)
    longer = dataclasses.replace(EXTEND, num_tokens=64, table_width=16)
    texts, forms = [], {sampler_key(build().spec, EXTEND, form) for form in SamplingMode}
    for runner in (build(), build(shapes=(longer,), model=build_model(wide, tiny_tensors(wide)))):
        sampler_program.cache_clear()  # what one left may not be looked up by the other
        jobs = lowerings(runner.state, runner.spec, runner.config)
        assert {key for key in jobs if key[0] == "sample"} == forms
        texts.append({key: jobs[key]().as_text() for key in forms})
    assert texts[0] == texts[1]


def test_rows_leave_in_the_smallest_type():
    runner = build()
    for shape in (EXTEND, DECODE):
        inputs = abstract_inputs(runner.state, runner.spec, runner.config, shape)
        out = jax.eval_shape(functools.partial(forward, spec=runner.spec, shape=shape), *inputs)[1]
        assert (out.rows.shape, out.rows.dtype) == ((shape.num_tokens, 3 * 4), jnp.uint8)


def test_a_step_writes_its_own_slots_and_the_padding_page():
    runner = compiled()
    before = np.asarray(runner._pool)
    run(runner, build_step(Fed(3, PAGES[:4], PROMPT[:13])))
    after = np.asarray(runner._pool)
    changed = (before != after).any(axis=(2, 3)).reshape(-1, NUM_PAGES, PAGE_SIZE)
    allowed = np.zeros((NUM_PAGES, PAGE_SIZE), bool)
    allowed[0] = True
    for position in range(13):
        allowed[PAGES[position // PAGE_SIZE], position % PAGE_SIZE] = True
    assert not changed[:, ~allowed].any()
    assert changed[:, allowed][:, PAGE_SIZE:].all(), "every layer writes every token"


@pytest.mark.parametrize("cuts", [(24,), (1, 23), (7, 8, 9), (16, 4, 3, 1)])
def test_a_prompt_in_chunks_is_the_prompt_in_one(cuts):
    runner, start = compiled(), 0
    judged = oracle().run(PROMPT)
    for size in cuts:
        mode = ForwardMode.DECODE if size == 1 else ForwardMode.EXTEND
        result = run(runner, build_step(Fed(2, PAGES, PROMPT[start : start + size], start=start), mode=mode))
        start += size
        assert result.tokens[0] == judged.logits[start - 1].argmax()
        np.testing.assert_allclose(result.logprobs[0], judged.logprobs[start - 1].max(), **TOLERANCE)
        assert np.array_equal(result.rows.reshape(size, 3, 4), judged.ids[start - size : start])


def test_other_slots_keep_their_last_tokens():
    runner = compiled()
    before = np.asarray(runner._last_tokens)
    result = run(runner, build_step(Fed(4, PAGES, PROMPT[:5]), Fed(2, (20, 21), PROMPT[:3])))
    after = np.asarray(runner._last_tokens)
    assert after[[4, 2]].tolist() == result.tokens[:2].tolist()
    others = [slot for slot in range(1, NUM_SLOTS) if slot not in (4, 2)]
    assert np.array_equal(after[others], before[others])


def count_by_loop(counts, batch):
    """Feed token after token, one slot's set of counts at a time."""
    generated, prompt = counts.generated.copy(), counts.prompt.copy()
    for row in range(batch.num_requests):
        slot = batch.request_slots[row]
        for at in range(batch.query_starts[row], batch.query_starts[row + 1]):
            if batch.positions[at] == 0:
                generated[slot], prompt[slot] = 0, False
            if batch.positions[at] < batch.sampling.prompt_len[row]:
                prompt[slot, batch.token_ids[at]] = True
            else:
                generated[slot, batch.token_ids[at]] += 1
    return generated, prompt


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_counted_as_a_loop_counts_them(seed):
    rng = np.random.default_rng(seed)
    counts = TokenCounts(
        rng.integers(0, 3, (NUM_SLOTS, VOCAB_SIZE)).astype(np.int32), rng.random((NUM_SLOTS, VOCAB_SIZE)) < 0.1
    )
    chunks = [
        Fed(
            int(slot),
            PAGES,
            tuple(rng.integers(0, 9, rng.integers(1, 9)).tolist()),
            start=int(start),
            prompt_len=int(rng.integers(0, 12)),
        )
        for slot, start in zip(rng.permutation(np.arange(1, NUM_SLOTS))[:4], rng.choice([0, 1, 5, 12], 4), strict=True)
    ][: rng.integers(1, 5)]
    batch = build_step(*chunks)
    counted, of_rows = jax.jit(functools.partial(update_token_counts, shape=EXTEND))(
        counts, batch.token_ids, pack(batch)
    )
    generated, prompt = count_by_loop(counts, batch)
    assert np.array_equal(np.asarray(counted.generated)[1:], generated[1:])  # slot 0 is padding
    assert np.array_equal(np.asarray(counted.prompt)[1:], prompt[1:])
    slots = batch.request_slots[: len(chunks)]
    assert np.array_equal(of_rows.generated[: len(chunks)], generated[slots])
    assert np.array_equal(of_rows.prompt[: len(chunks)], prompt[slots])
