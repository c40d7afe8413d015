"""AsyncGeneration: a call whose news an event loop takes, step by step. Knows nothing of HTTP.

First `accepted`, which raises what a full queue or an id in use raise; then `news`; and `close` at any time, from any
task, which aborts what is still running. A reader that falls behind is aborted: news never piles up without a bound."""

import asyncio
from collections.abc import AsyncIterator

from routed_experts.core.io_struct import BatchStrOut, FinishReason
from routed_experts.engine.loop.core import ABORTED
from routed_experts.engine.loop.engine_thread import EngineThread
from routed_experts.engine.requests.generation import GenerationCall
from routed_experts.engine.requests.output_queues import AsyncOutputQueue, LoopNotifier
from routed_experts.engine.requests.sequence_state import SequenceState
from routed_experts.engine.requests.submit_batcher import SubmitBatcher


class AsyncGeneration:
    """One call of one event loop. `max_backlog`: news a request that may wait for the reader; `mail`, `arrivals`:
    shared with other calls of the event loop; without `arrivals` it goes to the engine by itself, at once."""

    def __init__(
        self,
        call: GenerationCall,
        loop: EngineThread,
        *,
        max_backlog: int,
        mail: LoopNotifier | None = None,
        arrivals: SubmitBatcher | None = None,
    ) -> None:
        self._call, self._loop, self._arrivals = call, loop, arrivals
        self._is_closed = False
        self._sink = AsyncOutputQueue(
            mail or LoopNotifier(asyncio.get_running_loop()), max_waiting=max_backlog * len(call.answers)
        )

    @property
    def answers(self) -> tuple[SequenceState, ...]:
        """What each sequence has told so far, in order: prompt x n + choice."""
        return self._call.answers

    @property
    def is_open(self) -> bool:
        """Is there news to come."""
        return self._call.is_open

    async def accepted(self) -> None:
        """Hand the requests over, all or none. Raises QueueFullError, InvalidRequestError (an id in use) or
        EngineDeadError."""
        submission = self._call.submission(self._sink)
        if self._arrivals is None:
            await asyncio.wrap_future(self._loop.submit(submission))
        else:
            await self._arrivals.submit(submission)

    async def news(self) -> AsyncIterator[tuple[int, BatchStrOut]]:
        """Yield (index of the sequence, its news) until all have ended. Raises the error that ended one of them."""
        while self._call.is_open:
            out = await self._sink.coming.get()
            yield self._call.take(out)

    def close(self, reason: FinishReason = ABORTED) -> None:
        """End what has not ended. Idempotent: the first reason counts."""
        if not self._is_closed:
            self._is_closed = True
            self._call.abort_open(self._loop, self._sink, reason)
