"""AsyncEngine: an engine for the event loop of a server: its calls, and what is served.

Only the requests of a call enter the engine thread. Everything else answers from any thread, also while a step is
stuck."""

import asyncio
from collections.abc import Sequence

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from routed_experts.engine.engine import Engine
from routed_experts.engine.requests.generation import AsyncGeneration
from routed_experts.engine.requests.output_queues import LoopNotifier
from routed_experts.engine.requests.routing_options import RoutingDefaults
from routed_experts.engine.requests.submit_batcher import SubmitBatcher
from routed_experts.engine.requests.tokenizer import Tokenizer


class AsyncEngine:
    """An engine for an event loop. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._notifier: LoopNotifier | None = None  # both of the event loop that made the last call
        self._batcher: SubmitBatcher | None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with skip_tokenizer_init."""
        return self.engine.tokenizer

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its output may have together."""
        return self.engine.components.context_length

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.engine.components.vocab_size

    @property
    def capture(self) -> CaptureSpec | None:
        """The routing that is recorded; None when none is."""
        return self.engine.components.capture

    @property
    def kv_tokens(self) -> int:
        """KV slots that requests can fill."""
        return self.engine.components.kv_tokens

    def check_num_prompts(self, param: str, count: int) -> None:
        """Raise InvalidRequestError, naming `param`, for more prompts than a call may have."""
        self.engine.input_processor.check_count(param, count)

    def process(
        self,
        request: GenerateReqInput,
        *,
        default_max_tokens: int,
        routing: RoutingDefaults,
        stream_interval_s: float = 0.0,
    ) -> list[TokenizedGenerateReqInput]:
        """Validate and tokenise a call, from any thread. `stream_interval_s`: least time between two outputs of a
        stream; a small model makes a token a millisecond for every stream, and an output for each would take the cores
        from its steps. Raises InvalidRequestError or a subclass."""
        self.engine.thread.check_not_forked()
        return self.engine.input_processor.process(
            request, default_max_tokens=default_max_tokens, routing=routing, stream_interval_s=stream_interval_s
        )

    def generate(self, requests: Sequence[TokenizedGenerateReqInput], *, max_backlog: int) -> AsyncGeneration:
        """Make a call of the running event loop; `AsyncGeneration.submit` submits it. `max_backlog`: outputs a request
        that may wait for the reader."""
        event_loop = asyncio.get_running_loop()
        if self._notifier is None or self._batcher is None or self._notifier.event_loop is not event_loop:
            self._notifier = LoopNotifier(event_loop)
            self._batcher = SubmitBatcher(event_loop, self.engine.thread)
        return AsyncGeneration(
            self.engine.new_call(requests),
            self.engine.thread,
            max_backlog=max_backlog,
            notifier=self._notifier,
            batcher=self._batcher,
        )

    def flush_submissions(self) -> None:
        """Submit the calls that wait for others: before a command that affects every submitted call, such as an abort.
        Event loop only."""
        if self._batcher is not None:
            self._batcher.flush()

    def abort_all(self, message: str) -> None:
        """End all requests with what they have, from any thread; `message` says why. Waits for the end of the step.
        Raises EngineDeadError."""
        core = self.engine.components.core
        self.engine.thread.run_between_steps(lambda: core.abort_all(message))

    def join(self) -> BaseException | None:
        """Wait until the engine thread has ended; returns the exception that ended it, or None after a shutdown."""
        return self.engine.thread.join()
