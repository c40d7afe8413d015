"""The end of a replica's requests, with an engine that answers and with one whose step does not end."""

import asyncio
import threading

import pytest

from routed_experts.core.errors import EngineDeadError
from routed_experts.fleet import replica as module


def no_kill(cause):
    raise AssertionError(cause)


def test_an_engine_that_does_not_answer_is_killed_and_holds_no_drain(monkeypatch, caplog):
    monkeypatch.setattr(module, "STEP_GRACE_S", 0.01)
    monkeypatch.setattr(module, "FINAL_FLUSH_S", 3600.0)  # for responses, which the end of the process leaves no time
    killed, causes = threading.Event(), list[BaseException]()

    def abort():
        assert killed.wait(60.0)
        raise causes[0]

    def kill(cause):
        causes.append(cause)
        killed.set()

    asyncio.run(asyncio.wait_for(module.end_requests(abort, kill, asyncio.Event()), 20.0))
    assert killed.wait(20.0)
    assert isinstance(causes[0], EngineDeadError) and "did not end within 0.01 s" in str(causes[0])
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

        await module.end_requests(abort, no_kill, idle)
        assert idle.is_set() == (responses == "are sent")

    asyncio.run(asyncio.wait_for(drain(), 30.0))
    assert ended == [False] and not caplog.records


@pytest.mark.parametrize("error", [EngineDeadError("the engine has ended"), TimeoutError("the engine has ended")])
def test_the_error_of_an_engine_that_has_ended_is_raised(error):
    def abort():
        raise error

    with pytest.raises(type(error), match="has ended"):
        asyncio.run(module.end_requests(abort, no_kill, asyncio.Event()))
