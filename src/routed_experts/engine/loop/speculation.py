"""Speculation: what an engine does between two steps to draft: which requests, how many tokens, what came of it.

A drafter proposes, the policy decides how many of the proposed tokens a step verifies, and the scheduler cuts them to
what a request may verify. None of them changes a token: the model samples every one itself. Engine thread only."""

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Float64, Int32

from routed_experts.core.buckets import continuation_size
from routed_experts.core.model_worker_batch import ModelWorkerBatch, StepResult
from routed_experts.core.speculative_stats import SpeculativeCounts, SpeculativeTotals
from routed_experts.engine.loop.guarded_drafter import GuardedDrafter, build_draft_sample
from routed_experts.engine.loop.text_ahead import TextAhead
from routed_experts.engine.loop.verified_drafts import VerifiedDraft, VerifiedDrafts
from routed_experts.scheduling.schedule_batch import Req, ReqState
from routed_experts.speculation.acceptance_estimates import AcceptanceEstimates
from routed_experts.speculation.cost_table import CostTable
from routed_experts.speculation.drafter import NO_DRAFT, Draft, Drafter, DraftSample, DraftSource
from routed_experts.speculation.sorted_contexts import MOST_DRAFTS

WATCH_EVERY = 8  # steps, at least, from one watched step to the next while drafting is off
MOST_BACKED_OFF = 4  # times so many steps, at most, while no draft promises enough for a probe
WATCHED_A_STEP = 0.5  # requests, on average: the host's cores may be those of the device
TIMED_EVERY = 8  # of the steps without drafts, while drafting is off, one in so many moves the table of costs


class Policy(Protocol):
    """The choice of drafts: see DraftPolicy."""

    @property
    def is_off(self) -> bool:
        """Whether drafting is off: a step that may draft is then a probe."""
        ...

    def should_try(self, step: int) -> bool:
        """Return whether this step may draft."""
        ...

    def choose(self, survivals: Sequence[Float64[np.ndarray, " k"]], num_requests: int) -> list[int]:
        """Return for each request how many of its drafts to verify."""
        ...

    def choose_ahead(
        self, survivals: Sequence[Float64[np.ndarray, " k"]], num_requests: int, *, joined_gain: float
    ) -> list[int]:
        """Return the same for a step that the device does not wait for; none where a joined step is better."""
        ...

    def tried(self, *, num_requests: int, num_drafts: int, num_emitted: int, is_joined: bool = True) -> None:
        """Report on the step that should_try allowed."""
        ...

    def expect(self, survivals: Sequence[Float64[np.ndarray, " k"]], num_requests: int) -> bool:
        """Take the survivals of drafts that no step verifies; return whether they promise enough for a probe."""
        ...

    def renew(self) -> None:
        """Take note of a new request."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """The longest draft of a request, and the vocabulary that drafts are of."""

    num_drafts: int
    vocab_size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What drafts may hold of other requests. `shares_answers`: remembered answers of the same namespace;
    `remembers_answers`: those of ended requests are remembered."""

    shares_answers: bool = False
    remembers_answers: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class DraftsAhead:
    """What a step that is ahead verifies, by request id: how many drafts, the texts that they are of (None: they are on
    the device), and where these are from. `skipped`: why the other requests have none."""

    num_drafts: Mapping[str, int]
    texts: Mapping[str, Int32[np.ndarray, " C"]] | None
    sources: Mapping[str, DraftSource]
    skipped: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class _Unverified:
    """A draft that no step verifies. `start`: the position of its first token."""

    start: int
    draft: Draft
    survival: Float64[np.ndarray, " k"]


class Speculation:
    """The drafter and the policy of an engine. `costs` follow the steps that run."""

    def __init__(
        self, drafter: Drafter, policy: Policy, limits: DraftLimits, *, costs: CostTable, sharing: Sharing = Sharing()
    ) -> None:
        self.policy, self.costs = policy, costs
        self._sharing, self._limits = sharing, limits
        self.totals, self._estimates = SpeculativeTotals(), AcceptanceEstimates()
        self._drafter = GuardedDrafter(drafter, limits.vocab_size, self.totals)
        self._verified = VerifiedDrafts(self.totals, limits.num_drafts)
        self._text_ahead = TextAhead(limits.num_drafts)
        self._unverified: dict[str, _Unverified] = {}  # by request
        self._sources: dict[str, DraftSource] = {}  # of the last proposals, by request
        self._sources_ahead: dict[int, Mapping[str, DraftSource]] = {}  # by step in flight that is ahead
        self._num_in_flight = 0  # steps with proposals that have not been observed
        self._last_watch, self._backed_off = -math.inf, 1  # the step, and how many times as rarely as usual
        self._newest: str | None = None  # the last of the running requests
        self._num_untimed = 0  # resting steps since the last one that was timed

    @property
    def shares_answers(self) -> bool:
        """Whether drafts may hold answers that `remember` was given."""
        return self._sharing.shares_answers

    @property
    def has_failed(self) -> bool:
        """Whether the drafter has failed too often."""
        return self._drafter.has_failed

    def may_draft(self, running: Sequence[Req], step: int) -> bool:
        """Whether the next step may have drafts: the policy tries them, and no request still feeds its prompt. `step`
        counts the engine's steps."""
        if self.has_failed or not self.policy.should_try(step):
            return False
        return any(map(_may_speculate, running)) and all(req.is_prefilled for req in running)

    def wants_model_drafts(self, step: int) -> bool:
        """Whether a draft model is to draft after the step that is dispatched next, as the one after it may verify."""
        return self._drafter.model is not None and self.policy.should_try(step)

    def propose(self, running: Sequence[Req]) -> dict[str, Int32[np.ndarray, " k"]]:
        """The drafts that the next step verifies, by request id; no step is in flight."""
        model = self._drafter.model
        if model is not None and not any(model.is_ready(req.rid, req.num_known) for req in running):
            return {}  # the draft model has not drafted for these lengths; it drafts after the next step
        self._unverified.clear()
        start, probes = time.perf_counter(), self.policy.is_off
        drafts = [self._draft(req) for req in running]
        estimates = [self._estimates.survival(req.rid, draft) for req, draft in zip(running, drafts, strict=True)]
        lengths = self.policy.choose([draft.survival for draft in drafts] if probes else estimates, len(running))
        self._num_in_flight = int(any(lengths))
        if self._num_in_flight == 0:
            self.policy.tried(num_requests=len(running), num_drafts=0, num_emitted=len(running))
        self._sources = {req.rid: draft.source for req, draft in zip(running, drafts, strict=True)}
        self.totals.draft_s += time.perf_counter() - start
        return {
            req.rid: draft.tokens[:length]
            for req, draft, length in zip(running, drafts, lengths, strict=True)
            if length > 0
        }

    def choose_ahead(self, running: Sequence[Req], in_flight: Mapping[str, int], step: int) -> DraftsAhead | None:
        """The drafts that the next step verifies while the one before it, a verify step, is in flight; None: none, or
        the host has to read first. `in_flight`: tokens that a request feeds in that step. Drafts of a model, which are
        on the device, are expected to be as good as the last ones."""
        if self.has_failed or not self.policy.should_try(step) or self.policy.is_off:
            return None
        start, model, texts, sources = time.perf_counter(), self._drafter.model, None, dict[str, DraftSource]()
        skipped = [reason for req in running if (reason := _refusal(req)) is not None]
        if model is not None:
            known = [model.last_offer(req.rid)[1] if _may_speculate(req) else NO_DRAFT for req in running]
            expected = [self._estimates.foresee(req.rid, draft) for req, draft in zip(running, known, strict=True)]
            lengths = self.policy.choose_ahead(expected, len(running), joined_gain=1.0)
        else:
            size = continuation_size(self._limits.num_drafts)
            if size > MOST_DRAFTS:  # a text does not hold the drafts of two steps
                return None
            failures, drafts = self._drafter.num_failures, [self._continue(req, size) for req in running]
            if self.has_failed:  # now: what has been proposed is dropped, too
                return None
            texts = {req.rid: draft.tokens for req, draft in zip(running, drafts, strict=True)}
            sources = {req.rid: draft.source for req, draft in zip(running, drafts, strict=True)}
            expected = [
                self._text_ahead.propose(req.rid, req.num_known, draft, in_flight.get(req.rid, 0))
                for req, draft in zip(running, drafts, strict=True)
            ]
            lengths = self.policy.choose_ahead(expected, len(running), joined_gain=self._text_ahead.joined_gain)
            num_failed = self._drafter.num_failures - failures  # counted as such
            num_empty = sum(not survival.size for survival in expected)
            skipped += ["no_match"] * (num_empty - len(skipped) - num_failed)
        self.totals.draft_s += time.perf_counter() - start
        chosen = {req.rid: length for req, length in zip(running, lengths, strict=True) if length}
        return DraftsAhead(chosen, texts, sources, skipped) if chosen else None

    def _continue(self, req: Req, size: int) -> Draft:
        """At most `size` tokens that may follow the known ones of a request."""
        draft = self._drafter.propose(req, size) if _may_speculate(req) and self._index(req) else None
        return draft or NO_DRAFT

    def expect_result(self, drafts: DraftsAhead, step: int) -> None:
        """Take note that these drafts have been scheduled as a step that is ahead."""
        self._num_in_flight += 1
        self._sources_ahead[step] = drafts.sources
        for reason in drafts.skipped:
            self.totals.skipped[reason] += 1

    def catch_up(self, running: Iterable[Req]) -> None:
        """Give the drafter the tokens that it does not have; called while a step runs."""
        start = time.perf_counter()
        for req in filter(_may_speculate, running):
            self._index(req)
        self.totals.draft_s += time.perf_counter() - start

    def update_totals(self) -> None:
        """Count the drafts that were verified, and the host memory of the drafter. Called at the end of a step, when
        the next one runs, and where answers come or go between steps."""
        self._verified.count()
        self._drafter.count_bytes()

    def count_skipped(self, running: Sequence[Req]) -> None:
        """Count the requests of a step that was not drafted for, by reason. A step that the policy lets rest adds no
        reason of its own."""
        of_all = "drafter_off" if self.has_failed else None
        if of_all is None and not all(req.is_prefilled for req in running):
            of_all = "prompts"
        for req in running:
            reason = _refusal(req) or of_all
            if reason is not None and req.is_prefilled:
                self.totals.skipped[reason] += 1

    def watch(self, running: Sequence[Req], step: int) -> None:
        """While the policy drafts nothing, propose without verifying, and compare with the tokens that come, to notice
        text that has become predictable. The step in flight hides a part of this work; where the device is the host's
        own cores it hides little, so this becomes rarer while no draft promises enough for a probe, until the newest
        request is another one."""
        self.count_skipped(running)
        every = max(WATCH_EVERY, int(len(running) / WATCHED_A_STEP))
        newest = running[-1].rid if running else None
        rests = self.policy.is_off
        if newest != self._newest or not rests:
            self._newest, self._backed_off = newest, 1
        if not rests or self.has_failed or step < self._last_watch + self._backed_off * every:
            return
        if self._drafter.model is not None:
            return  # a draft model drafts for steps that verify alone
        start, survivals = time.perf_counter(), list[Float64[np.ndarray, " k"]]()
        for req in filter(_may_speculate, running):
            last = self._unverified.get(req.rid)
            if last is None or self._settle(req, last):
                draft = (self._drafter.propose(req, self._limits.num_drafts) if self._index(req) else None) or NO_DRAFT
                last = _Unverified(req.num_known, draft, self._estimates.survival(req.rid, draft))
                self._unverified[req.rid] = last
            survivals.append(last.survival)
        pays = self.policy.expect(survivals, len(running))
        self._backed_off = 1 if pays else min(2 * self._backed_off, MOST_BACKED_OFF)
        self._last_watch = step
        self.totals.draft_s += time.perf_counter() - start

    def _settle(self, req: Req, last: _Unverified) -> bool:
        """Observe a draft that the tokens decide about; returns whether they do."""
        drafted = last.draft.tokens
        sampled = req.tokens[last.start : req.num_known][: drafted.size]
        matches = sampled == drafted[: sampled.size]
        accepted = sampled.size if matches.all() else int(matches.argmin())
        if accepted == sampled.size < drafted.size:
            return False
        self._estimates.observe(req.rid, drafted.size, accepted)
        return True

    def observe(self, batch: ModelWorkerBatch, result: StepResult, advanced: Iterable[Req]) -> None:
        """Learn from what a verify step accepted and kept; `update_totals` counts it. The first step after proposals
        has them, if it had room."""
        num_requests, num_drafts = batch.num_requests, batch.num_tokens - batch.num_requests
        if self._num_in_flight:
            self._num_in_flight -= 1
            accepted = 0 if result.accepted is None else int(result.accepted.sum())
            drafts = 0 if result.accepted is None else num_drafts
            self.policy.tried(
                num_requests=num_requests,
                num_drafts=drafts,
                num_emitted=num_requests + accepted,
                is_joined=not batch.is_ahead,
            )
        if result.accepted is not None:
            self._observe_accepted(batch, result.accepted, advanced)
        else:
            for req in advanced:
                if req.state is ReqState.FINISHED or req.pending_finish is not None:
                    continue  # its last token may have come before
                before = req.num_known - 1  # others have one more
                self._text_ahead.observe(req.rid, before, req.tokens[before : req.num_known])
        if result.drafts is not None:
            self._offer(batch, result.drafts, advanced)

    def _observe_accepted(
        self, batch: ModelWorkerBatch, accepted_drafts: Int32[np.ndarray, " B"], advanced: Iterable[Req]
    ) -> None:
        """Learn what became of the drafts of a verify step."""
        model, reqs = self._drafter.model, {req.slot: req for req in advanced}
        sources = self._sources_ahead.pop(batch.step, self._sources)
        starts, slots = batch.query_starts.tolist(), batch.request_slots.tolist()
        first_positions = batch.positions[batch.query_starts[: accepted_drafts.size]].tolist()
        for row, accepted in enumerate(accepted_drafts.tolist()):
            proposed, req = starts[row + 1] - starts[row] - 1, reqs.get(slots[row])
            if req is None:
                continue
            if model is not None and batch.is_ahead:  # drafted before the host knew it
                self._estimates.survival(req.rid, model.last_offer(req.rid)[1])
            before = first_positions[row] + 1  # tokens that the request had
            emitted = req.num_known - before
            if model is None:
                self._text_ahead.observe(req.rid, before, req.tokens[before : req.num_known])
            if proposed == 0 or emitted == 0:  # emitted none: the step before ended it, this one fed its last token
                continue
            if model is not None or not batch.is_ahead:
                self._estimates.observe(req.rid, proposed, accepted)
            source = DraftSource.MODEL if model is not None else sources.get(req.rid, DraftSource.CONTEXT)
            verified = VerifiedDraft(source, proposed, min(accepted, emitted), emitted)
            self._verified.add(verified)
            if source is DraftSource.PREDICTION:
                req.speculative.add_predicted(proposed=proposed, accepted=verified.accepted)
        self._text_ahead.end_step()
        self._verified.end_step()

    def _offer(self, batch: ModelWorkerBatch, drafts: Int32[np.ndarray, "B 2k"], advanced: Iterable[Req]) -> None:
        """Give the drafter what a draft model proposes after a step."""
        model = self._drafter.model
        if model is None:
            return
        rows = {slot: row for row, slot in enumerate(batch.request_slots[: batch.num_requests].tolist())}
        most = drafts.shape[1] // 2
        probabilities = np.ascontiguousarray(drafts[:, most:]).view(np.float32)
        for req in advanced:
            if req.state is ReqState.RUNNING:
                row = rows[req.slot]
                model.offer(req.rid, req.num_known, drafts[row, :most], probabilities[row])

    def time_step(self, batch: ModelWorkerBatch, seconds: float, *, waited_s: float | None = None) -> None:
        """Take note of what a step without prompt chunks took, and before that how long the device waited for the host
        (None: it did not). While drafting is off, one in TIMED_EVERY of the steps without drafts is noted."""
        if not batch.all_generated:
            return
        if waited_s is not None:
            self.costs.follow_wait(batch.num_requests, waited_s)
        rests = batch.num_tokens == batch.num_requests and self.policy.is_off
        if rests and self._num_untimed < TIMED_EVERY - 1:
            self._num_untimed += 1
            return
        steps, self._num_untimed = self._num_untimed + 1, 0
        self.costs.follow(batch.num_requests, batch.token_ids.size, batch.num_tokens, seconds, steps=steps)

    def counts_of(self, req: Req) -> SpeculativeCounts:
        """What became of a request's drafts so far."""
        return req.speculative.counts(self._limits.num_drafts)

    def remember(self, prompt: Int32[np.ndarray, " S"], output: Int32[np.ndarray, " G"], sample: DraftSample) -> None:
        """Give the drafter an answer, for later requests of the namespace; called between steps."""
        self._drafter.remember(prompt, output, sample)
        self.update_totals()

    def forget(self) -> None:
        """Drop all answers that the drafter remembers; called between steps."""
        self._drafter.forget()
        self.update_totals()

    def close(self, req: Req) -> None:
        """Forget a request that has ended; its answer is remembered where that is asked for."""
        if self._sharing.remembers_answers and req.num_output and _refusal(req) is None:
            self._drafter.remember(req.tokens[: req.prompt_len], req.output_ids, build_draft_sample(req))
        self._drafter.close(req)
        self._unverified.pop(req.rid, None)
        self._estimates.forget(req.rid)
        self._text_ahead.close(req.rid)

    def _draft(self, req: Req) -> Draft:
        """What the drafter proposes for a request; empty where it may not have drafts, or the drafter fails."""
        reason = "drafter_off" if self.has_failed else _refusal(req)
        if reason is None:
            most, failures = min(req.max_drafts, self._limits.num_drafts), self._drafter.num_failures
            if most > 0 and self._index(req):
                draft = self._drafter.propose(req, most)
                if draft is not None and draft.tokens.size:
                    return draft
            if self._drafter.num_failures > failures:  # counted as such
                return NO_DRAFT
            reason = "no_match" if most > 0 else "length"
        self.totals.skipped[reason] += 1
        return NO_DRAFT

    def _index(self, req: Req) -> bool:
        """Give the drafter the known tokens of a request; False where it fails."""
        if not (self.has_failed or self._drafter.has_indexed(req)):
            self.policy.renew()
        return self._drafter.index(req)


def _may_speculate(req: Req) -> bool:
    """Whether a request may ever have drafts."""
    return _refusal(req) is None and req.state is ReqState.RUNNING


def _refusal(req: Req) -> str | None:
    """Why a request has no drafts, whatever its text; None where it may."""
    if req.grammar is not None:
        return "structured"
    return None if req.source.sampling.speculative else "not_requested"
