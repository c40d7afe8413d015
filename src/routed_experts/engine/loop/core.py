"""EngineCore: the step loop without a thread. Ties scheduler, runner and capturer; knows no text but stop strings.

    schedule n+1 -> dispatch n+1 -> read n -> file its rows -> commit n -> gather rows of the ended -> release their
    pages
so that all host work of step n happens while the device runs step n+1. Engine thread only."""

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Int

from routed_experts.capture.routed_experts_capturer import RoutedExpertsCapturer
from routed_experts.core.errors import QueueFullError, RoutedExpertsError, RoutingIncompleteError
from routed_experts.core.integrity import Violation
from routed_experts.core.io_struct import BatchTokenIDOut, FinishReason, TokenIDOut
from routed_experts.core.model_worker_batch import ModelWorkerBatch
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.engine.loop.request_table import RequestTable, StopCheck, check_outcomes
from routed_experts.engine.loop.rerouting_stats import ReroutingStats
from routed_experts.execution.model_runner import ModelRunner, PendingStep
from routed_experts.scheduling.schedule_batch import Req, ReqState
from routed_experts.scheduling.scheduler import Scheduler

ABORTED = FinishReason(type="abort", message="aborted by the caller")
AfterStep = Callable[[float], None]  # called with the seconds since the step before, or since there was work
NO_STOPS: Mapping[str, StopCheck] = MappingProxyType({})


class PauseMode(enum.Enum):
    """How a pause treats what is running: it finishes, goes back to the queue, stays where it is, or has been ended."""

    WAIT = "wait"
    RETRACT = "retract"
    IN_PLACE = "in_place"
    ABORT = "abort"


class EngineCore:
    """The loop's state: the live requests and the step in flight."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        capturer: RoutedExpertsCapturer,
        *,
        after_step: AfterStep | None = None,
        departures: ReroutingStats | None = None,
    ) -> None:
        self.scheduler, self.runner, self.capturer, self._after_step = scheduler, runner, capturer, after_step
        self.departures = departures  # None: no capacities lead requests away from their experts
        self.ledger = RequestTable()
        self.num_steps = self.num_rows = self.num_missing_rows = 0  # rows filed; requests that lacked one
        self.last_progress = time.monotonic()  # when a step ended, or work came to an idle core
        self.hold: PauseMode | None = None  # set by engine/loop/pausing.py
        self.released = frozenset[str]()  # memory that was given up: engine/control/memory_control.py
        self._pending: PendingStep | None = None
        self._ended: list[TokenIDOut] = []  # news of requests that ended between steps

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or is in flight, and nothing is left to tell."""
        return self.ledger.num_live == 0 and self._pending is None and not self._ended

    def add(self, reqs: Sequence[Req], stops: Mapping[str, StopCheck] = NO_STOPS) -> None:
        """Accept the requests of one call, all or none; QueueFullError if they do not fit."""
        try:
            self.scheduler.add(reqs)
        except QueueFullError:
            self.ledger.reject(len(reqs))
            raise
        if self.ledger.num_live == 0:
            self.last_progress = time.monotonic()
        for req in reqs:
            self.ledger.enter(req, stops.get(req.rid))

    def abort(self, rid: str, reason: FinishReason = ABORTED) -> bool:
        """End a live request with what it has; its news leaves with the next step. False if there is no such
        request."""
        req = self.ledger.find(rid)
        if req is None:
            return False
        req.finish(reason)
        self._ended.append(self._news(req))
        _forget_changed_pages(self.scheduler, self.capturer)
        return True

    def step(self) -> BatchTokenIDOut:
        """Dispatch the next step, then finish the one before it."""
        batch = self._schedule()
        dispatched = None if batch is None else self.runner.dispatch(batch)
        return self._finish(dispatched)

    def drain(self) -> BatchTokenIDOut:
        """Finish the step in flight without dispatching another."""
        return self._finish(None)

    def retract(self, req: Req) -> None:
        """Send a running request back to the queue with its tokens and rows. Drain first."""
        assert self._pending is None, "a retracted request takes its rows along: drain first"
        saved = req.saved_rows
        if self.capturer.enabled:
            saved = self.capturer.save(self.scheduler.pages.kv_slots(req, 0, req.num_committed), earlier=req.saved_rows)
        if self.departures is not None:
            self.departures.retract(req, _prefix_of(self.scheduler, req))
        self.scheduler.retract(req, saved)
        _forget_changed_pages(self.scheduler, self.capturer)

    def flush_cache(self) -> int:
        """Forget all cached prefixes; returns the pages freed. Pages of running requests stay theirs."""
        freed = self.scheduler.pages.flush()
        _forget_changed_pages(self.scheduler, self.capturer)
        return freed

    def update_weights(
        self, state: nnx.State[Any, Any] | None, *, version: int, cache: str, donate: bool = False
    ) -> None:
        """Run later steps with other weights, or (None) with the same ones under another version. Old prefixes are
        never matched again; "flush" also sends running requests back to prefill anew, "keep" leaves them their pages.
        Written rows stay. Drain first."""
        self.runner.update_weights(state, version=version, donate=donate)
        self.scheduler.weight_version = version
        self.released -= {"weights"}
        for req in tuple(reversed(self.scheduler.running)) if cache == "flush" else ():
            self.retract(req)
        self.flush_cache()

    def check_integrity(self) -> list[Violation]:
        """I1, I3, I4 and I5 of the live state; empty when all hold. Call between steps."""
        slots = self.scheduler.pages.owned_slots(self.scheduler.running)
        return [*self.scheduler.check_integrity(), *self.capturer.check_integrity(slots), *check_outcomes(self.ledger)]

    def _schedule(self) -> ModelWorkerBatch | None:
        """The next batch; when pages have run out and nothing is in flight, requests go back to the queue until one can
        run."""
        if self.released or self.hold not in (None, PauseMode.WAIT):
            return None
        batch = _next_batch(self.scheduler, self.ledger)
        while batch is None and self._pending is None and (victim := self.scheduler.preemption_victim()) is not None:
            self.retract(victim)
            batch = _next_batch(self.scheduler, self.ledger)
        stuck = (
            batch is None
            and self._pending is None
            and (self.ledger.num_live > 0 if self.hold is None else self.scheduler.has_started)
        )
        assert not stuck, f"{self.ledger.num_live} requests live, and none can run"
        _forget_changed_pages(self.scheduler, self.capturer)
        return batch

    def _finish(self, dispatched: PendingStep | None) -> BatchTokenIDOut:
        """Read the step in flight, file its rows, take in its tokens; `dispatched` is in flight from now on."""
        finished, self._pending = self._pending, dispatched
        outs, self._ended = self._ended, []
        if finished is not None:
            batch, result = finished.batch, self.runner.read(finished)
            if result.rows is not None:
                live = self.scheduler.live_tokens(batch)
                self.num_rows += batch.num_tokens if live is None else int(np.count_nonzero(live))
                self.capturer.on_forward_end(batch.kv_slots, result.rows, result.weight_version, live, batch.origins)
            if self.departures is not None and result.rerouting is not None:
                self.departures.file(batch, result.rerouting, self.scheduler.live_tokens(batch), self.scheduler.running)
            now = time.monotonic()
            for req in self.scheduler.commit(batch, result):
                matched = None if req.last_row_ready else self.ledger.stop_string(req)
                if matched is not None:
                    req.stop_at(matched)
                tells = req.source.stream and req.pending_finish is None  # its last token comes with its end
                if req.state is ReqState.FINISHED or (tells and self.ledger.is_due(req, now)):
                    outs.append(self._news(req))
            self.num_steps += 1
            took, self.last_progress = time.monotonic() - self.last_progress, time.monotonic()
            if self._after_step is not None:
                self._after_step(took)
        _forget_changed_pages(self.scheduler, self.capturer)
        return BatchTokenIDOut(step=self.num_steps, outs=tuple(outs))

    def _news(self, req: Req) -> TokenIDOut:
        """What a request has to tell. An ended one hands over its rows (one that streams them: those not told yet), and
        only then its pages."""
        record: RoutedExperts | None = None
        error: Exception | None = None
        ended = req.state is ReqState.FINISHED
        if ended or req.source.routed_experts.stream:
            try:
                record = _record(self.scheduler, self.capturer, req, start=self.ledger.next_row(req))
            except RoutedExpertsError as cause:
                error = cause
                self.num_missing_rows += isinstance(cause, RoutingIncompleteError)
        rerouting = (
            None if self.departures is None else self.departures.of(req, _prefix_of(self.scheduler, req), ended=ended)
        )
        if ended:
            self.scheduler.release(req)
        runner = self.runner
        return self.ledger.news(
            req,
            record=record,
            error=error,
            weight_version=runner.weight_version,
            exact=runner.exact,
            rerouting=rerouting,
        )


def _next_batch(scheduler: Scheduler, ledger: RequestTable) -> ModelWorkerBatch | None:
    """Schedule, and note who left the queue."""
    held = len(scheduler.running)
    batch = scheduler.schedule()
    ledger.begin(scheduler.running[held:])
    return batch


def has_work(core: EngineCore) -> bool:
    """Would a step do anything now. Requests that a pause holds back do not count."""
    if core._pending is not None or core._ended:
        return True
    if core.released:
        return False
    return core.ledger.num_live > 0 if core.hold is None else core.hold is PauseMode.WAIT and core.scheduler.has_started


def _record(scheduler: Scheduler, capturer: RoutedExpertsCapturer, req: Req, *, start: int) -> RoutedExperts | None:
    """The rows of a request from token `start` on, from the slots of its pages and from those it took along when it was
    retracted."""
    if not req.source.routed_experts.asked or req.num_output == 0:
        return None
    end = min(req.num_committed, req.num_known - (0 if req.last_row_ready else 1))
    slots = scheduler.pages.kv_slots(req, start, end) if end > start else np.zeros(0, np.int64)
    return capturer.collect(
        slots,
        start=start,
        num_tokens=req.num_known,
        num_prompt_tokens=req.prompt_len,
        saved=req.saved_rows,
        include_last=req.last_row_ready,
    )


def _prefix_of(scheduler: Scheduler, req: Req) -> Int[np.ndarray, " S"]:
    """The slots of what a request found in the prefix cache; none while it holds no pages."""
    cached = min(req.cached_tokens, req.num_committed)
    return scheduler.pages.kv_slots(req, 0, cached) if cached else np.zeros(0, np.int64)


def _forget_changed_pages(scheduler: Scheduler, capturer: RoutedExpertsCapturer) -> None:
    """What was recorded of pages that were handed out or freed holds no more."""
    pages = scheduler.pages.drain_changed_pages()
    if pages.size:
        capturer.on_pages_allocated(pages)
