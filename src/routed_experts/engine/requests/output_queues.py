"""Output queues: how the outputs of a call leave the engine thread, for a caller in a thread or in an event loop.

A queue buffers outputs and delivers them once a step: waking another thread costs more than most outputs, and
lets that thread take the interpreter from the step. `put` and `flush` run on the engine thread, reading does not."""

import asyncio
import queue
from collections.abc import Sequence

from routed_experts.core.io_struct import TokenIDOut


class ThreadOutputQueue:
    """For a caller that waits in its own thread: `steps` holds the outputs of one step at a time."""

    def __init__(self) -> None:
        self.steps: queue.SimpleQueue[tuple[TokenIDOut, ...]] = queue.SimpleQueue()
        self._step: list[TokenIDOut] = []

    def put(self, out: TokenIDOut) -> bool:
        """Buffer an output until the next flush."""
        self._step.append(out)
        return True

    def flush(self) -> None:
        """Deliver the outputs of the step."""
        if self._step:
            self.steps.put(tuple(self._step))
            self._step.clear()


class LoopNotifier:
    """Collects the outputs for all calls of one event loop, with one wake-up a step."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self.event_loop = event_loop
        self._step: list[tuple[asyncio.Queue[TokenIDOut], TokenIDOut]] = []

    def put(self, receiver: "asyncio.Queue[TokenIDOut]", out: TokenIDOut) -> bool:
        """Buffer an output of a call; False if the event loop has been closed."""
        self._step.append((receiver, out))
        return not self.event_loop.is_closed()

    def flush(self) -> None:
        """Deliver the outputs of the step; the first flush delivers for all calls."""
        if not self._step:
            return
        step, self._step = self._step, []
        try:
            self.event_loop.call_soon_threadsafe(_deliver, step)
        except RuntimeError:  # the event loop has been closed meanwhile, and its readers with it
            return


class AsyncOutputQueue:
    """Queue of a caller in an event loop. A reader with more than `max_waiting` unread outputs counts as
    disconnected."""

    def __init__(self, notifier: LoopNotifier, *, max_waiting: int) -> None:
        self.queue: asyncio.Queue[TokenIDOut] = asyncio.Queue()
        self._notifier, self._max_waiting = notifier, max_waiting

    def put(self, out: TokenIDOut) -> bool:
        """Buffer an output with those of the event loop."""
        return self._notifier.put(self.queue, out) and self.queue.qsize() < self._max_waiting

    def flush(self) -> None:
        """Deliver the outputs of the event loop."""
        self._notifier.flush()


def _deliver(step: "Sequence[tuple[asyncio.Queue[TokenIDOut], TokenIDOut]]") -> None:
    """Put (on the event loop) each output into the queue of its call."""
    for receiver, out in step:
        receiver.put_nowait(out)
