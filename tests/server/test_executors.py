"""Threads of a kind of calls: what is left of a call whose caller has gone."""

import asyncio
import gc
import threading

from routed_experts.server.executors import BoundedExecutor


def test_the_error_of_a_call_without_a_caller_is_not_logged():
    reports, began, leave = [], threading.Event(), threading.Event()

    def work():
        began.set()
        leave.wait(30)
        raise ValueError

    async def run():
        loop, executor = asyncio.get_running_loop(), BoundedExecutor(1)
        loop.set_exception_handler(lambda _, context: reports.append(context))
        call = asyncio.create_task(executor.run(work))
        await asyncio.to_thread(began.wait, 30)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        leave.set()
        while executor.num_running:
            await asyncio.sleep(0)
        gc.collect()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert not reports
