"""Service: the engine's life as HTTP sees it: starting, serving, draining, dead; and what every route shares. Knows no
route.

Probes read what the engine publishes and never enter its thread. Event loop only, but for `phase`, which the loading
thread calls."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import EngineDeadError, InvalidRequestError
from routed_experts.core.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.engine.requests.routing_options import RoutingDefaults
from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.models.loading.model_source import model_name
from routed_experts.server.admin.integrity import IntegrityWatch
from routed_experts.server.admin.metrics import Metrics
from routed_experts.server.errors import ApiError, busy
from routed_experts.server.executors import BoundedExecutor, run_in_thread_if_large
from routed_experts.server.limits import MAX_SCORING_CALLS, MAX_WAITING_PAUSES, ServerSettings
from routed_experts.server.routing.stats import CachedReader
from routed_experts.server.routing.store import RoutingStore

logger = logging.getLogger("routed_experts.server")
_SAME: Mapping[str, str] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What a probe is told."""

    state: str
    phase: str
    last_step_age_s: float
    running: int
    waiting: int
    broken: tuple[str, ...] = ()  # names of invariants


class ServerState:
    """Shared by all routes of one server."""

    def __init__(
        self, settings: ServerSettings, *, model_path: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.model_name = settings.served_model_name or model_name(model_path)
        self.created = int(time.time())
        self.metrics = Metrics(compat=settings.metrics_compat, each_expert=settings.expert_metrics)
        self.store = RoutingStore(
            max_bytes=settings.routing_store_bytes,
            ttl_s=settings.routing_store_ttl,
            clock=clock,
            later=lambda seconds, call: asyncio.get_running_loop().call_later(seconds, call),
        )
        self.pause_executor, self.scoring_room = BoundedExecutor(MAX_WAITING_PAUSES), BoundedExecutor(MAX_SCORING_CALLS)
        self.stats = CachedReader(lambda: self.door.engine.routing_stats())
        self.resets = CachedReader(lambda: self.door.engine.reset_routing_stats())
        self.integrity = IntegrityWatch(clock, self.metrics.violation)
        self._door: AsyncEngine | None = None
        self._phase, self._is_draining = "config", False
        self._death: BaseException | None = None
        self._probe: asyncio.Task[None] | None = None
        self._was_stalled = False

    def phase(self, name: str) -> None:
        """Note which phase of start-up runs."""
        self._phase = name

    def serve(self, door: AsyncEngine) -> None:
        """The engine is ready."""
        self._door, self._phase = door, "ready"
        self.metrics.watch(door, self.store)

    def drain(self) -> None:
        """Take nothing new; what runs may finish."""
        self._is_draining = True

    def die(self, cause: BaseException | None) -> None:
        """The engine's thread has ended."""
        self._death = cause or EngineDeadError("the engine was shut down")

    @property
    def door(self) -> AsyncEngine:
        """The engine, for what does not generate. Raises 503 while it starts."""
        if self._door is None:
            raise busy(f"the model is being loaded ({self._phase}); try again soon", code="starting")
        return self._door

    @property
    def accepting_engine(self) -> AsyncEngine:
        """The engine, for new requests. Raises 503 while it starts, drains or after its end."""
        if self._is_draining:
            raise busy("the server is shutting down; send the request to another", code="draining")
        if self._death is not None:
            raise busy("the engine has ended; the server restarts", code="engine_dead")
        return self.door

    def on_idle(self) -> None:
        """Nothing is being answered: a good moment to look at the engine's invariants."""
        if self._door is not None and self._death is None and not self._is_draining:
            self.integrity.look(self._door)

    def tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer; a request that needs one where there is none names `param`."""
        if self.door.tokenizer is None:
            raise InvalidRequestError(f"{param} is text, but this server has no tokenizer; send token ids", param=param)
        return self.door.tokenizer

    def check_model(self, name: str | None) -> None:
        """Raise 404 for a model that is not served; none named is the one that is."""
        if name not in (None, "", self.model_name):
            text = f"model {short_repr(name)} is not served here; this server has {self.model_name!r}"
            raise ApiError(text, status=404, code="model_not_found", param="model")

    def health(self) -> Health:
        """The state now."""
        if self._door is None:
            return Health(state="starting", phase=self._phase, last_step_age_s=0.0, running=0, waiting=0)
        seen = self._door.engine.stats()
        state = "paused" if self._door.engine.paused or self._door.engine.released else "serving"
        if state == "serving" and seen.last_step_age_s > self.settings.stall_timeout:
            state = "stalled"
        if state == "stalled" and not self._was_stalled:
            self.metrics.stalled()
        self._was_stalled = state == "stalled"
        state = "degraded" if self.integrity.broken else state
        state = "dead" if self._death is not None else "draining" if self._is_draining else state
        return Health(
            state=state,
            phase=self._phase,
            last_step_age_s=seen.last_step_age_s,
            running=seen.running,
            waiting=seen.waiting,
            broken=tuple(sorted(self.integrity.broken)),
        )

    async def admit(
        self,
        said: GenerateReqInput,
        *,
        default_max_tokens: int,
        routing: RoutingDefaults,
        num_bytes: int,
        names: Mapping[str, str] = _SAME,
    ) -> Sequence[TokenizedGenerateReqInput]:
        """Check and tokenise; long text off the event loop. `names`: what this surface calls parameters of the engine,
        for errors."""
        door = self.accepting_engine
        try:
            return await run_in_thread_if_large(
                num_bytes,
                lambda: door.process(
                    said,
                    default_max_tokens=default_max_tokens,
                    routing=routing,
                    stream_interval_s=self.settings.stream_interval,
                ),
            )
        except InvalidRequestError as error:
            field = names.get(error.param or "")
            if field is None:
                raise
            raise error.renamed(field) from error

    async def probe(self, generate: Callable[[], "asyncio.Task[None]"]) -> None:
        """Run one token through the engine; callers that come meanwhile share the answer."""
        if self._probe is None or self._probe.done():
            self._probe = generate()
        await asyncio.shield(self._probe)
