"""EngineDoor: what a server needs of an engine beside `generate`: calls for its event loop, and how it is, from any thread.

Knows nothing of HTTP. Nothing here enters the engine thread but a call's requests: a probe is answered while a step is stuck."""

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from routed_experts.engine.call import Call
from routed_experts.engine.engine import Engine
from routed_experts.engine.open_call import OpenCall
from routed_experts.engine.placement_stats import PlacementStats
from routed_experts.engine.routing_wish import RoutingDefaults
from routed_experts.engine.sinks import EventMail
from routed_experts.engine.tokenizer import Tokenizer
from routed_experts.execution.placed_runner import PlacedRunner
from routed_experts.execution.split_runner import SplitRunner


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """Counts of one moment. `last_step_age_s`: seconds since a step ended, or since work came to an idle engine; 0 when idle."""

    running: int
    waiting: int
    accepted: int
    finished: Mapping[str, int]
    num_steps: int
    last_step_age_s: float
    free_pages: int
    cached_pages: int
    total_pages: int
    preemptions: int
    capture_host_bytes: int
    capture_rows: int
    capture_missing_rows: int
    weight_version: int
    resident_hits: Mapping[int, float]  # by MoE layer, where experts are shared out with the host
    resident_swaps: int
    deferred_slots: int  # whose experts came a layer late
    host_experts_s: float  # that threads of the host ran experts inside programs
    resident_failures: int  # exchanges of residents that failed; those that were there stayed
    placement: PlacementStats | None  # None: experts are not placed


class EngineDoor:
    """An engine as a server sees it. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._assembly = engine._assembly
        self._mail: EventMail | None = None  # of the event loop that opened the last call

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

    def admit(self, said: GenerateReqInput, *, default_max_tokens: int, routing: RoutingDefaults) -> list[TokenizedGenerateReqInput]:
        """Check and tokenise a call, from any thread. Raises InvalidRequestError and its kin."""
        return self.engine._door.admit(said, default_max_tokens=default_max_tokens, routing=routing)

    def open(self, requests: Sequence[TokenizedGenerateReqInput], *, max_backlog: int, interval_s: float = 0.0) -> OpenCall:
        """Make a call of the running event loop; nothing is handed over yet. `max_backlog`: news a request that may wait;
        `interval_s`: between two news of a stream at least. A small model makes a token a millisecond for every stream, and news of
        each would take from the steps the cores that they run on."""
        requests = [dataclasses.replace(request, stream_interval_s=interval_s) for request in requests]
        mode = self.engine.server_args.logprobs_mode
        call = Call(requests, self.tokenizer, single=False, logprobs_mode=mode, capture=self.capture)
        mail, events = self._mail, asyncio.get_running_loop()
        if mail is None or mail.events is not events:
            self._mail = mail = EventMail(events)
        return OpenCall(call, self.engine._loop, max_backlog=max_backlog, mail=mail)

    def snapshot(self) -> EngineSnapshot:
        """How the engine is, without asking its thread: counts may be a step apart from each other."""
        core = self._assembly.core
        allocator, running = core.scheduler.pages.allocator, len(core.scheduler.running)
        idle = core.ledger.num_live == 0
        split = core.runner if isinstance(core.runner, SplitRunner) else None
        host = None if split is None else split.host_counts()
        return EngineSnapshot(
            running=running,
            waiting=len(core.scheduler.waiting),
            accepted=core.ledger.accepted,
            finished=MappingProxyType(dict(core.ledger.finished)),
            num_steps=core.num_steps,
            last_step_age_s=0.0 if idle else time.monotonic() - core.last_progress,
            free_pages=allocator.num_free,
            cached_pages=core.scheduler.pages.cache.num_evictable,
            total_pages=allocator.num_total,
            preemptions=core.scheduler.num_retracted,
            capture_host_bytes=core.capturer.host_bytes(),
            capture_rows=core.num_rows,
            capture_missing_rows=core.num_missing_rows,
            weight_version=core.runner.weight_version,
            resident_hits=MappingProxyType({} if host is None else dict(host.hits)),
            deferred_slots=0 if host is None else host.deferred,
            host_experts_s=0.0 if host is None else host.busy_s,
            resident_swaps=0 if split is None else split.num_swapped,
            resident_failures=0 if split is None else split.num_failed,
            placement=PlacementStats.of(self._assembly, core.runner) if isinstance(core.runner, PlacedRunner) else None,
        )

    def wait(self) -> BaseException | None:
        """Wait until the engine's thread has ended; the exception that ended it, or None after a shutdown."""
        loop = self.engine._loop
        loop._thread.join()
        return loop._cause
