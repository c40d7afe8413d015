"""Streams: what comes piece by piece is what comes at once, nothing follows the end, and leaving early leaves nothing
behind."""

import asyncio
import concurrent.futures
import gc
import itertools
import threading

import pytest

from routed_experts import InvalidRequestError
from support.engines import assert_idle, letter_bias, on_engine_thread

GREEDY = {"temperature": 0.0, "ignore_eos": True}
LONG = GREEDY | {"max_tokens": 400}
EVERYTHING = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "return_routed_experts": True}


def stable_fields(result):
    """All that must not depend on how an answer was brought."""
    meta = {
        key: value for key, value in result["meta_info"].items() if key not in ("id", "e2e_latency", "cached_tokens")
    }
    return {"text": result["text"], "output_ids": result["output_ids"], "meta_info": meta}


def num_live(engine):
    return on_engine_thread(engine, lambda core: core.request_table.num_live)


def assert_cumulative(events):
    """Each event holds the one before it, and only the last one has ended."""
    for earlier, later in itertools.pairwise(events):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        logprobs = [event["meta_info"].get("output_token_logprobs", []) for event in (earlier, later)]
        assert logprobs[1][: len(logprobs[0])] == logprobs[0]
    for event in events[:-1]:
        assert event["meta_info"]["finish_reason"] is None
        assert not [key for key in event["meta_info"] if key.startswith("routed_experts")], "rows come with the end"


# --- the same answer


@pytest.mark.parametrize("kwargs", [{}, EVERYTHING, {"return_routed_experts": True, "routed_experts_format": "npy"}])
def test_the_last_event_is_the_answer_at_once(engine, kwargs):
    engine.flush_cache()
    events = list(engine.generate("once upon a time", GREEDY, max_new_tokens=20, stream=True, **kwargs))
    engine.flush_cache()
    at_once = engine.generate("once upon a time", GREEDY, max_new_tokens=20, **kwargs)
    assert_cumulative(events)
    assert len(events) == 20 and [len(event["output_ids"]) for event in events] == list(range(1, 21))
    assert stable_fields(events[-1]) == stable_fields(at_once)


def test_prompt_logprobs_are_there_from_the_first_event(engine):
    events = list(engine.generate("once upon a time", GREEDY, max_new_tokens=3, stream=True, **EVERYTHING))
    first = events[0]["meta_info"]["input_token_logprobs"]
    assert len(first) == events[0]["meta_info"]["prompt_tokens"]
    assert all(event["meta_info"]["input_token_logprobs"] == first for event in events)


@pytest.mark.parametrize("length", range(1, 5))
def test_text_that_may_be_a_stop_string_is_held_back(engine, length):
    params = GREEDY | {"logit_bias": letter_bias(engine), "frequency_penalty": 1.5}
    whole = engine.generate("the cat", params, max_new_tokens=24)["text"]
    stop = whole[20 : 20 + length]
    begin = whole.index(stop)
    events = list(engine.generate("the cat", params | {"stop": [stop + "#", stop]}, max_new_tokens=24, stream=True))
    assert_cumulative(events)
    assert events[-1]["text"] == whole[:begin] and events[-1]["meta_info"]["finish_reason"]["matched"] == stop
    assert all(whole.startswith(event["text"]) and len(event["text"]) <= begin for event in events)


def test_no_event_shows_half_a_character(engine):
    events = list(engine.generate("the cat", {"seed": 4, "max_tokens": 60, "ignore_eos": True}, stream=True))
    assert_cumulative(events)
    assert events[-1]["text"] == engine.tokenizer.decode(events[-1]["output_ids"])


def test_events_of_several_prompts_and_choices_name_their_place(engine):
    prompts = ["once upon", "the cat"]
    params = {"n": 2, "seed": 9, "max_tokens": 8, "ignore_eos": True}
    events = list(engine.generate(prompts, params, stream=True, return_routed_experts=True))
    engine.flush_cache()
    at_once = engine.generate(prompts, params, return_routed_experts=True)
    for index in range(4):
        own = [event for event in events if event["index"] == index]
        assert_cumulative(own)
        assert stable_fields(own[-1]) == stable_fields(at_once[index])
    assert {event["index"] for event in events} == {0, 1, 2, 3}


def test_async_answers_are_those_of_the_sync_engine(engine):
    async def ask():
        at_once = await engine.async_generate("once upon a time", GREEDY, max_new_tokens=10, **EVERYTHING)
        several = await engine.async_generate(["once upon a time", "the cat"], GREEDY, max_new_tokens=10, **EVERYTHING)
        events = [
            event async for event in await engine.async_generate("the cat", GREEDY, max_new_tokens=10, stream=True)
        ]
        return at_once, several, events

    at_once, several, events = asyncio.run(ask())
    expected = stable_fields(engine.generate("once upon a time", GREEDY, max_new_tokens=10, **EVERYTHING))
    assert stable_fields(at_once) == stable_fields(several[0]) == expected
    assert_cumulative(events)
    assert stable_fields(events[-1]) == stable_fields(engine.generate("the cat", GREEDY, max_new_tokens=10))


# --- leaving early


def test_a_closed_iterator_is_aborted_before_another_step(engine):
    stream = engine.generate("once upon a time", LONG, stream=True)
    for _ in range(3):
        next(stream)
    stream.close()
    assert num_live(engine) == 0
    assert_idle(engine)
    with pytest.raises(StopIteration):
        next(stream)


def test_an_iterator_that_is_dropped_is_aborted(engine):
    stream = engine.generate("once upon a time", LONG, stream=True)
    next(stream)
    del stream
    gc.collect()
    assert num_live(engine) == 0


def test_an_iterator_that_is_never_advanced_submits_nothing(engine):
    accepted = engine.get_server_info()["requests_accepted"]
    engine.generate("once upon a time", LONG, stream=True).close()
    assert engine.get_server_info()["requests_accepted"] == accepted


def test_an_exception_in_the_loop_over_a_stream_aborts(engine):
    def read():
        for _ in engine.generate(["once", "upon"], LONG, stream=True):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()
    gc.collect()
    assert num_live(engine) == 0


def test_leaving_early_harms_no_neighbour(engine):
    expected = engine.generate("the cat", GREEDY, max_new_tokens=40)["output_ids"]
    stays = engine.generate("the cat", GREEDY, max_new_tokens=40, stream=True)
    next(stays)
    for _ in range(5):
        leaves = engine.generate("once upon a time", LONG, stream=True)
        next(leaves)
        leaves.close()
    assert list(stays)[-1]["output_ids"] == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("turns", [0, 1, 2, 5, 60])
def test_a_cancelled_task_is_aborted_wherever_it_stands(engine, stream, turns):
    async def ask():
        result = await engine.async_generate("once upon a time", LONG, stream=stream)
        if stream:
            async for _ in result:
                await asyncio.sleep(0)

    async def leave():
        task = asyncio.create_task(ask())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert num_live(engine) == 0


def test_an_async_stream_that_is_closed_is_aborted(engine):
    async def ask():
        stream = await engine.async_generate("once upon a time", LONG, stream=True)
        await anext(stream)
        await stream.aclose()

    asyncio.run(ask())
    assert num_live(engine) == 0


def test_an_event_loop_that_is_closed_under_a_request_does_not_end_the_engine(engine):
    loop = asyncio.new_event_loop()

    async def begin():
        stream = await engine.async_generate("once upon a time", LONG, stream=True)
        await anext(stream)
        return stream

    stream = loop.run_until_complete(begin())
    loop.close()  # without a word to anybody
    assert len(engine.generate("the cat", GREEDY, max_new_tokens=4)["output_ids"]) == 4
    assert num_live(engine) == 0, "nobody listens: the request ends"
    closing = stream.aclose()
    with pytest.raises(StopIteration):
        closing.send(None)


def test_a_refused_request_does_not_abort_the_holder_of_its_id(engine):
    stream = engine.generate("once upon a time", LONG, rid="mine", stream=True)
    next(stream)
    for streamed in (False, True):
        with pytest.raises(
            InvalidRequestError, match="rid='mine' is the id of a request that has not ended"
        ) as excinfo:
            list(engine.generate("the cat", GREEDY, rid="mine", stream=streamed))
        assert (excinfo.value.param, excinfo.value.code) == ("rid", "duplicate_request_id")
    assert len(list(stream)[-1]["output_ids"]) == 400
    assert engine.generate("the cat", GREEDY, rid="mine", max_new_tokens=1)["meta_info"]["id"] == "mine"


def test_an_id_may_be_used_again_as_soon_as_its_stream_is_closed(engine):
    """Abort and new request arrive between the same two steps: the end of the first does not reach the second."""
    stream = engine.generate("once upon a time", LONG, rid="again", stream=True)
    next(stream)
    blocked, go = threading.Event(), threading.Event()

    def hold(core):
        blocked.set()
        go.wait()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        holder = pool.submit(on_engine_thread, engine, hold)
        blocked.wait()
        stream.close()
        second = pool.submit(engine.generate, "the cat", GREEDY, max_new_tokens=5, rid="again")
        while engine.thread.num_pending_commands < 2:
            pass
        go.set()
        assert second.result(timeout=60)["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
        holder.result()


# --- many at once


def test_sixteen_threads_get_their_own_answers(engine):
    prompts = [f"experts of thread {index}" for index in range(16)]
    expected = [engine.generate(prompt, GREEDY, max_new_tokens=6)["output_ids"] for prompt in prompts]
    start = threading.Barrier(16)

    def ask(index):
        start.wait()
        answers = []
        for turn in range(5):
            if turn % 2:
                answers.append(list(engine.generate(prompts[index], GREEDY, max_new_tokens=6, stream=True))[-1])
            else:
                answers.append(engine.generate(prompts[index], GREEDY, max_new_tokens=6, return_routed_experts=True))
        return [answer["output_ids"] for answer in answers]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == [[ids] * 5 for ids in expected]


def test_many_tasks_of_one_event_loop_get_their_own_answers(engine):
    prompts = [f"experts of task {index}" for index in range(20)]

    async def ask():
        return await asyncio.gather(*(engine.async_generate(prompt, GREEDY, max_new_tokens=4) for prompt in prompts))

    answers = asyncio.run(ask())
    assert [answer["output_ids"] for answer in answers] == [
        engine.generate(prompt, GREEDY, max_new_tokens=4)["output_ids"] for prompt in prompts
    ]


def test_a_call_of_many_choices_is_refused_while_a_call_of_its_id_lives(engine):
    running = engine.generate(
        "the cat", {"temperature": 0.0, "ignore_eos": True}, max_new_tokens=60, rid="job", stream=True
    )
    next(running)
    with pytest.raises(InvalidRequestError) as excinfo:
        engine.generate("the cat", {"n": 2, "max_tokens": 2}, rid="job")
    assert excinfo.value.code == "duplicate_request_id"
    running.close()
