"""The end of a replica's requests, with an engine that answers and with one whose step does not end."""

import asyncio
import threading

import pytest

from routed_experts.core.errors import EngineDeadError
from routed_experts.fleet import replica as module


def test_an_engine_that_does_not_answer_holds_no_drain(monkeypatch, caplog):
    monkeypatch.setattr(module, "STEP_GRACE_S", 0.01)
    step_ends = threading.Event()

    async def drain():
        try:
            await module.end_requests(step_ends.wait, asyncio.Event())
            assert not step_ends.is_set()
        finally:
            step_ends.set()  # the thread ends, and with it the event loop

    asyncio.run(asyncio.wait_for(drain(), 30.0))
    assert "has not ended its requests within 0.01 s" in caplog.text


@pytest.mark.parametrize("responses", ["are sent", "are not read"])
def test_requests_end_before_their_responses_are_awaited(monkeypatch, caplog, responses):
    monkeypatch.setattr(module, "FINAL_FLUSH_S", 0.01 if responses == "are not read" else 30.0)
    ended = []

    async def drain():
        loop, idle = asyncio.get_running_loop(), asyncio.Event()

        def abort():
            ended.append(idle.is_set())
            if responses == "are sent":
                loop.call_soon_threadsafe(idle.set)

        await module.end_requests(abort, idle)
        assert idle.is_set() == (responses == "are sent")

    asyncio.run(asyncio.wait_for(drain(), 30.0))
    assert ended == [False] and not caplog.records


def test_the_error_of_an_engine_that_has_ended_is_raised():
    def abort():
        raise EngineDeadError("the engine has ended")

    with pytest.raises(EngineDeadError, match="has ended"):
        asyncio.run(module.end_requests(abort, asyncio.Event()))
