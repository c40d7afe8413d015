"""AsyncEngine: what a server needs of an engine beside `generate`: calls for its event loop, and what it serves, from
any thread.

Knows nothing of HTTP. Nothing here enters the engine thread but a call's requests: a probe is answered while a step is
stuck."""

import asyncio
import dataclasses
from collections.abc import Sequence

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from routed_experts.engine.engine import Engine
from routed_experts.engine.requests.async_generation import AsyncGeneration
from routed_experts.engine.requests.generation import GenerationCall
from routed_experts.engine.requests.output_queues import LoopNotifier
from routed_experts.engine.requests.routing_options import RoutingDefaults
from routed_experts.engine.requests.submit_batcher import SubmitBatcher
from routed_experts.engine.requests.tokenizer import Tokenizer


class AsyncEngine:
    """An engine as a server sees it. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._assembly = engine._assembly
        self._mail: LoopNotifier | None = None  # both of the event loop that opened the last call
        self._arrivals: SubmitBatcher | None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with skip_tokenizer_init."""
        return self.engine.tokenizer

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and what is generated may have together."""
        return self._assembly.context_length

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._assembly.vocab_size

    @property
    def capture(self) -> CaptureSpec | None:
        """The routing that is recorded; None when none is."""
        return self._assembly.capture

    @property
    def kv_tokens(self) -> int:
        """KV slots that requests can fill."""
        return (self._assembly.plan.pool.num_pages - 1) * self.engine.server_args.page_size

    def admit(
        self, said: GenerateReqInput, *, default_max_tokens: int, routing: RoutingDefaults
    ) -> list[TokenizedGenerateReqInput]:
        """Check and tokenise a call, from any thread. Raises InvalidRequestError and its kin."""
        return self.engine._door.admit(said, default_max_tokens=default_max_tokens, routing=routing)

    def open(
        self, requests: Sequence[TokenizedGenerateReqInput], *, max_backlog: int, interval_s: float = 0.0
    ) -> AsyncGeneration:
        """Make a call of the running event loop; nothing is handed over yet. `max_backlog`: news a request that may
        wait; `interval_s`: between two news of a stream at least. A small model makes a token a millisecond for every
        stream, and news of each would take from the steps the cores that they run on."""
        requests = [dataclasses.replace(request, stream_interval_s=interval_s) for request in requests]
        mode = self.engine.server_args.logprobs_mode
        call = GenerationCall(requests, self.tokenizer, single=False, logprobs_mode=mode, capture=self.capture)
        mail, arrivals, events, loop = self._mail, self._arrivals, asyncio.get_running_loop(), self.engine._loop
        if mail is None or arrivals is None or mail.events is not events:
            self._mail, self._arrivals = mail, arrivals = LoopNotifier(events), SubmitBatcher(events, loop)
        return AsyncGeneration(call, loop, max_backlog=max_backlog, mail=mail, arrivals=arrivals)

    def let_in(self) -> None:
        """Let calls in that wait for company: before a command that is about all who have called. Event loop only."""
        if self._arrivals is not None:
            self._arrivals.hand_over()

    def wait(self) -> BaseException | None:
        """Wait until the engine's thread has ended; the exception that ended it, or None after a shutdown."""
        loop = self.engine._loop
        loop._thread.join()
        return loop._cause
