"""State that all routes of one server share: settings, the engine and its health, metrics, kept rows.

A server starts, serves, drains, or has failed. Probes read what the engine publishes and never wait for its thread.
Event loop only, except `set_phase`, which the loading thread calls."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import EngineDeadError, InvalidRequestError
from routed_experts.core.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from routed_experts.core.sampling_params import may_compile
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.engine.requests.routing_options import RoutingDefaults
from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.models.loading.model_source import full_path, model_name
from routed_experts.parsing import ResponseFormat, resolve_format
from routed_experts.server.cached_reader import CachedReader
from routed_experts.server.errors import ApiError, unavailable
from routed_experts.server.executors import BoundedExecutor, run_in_thread_if_large
from routed_experts.server.integrity import IntegrityWatch
from routed_experts.server.limits import INLINE_BYTES, MAX_SCORING_CALLS, MAX_WAITING_PAUSES, ServerSettings
from routed_experts.server.metrics.metrics import Metrics
from routed_experts.server.routing_store import RoutingStore, StoreEntry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The answer to a probe."""

    state: str
    phase: str  # of start-up
    last_step_age_s: float
    running: int
    waiting: int
    broken: tuple[str, ...] = ()  # names of violated invariants


class ServerState:
    """Shared by all routes of one server.

    `model_path`, `tokenizer_path`: folders, in full, or ids of repositories; clients that
    count tokens load the tokenizer from there. `version`: of this package."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        model_path: str,
        tokenizer_path: str | None = None,
        version: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.version = settings, version
        self.model_path, self.tokenizer_path = full_path(model_path), full_path(tokenizer_path or model_path)
        self.model_name = settings.served_model_name or model_name(model_path)
        self.created = int(time.time())
        self.metrics = Metrics(
            compat=settings.metrics_compat, each_expert=settings.expert_metrics, model_name=self.model_name
        )
        self.store = RoutingStore(
            max_bytes=settings.routing_store_bytes,
            ttl_s=settings.routing_store_ttl,
            clock=clock,
            call_later=lambda seconds, call: asyncio.get_running_loop().call_later(seconds, call),
        )
        self.on_rows_reserved: Callable[[StoreEntry], Awaitable[None]] | None = None  # of a fleet
        self.pause_executor = BoundedExecutor(MAX_WAITING_PAUSES)
        self.score_executor = BoundedExecutor(MAX_SCORING_CALLS)
        self.routing_stats = CachedReader(lambda: self.engine.engine.routing_stats())
        self.routing_resets = CachedReader(lambda: self.engine.engine.reset_routing_stats())
        self.integrity = IntegrityWatch(clock, self.metrics.violation)
        self._response_format = ResponseFormat()
        self._engine: AsyncEngine | None = None
        self._phase, self._is_draining = "config", False
        self._failure: BaseException | None = None
        self._probe: asyncio.Task[None] | None = None
        self._was_stalled = False
        self._background = set[asyncio.Task[None]]()

    async def reserve_rows(self, entry: StoreEntry) -> None:
        """Tell the fleet of a new entry of the store, if this server is part of one. Before the answer that names the
        rows is sent."""
        if self.on_rows_reserved is not None:
            await self.on_rows_reserved(entry)

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what no request waits for. Event loop only."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def set_phase(self, name: str) -> None:
        """Note the phase of start-up."""
        self._phase = name

    def set_ready(self, engine: AsyncEngine) -> None:
        """Start to serve."""
        self._engine, self._phase = engine, "ready"
        self._response_format = resolve_format(
            None if engine.tokenizer is None else engine.tokenizer.tool_template,
            tool_call_parser=self.settings.tool_call_parser,
            reasoning_parser=self.settings.reasoning_parser,
        )
        self.metrics.watch(engine, self.store)

    def set_draining(self) -> None:
        """Refuse new requests; running ones may finish."""
        self._is_draining = True

    def set_failed(self, cause: BaseException | None) -> None:
        """Note that the engine thread has ended."""
        self._failure = cause or EngineDeadError("the engine was shut down")

    @property
    def engine(self) -> AsyncEngine:
        """The engine, for everything but new requests. Raises ApiError (503) during start-up."""
        if self._engine is None:
            raise unavailable(f"the model is being loaded ({self._phase}); try again soon", code="starting")
        return self._engine

    @property
    def accepting_engine(self) -> AsyncEngine:
        """The engine, for new requests. Raises ApiError (503) unless the server serves."""
        if self._is_draining:
            raise unavailable("the server is shutting down; send the request to another", code="draining")
        if self._failure is not None:
            code = self._failure.code if isinstance(self._failure, EngineDeadError) else "engine_dead"
            raise unavailable("the engine has ended; the server restarts", code=code)
        return self.engine

    def on_idle(self) -> None:
        """Check the engine's invariants: no request is in progress."""
        if self._engine is not None and self._failure is None and not self._is_draining:
            self.integrity.check(self._engine)

    def tokenizer(self, param: str) -> Tokenizer:
        """Return the tokenizer. Raises InvalidRequestError for `param` on a server without one."""
        if self.engine.tokenizer is None:
            raise InvalidRequestError(f"{param} is text, but this server has no tokenizer; send token ids", param=param)
        return self.engine.tokenizer

    @property
    def response_format(self) -> ResponseFormat:
        """How reasoning and tool calls stand in generated text."""
        return self._response_format

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) for another model than the served one; None and "" mean the served one."""
        if name not in (None, "", self.model_name):
            text = f"model {short_repr(name)} is not served here; this server has {self.model_name!r}"
            raise ApiError(text, status=404, code="model_not_found", param="model")

    @property
    def holds_requests(self) -> bool:
        """Whether new requests wait for the end of a pause, or for memory that was released."""
        return self._engine is not None and bool(self._engine.engine.paused or self._engine.engine.released)

    def health(self) -> Health:
        """Return the present state."""
        if self._engine is None:
            return Health(state="starting", phase=self._phase, last_step_age_s=0.0, running=0, waiting=0)
        stats = self._engine.engine.stats()
        state = "paused" if self.holds_requests else "serving"
        if state == "serving" and stats.last_step_age_s > self.settings.stall_timeout:
            state = "stalled"
        if state == "stalled" and not self._was_stalled:
            self.metrics.stalled()
        self._was_stalled = state == "stalled"
        state = "degraded" if self.integrity.broken else state
        state = "dead" if self._failure is not None else "draining" if self._is_draining else state
        return Health(
            state=state,
            phase=self._phase,
            last_step_age_s=stats.last_step_age_s,
            running=stats.running,
            waiting=stats.waiting,
            broken=tuple(sorted(self.integrity.broken)),
        )

    async def process(
        self, inputs: GenerateReqInput, *, default_max_tokens: int, routing: RoutingDefaults, num_bytes: int
    ) -> Sequence[TokenizedGenerateReqInput]:
        """Validate and tokenise a call; one of `num_bytes` above INLINE_BYTES, or with something to compile, in a
        thread."""
        engine = self.accepting_engine
        return await run_in_thread_if_large(
            INLINE_BYTES + 1 if may_compile(inputs.sampling_params, inputs.token_ids_logprob) else num_bytes,
            lambda: engine.process(
                inputs,
                default_max_tokens=default_max_tokens,
                routing=routing,
                stream_interval_s=self.settings.stream_interval,
            ),
        )

    async def run_probe(self, start: Callable[[], "asyncio.Task[None]"]) -> None:
        """Run one token through the engine; concurrent callers share one run, which ends without them, too. Raises what
        the run raises."""
        if self._probe is None or self._probe.done():
            self._probe = start()
        await asyncio.shield(self._probe)
