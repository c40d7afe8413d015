"""EngineCore: the step loop, without a thread. It ties the schedulers and routing capturers of the data ranks and the
model runner together.

    schedule n+1 -> dispatch n+1 -> read n -> commit n -> file its rows -> collect rows of finished requests -> release
    their pages
All host work of step n happens while the device runs step n+1 (overlapped). Where a request has a grammar, the layers
of step n+1 are dispatched before step n is read, and its sampler once step n is committed and the mask is filled: the
device waits for the mask only where its layers take less time than that. The alternative, to read step n before step
n+1 is dispatched, would leave the device idle in each of these steps. A step that verifies drafts may follow one whose
accepted drafts the host does not know yet (ahead): drafts of a model are on the device, and drafts of the host come
with it, as a text that begins before the step in flight. Else step n is read and committed before step n+1 is scheduled
(joined): the first of several steps with drafts, and where drafts that follow known tokens gain more than the device
loses by its wait. Engine thread only. The only text that it handles is that of requests with stop strings. Dims: S
tokens of a sequence."""

import dataclasses
import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Int, UInt32

from routed_experts.capture.routed_experts_capturer import RoutedExpertsCapturer
from routed_experts.core.errors import QueueFullError, RoutedExpertsError, RoutingIncompleteError
from routed_experts.core.integrity import Violation
from routed_experts.core.io_struct import BatchTokenIDOut, FinishReason, ReroutingCounts, TokenIDOut
from routed_experts.core.model_worker_batch import ForwardMode, ModelWorkerBatch, StepResult
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.core.weight_version import INITIAL_LABEL, WeightVersion
from routed_experts.engine.loop.request_table import RequestTable, StopDetokenizer
from routed_experts.engine.loop.rerouting_stats import ReroutingStats
from routed_experts.engine.loop.speculation import Speculation
from routed_experts.execution.model_runner import ModelRunner, PendingStep, StartedStep
from routed_experts.scheduling.data_ranks import DataRanks
from routed_experts.scheduling.schedule_batch import Req, ReqState
from routed_experts.scheduling.scheduler import NO_DRAFTS, ChosenStep, Drafts, Scheduler

ABORTED = FinishReason(type="abort", message="aborted by the caller")
AfterStep = Callable[[float], None]  # receives the seconds since the step before, or since work arrived
NO_DETOKENIZERS: Mapping[str, StopDetokenizer] = MappingProxyType({})


class PauseMode(enum.Enum):
    """What a pause does with requests that have started. In every mode new requests queue until it ends."""

    WAIT = "wait"  # they run to their end
    RETRACT = "retract"  # they return to the queue with their tokens and rows, and their pages are freed
    IN_PLACE = "in_place"  # they keep their pages and do not advance
    ABORT = "abort"  # every request ends with what it has


@dataclasses.dataclass(frozen=True, slots=True)
class _CommittedStep:
    """A step whose tokens have been committed: its batches, the requests that it advanced, when its result was read,
    when it was dispatched (None: while another step ran), and how long the device had waited for that after the step
    before (None: there was none)."""

    batches: tuple[ModelWorkerBatch, ...]
    advanced: list[Req]
    read_at: float
    joined_at: float | None
    waited_s: float | None


class EngineCore:
    """The live requests, the step in flight, and what one step does."""

    def __init__(
        self,
        ranks: DataRanks,
        runner: ModelRunner,
        capturers: Sequence[RoutedExpertsCapturer],
        *,
        after_step: AfterStep | None = None,
        rerouting: ReroutingStats | None = None,
        speculation: Speculation | None = None,
        weight_label: str = INITIAL_LABEL,
    ) -> None:
        assert len(ranks) == len(capturers), (len(ranks), len(capturers))
        self.ranks, self.runner = ranks, runner
        self.weight_version = WeightVersion(label=weight_label, update_count=runner.weight_version)
        self.capturers = tuple(capturers)  # of the data ranks
        self.after_step = after_step
        self.rerouting = rerouting  # None: expert instances have no capacities
        self.speculation = speculation  # None: nothing is drafted
        self.request_table = RequestTable()
        self.num_steps = 0
        self.num_rows = 0  # that were filed
        self.num_requests_missing_rows = 0
        self.rank_tokens = [0] * len(ranks)  # fed by each data rank
        self.padding_ratio = 1.0  # tokens of the last step, padding of all data ranks included, over those without it
        self.last_progress = time.monotonic()  # when a step, a pause or an update ended, or work came to an idle core
        self.pause_mode: PauseMode | None = None
        self.released = frozenset[str]()  # device memory that was released: "kv_cache", "weights"
        self._pending: PendingStep | None = None
        self.flushed_at_step = 0  # steps before the last flush
        self._joined_at: float | None = None  # when the step in flight was dispatched, unless it overlapped another
        self._waited_s: float | None = None  # of the device, from the result of the step before to that
        self._failed: list[Req] = []  # that end after the step that is being processed
        self._finished: list[TokenIDOut] = []  # outputs of requests that ended between steps

    @property
    def is_idle(self) -> bool:
        """No request waits, runs or is in flight, and no output is left to deliver."""
        return self.request_table.num_live == 0 and self._pending is None and not self._finished

    @property
    def has_work(self) -> bool:
        """Whether a step has work to do. Requests that a pause holds back do not count."""
        if self._pending is not None or self._finished:
            return True
        if self.released:
            return False
        if self.pause_mode is None:
            return self.request_table.num_live > 0
        return self.pause_mode is PauseMode.WAIT and self.ranks.has_started

    @property
    def has_step_in_flight(self) -> bool:
        """Whether a step was dispatched whose result has not been read."""
        return self._pending is not None

    @property
    def _runs(self) -> bool:
        """Whether steps are scheduled at all."""
        return not self.released and self.pause_mode in (None, PauseMode.WAIT)

    @property
    def has_admitted_requests(self) -> bool:
        """Whether a request is open, and not all of them wait for admission."""
        holds_all = self.pause_mode is PauseMode.WAIT and not self.ranks.has_started
        return self.request_table.num_live > 0 and not holds_all

    def add(self, reqs: Sequence[Req], detokenizers: Mapping[str, StopDetokenizer] = NO_DETOKENIZERS) -> None:
        """Accept the requests of one call, all or none; `detokenizers` belong to those with stop strings, by request
        id. Raises QueueFullError if they do not fit."""
        try:
            self.ranks.add(reqs)
        except QueueFullError:
            self.request_table.reject(len(reqs))
            raise
        if self.request_table.num_live == 0:
            self.last_progress = time.monotonic()
        for req in reqs:
            detokenizer = detokenizers.get(req.rid)
            req.has_stop_strings = detokenizer is not None
            self.request_table.add(req, detokenizer)

    def abort(self, rid: str, reason: FinishReason = ABORTED) -> bool:
        """End a live request with what it has; its last output leaves with the next step. False if there is no such
        request."""
        req = self.request_table.find(rid)
        if req is None:
            return False
        req.finish(reason)
        self._finished.append(self._make_output(req))
        self._invalidate_recycled_rows()
        return True

    def abort_all(self, message: str) -> None:
        """End every live request with what it has."""
        for rid in self.request_table.live():
            self.abort(rid, FinishReason(type="abort", message=message))

    def step(self) -> BatchTokenIDOut:
        """Dispatch the next step and process the result of the one before it, in this order unless the next one is
        joined."""
        speculation = self.speculation
        batches = None if speculation is None else self._schedule_ahead(speculation)
        is_ahead = batches is not None
        if speculation is not None and not is_ahead and self._is_joined(speculation):
            return self._joined_step(speculation)
        if not is_ahead:
            batches = self._schedule()
        outs = self._process_result(None if batches is None else self._start(batches))
        self._joined_at = None
        if speculation is not None and is_ahead:
            speculation.catch_up(self.ranks.running)
        elif speculation is not None:
            speculation.watch(self.ranks.running, self.num_steps)
        self._end_step()
        return outs

    def drain(self) -> BatchTokenIDOut:
        """Process the step in flight without dispatching another."""
        outs = self._process_result(None)
        self._end_step()
        return outs

    def _end_step(self) -> None:
        """Take the rows of the last step off the device, and update the totals of drafts: the next step has been
        dispatched, if there is one."""
        for capturer in self.capturers:
            capturer.on_step_end()
        if self.speculation is not None:
            self.speculation.update_totals()

    def retract(self, req: Req) -> None:
        """Send a running request back to the queue with its tokens and rows. No step of its data rank may be in flight:
        drain first."""
        scheduler, capturer, saved = self.ranks.scheduler_of(req), self.capturers[req.dp_rank], req.saved_rows
        assert not scheduler.is_in_flight, "a retracted request takes its rows along: drain first"
        if capturer.enabled:
            saved = capturer.save(scheduler.pages.kv_slots(req, 0, req.num_committed), earlier=req.saved_rows)
        if self.rerouting is not None:
            self.rerouting.retract(req, self._prefix_slots(req))
        scheduler.retract(req, saved)
        self._invalidate_recycled_rows()

    def pause(self, mode: PauseMode) -> None:
        """Stop scheduling until `resume`; `mode` decides about running requests. Drain first."""
        self.pause_mode = mode
        for scheduler in self.ranks:
            scheduler.accepts_new = False
        if mode is PauseMode.RETRACT:
            self._retract_all()
        elif mode is PauseMode.ABORT:
            self.abort_all("aborted by a pause")

    def resume(self) -> None:
        """End the pause, if there is one; requests continue where they are."""
        self.pause_mode = None
        self.last_progress = time.monotonic()
        for scheduler in self.ranks:
            scheduler.accepts_new = True

    def flush_cache(self, *, drafts: bool = False, retract: bool = False) -> int:
        """Drop all cached prefixes, and with `drafts` all remembered answers; returns the pages freed. Running requests
        keep their pages, but with `retract` they return to the queue with their tokens and rows: drain first."""
        if retract:
            self._retract_all()
        if drafts and self.speculation is not None:
            self.speculation.forget()
        self.flushed_at_step = self.num_steps
        freed = sum(scheduler.pages.flush() for scheduler in self.ranks)
        self._invalidate_recycled_rows()
        return freed

    def update_weights(
        self, state: nnx.State[Any, Any] | None, *, version: WeightVersion, cache: str, donate: bool = False
    ) -> None:
        """Run later steps with other weights, or (None) with the same ones under another version. Old prefixes are
        never matched again; "flush" also sends running requests back to prefill again, "keep" leaves them their pages.
        Written rows stay. Drain first."""
        self.runner.update_weights(state, version=version.update_count, donate=donate)
        self.request_table.note_update(self.weight_version)
        self.weight_version = version
        for scheduler in self.ranks:
            scheduler.weight_version = version.update_count
        self.released -= {"weights"}
        self.flush_cache(retract=cache == "flush")
        self.last_progress = time.monotonic()

    def release_memory(self, tags: frozenset[str]) -> None:
        """Release the KV pool ("kv_cache"), the weights ("weights") or both. Running requests return to the queue with
        their tokens and rows. Drain first."""
        self.flush_cache(retract=True)
        self.released |= tags
        self.runner.release(pool="kv_cache" in tags, weights="weights" in tags)

    def resume_memory(self) -> None:
        """Allocate the pool again, empty. Released weights must have come by `update_weights` before."""
        assert "weights" not in self.released, "the weights come first"
        if "kv_cache" in self.released:
            self.runner.allocate_pool()
        self.released = frozenset()
        self.last_progress = time.monotonic()

    def check_integrity(self) -> list[Violation]:
        """Check the live state: each accepted request is live or has ended once, each page has one owner, each lock a
        holder, and no row is valid outside of pages that are held. Empty when all hold. Call between steps."""
        violations = self.request_table.check_integrity()
        for scheduler, capturer in zip(self.ranks, self.capturers, strict=True):
            slots = scheduler.pages.owned_slots(scheduler.running)
            violations += [*scheduler.check_integrity(), *capturer.check_integrity(slots)]
        return violations

    def routing_stats(self, *, reset: bool = False, wait: bool = True) -> RoutingStats:
        """How often each expert was chosen in all data ranks; see RoutedExpertsCapturer."""
        return RoutingStats.merge([capturer.routing_stats(reset=reset, wait=wait) for capturer in self.capturers])

    def _is_joined(self, speculation: Speculation) -> bool:
        """Whether the step in flight is read before the next is scheduled: it has drafts, or the next may have some."""
        pending = self._pending
        in_flight = pending is not None and pending.batches[0].mode is ForwardMode.TARGET_VERIFY
        return in_flight or speculation.may_draft(self.ranks.running, self.num_steps)

    def _schedule_ahead(self, speculation: Speculation) -> tuple[ModelWorkerBatch] | None:
        """The batch of a verify step that follows the one in flight; None where the next step has to be joined, or is
        another one."""
        in_flight = self._pending
        if in_flight is None or in_flight.batches[0].mode is not ForwardMode.TARGET_VERIFY or not self._runs:
            return None
        running = self.ranks.running
        if not self.runner.can_run_ahead or any(req.grammar is not None for req in running):
            return None  # a mask follows tokens that the host knows
        (scheduler,) = self.ranks
        if not scheduler.may_be_ahead():
            return None
        drafts = speculation.choose_ahead(running, scheduler.count_in_flight(), self.num_steps + 1)
        if drafts is None or (batch := scheduler.schedule_ahead(drafts.num_drafts, drafts.texts)) is None:
            return None
        speculation.expect_result(drafts, batch.step)
        self._invalidate_recycled_rows()
        return (batch,)

    def _joined_step(self, speculation: Speculation) -> BatchTokenIDOut:
        """Commit the step in flight, then dispatch the next, with drafts where they pay. What does not change the next
        step waits until it runs: outputs of requests that go on, counts, and indices that take in new tokens."""
        outs, self._finished = self._finished, []
        committed = self._commit_in_flight()
        if committed is not None:
            outs += self._outputs_of_finished(committed.advanced)
        self._end_failed()
        self._invalidate_recycled_rows()
        running = self.ranks.running
        may_draft = speculation.may_draft(running, self.num_steps)
        if not may_draft:
            speculation.count_skipped(running)
        batches = self._schedule(speculation.propose(running) if may_draft else NO_DRAFTS)
        dispatched = None if batches is None else self._start(batches)
        self._joined_at = time.monotonic()
        self._waited_s = None if committed is None else self._joined_at - committed.read_at
        self._pending = self._sample_late(dispatched)
        if committed is not None:
            outs += self._outputs_to_stream(committed.advanced)
            self._note_step(committed, overlaps=False)
        self._end_failed()
        speculation.catch_up(self.ranks.running)
        self._end_step()
        return BatchTokenIDOut(step=self.num_steps, outs=tuple(outs))

    def _schedule(self, drafts: Drafts = NO_DRAFTS) -> tuple[ModelWorkerBatch, ...] | None:
        """The batches of the next step, one a data rank; None where none can run."""
        if not self._runs:
            return None
        speculation = self.speculation
        drafts_ahead = speculation is not None and speculation.wants_model_drafts(self.num_steps)
        chosen = [self._choose(scheduler, drafts) for scheduler in self.ranks]
        batches = self.ranks.build(chosen, drafts_ahead=drafts_ahead)
        if batches is None and self._pending is None:
            num_live = self.request_table.num_live
            stuck = num_live > 0 if self.pause_mode is None else self.ranks.has_started
            assert not stuck, f"{num_live} requests live, and none can run"
        self._invalidate_recycled_rows()
        return batches

    def _choose(self, scheduler: Scheduler, drafts: Drafts) -> ChosenStep | None:
        """What a data rank feeds next. When its pages have run out and none of its steps is in flight, requests return
        to the queue until one can run."""
        chosen = self._choose_and_mark(scheduler, drafts)
        while chosen is None and not scheduler.is_in_flight and (victim := scheduler.preemption_victim()) is not None:
            self.retract(victim)
            chosen = self._choose_and_mark(scheduler, NO_DRAFTS)
        return chosen

    def _choose_and_mark(self, scheduler: Scheduler, drafts: Drafts) -> ChosenStep | None:
        """Choose, and mark the requests that left the queue."""
        num_running = len(scheduler.running)
        chosen = scheduler.choose(drafts)
        self.request_table.mark_scheduled(scheduler.running[num_running:])
        return chosen

    def _start(self, batches: Sequence[ModelWorkerBatch]) -> PendingStep | StartedStep:
        """Dispatch a step; of one with a mask the layers alone."""
        return self.runner.begin(batches) if batches[0].is_masked else self.runner.dispatch(batches)

    def _sample(self, started: StartedStep) -> PendingStep:
        """Fill the mask of a step and dispatch its sampler; every step before it has been committed."""
        masks: list[UInt32[np.ndarray, "B W"]] = []
        for scheduler, batch in zip(self.ranks, started.batches, strict=True):
            mask, failed = scheduler.fill_mask(batch)
            masks.append(mask)
            self._failed += failed
        return self.runner.sample(started, masks[0] if len(masks) == 1 else np.concatenate(masks))

    def _end_failed(self) -> None:
        """End the requests whose grammar cannot be followed any further, with what they have."""
        failed, self._failed = self._failed, []
        for req in failed:
            if req.state is not ReqState.FINISHED and req.grammar is not None:
                self.abort(req.rid, FinishReason(type="abort", message=f"the grammar ends it: {req.grammar.error}"))

    def _sample_late(self, dispatched: PendingStep | StartedStep | None) -> PendingStep | None:
        """The step that is in flight from now on."""
        return self._sample(dispatched) if isinstance(dispatched, StartedStep) else dispatched

    def _process_result(self, dispatched: PendingStep | StartedStep | None) -> BatchTokenIDOut:
        """Read the step in flight, commit its tokens and file its rows; `dispatched` is in flight from now on, its
        sampler too."""
        outs, self._finished = self._finished, []
        committed = self._commit_in_flight()
        self._pending = self._sample_late(dispatched)
        if committed is not None:
            outs += self._outputs_of_finished(committed.advanced)
            outs += self._outputs_to_stream(committed.advanced)
            self._note_step(committed, overlaps=self._pending is not None)
        self._end_failed()
        self._invalidate_recycled_rows()
        return BatchTokenIDOut(step=self.num_steps, outs=tuple(outs))

    def _commit_in_flight(self) -> _CommittedStep | None:
        """Read the step in flight, commit its tokens and file its rows; None where there is none. Its arrays are let
        go of, so that the next step may use their memory."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        results = self.runner.read(pending)
        read_at, advanced = time.monotonic(), list[Req]()
        for number, (batch, result) in enumerate(zip(pending.batches, results, strict=True)):
            if batch.num_requests:
                advanced += self._commit(number, batch, result)
        self.num_steps += 1
        return _CommittedStep(pending.batches, advanced, read_at, self._joined_at, self._waited_s)

    def _outputs_of_finished(self, advanced: Iterable[Req]) -> list[TokenIDOut]:
        """The last outputs of the requests that have ended, whose pages are released."""
        return [self._make_output(req) for req in advanced if req.state is ReqState.FINISHED]

    def _outputs_to_stream(self, advanced: Iterable[Req]) -> list[TokenIDOut]:
        """The outputs of streams that go on, also of those that were retracted meanwhile, where it is time for one. The
        last token of a stream comes with its end."""
        now = time.monotonic()
        return [
            self._make_output(req)
            for req in advanced
            if req.source.stream
            and req.state is not ReqState.FINISHED
            and req.pending_finish is None
            and self.request_table.should_emit(req, now)
        ]

    def _note_step(self, committed: _CommittedStep, *, overlaps: bool) -> None:
        """Count a committed step and its time. `overlaps`: another step runs that was dispatched before this one was
        read."""
        if len(self.ranks) > 1:
            self._count_tokens(committed.batches)
        elapsed_s, self.last_progress = committed.read_at - self.last_progress, committed.read_at
        if self.speculation is not None:
            self._time_step(self.speculation, committed, elapsed_s, overlaps=overlaps)
        if self.after_step is not None:
            self.after_step(elapsed_s)

    def _commit(self, rank: int, batch: ModelWorkerBatch, result: StepResult) -> list[Req]:
        """Commit the tokens of a data rank's part of a step and file its rows; returns the requests that it
        advanced."""
        scheduler = self.ranks[rank]
        if batch.is_ahead:
            batch = scheduler.locate(batch)
        committed = scheduler.commit(batch, result, self.request_table.match_stop_string)
        live = committed.live
        if result.rows is not None:
            self.num_rows += batch.num_tokens if live is None else int(np.count_nonzero(live))
            capturer, version = self.capturers[rank], result.weight_version
            capturer.on_forward_end(batch.kv_slots, result.rows, version, live, batch.origins)
        if self.rerouting is not None and result.rerouting is not None:
            self.rerouting.file(batch, result.rerouting, live, scheduler.running)
        if self.speculation is not None:
            self.speculation.observe(batch, result, committed.advanced)
        return committed.advanced

    def _count_tokens(self, batches: Sequence[ModelWorkerBatch]) -> None:
        """Count what the data ranks fed in a step, and its padding."""
        for number, batch in enumerate(batches):
            self.rank_tokens[number] += batch.num_tokens
        self.padding_ratio = sum(batch.token_ids.size for batch in batches) / sum(batch.num_tokens for batch in batches)

    def _time_step(
        self, speculation: Speculation, committed: _CommittedStep, elapsed_s: float, *, overlaps: bool
    ) -> None:
        """Report what a step took: of a joined one from its dispatch to its result, and how long the device had waited;
        of another one from the result of the step before to its own."""
        batch, joined_at = committed.batches[0], committed.joined_at
        is_verify = batch.mode is ForwardMode.TARGET_VERIFY
        if joined_at is not None and (is_verify or not overlaps):
            speculation.time_step(batch, committed.read_at - joined_at, waited_s=committed.waited_s)
        elif joined_at is None and (is_verify or overlaps):
            speculation.time_step(batch, elapsed_s)

    def _make_output(self, req: Req) -> TokenIDOut:
        """What a request has gained since its last output. A finished request carries its rows (one that streams rows:
        those not emitted yet), and only then its pages."""
        record: RoutedExperts | None = None
        error: Exception | None = None
        is_finished = req.state is ReqState.FINISHED
        if is_finished or req.source.routed_experts.stream:
            try:
                record = self._collect_rows(req, start=self.request_table.next_row(req))
            except RoutedExpertsError as cause:
                error = cause
                self.num_requests_missing_rows += isinstance(cause, RoutingIncompleteError)
        rerouting: ReroutingCounts | None = None
        if self.rerouting is not None:
            rerouting = self.rerouting.counts_for(req, self._prefix_slots(req), ended=is_finished)
        if is_finished:
            self.ranks.scheduler_of(req).release(req)
            if self.speculation is not None:
                self.speculation.close(req)
        return self.request_table.make_output(
            req,
            record=record,
            error=error,
            weight_version=self.weight_version,
            exact=not self._may_have_deferred(req),
            defers_experts=not self.runner.exact,
            rerouting=rerouting,
            speculative=None if self.speculation is None else self.speculation.counts_of(req),
            dp_rank=None if len(self.ranks) == 1 else req.dp_rank,
        )

    def _may_have_deferred(self, req: Req) -> bool:
        """Whether experts of a token that a request has fed may have been added late: of one that it generated, or of
        one that came with pages of the prefix cache, which another request may have generated."""
        return not self.runner.exact and (req.num_fed > req.prompt_len or req.cached_tokens > 0)

    def _collect_rows(self, req: Req, *, start: int) -> RoutedExperts | None:
        """The rows of a request from token `start` on: from the slots of its pages, and from the rows that it kept when
        it was retracted."""
        if not req.source.routed_experts.enabled or req.num_output == 0:
            return None
        end = min(req.num_committed, req.num_known - (0 if req.last_row_ready else 1))
        pages = self.ranks.scheduler_of(req).pages
        slots = pages.kv_slots(req, start, end) if end > start else np.zeros(0, np.int64)
        return self.capturers[req.dp_rank].collect(
            slots,
            start=start,
            num_tokens=req.num_known,
            num_prompt_tokens=req.prompt_len,
            saved=req.saved_rows,
            include_last=req.last_row_ready,
            weights=req.source.routed_experts.weights,
        )

    def _prefix_slots(self, req: Req) -> Int[np.ndarray, " S"]:
        """The slots of the cached prefix of a request; none while it holds no pages."""
        cached = min(req.cached_tokens, req.num_committed)
        pages = self.ranks.scheduler_of(req).pages
        return pages.kv_slots(req, 0, cached) if cached else np.zeros(0, np.int64)

    def _retract_all(self) -> None:
        """Send every running request back to the queue, the newest first, so that the oldest leads it."""
        for scheduler in self.ranks:
            for req in tuple(reversed(scheduler.running)):
                self.retract(req)

    def _invalidate_recycled_rows(self) -> None:
        """Invalidate the rows of pages that were reallocated or freed."""
        for scheduler, capturer in zip(self.ranks, self.capturers, strict=True):
            pages = scheduler.pages.drain_changed_pages()
            if pages.size:
                capturer.on_pages_allocated(pages)
