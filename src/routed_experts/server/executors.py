"""Which work leaves the event loop, and where it goes: large pieces to the shared threads, long waits to threads of
their own. Knows nothing of what is done."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from routed_experts.server.errors import busy
from routed_experts.server.limits import INLINE_BYTES

_T = TypeVar("_T")


async def run_in_thread_if_large(num_bytes: int, work: Callable[[], _T]) -> _T:
    """Do `work`, in a thread if what it goes over is large."""
    return await asyncio.to_thread(work) if num_bytes > INLINE_BYTES else work()


class BoundedExecutor:
    """Threads for work that may wait as long as requests run, so that it keeps the shared ones from nobody. Event loop
    only."""

    def __init__(self, max_workers: int) -> None:
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix="waiting")
        self._num_seats, self.num_taken = max_workers, 0

    async def wait(self, work: Callable[[], _T]) -> _T:
        """Do `work`, to its end even if nobody waits for it any more. Raises ApiError (503) when every seat is
        taken."""
        if self.num_taken >= self._num_seats:
            raise busy(f"{self._num_seats} calls of this kind are under way; try again later", code="too_many_requests")
        self.num_taken += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        future.add_done_callback(self._left)
        return await asyncio.shield(future)

    def _left(self, future: asyncio.Future[_T]) -> None:
        self.num_taken -= 1
