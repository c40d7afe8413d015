"""GenerationCall: one `generate` call, from its validated requests to the end of its sequences.

A caller in a thread iterates `outputs`; a caller in an event loop uses AsyncGeneration. Leaving early (an exception, a
closed iterator, a cancelled task) aborts what has not ended."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.io_struct import FinishReason, StrOut, TokenIDOut, TokenizedGenerateReqInput
from routed_experts.engine.loop.core import ABORTED
from routed_experts.engine.loop.engine_thread import EngineThread, OutputQueue, Submission
from routed_experts.engine.requests.output_queues import AsyncOutputQueue, LoopNotifier, ThreadOutputQueue
from routed_experts.engine.requests.sequence_state import SequenceState
from routed_experts.engine.requests.submit_batcher import SubmitBatcher
from routed_experts.engine.requests.tokenizer import Tokenizer


class GenerationCall:
    """The sequences of one call, in order: prompt x n + choice. `num_compiled` counts the programs that the engine has
    compiled since it was ready."""

    def __init__(
        self,
        requests: Sequence[TokenizedGenerateReqInput],
        thread: EngineThread,
        tokenizer: Tokenizer | None,
        *,
        logprobs_mode: str,
        capture: CaptureSpec | None = None,
        num_compiled: Callable[[], int] = lambda: 0,
    ) -> None:
        self.sequences = tuple(
            SequenceState(request, tokenizer, logprobs_mode=logprobs_mode, capture=capture, num_compiled=num_compiled)
            for request in requests
        )
        self._thread = thread
        self._index = {request.rid: index for index, request in enumerate(requests)}
        self._open = set(self._index)

    @property
    def is_open(self) -> bool:
        """Whether a sequence has not ended."""
        return bool(self._open)

    def outputs(self) -> Iterator[tuple[int, StrOut]]:
        """Submit the requests, then yield (index of the sequence, its output) until all have ended. Raises what refused
        the call, or the error that ended a sequence."""
        queue = ThreadOutputQueue()
        accepted = self._thread.submit(self.to_submission(queue))
        try:
            accepted.result()
            while self._open:
                for out in queue.steps.get():
                    yield self.process_output(out)
        finally:
            self.abort(queue)

    def to_submission(self, queue: OutputQueue) -> Submission:
        """The requests for the engine thread; submit them once."""
        detokenizers = {
            sequence.request.rid: sequence.stop_detokenizer
            for sequence in self.sequences
            if sequence.stop_detokenizer is not None
        }
        return Submission([sequence.request for sequence in self.sequences], queue, detokenizers)

    def process_output(self, out: TokenIDOut) -> tuple[int, StrOut]:
        """Add an output to its sequence; returns the index of the sequence, and the output with its text. Raises the
        error that ended the request."""
        index = self._index[out.rid]
        if out.finish_reason is not None:
            self._open.discard(out.rid)
        return index, self.sequences[index].update(out)

    def abort(self, queue: OutputQueue, reason: FinishReason = ABORTED) -> None:
        """End what has not ended; `queue` is the one that was submitted."""
        if self._open:
            self._thread.abort(sorted(self._open), queue, reason)


class AsyncGeneration:
    """A call of the running event loop: `submit`, then `outputs`, and `abort` at any time, from any task.

    A reader that falls behind by `max_backlog` outputs a request is aborted, so that unread outputs are bounded. Calls
    of one event loop share `notifier` and `batcher`; without a batcher the call is submitted by itself, at once."""

    def __init__(
        self,
        call: GenerationCall,
        thread: EngineThread,
        *,
        max_backlog: int,
        notifier: LoopNotifier | None = None,
        batcher: SubmitBatcher | None = None,
    ) -> None:
        self._call, self._thread, self._batcher = call, thread, batcher
        self._is_aborted = False
        self._accepted: asyncio.Future[None] | None = None  # once it is submitted
        notifier = notifier or LoopNotifier(asyncio.get_running_loop())
        self._queue = AsyncOutputQueue(notifier, max_waiting=max_backlog * len(call.sequences))

    @property
    def sequences(self) -> tuple[SequenceState, ...]:
        """The sequences so far, in order: prompt x n + choice."""
        return self._call.sequences

    @property
    def is_open(self) -> bool:
        """Whether a sequence has not ended."""
        return self._call.is_open

    async def submit(self) -> None:
        """Submit the requests, all or none. Raises QueueFullError, InvalidRequestError (an id in use) or
        EngineDeadError. Cancelled early, they are never accepted; cancelled later, `was_accepted` says whether they
        were."""
        submission = self._call.to_submission(self._queue)
        withdraw: Callable[[], object]
        if self._batcher is None:
            submitted = self._thread.submit(submission)
            self._accepted, withdraw = asyncio.wrap_future(submitted), submitted.cancel
        else:
            self._accepted = self._batcher.submit(submission)
            withdraw = functools.partial(self._batcher.withdraw, self._accepted)
        try:
            await asyncio.shield(self._accepted)
        except asyncio.CancelledError:
            withdraw()
            raise

    async def was_accepted(self) -> bool:
        """Whether the requests have been submitted and accepted; waits until that is known."""
        if self._accepted is None:
            return False
        await asyncio.wait([self._accepted])
        return not self._accepted.cancelled() and self._accepted.exception() is None

    async def outputs(self) -> AsyncIterator[tuple[int, StrOut]]:
        """Yield (index of the sequence, its output) until all have ended. Raises the error that ended a sequence."""
        while self._call.is_open:
            yield self._call.process_output(await self._queue.queue.get())

    async def run(self) -> None:
        """Submit the requests and wait until all have ended. Leaving early aborts. Raises as `submit` and `outputs`
        do."""
        try:
            await self.submit()
            async for _ in self.outputs():
                continue
        finally:
            self.abort()

    def abort(self, reason: FinishReason = ABORTED) -> None:
        """End what has not ended. Idempotent: the first reason counts."""
        if not self._is_aborted:
            self._is_aborted = True
            self._call.abort(self._queue, reason)
