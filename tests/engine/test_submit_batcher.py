"""Calls of an event loop that arrive together are submitted together, each with an outcome of its own."""

import asyncio
import contextlib

import pytest

from routed_experts import Engine, EngineDeadError, InvalidRequestError
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.engine.requests.routing_options import SGLANG_DEFAULTS
from support.engines import SMALL
from support.tiny_checkpoint import write_tiny_checkpoint

PROMPTS = [[5 + number] * 4 for number in range(4)]
SAMPLING = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}


def build_requests(async_engine, prompt, **keywords):
    request = GenerateReqInput(input_ids=prompt, sampling_params=SAMPLING, **keywords)
    return async_engine.process(request, default_max_tokens=5, routing=SGLANG_DEFAULTS)


async def answer(async_engine, prompt, **keywords):
    call = async_engine.generate(build_requests(async_engine, prompt, **keywords), max_backlog=100)
    try:
        await call.submit()
        async for _ in call.outputs():
            continue
    finally:
        call.abort()
    return list(call.sequences[0].token_ids)


def test_those_that_come_together_share_their_first_step(engine_factory):
    with engine_factory(enable_return_routed_experts=True) as engine:
        before = engine.stats().num_steps
        expected = [result["output_ids"] for result in engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)]
        alone = engine.stats().num_steps - before

        async def run():
            async_engine = AsyncEngine(engine)
            return await asyncio.gather(*(answer(async_engine, prompt) for prompt in PROMPTS))

        for _ in range(10):  # by luck they share it now and then without being gathered
            engine.flush_cache()
            before = engine.stats().num_steps
            assert asyncio.run(run()) == expected
            assert engine.stats().num_steps - before == alone, "no step for one of them alone"


def test_an_abort_reaches_submissions_that_are_being_batched(engine_factory):
    with engine_factory(enable_return_routed_experts=True) as engine:

        async def run():
            async_engine = AsyncEngine(engine)
            long = GenerateReqInput(input_ids=PROMPTS[0], sampling_params=SAMPLING | {"max_new_tokens": 20}, rid="x")
            call = async_engine.generate(
                async_engine.process(long, default_max_tokens=5, routing=SGLANG_DEFAULTS), max_backlog=100
            )
            accepted = asyncio.create_task(call.submit())
            await asyncio.sleep(0)  # it waits for more submissions
            async_engine.flush_submissions()
            aborted = await asyncio.to_thread(engine.abort, "x")
            await accepted
            async for _ in call.outputs():
                continue
            return aborted, call.sequences[0].finish_reason.type

        assert asyncio.run(run()) == (1, "abort")


def test_one_that_is_refused_refuses_no_other(engine_factory):
    with engine_factory(enable_return_routed_experts=True) as engine:

        async def run():
            async_engine = AsyncEngine(engine)
            calls = [
                answer(async_engine, prompt, rid="same" if number in (1, 2) else f"r{number}")
                for number, prompt in enumerate(PROMPTS)
            ]
            return await asyncio.gather(*calls, return_exceptions=True)

        results = asyncio.run(run())
        assert [type(result) for result in results] == [list, list, InvalidRequestError, list] and results[
            2
        ].code == "duplicate_request_id"


def test_one_that_leaves_before_it_is_handed_over_never_comes_in(engine_factory):
    with engine_factory(enable_return_routed_experts=True) as engine:
        before = engine.stats().accepted

        async def run():
            async_engine = AsyncEngine(engine)
            leaving, staying = (asyncio.create_task(answer(async_engine, prompt)) for prompt in PROMPTS[:2])
            await asyncio.sleep(0)  # both wait for more submissions
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving
            return await staying

        assert len(asyncio.run(run())) == 5
        assert engine.stats().accepted - before == 1


def test_an_engine_that_has_ended_raises_for_each_caller(tmp_path):
    with Engine(str(write_tiny_checkpoint(tmp_path)), **SMALL) as engine:
        async_engine = AsyncEngine(engine)

    async def run():
        return await asyncio.gather(*(answer(async_engine, prompt) for prompt in PROMPTS), return_exceptions=True)

    assert [type(result) for result in asyncio.run(run())] == [EngineDeadError] * 4
    with pytest.raises(EngineDeadError):
        engine.generate(input_ids=PROMPTS[0])
