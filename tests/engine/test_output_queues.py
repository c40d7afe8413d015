"""Output queues: the outputs of a step reach each caller in order, with one wake-up an event loop for all its calls."""

import asyncio
import dataclasses
import threading

from routed_experts.core.io_struct import Logprobs, TokenIDOut
from routed_experts.core.weight_version import WeightVersion
from routed_experts.engine.requests.output_queues import AsyncOutputQueue, LoopNotifier, ThreadOutputQueue

OUTPUT = TokenIDOut(
    rid="",
    new_token_ids=(),
    output_logprobs=Logprobs(),
    input_logprobs=None,
    prompt_tokens=1,
    completion_tokens=0,
    cached_tokens=0,
    weight_version=WeightVersion(),
    finish_reason=None,
    return_routed_experts=False,
    routed_experts=None,
)


def output(rid):
    return dataclasses.replace(OUTPUT, rid=rid)


def test_a_thread_gets_the_outputs_of_a_step_at_once_and_an_empty_step_wakes_no_thread():
    receiver = ThreadOutputQueue()
    assert receiver.put(output("a")) and receiver.put(output("b"))
    assert receiver.steps.empty(), "nothing is handed over before the flush"
    receiver.flush()
    receiver.flush()
    assert [out.rid for out in receiver.steps.get()] == ["a", "b"] and receiver.steps.empty()


def test_calls_of_one_event_loop_share_a_wake_up_and_get_their_own_in_order():
    async def run():
        event_loop, wakes = asyncio.get_running_loop(), []
        real = event_loop.call_soon_threadsafe
        event_loop.call_soon_threadsafe = lambda *call: (wakes.append(call), real(*call))
        notifier = LoopNotifier(event_loop)
        queues = {name: AsyncOutputQueue(notifier, max_waiting=10) for name in "abc"}

        def steps():
            for step in range(3):
                for name, receiver in queues.items():
                    assert receiver.put(output(f"{name}{step}"))
                for receiver in queues.values():
                    receiver.flush()

        thread = threading.Thread(target=steps)
        thread.start()
        received = {name: [(await receiver.queue.get()).rid for _ in range(3)] for name, receiver in queues.items()}
        await asyncio.to_thread(thread.join)
        return received, [call for call in wakes if call[0].__name__ == "_deliver"]

    received, wakes = asyncio.run(run())
    assert received == {name: [f"{name}{step}" for step in range(3)] for name in "abc"}
    assert len(wakes) == 3, "one a step, for three calls"


def test_a_reader_that_is_behind_and_a_closed_event_loop_are_reported():
    async def behind():
        receiver = AsyncOutputQueue(LoopNotifier(asyncio.get_running_loop()), max_waiting=2)
        accepted = []
        for _ in range(3):
            accepted.append(receiver.put(output("a")))
            receiver.flush()
            await asyncio.sleep(0)
        return receiver, accepted

    receiver, accepted = asyncio.run(behind())
    assert accepted == [True, True, False]
    assert not receiver.put(output("a")), "its event loop is closed"
    receiver.flush()
