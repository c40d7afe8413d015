"""Call: one `generate` from the caller's side, waiting in its own thread or event loop. Knows the loop only by its
doors.

Leaving early (an exception, a closed iterator, a cancelled task) aborts what is still running."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Sequence

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.io_struct import BatchStrOut, FinishReason, TokenIDOut, TokenizedGenerateReqInput
from routed_experts.engine.loop.core import ABORTED
from routed_experts.engine.loop.engine_thread import EngineThread, Submission
from routed_experts.engine.loop.request_table import StopCheck
from routed_experts.engine.requests.output_queues import AsyncOutputQueue, LoopNotifier, OutputQueue, ThreadOutputQueue
from routed_experts.engine.requests.sequence_state import SequenceState, detokenizer_of
from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.scheduling.schedule_batch import Req


class GenerationCall:
    """The answers of one call's requests, by request id, in order."""

    def __init__(
        self,
        requests: Sequence[TokenizedGenerateReqInput],
        tokenizer: Tokenizer | None,
        *,
        single: bool,
        logprobs_mode: str,
        capture: CaptureSpec | None = None,
    ) -> None:
        self._tokenizer, self._single = tokenizer, single
        self._index = {request.rid: index for index, request in enumerate(requests)}
        self._answers = {
            request.rid: SequenceState(request, tokenizer, logprobs_mode=logprobs_mode, capture=capture)
            for request in requests
        }
        self._open = {request.rid for request in requests}

    def run(self, loop: EngineThread) -> dict[str, object] | list[dict[str, object]]:
        """Wait for all answers."""
        for _ in self.stream(loop):
            pass
        return self.result()

    def stream(self, loop: EngineThread) -> Iterator[dict[str, object]]:
        """Yield each answer as it grows, cumulative; `index` tells which where there are several."""
        sink = ThreadOutputQueue()
        accepted = loop.submit(self.submission(sink))
        try:
            accepted.result()
            while self._open:
                for out in sink.coming.get():
                    yield self._said(*self.take(out))
        finally:
            self.abort_open(loop, sink)

    async def run_async(self, loop: EngineThread) -> dict[str, object] | list[dict[str, object]]:
        """Wait for all answers without blocking the event loop."""
        async for _ in self.stream_async(loop):
            pass
        return self.result()

    async def stream_async(self, loop: EngineThread) -> AsyncIterator[dict[str, object]]:
        """`stream` for an event loop."""
        sink = AsyncOutputQueue(LoopNotifier(asyncio.get_running_loop()), max_waiting=sys.maxsize)
        accepted = loop.submit(self.submission(sink))
        try:
            await asyncio.wrap_future(accepted)
            while self._open:
                yield self._said(*self.take(await sink.coming.get()))
        finally:
            self.abort_open(loop, sink)

    def result(self) -> dict[str, object] | list[dict[str, object]]:
        """The answers: one dict for one prompt and n = 1, else a list in order."""
        results = [answer.to_dict() for answer in self._answers.values()]
        return results[0] if self._single else results

    @property
    def answers(self) -> tuple[SequenceState, ...]:
        """The answers so far, in order."""
        return tuple(self._answers.values())

    @property
    def is_open(self) -> bool:
        """Has one of the requests not ended."""
        return bool(self._open)

    def submission(self, sink: OutputQueue) -> Submission:
        """The requests, to be handed over once."""
        reqs = [Req(answer.request) for answer in self._answers.values()]
        return Submission(
            reqs, {req.rid: self._stop_check(req.source) for req in reqs if req.source.sampling.stop}, sink
        )

    def _stop_check(self, request: TokenizedGenerateReqInput) -> StopCheck:
        """Finds stop strings on the engine thread, with a detokenizer of its own; the answer's finds the same ones."""
        assert self._tokenizer is not None, "the door refuses stop strings without a tokenizer"
        text = detokenizer_of(request, self._tokenizer)

        def check(token: int) -> str | None:
            text.push([token])
            return text.stopped

        return check

    def take(self, out: TokenIDOut) -> tuple[int, BatchStrOut]:
        """Take in news: which request it is of, and its text. Raises the error that ended the request."""
        if out.finish_reason is not None:
            self._open.discard(out.rid)
        return self._index[out.rid], self._answers[out.rid].add(out)

    def abort_open(self, loop: EngineThread, sink: OutputQueue, reason: FinishReason = ABORTED) -> None:
        """Abort what has not ended; `sink` is the one that was submitted."""
        loop.abort(sorted(self._open), sink, reason)

    def _said(self, index: int, news: BatchStrOut) -> dict[str, object]:
        answer = self._answers[news.out.rid]
        said = answer.to_dict() if answer.request.stream else {}
        return said if self._single else {**said, "index": index}
