"""AbortableCalls: coroutines that threads run to their end, and that another thread aborts by the id of the call."""

import asyncio
import collections
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

_T = TypeVar("_T")
_MAX_EARLY = 1024


class AbortableCalls:
    """The open calls of one process. Thread-safe."""

    def __init__(self) -> None:
        self._cancels: dict[str, Callable[[], object]] = {}
        # Aborted and not begun: these wait for a thread, or have ended already. Beyond _MAX_EARLY the oldest are
        # forgotten, and run if they do begin.
        self._early = collections.deque[str](maxlen=_MAX_EARLY)
        self._lock = threading.Lock()

    def run(self, call_id: str, make_call: Callable[[], Awaitable[_T]]) -> _T | None:
        """Run a coroutine in this thread, in an event loop of its own; returns its result, or None where the call was
        aborted, which cancels it or keeps it from beginning. Raises what it raises."""
        return asyncio.run(self._run(call_id, make_call))

    def abort(self, call_id: str) -> None:
        """Abort a call, which may not have begun."""
        with self._lock:
            cancel = self._cancels.get(call_id)
            if cancel is None:
                self._early.append(call_id)
            else:
                cancel()

    async def _run(self, call_id: str, make_call: Callable[[], Awaitable[_T]]) -> _T | None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        with self._lock:
            if call_id in self._early:
                self._early.remove(call_id)
                return None
            self._cancels[call_id] = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            return await make_call()
        except asyncio.CancelledError:
            return None
        finally:
            with self._lock:
                del self._cancels[call_id]
