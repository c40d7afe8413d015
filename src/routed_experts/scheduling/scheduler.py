"""Scheduler: who goes next. Keeps the waiting queue, the running requests and their pages. Knows no device and no text.

A step holds every request that can decode, then prompt chunks within the token budget: first of requests already
running, then of waiting ones, first come first served. Requests of one prompt (n > 1) wait until the first has read its
prompt back, then find it in the prefix cache. When pages run out, the request admitted last goes back to the queue with
its rows. At most one step is in flight when the next is scheduled."""

import collections
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from jaxtyping import Bool

from routed_experts.capture.host_cache import SavedRows
from routed_experts.core.buckets import Buckets
from routed_experts.core.errors import QueueFullError
from routed_experts.core.integrity import Violation
from routed_experts.core.io_struct import FinishReason
from routed_experts.core.model_worker_batch import ModelWorkerBatch, StepResult
from routed_experts.core.server_args import ServerArgs
from routed_experts.scheduling.batch_builder import BatchBuilder, has_scored_prompt_tokens
from routed_experts.scheduling.request_pages import RequestPages
from routed_experts.scheduling.schedule_batch import Req, ReqState, ScheduledChunk


class Scheduler:
    """The queue, the running requests, and the policy between them. Engine thread only."""

    def __init__(self, args: ServerArgs, buckets: Buckets, *, num_pages: int, vocab_size: int) -> None:
        self._args, self._buckets = args, buckets
        self.weight_version = 0
        slots = args.running_limit + 1
        self.pages = RequestPages(
            num_pages=num_pages,
            page_size=args.page_size,
            num_request_slots=slots,
            table_width=buckets.table_width,
            use_prefix_cache=not args.disable_radix_cache,
        )
        self._batch_builder = BatchBuilder(
            buckets, self.pages.table, num_request_slots=slots, page_size=args.page_size, vocab_size=vocab_size
        )
        self.waiting: collections.deque[Req] = collections.deque()
        self.running: list[Req] = []
        self._leaders: dict[str, Req] = {}  # group -> its first choice, while later choices may wait for it
        self._in_flight: dict[
            int, tuple[tuple[ScheduledChunk, ...], int]
        ] = {}  # by step: its rows, and how many had been released before
        self._num_released = 0
        self._step = 0
        self.num_retracted = 0
        self.accepts_new = True  # False while a pause lets what has started finish

    @property
    def has_started(self) -> bool:
        """Is there a request that runs, or that has generated something and was sent back to the queue."""
        return bool(self.running) or any(req.num_output for req in self.waiting)

    def add(self, reqs: Sequence[Req]) -> None:
        """Queue the requests of one call, all or none; QueueFullError if they do not fit."""
        limit = self._args.max_queued_requests
        if len(reqs) > limit:
            raise QueueFullError(
                f"{len(reqs)} requests came in one call, max_queued_requests={limit}; send at most {limit} at once"
            )
        if len(self.waiting) + len(reqs) > limit:
            raise QueueFullError(
                f"{len(self.waiting)} requests wait and {len(reqs)} came, max_queued_requests={limit}; try again later"
            )
        for req in reqs:
            if req.source.choice == 0:
                self._leaders[req.source.group] = req
            self.waiting.append(req)

    def schedule(self) -> ModelWorkerBatch | None:
        """Choose the rows of the next step; None when nothing can run now."""
        rows = [
            ScheduledChunk(req, req.num_dispatched, 1, True)
            for req in self.running
            if req.wants_decode and self.pages.grow(req, req.num_dispatched + 1)
        ]
        decoding, budget = len(rows), min(self._args.prefill_limit, self._buckets.extend[-1] - len(rows))
        for req in self.running:
            if (
                req.state is ReqState.RUNNING
                and req.num_pending == 0
                and not req.wants_decode
                and budget > 0
                and req.num_unfed > 0
            ):
                rows.append(_next_chunk(req, budget))
                budget -= rows[-1].count
        budget = self._admit(rows, budget)
        if not rows:
            return None
        batch = self._batch_builder.build(rows, step=self._step, all_generated=len(rows) == decoding)
        self._in_flight[self._step] = tuple(rows), self._num_released
        self._step += 1
        for row in rows:
            row.req.num_dispatched = row.start + row.count
            row.req.num_pending += row.samples
        return batch

    def commit(self, batch: ModelWorkerBatch, result: StepResult) -> list[Req]:
        """Take in what a step computed. Returns the requests that gained a token, those that it ended among them (they
        keep their pages until `release`)."""
        advanced: list[Req] = []
        rows, _ = self._in_flight.pop(batch.step)
        tokens, logprobs = result.tokens.tolist(), result.logprobs.tolist()
        for index, row in enumerate(rows):
            req = row.req
            if req.state is ReqState.FINISHED:
                continue
            req.num_committed = row.start + row.count
            if batch.prompt_targets is not None and has_scored_prompt_tokens(row):
                _add_prompt_logprobs(req, row, int(batch.query_starts[index]), result)
            if not row.samples:
                continue
            if not req.is_prefilled:
                req.is_prefilled = True
                self.pages.cache_prefix(req, self.namespace(req))
            req.num_pending -= 1
            advanced.append(req)
            if req.pending_finish is not None:
                req.finish(req.pending_finish)  # what was sampled after the last token is nobody's
            else:
                _append(req, tokens[index], logprobs[index], index, result)
        return advanced

    def live_tokens(self, batch: ModelWorkerBatch) -> Bool[np.ndarray, " num_tokens"] | None:
        """Which tokens of a step in flight still belong to a request that has not ended: a mask, or None for all."""
        rows, released = self._in_flight[batch.step]
        if released == self._num_released:  # nobody has ended since
            return None
        return np.repeat([row.req.state is not ReqState.FINISHED for row in rows], [row.count for row in rows])

    def release(self, req: Req) -> None:
        """Let go of a finished request: its pages go to the prefix cache or the free list."""
        assert req.state is ReqState.FINISHED, (req.rid, req.state)
        self._num_released += 1
        if req in self.running:
            self.running.remove(req)
            self.pages.release(req, self.namespace(req), cache=True)
        else:
            self.waiting.remove(req)
        if self._leaders.get(req.source.group) is req:
            del self._leaders[req.source.group]

    def preemption_victim(self) -> Req | None:
        """The request to send back when pages run out: the one admitted last, but never the only one."""
        return self.running[-1] if len(self.running) > 1 else None

    def retract(self, req: Req, saved: SavedRows | None) -> None:
        """Send a running request back to the head of the queue, with its tokens and its rows. Nothing may be in
        flight."""
        assert not self._in_flight and req.num_pending == 0, (req.rid, list(self._in_flight))
        self.running.remove(req)
        self.pages.release(req, self.namespace(req), cache=False)
        req.saved_rows, req.state = saved, ReqState.WAITING
        req.num_dispatched = req.num_committed = 0
        self.waiting.appendleft(req)
        self.num_retracted += 1

    def namespace(self, req: Req) -> Hashable:
        """What must be equal for two requests to share pages, beside their tokens."""
        return req.weight_version, req.source.extra_key

    def check_integrity(self) -> list[Violation]:
        """I3, I4, I5 of the live state."""
        found = self.pages.check_integrity(self.running)
        stray = [req.rid for req in self.waiting if req.num_pages or req.slot]
        if stray:
            found.append(
                Violation(name="waiting_holds_pages", detail=f"waiting requests {stray[:8]} hold pages or a slot")
            )
        return found

    def _admit(self, rows: list[ScheduledChunk], budget: int) -> int:
        """Move waiting requests to running while tokens, slots and pages last; appends their first chunks to `rows`."""
        for req in self._admissible():
            if budget <= 0 or len(rows) >= self._args.running_limit or len(self.running) >= self._args.running_limit:
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
            rows.append(_next_chunk(req, budget))
            budget -= rows[-1].count
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
    """The next part of a request's known tokens, of at most `budget` tokens."""
    count = min(req.num_unfed, budget)
    return ScheduledChunk(req, req.num_dispatched, count, req.num_dispatched + count == req.num_known)


def _append(req: Req, token: int, logprob: float, index: int, result: StepResult) -> None:
    """Note a sampled token, and end the request if it was its last."""
    req.tokens[req.num_known] = token
    req.num_known += 1
    if req.source.return_logprob:
        req.output_logprobs.append(logprob)
        req.output_top.append(_top(result.top_logprobs, result.top_ids, index, req.source.top_logprobs_num))
    if token in req.source.stop_token_ids and req.num_known >= req.min_len:
        req.end(FinishReason(type="stop", matched=token))
    elif req.num_known == req.max_len:
        req.end(FinishReason(type="length", length=req.num_output))


def _add_prompt_logprobs(req: Req, row: ScheduledChunk, first: int, result: StepResult) -> None:
    """Keep the logprobs of the prompt tokens that follow this row's tokens; the first pass that computes one wins."""
    assert result.prompt_logprobs is not None, req.rid
    expected = max(req.source.logprob_start_len, 1)
    for place in range(max(row.start, expected - 1), min(row.start + row.count, req.prompt_len - 1)):
        at = first + place - row.start
        top = _top(result.prompt_top_logprobs, result.prompt_top_ids, at, req.source.top_logprobs_num)
        req.input_logprobs.setdefault(place + 1, (float(result.prompt_logprobs[at]), top))


def _top(
    values: np.ndarray | None, ids: np.ndarray | None, index: int, count: int
) -> tuple[tuple[float, int], ...] | None:
    """The best `count` (logprob, id) of one row."""
    if count == 0 or values is None or ids is None:
        return None
    return tuple(
        (float(value), int(token)) for value, token in zip(values[index, :count], ids[index, :count], strict=True)
    )
