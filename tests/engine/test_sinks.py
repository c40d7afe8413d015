"""Sinks: the news of a step reach each caller in order, with one wake-up for an event loop however many calls it
has."""

import asyncio
import dataclasses
import threading

from routed_experts.core.io_struct import Logprobs, TokenIDOut
from routed_experts.engine.requests.output_queues import AsyncOutputQueue, LoopNotifier, ThreadOutputQueue

NEWS = TokenIDOut(
    rid="",
    new_token_ids=(),
    output_logprobs=Logprobs(),
    input_logprobs=None,
    prompt_tokens=1,
    completion_tokens=0,
    cached_tokens=0,
    weight_version=0,
    finish_reason=None,
    return_routed_experts=False,
    routed_experts=None,
)


def news(rid):
    return dataclasses.replace(NEWS, rid=rid)


def test_a_thread_gets_the_news_of_a_step_at_once_and_an_empty_step_wakes_nobody():
    sink = ThreadOutputQueue()
    assert sink.put(news("a")) and sink.put(news("b"))
    assert sink.steps.empty(), "nothing is told before the ring"
    sink.flush()
    sink.flush()
    assert [out.rid for out in sink.steps.get()] == ["a", "b"] and sink.steps.empty()


def test_calls_of_one_event_loop_share_a_wake_up_and_get_their_own_in_order():
    async def run():
        events, wakes = asyncio.get_running_loop(), []
        real = events.call_soon_threadsafe
        events.call_soon_threadsafe = lambda *call: (wakes.append(call), real(*call))
        mail = LoopNotifier(events)
        sinks = {name: AsyncOutputQueue(mail, max_waiting=10) for name in "abc"}

        def steps():
            for step in range(3):
                for name, sink in sinks.items():
                    assert sink.put(news(f"{name}{step}"))
                for sink in sinks.values():
                    sink.flush()

        thread = threading.Thread(target=steps)
        thread.start()
        told = {name: [(await sink.queue.get()).rid for _ in range(3)] for name, sink in sinks.items()}
        await asyncio.to_thread(thread.join)
        return told, [call for call in wakes if call[0].__name__ == "_hand_over"]

    told, wakes = asyncio.run(run())
    assert told == {name: [f"{name}{step}" for step in range(3)] for name in "abc"}
    assert len(wakes) == 3, "one a step, for three calls"


def test_a_reader_that_is_behind_and_a_closed_event_loop_are_told_of():
    async def behind():
        sink = AsyncOutputQueue(LoopNotifier(asyncio.get_running_loop()), max_waiting=2)
        kept = []
        for _ in range(3):
            kept.append(sink.put(news("a")))
            sink.flush()
            await asyncio.sleep(0)
        return sink, kept

    sink, kept = asyncio.run(behind())
    assert kept == [True, True, False]
    assert not sink.put(news("a")), "its event loop is closed"
    sink.flush()
