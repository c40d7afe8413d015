"""Work that leaves the event loop: large inputs go to asyncio's shared threads, long waits to threads of their own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from routed_experts.server.errors import unavailable
from routed_experts.server.limits import INLINE_BYTES

_T = TypeVar("_T")


async def run_in_thread_if_large(num_bytes: int, work: Callable[[], _T]) -> _T:
    """Run `work`, in a thread if its input is larger than INLINE_BYTES."""
    return await asyncio.to_thread(work) if num_bytes > INLINE_BYTES else work()


class BoundedExecutor:
    """Own threads for work that may wait as long as requests run, so that it never exhausts the shared threads. Event
    loop only."""

    def __init__(self, max_workers: int) -> None:
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix="bounded")
        self._max_workers, self.num_running = max_workers, 0

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run `work`, to its end even if the caller is cancelled. Raises ApiError (503) when every worker is busy."""
        if self.num_running >= self._max_workers:
            text = f"{self._max_workers} calls of this kind are running; try again later"
            raise unavailable(text, code="too_many_requests")
        self.num_running += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        future.add_done_callback(self._release)
        return await asyncio.shield(future)

    def _release(self, future: asyncio.Future[_T]) -> None:
        self.num_running -= 1
        if not future.cancelled():
            future.exception()  # a caller that still waits raises it; without one asyncio would log it
