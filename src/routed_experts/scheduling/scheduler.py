"""Scheduler: the waiting queue, the running requests and their pages.

A step holds every request that can decode, then prompt chunks within the token budget: first of running requests,
then of waiting ones, first come first served. Requests of one prompt (n > 1) wait until the first has committed its
prompt, then find it in the prefix cache. When pages run out, the request admitted last returns to the queue with its
rows. At most one step is in flight when the next is scheduled, none where the drafts of the next follow tokens that the
host has to know. A step with prompt chunks has no drafts. Requests with a grammar have none; the tokens that it forces
are fed as a chunk. In deterministic mode they are fed one a step: their logprobs come from another program in a chunk,
and where a chunk is cut depends on other requests.

A step is scheduled in two parts: `choose` what it feeds, then `build` the batch. Between them the schedulers of several
data ranks agree on one padded shape."""

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from jaxtyping import Bool, Int32, UInt32

from routed_experts.capture.host_cache import SavedRows
from routed_experts.core.buckets import Buckets
from routed_experts.core.integrity import Violation
from routed_experts.core.model_worker_batch import ForwardMode, ModelWorkerBatch, StepResult
from routed_experts.core.server_args import ServerArgs
from routed_experts.scheduling.batch_builder import BatchBuilder, StepForm, Texts, has_scored_prompt_tokens
from routed_experts.scheduling.request_pages import RequestPages
from routed_experts.scheduling.schedule_batch import NO_TOKENS, Req, ReqState, ScheduledChunk
from routed_experts.scheduling.step_results import (
    SampledTokens,
    StopMatcher,
    add_prompt_logprobs,
    append_token,
    commit_forced,
    commit_run,
    live_tokens,
    no_stop_strings,
)

Drafts = Mapping[str, Int32[np.ndarray, " k"]]  # by request id
NO_DRAFTS: Drafts = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class Committed:
    """What a step has changed. `advanced`: requests with a new token, or that finished; these keep their pages until
    `release`. `live`: which of the step's tokens have rows to file: those of requests that had not finished, without
    rejected drafts; None for all."""

    advanced: list[Req]
    live: Bool[np.ndarray, " num_tokens"] | None


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenStep:
    """What the requests of a scheduler feed in its next step. `all_generated`: no token of a prompt, and none that was
    forced."""

    chunks: list[ScheduledChunk]
    all_generated: bool


class Scheduler:
    """The queue, the running requests, and the scheduling policy. Engine thread only."""

    def __init__(
        self, args: ServerArgs, buckets: Buckets, *, num_pages: int, vocab_size: int, one_pass_prefixes: bool = False
    ) -> None:
        """`one_pass_prefixes`: see RequestPages."""
        self._args, self._buckets = args, buckets
        self._prefill_limit, self._running_limit = args.prefill_limit, args.running_limit
        self.weight_version = 0
        slots = self._running_limit + 1
        self.pages = RequestPages(
            num_pages=num_pages,
            page_size=args.page_size,
            num_request_slots=slots,
            table_width=buckets.table_width,
            use_prefix_cache=not args.disable_radix_cache,
            one_pass_prefixes=one_pass_prefixes,
        )
        self._batch_builder = BatchBuilder(
            buckets, self.pages.table, num_request_slots=slots, page_size=args.page_size, vocab_size=vocab_size
        )
        self.waiting: collections.deque[Req] = collections.deque()
        self.running: list[Req] = []
        self._leaders: dict[str, Req] = {}  # by group: its first choice, while later choices may wait for it
        self._in_flight: dict[int, tuple[ScheduledChunk, ...]] = {}  # by step
        self._located = frozenset[str]()  # requests whose slots on the device stand where the last verify step put them
        self._step = 0
        self.num_retracted = 0
        self.accepts_new = True  # False while a pause lets running requests finish

    @property
    def has_started(self) -> bool:
        """Whether a request runs, or has generated tokens and was returned to the queue."""
        return bool(self.running) or any(req.num_output for req in self.waiting)

    @property
    def is_in_flight(self) -> bool:
        """Whether a step with requests of this scheduler has not been committed."""
        return bool(self._in_flight)

    @property
    def num_live_tokens(self) -> int:
        """Known tokens of the requests that wait or run."""
        return sum(req.num_known for req in (*self.waiting, *self.running))

    def num_cached(self, req: Req) -> int:
        """How many tokens of a request's prompt it would take from the prefix cache, were it admitted now."""
        return self.pages.num_cached(req, (self.weight_version, req.source.extra_key))

    def add(self, reqs: Iterable[Req]) -> None:
        """Queue requests."""
        for req in reqs:
            if req.source.choice == 0:
                self._leaders[req.source.group] = req
            self.waiting.append(req)

    def schedule(self, drafts: Drafts = NO_DRAFTS, *, drafts_ahead: bool = False) -> ModelWorkerBatch | None:
        """Build the batch of the next step of this scheduler alone; None when nothing can run now. See `choose` and
        `build`."""
        chosen = self.choose(drafts)
        return None if chosen is None else self.build(chosen, drafts_ahead=drafts_ahead)

    def choose(self, drafts: Drafts = NO_DRAFTS) -> ChosenStep | None:
        """Choose what the next step feeds, and admit requests to it; None when nothing can run now. `drafts` are cut to
        what a request may verify, and dropped where the step has prompt chunks or pages are short. `build` follows
        before anything else."""
        chunks = [
            ScheduledChunk(req, req.num_dispatched, 1, True)
            for req in self.running
            if req.wants_decode and self.pages.grow(req, req.num_dispatched + 1)
        ]
        decoding, budget = len(chunks), min(self._prefill_limit, self._buckets.extend[-1] - len(chunks))
        if not self._args.deterministic and any([chunk.req.forced.size for chunk in chunks]):
            budget = self._add_forced(chunks, budget)
        for req in self.running:
            if (
                req.state is ReqState.RUNNING
                and req.num_pending == 0
                and not req.wants_decode
                and budget > 0
                and req.num_unfed > 0
            ):
                chunks.append(_next_chunk(req, budget))
                budget -= chunks[-1].count
        budget = self._admit(chunks, budget)
        if not chunks:
            return None
        one_token_each = len(chunks) == decoding and not any([chunk.forced is not None for chunk in chunks])
        if drafts and one_token_each:
            assert not self._in_flight, "drafts follow tokens that the host knows"
            chunks = self._with_drafts(chunks, drafts)
        return ChosenStep(chunks, one_token_each)

    def form(self, chosen: ChosenStep) -> StepForm:
        """The form of a chosen step by itself."""
        return self._batch_builder.form(chosen.chunks, all_generated=chosen.all_generated)

    def build(
        self, chosen: ChosenStep | None, form: StepForm | None = None, *, drafts_ahead: bool = False
    ) -> ModelWorkerBatch:
        """Build the batch of a chosen step, padded as `form` says (None: its own). None is a batch of padding, for a
        step of other data ranks. `drafts_ahead`: a model drafts for the step after it; the pages that it writes to are
        allocated as far as there are some."""
        if chosen is None:
            assert form is not None, "of the ranks that do run"
            return self._batch_builder.build((), form, step=self._step, all_generated=True)
        chunks = chosen.chunks
        if drafts_ahead:
            for chunk in chunks:
                self._grow_ahead(chunk)
        batch = self._batch_builder.build(
            chunks,
            form,
            step=self._step,
            all_generated=chosen.all_generated,
            drafts_ahead=drafts_ahead,
        )
        is_verify = batch.mode is ForwardMode.TARGET_VERIFY
        self._located = frozenset(chunk.req.rid for chunk in chunks) if is_verify else frozenset()
        self._in_flight[self._step] = tuple(chunks)
        self._step += 1
        for chunk in chunks:
            chunk.req.num_dispatched = chunk.start + chunk.count
            chunk.req.num_pending += chunk.samples + chunk.num_forced
            if chunk.samples:
                chunk.req.forced = NO_TOKENS  # those of the next token are known when its mask is filled
        return batch

    def fill_mask(self, batch: ModelWorkerBatch) -> tuple[UInt32[np.ndarray, "B W"], list[Req]]:
        """The tokens that each row of a step in flight may sample, and the requests whose grammar cannot be followed
        any further. Every step before it must have been committed. Rows without a grammar, and those of requests that
        have ended, have all bits set."""
        mask = np.full((batch.seq_lens.size, self._batch_builder.num_mask_words), 0xFFFFFFFF, np.uint32)
        failed: list[Req] = []
        for index, chunk in enumerate(self._in_flight.get(batch.step, ())):
            req, state = chunk.req, chunk.req.grammar
            if state is None or not chunk.samples or req.state is not ReqState.RUNNING:
                continue
            if req.pending_finish is not None:
                continue  # its last token is fed for its row, and what follows is dropped
            for token in () if chunk.forced is None else chunk.forced.tolist():
                state.accept(token)
            forced = state.forced_tokens()
            if forced:
                mask[index] = 0
                mask[index, forced[0] // 32] = np.uint32(1 << forced[0] % 32)
                req.forced = np.array(forced[1:], np.int32)
            else:
                state.fill(mask[index], keep_end=not req.source.sampling.ignore_eos)
            if state.error is not None:
                mask[index] = 0xFFFFFFFF
                failed.append(req)
        return mask, failed

    def count_in_flight(self) -> dict[str, int]:
        """How many tokens each request feeds in the step in flight."""
        return {chunk.req.rid: chunk.count for chunks in self._in_flight.values() for chunk in chunks}

    def may_be_ahead(self) -> bool:
        """Whether a verify step may follow the one in flight. Not where the host has to read first: a request was not
        in the last verify step, waits to be admitted, or has its stop tokens banned."""
        if not self._in_flight or (self.waiting and len(self.running) < self._running_limit):
            return False
        return all(req.rid in self._located and req.num_known >= req.min_stop_len for req in self.running)

    def schedule_ahead(self, num_drafts: Mapping[str, int], texts: Texts | None = None) -> ModelWorkerBatch | None:
        """Build the batch of a verify step that follows another one in flight. `num_drafts`: by request id, of those
        that are on the device, or from `texts`. A request that the step in flight may bring to its end is left out.
        None where none `may_be_ahead`, pages are short, or there is no draft."""
        if not self.may_be_ahead():
            return None
        in_flight = self.count_in_flight()
        ready = list[tuple[Req, int, int]]()  # of a request: its last possible position, tokens that it may feed there
        for req in self.running:
            last = req.num_known - 1 + in_flight.get(req.rid, 0)
            most = req.max_len - 1 - last
            if req.pending_finish is not None:  # its last token has still to be fed, unless the step in flight does so
                most = 0 if req.num_pending else 1
            if most > 0:
                ready.append((req, last, most))
        if not ready or not all(self.pages.grow(req, last + 1) for req, last, _ in ready):
            return None
        spare, chunks = self._buckets.verify_capacity(len(ready)) - len(ready), list[ScheduledChunk]()
        for req, last, most in ready:
            count = 1 + min(num_drafts.get(req.rid, 0), most - 1, self._buckets.num_drafts, spare)
            if not self.pages.grow(req, last + count):
                count = 1
            self.pages.grow(req, min(last + count + self._buckets.lookahead, req.max_len))
            chunks.append(ScheduledChunk(req, 0, count, True))
            spare -= count - 1
        if all(chunk.count == 1 for chunk in chunks):
            return None
        batch = self._batch_builder.build(
            chunks, step=self._step, all_generated=True, drafts_ahead=texts is None, is_ahead=True, texts=texts
        )
        self._in_flight[self._step] = tuple(chunks)
        self._step += 1
        for chunk in chunks:
            chunk.req.num_pending += 1
        return batch

    def locate(self, batch: ModelWorkerBatch) -> ModelWorkerBatch:
        """Return a batch that is ahead, with the positions of its tokens, which its chunks in flight get, too. Every
        step before it must have been committed."""
        chunks = [dataclasses.replace(chunk, start=chunk.req.num_known - 1) for chunk in self._in_flight[batch.step]]
        self._in_flight[batch.step] = tuple(chunks)
        return self._batch_builder.locate(batch, [chunk.start for chunk in chunks])

    def commit(
        self, batch: ModelWorkerBatch, result: StepResult, match_stop_string: StopMatcher = no_stop_strings
    ) -> Committed:
        """Apply the result of a step, token by token: a request ends at the first token that is a stop token, completes
        a stop string or reaches its length, and gets no later one."""
        advanced: list[Req] = []
        chunks = self._in_flight.pop(batch.step)
        rows = [chunk.count for chunk in chunks]  # to file
        tokens, logprobs, runs = result.tokens.tolist(), result.logprobs.tolist(), None
        sampled = SampledTokens(tokens, logprobs, result)
        if result.accepted is not None:
            accepted = result.accepted.tolist()
            runs = list(zip(batch.query_starts[: len(accepted)].tolist(), accepted, strict=True))
        for index, chunk in enumerate(chunks):
            req = chunk.req
            if req.state is ReqState.FINISHED:
                rows[index] = 0
                continue
            req.placement_epoch = result.placement_epoch
            if runs is not None:
                first, num_accepted = runs[index]
                run = range(first, first + num_accepted + 1)
                rows[index] = commit_run(req, chunk, run, sampled, match_stop_string)
                advanced.append(req)
                continue
            if chunk.forced is not None:
                rows[index] = commit_forced(req, chunk, index, batch, result, match_stop_string)
                advanced.append(req)
                continue
            req.num_committed = chunk.start + chunk.count
            if batch.prompt_targets is not None and has_scored_prompt_tokens(chunk):
                add_prompt_logprobs(req, chunk, int(batch.query_starts[index]), result)
            if not chunk.samples:
                continue
            if not req.is_prefilled:
                req.is_prefilled = True
                self.pages.cache_prefix(req, self.namespace(req))
            req.num_pending -= 1
            advanced.append(req)
            if req.pending_finish is not None:
                req.finish(req.pending_finish)  # the token sampled after the last one is dropped
            else:
                append_token(req, tokens[index], logprobs[index], index, result, match_stop_string)
        return Committed(advanced, live_tokens(chunks, rows))

    def release(self, req: Req) -> None:
        """Release a finished request: its pages go to the prefix cache or the free list."""
        assert req.state is ReqState.FINISHED, (req.rid, req.state)
        if req in self.running:
            self.running.remove(req)
            self.pages.release(req, self.namespace(req), cache=True)
        else:
            self.waiting.remove(req)
        if self._leaders.get(req.source.group) is req:
            del self._leaders[req.source.group]

    def preemption_victim(self) -> Req | None:
        """Return the request to retract when pages run out: the one admitted last, but never the only one."""
        return self.running[-1] if len(self.running) > 1 else None

    def retract(self, req: Req, saved: SavedRows | None) -> None:
        """Return a running request to the head of the queue, with its tokens and its rows. No step may be in flight."""
        assert not self._in_flight and req.num_pending == 0, (req.rid, list(self._in_flight))
        self.running.remove(req)
        self.pages.release(req, self.namespace(req), cache=False)
        req.saved_rows, req.state = saved, ReqState.WAITING
        req.most_fed = req.num_fed
        req.num_dispatched = req.num_committed = 0
        req.forced = NO_TOKENS
        self.waiting.appendleft(req)
        self.num_retracted += 1

    def namespace(self, req: Req) -> Hashable:
        """Return what two requests must have in common, besides tokens, to share pages."""
        return req.weight_version, req.source.extra_key

    def check_integrity(self) -> list[Violation]:
        """Check the owners of pages and locks, and that waiting requests hold none."""
        violations = self.pages.check_integrity(self.running)
        stray = [req.rid for req in self.waiting if req.num_pages or req.slot]
        if stray:
            violations.append(
                Violation(name="waiting_holds_pages", detail=f"waiting requests {stray[:8]} hold pages or a slot")
            )
        return violations

    def _with_drafts(self, chunks: Sequence[ScheduledChunk], drafts: Drafts) -> list[ScheduledChunk]:
        """The decoding chunks with the drafts that they may verify, as far as a step holds them."""
        spare, following = self._buckets.verify_capacity(len(chunks)) - len(chunks), list[ScheduledChunk]()
        for chunk in chunks:
            req, own = chunk.req, drafts.get(chunk.req.rid)
            count = 0 if own is None else min(own.size, req.max_drafts, self._buckets.num_drafts, spare)
            if own is not None and count > 0 and self.pages.grow(req, chunk.start + 1 + count):
                chunk = ScheduledChunk(req, chunk.start, 1 + count, True, own[:count])
                spare -= count
            following.append(chunk)
        return following

    def _add_forced(self, chunks: list[ScheduledChunk], budget: int) -> int:
        """Give decoding chunks the tokens that are forced after theirs, as far as the step and the pages hold them;
        returns the rest of the budget."""
        for index, chunk in enumerate(chunks):
            req = chunk.req
            count = min(req.forced.size, budget, req.max_len - 2 - chunk.start)
            if req.pending_finish is None and count > 0 and self.pages.grow(req, chunk.start + 1 + count):
                chunks[index] = dataclasses.replace(chunk, count=1 + count, forced=req.forced[:count])
                budget -= count
        return budget

    def _grow_ahead(self, chunk: ScheduledChunk) -> None:
        """Allocate pages for the drafts of a model behind a chunk, where that is possible."""
        req = chunk.req
        if chunk.samples:
            self.pages.grow(req, min(chunk.start + chunk.count + self._buckets.lookahead, req.max_len))

    def _admit(self, chunks: list[ScheduledChunk], budget: int) -> int:
        """Admit waiting requests while tokens, slots and pages last; appends their first chunks to `chunks`."""
        for req in self._admissible():
            if budget <= 0 or max(len(chunks), len(self.running)) >= self._running_limit:
                break
            req.weight_version = self.weight_version
            if not self.pages.admit(req, self.namespace(req), spare=len(self.running)):
                break
            if not req.is_prefilled:
                req.cached_tokens = req.num_dispatched
            self.waiting.remove(req)
            req.state = ReqState.RUNNING
            self.running.append(req)
            self._batch_builder.register(req)
            chunks.append(_next_chunk(req, budget))
            budget -= chunks[-1].count
        return budget

    def _admissible(self) -> Iterable[Req]:
        """Waiting requests in order, without those that wait for the first choice of their prompt."""
        for req in tuple(self.waiting):
            leader = self._leaders.get(req.source.group)
            waits = (
                leader is not None
                and leader is not req
                and not leader.is_prefilled
                and not self._args.disable_radix_cache
            )
            if not waits and (self.accepts_new or req.num_output):
                yield req


def _next_chunk(req: Req, budget: int) -> ScheduledChunk:
    """Return the next chunk of a request's known tokens, at most `budget` tokens."""
    count = min(req.num_unfed, budget)
    return ScheduledChunk(req, req.num_dispatched, count, req.num_dispatched + count == req.num_known)
