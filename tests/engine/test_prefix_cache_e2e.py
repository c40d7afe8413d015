"""The prefix cache end to end: answers and rows are those of an engine without one, and cached tokens are reported."""

import concurrent.futures

import numpy as np
import pytest

from routed_experts.formats.meta_info import record_from_meta_info
from support.engines import assert_idle, on_engine_thread

PAGE = 16
GREEDY = {"temperature": 0.0, "ignore_eos": True}
REQUEST_KWARGS = {"return_logprob": True, "logprob_start_len": -1, "return_routed_experts": True}


@pytest.fixture(scope="module")
def plain(engine_factory):
    with engine_factory(enable_return_routed_experts=True, disable_radix_cache=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def cramped(engine_factory):
    """Pages for 10 x 16 tokens."""
    with engine_factory(enable_return_routed_experts=True, max_total_tokens=160) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _cold(engine):
    engine.flush_cache()


def tokens(length, seed=0):
    return [int(token) for token in np.random.default_rng(seed).integers(3, 313, length)]


def ask(engine, prompt, *, max_new_tokens=12, **kwargs):
    return engine.generate(
        input_ids=prompt, sampling_params=GREEDY, max_new_tokens=max_new_tokens, **(REQUEST_KWARGS | kwargs)
    )


def cached(result):
    return result["meta_info"]["cached_tokens"]


def assert_same(result, expected):
    assert result["output_ids"] == expected["output_ids"]
    logprobs = [
        [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]] for answer in (result, expected)
    ]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    record, other = record_from_meta_info(result), record_from_meta_info(expected)
    assert record.valid is None and np.array_equal(record.ids, other.ids)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48, 64, 70])
def test_warm_cold_and_without_a_cache_are_one_answer(engine, plain, length):
    prompt = tokens(length)
    expected = ask(plain, prompt)
    cold, warm = ask(engine, prompt), ask(engine, prompt)
    assert_same(cold, expected)
    assert_same(warm, expected)
    assert cached(expected) == cached(ask(plain, prompt)) == cached(cold) == 0
    assert cached(warm) == (length - 1) // PAGE * PAGE, "whole pages, and never the last token of the prompt"


def test_turns_hit_the_prefix_of_earlier_turns(engine, plain):
    """Each turn sends the whole conversation and requests only the rows it does not have."""
    history, rows = tokens(20), []
    for turn in range(4):
        start = (
            max(len(history) - 6, 0) if turn else 0
        )  # the row of the last token of the turn before, and the five new tokens
        result = ask(engine, history, routed_experts_start_len=start)
        assert cached(result) == (0 if turn == 0 else (len(history) - 6) // PAGE * PAGE)
        rows.append(record_from_meta_info(result).ids)
        history += [*result["output_ids"], *tokens(5, seed=turn + 1)]
    prefix = history[: len(history) - 5]
    expected = ask(plain, prefix[:-1], max_new_tokens=1)
    assert prefix[-1] == expected["output_ids"][0]
    assert np.array_equal(np.concatenate(rows), record_from_meta_info(expected).ids), "one row a token, none twice"


def test_a_reader_gets_the_rows_of_a_writer_that_did_not_ask(engine, plain):
    prompt = tokens(50)
    engine.generate(input_ids=prompt, sampling_params=GREEDY, max_new_tokens=1)
    result = ask(engine, prompt)
    assert cached(result) == 48
    assert_same(result, ask(plain, prompt))


def test_other_keys_share_nothing(engine):
    prompt = tokens(40)
    ask(engine, prompt, extra_key="one")
    assert [cached(ask(engine, prompt, extra_key=key)) for key in ("two", None, "one", "two")] == [0, 0, 32, 32]


def test_a_flush_forgets_and_returns_the_number_of_pages(engine, plain):
    prompt = tokens(40)
    ask(engine, prompt)
    assert engine.flush_cache() == (40 + 12 - 1) // PAGE
    assert engine.flush_cache() == 0
    result = ask(engine, prompt)
    assert cached(result) == 0
    assert_same(result, ask(plain, prompt))


def test_a_flush_under_running_requests_leaves_them_their_pages(engine, plain):
    prompt = tokens(40)
    ask(engine, prompt)
    stream = engine.generate(input_ids=prompt, sampling_params=GREEDY, max_new_tokens=60, stream=True, **REQUEST_KWARGS)
    for _ in range(5):
        next(stream)
    engine.flush_cache()
    assert engine.check_integrity() == []
    assert cached(ask(engine, prompt)) == 0, "a flushed prefix is matched"
    assert_same(list(stream)[-1], ask(plain, prompt, max_new_tokens=60))
    assert_idle(engine)


def test_choices_share_their_prompt(engine):
    params = {"n": 3, "seed": 4, "max_tokens": 20, "ignore_eos": True}
    results = engine.generate(input_ids=tokens(40), sampling_params=params, return_routed_experts=True)
    assert [cached(result) for result in results] == [0, 32, 32]
    prompts = [record_from_meta_info(result).prompt.ids for result in results]
    assert np.array_equal(prompts[0][:32], prompts[1][:32]) and np.array_equal(prompts[0][:32], prompts[2][:32])


def test_penalised_requests_read_nothing_from_the_cache_and_leave_their_pages(engine, plain):
    prompt, penalised = tokens(40), GREEDY | {"frequency_penalty": 1.0, "max_tokens": 12}
    ask(engine, prompt)
    result = engine.generate(input_ids=prompt, sampling_params=penalised, **REQUEST_KWARGS)
    assert cached(result) == 0
    assert_same(result, plain.generate(input_ids=prompt, sampling_params=penalised, **REQUEST_KWARGS))
    assert cached(ask(engine, prompt)) == 32


def test_prompt_logprobs_take_only_what_lies_before_them(engine, plain):
    prompt = tokens(60)
    ask(engine, prompt)
    for start, num_cached in ((0, 0), (16, 0), (17, 16), (40, 32), (59, 48)):
        result, expected = (ask(case, prompt, logprob_start_len=start) for case in (engine, plain))
        assert cached(result) == num_cached
        values = [[value for value, _, _ in case["meta_info"]["input_token_logprobs"]] for case in (result, expected)]
        assert values[0][1:] == pytest.approx(values[1][1:], abs=1e-4) and len(values[0]) == 60 - start


def test_a_pool_too_small_for_all_evicts_and_stays_right(cramped, plain):
    prompts = [tokens(50, seed=seed) for seed in range(8)]
    expected = [ask(plain, prompt) for prompt in prompts]
    for _ in range(2):
        for prompt, reference in zip(prompts, expected, strict=True):
            assert_same(ask(cramped, prompt), reference)
    assert cramped.check_integrity() == []


def test_sixteen_requests_on_pages_for_little_more_than_two_all_finish(cramped, plain):
    prompts = [tokens(20 + i % 5, seed=i % 9) for i in range(16)]
    expected = [ask(plain, prompt, max_new_tokens=44) for prompt in prompts]
    before = on_engine_thread(cramped, lambda core: core.ranks[0].num_retracted)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda prompt: ask(cramped, prompt, max_new_tokens=44), prompts))
    assert on_engine_thread(cramped, lambda core: core.ranks[0].num_retracted) > before, "pages never ran out"
    for result, reference in zip(results, expected, strict=True):
        assert_same(result, reference)
    assert_idle(cramped)
