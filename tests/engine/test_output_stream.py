"""Engine.stream: streamed outputs join to the result of `generate`, with rows and logprobs."""

import asyncio
import collections
import contextlib
import inspect
import sys

import numpy as np
import pytest

from routed_experts import InvalidRequestError, PromptTooLongError, SamplingParams
from routed_experts.engine.requests import outputs as request_outputs
from routed_experts.engine.requests import sequence_state
from routed_experts.formats import record_from_response
from support.engines import assert_idle, on_engine_thread

PROMPT = "the router scores"
PARAMS = SamplingParams(n=2, max_tokens=12, seed=5, ignore_eos=True, logprobs=2, return_routed_experts=True)


@pytest.fixture(scope="module")
def whole(engine):
    results = engine.generate(PROMPT, PARAMS)
    assert len(results) == 2
    return results


def outputs(engine, prompt=PROMPT, params=PARAMS, **kwargs):
    async def read():
        return [output async for output in engine.stream(prompt, params, **kwargs)]

    return asyncio.run(read())


def assert_same(choice, expected):
    meta = expected["meta_info"]
    assert (choice.text, list(choice.token_ids)) == (expected["text"], expected["output_ids"])
    assert choice.cumulative_logprob == pytest.approx(sum(entry[0] for entry in meta["output_token_logprobs"]))
    assert [logprob[token].logprob for logprob, token in zip(choice.logprobs, choice.token_ids, strict=True)] == [
        entry[0] for entry in meta["output_token_logprobs"]
    ]
    assert choice.finish_reason == "length" and choice.record == record_from_response(expected)


def test_the_final_output_is_the_answer(engine, whole):
    (output,) = outputs(engine, output_kind="final")
    assert output.finished and output.prompt == PROMPT and [choice.index for choice in output.outputs] == [0, 1]
    for choice, expected in zip(output.outputs, whole, strict=True):
        assert_same(choice, expected)


def test_cumulative_outputs_grow_to_the_answer(engine, whole):
    received = outputs(engine, output_kind="cumulative")
    for index, expected in enumerate(whole):
        own = [output for output in received if output.outputs[0].index == index]
        assert [output.finished for output in own] == [False] * (len(own) - 1) + [True] and len(own) == 12
        assert [len(output.outputs[0].token_ids) for output in own] == list(range(1, 13))
        assert all(output.outputs[0].record is None and output.outputs[0].finish_reason is None for output in own[:-1])
        assert_same(own[-1].outputs[0], expected)


def test_deltas_join_to_the_answer(engine, whole):
    received = outputs(engine)
    for index, expected in enumerate(whole):
        own = [output.outputs[0] for output in received if output.outputs[0].index == index]
        assert "".join(choice.text for choice in own) == expected["text"]
        assert [token for choice in own for token in choice.token_ids] == expected["output_ids"]
        assert sum(len(choice.logprobs) for choice in own) == 12
        assert own[-1].record == record_from_response(expected) and own[-1].finish_reason == "length"


@contextlib.contextmanager
def counted_calls(*modules):
    """A Counter of the calls of this thread, by code object, of the functions of these modules that do not suspend."""
    files, calls = {module.__file__ for module in modules}, collections.Counter()
    suspends = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename in files and not frame.f_code.co_flags & suspends:
            calls[frame.f_code] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def test_a_delta_takes_the_same_work_at_any_position(engine):
    async def read():
        params = SamplingParams(max_tokens=200, seed=5, ignore_eos=True, logprobs=2)
        work = []
        with counted_calls(request_outputs, sequence_state) as calls:
            async for output in engine.stream(PROMPT, params):
                work.append((len(output.outputs[0].token_ids), sum(calls.values()), set(calls)))
                calls.clear()
        return work

    work = asyncio.run(read())
    assert sum(num_tokens for num_tokens, _, _ in work) == 200
    later = [(num_calls, codes) for num_tokens, num_calls, codes in work[1:-1] if num_tokens == 1]
    assert len(later) > 100 and len({num_calls for num_calls, _ in later}) == 1
    whole_sequence = {
        sequence_state.SequenceState.text.fget.__code__,
        sequence_state.SequenceState.token_ids.fget.__code__,
    }
    assert work[0][2] >= whole_sequence
    assert all(codes.isdisjoint(whole_sequence) for _, codes in later)


def test_leaving_early_aborts(engine):
    async def leave():
        stream = engine.stream([5, 6, 7], SamplingParams(max_tokens=400, ignore_eos=True))
        async for output in stream:
            assert len(output.outputs[0].token_ids) == 1
            break
        await stream.aclose()

    before = on_engine_thread(engine, lambda core: core.request_table.finished.get("abort", 0))
    asyncio.run(leave())
    assert_idle(engine)
    assert on_engine_thread(engine, lambda core: core.request_table.finished["abort"]) == before + 1


def test_what_is_wrong_is_refused_at_once(engine):
    for prompt, params, kind, error, param in (
        ("a", None, "deltas", InvalidRequestError, "output_kind"),
        ("", None, "delta", InvalidRequestError, "prompt"),
        ([313], None, "delta", InvalidRequestError, "input_ids"),
        ([5] * 512, None, "delta", PromptTooLongError, "input_ids"),
        ("a", SamplingParams(routed_experts_format="npy"), "delta", InvalidRequestError, "routed_experts_format"),
    ):
        with pytest.raises(error) as excinfo:
            engine.stream(prompt, params, output_kind=kind)
        assert excinfo.value.param == param


def test_an_array_is_a_prompt_too(engine):
    (output,) = outputs(engine, prompt=np.array([5, 6, 7]), params=SamplingParams(max_tokens=2), output_kind="final")
    assert output.prompt is None and output.prompt_token_ids == (5, 6, 7) and output.outputs[0].record is None
