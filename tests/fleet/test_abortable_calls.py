"""A call is aborted while it runs, before it begins, or not at all."""

import asyncio
import threading

import pytest

from routed_experts.fleet.abortable_calls import AbortableCalls


async def answer():
    return 7


async def fail():
    raise ValueError("no")


def test_a_call_that_nobody_aborts_returns_or_raises():
    calls = AbortableCalls()
    assert calls.run("a", answer) == 7
    with pytest.raises(ValueError, match="no"):
        calls.run("a", fail)
    calls.abort("b")
    assert calls.run("a", answer) == 7


def test_an_abort_cancels_the_call_that_runs():
    calls, began, ends = AbortableCalls(), threading.Barrier(3), []

    async def wait(name):
        began.wait(10)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append(f"{name} is cancelled")
            raise

    threads = [
        threading.Thread(target=lambda name=name: ends.append(calls.run(name, lambda: wait(name)))) for name in "ab"
    ]
    for thread in threads:
        thread.start()
    began.wait(10)
    for name, thread in zip("ab", threads, strict=True):
        calls.abort(name)
        thread.join(10)
    assert ends == ["a is cancelled", None, "b is cancelled", None]


def test_an_abort_keeps_a_call_from_beginning_once():
    calls, begun = AbortableCalls(), []
    calls.abort("a")
    assert calls.run("a", lambda: begun.append("a")) is None and begun == []
    assert calls.run("a", answer) == 7
