"""The end of a replica's requests, with an engine that answers and with one whose step does not end."""

import asyncio
import concurrent.futures
import contextlib
import threading

import pytest

from routed_experts import Engine
from routed_experts.core.errors import EngineDeadError
from routed_experts.fleet import replica as module
from routed_experts.fleet.start import SHUTDOWN_MARGIN_S
from support.engines import SMALL
from support.fleet_process import wait_until
from support.http_server import running


def no_kill(cause):
    raise AssertionError(cause)


def never():
    return False


@pytest.mark.parametrize("kind", ["step", "command"])
def test_an_engine_that_does_not_answer_is_killed_and_its_errors_are_sent(monkeypatch, caplog, kind):
    monkeypatch.setattr(module, "STEP_GRACE_S", 0.01)
    monkeypatch.setattr(module, "COMMAND_GRACE_S", 0.03)
    monkeypatch.setattr(module, "FINAL_FLUSH_S", 30.0)
    killed, causes = threading.Event(), list[BaseException]()

    async def drain():
        loop, idle = asyncio.get_running_loop(), asyncio.Event()

        def abort():
            assert killed.wait(60.0)
            raise causes[0]

        def kill(cause):
            causes.append(cause)
            killed.set()
            loop.call_soon_threadsafe(idle.set)

        await module.end_requests(abort, kill, idle, runs_command=lambda: kind == "command")
        assert idle.is_set()

    asyncio.run(asyncio.wait_for(drain(), 20.0))
    limit = {"step": "0.01", "command": "0.03"}[kind]
    assert isinstance(causes[0], EngineDeadError) and f"its {kind} did not end within {limit} s" in str(causes[0])
    assert f"has not ended its {kind} within {limit} s" in caplog.text


def test_errors_that_are_not_read_hold_no_drain(monkeypatch):
    monkeypatch.setattr(module, "STEP_GRACE_S", 0.01)
    monkeypatch.setattr(module, "FINAL_FLUSH_S", 0.01)
    killed = threading.Event()

    async def drain():
        await module.end_requests(killed.wait, lambda _: killed.set(), asyncio.Event(), runs_command=never)

    asyncio.run(asyncio.wait_for(drain(), 20.0))
    assert killed.wait(20.0)


def test_a_command_may_take_longer_than_a_step(monkeypatch, caplog):
    monkeypatch.setattr(module, "STEP_GRACE_S", 0.01)
    monkeypatch.setattr(module, "COMMAND_GRACE_S", 60.0)
    monkeypatch.setattr(module, "FINAL_FLUSH_S", 0.01)
    ends = threading.Event()

    def runs_command():
        ends.set()  # after the time of a step
        return True

    async def drain():
        await module.end_requests(lambda: ends.wait(60.0), no_kill, asyncio.Event(), runs_command=runs_command)

    asyncio.run(asyncio.wait_for(drain(), 30.0))
    assert ends.is_set() and not caplog.records


def test_the_end_of_a_fleet_waits_for_the_longest_drain():
    assert module.STEP_GRACE_S < module.COMMAND_GRACE_S
    assert module.COMMAND_GRACE_S + module.FINAL_FLUSH_S < 2 * SHUTDOWN_MARGIN_S


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

        await module.end_requests(abort, no_kill, idle, runs_command=never)
        assert idle.is_set() == (responses == "are sent")

    asyncio.run(asyncio.wait_for(drain(), 30.0))
    assert ended == [False] and not caplog.records


@pytest.mark.parametrize("error", [EngineDeadError("the engine has ended"), TimeoutError("the engine has ended")])
def test_the_error_of_an_engine_that_has_ended_is_raised(error):
    def abort():
        raise error

    with pytest.raises(type(error), match="has ended"):
        asyncio.run(module.end_requests(abort, no_kill, asyncio.Event(), runs_command=never))


@contextlib.contextmanager
def held(folder):
    """An engine and its server; what the engine thread is to run, which tells that it began, and ends by an event."""
    began, leave = threading.Event(), threading.Event()

    def hold():
        began.set()
        leave.wait(60.0)

    with (
        Engine(str(folder), **SMALL) as engine,
        running(engine) as server,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        try:
            yield engine, server, pool, hold, began, leave
        finally:
            leave.set()


@pytest.mark.parametrize("kind", ["step", "command", "step that ends"])
@pytest.mark.usefixtures("lazy_compilation")
def test_a_drain_ends_the_requests_of_an_engine(tiny_checkpoint, monkeypatch, kind):
    monkeypatch.setattr(module, "STEP_GRACE_S", 60.0 if kind == "step that ends" else 0.01)
    monkeypatch.setattr(module, "COMMAND_GRACE_S", 0.02)
    monkeypatch.setattr(module, "FINAL_FLUSH_S", 60.0)
    with held(tiny_checkpoint) as (engine, server, pool, hold, began, leave):
        if kind == "command":
            pool.submit(engine.thread.run_between_steps, hold)
        else:
            engine.thread.post(hold)
        assert began.wait(30.0) and engine.thread.runs_command == (kind == "command")
        call = pool.submit(server.post, "/v1/completions", {"prompt": "ab", "max_tokens": 100})
        wait_until(lambda: engine.thread.num_pending_commands, pause=0.01)
        drained = asyncio.run_coroutine_threadsafe(module.drain(server.state, server.middleware.idle, 0.0), server.loop)
        if kind == "step that ends":
            wait_until(lambda: engine.thread.num_pending_commands == 2, pause=0.01)  # the request, and the end of all
            leave.set()
        drained.result(60.0)
        assert server.middleware.idle.is_set()
        response = call.result(60.0)
        if kind == "step that ends":
            assert response.json()["choices"][0]["finish_reason"] == "abort", response.text
        else:
            error = response.json()["error"]
            assert response.status_code == 503 and f"its {kind} did not end within 0.0" in error["message"], error
            assert isinstance(engine.thread.join(), EngineDeadError)
