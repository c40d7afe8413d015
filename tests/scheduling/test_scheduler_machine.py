"""Random schedules of many requests in a pool that is too small for them: arrivals, aborts, retractions, flushes, new
weights, drafts that are right, wrong or partly right, of the host and of the device.

One step is in flight while the next is scheduled, as in the engine. The output of a request is known beforehand
(numpy_device.expected_tokens): any page that is shared, lost or overwritten wrongly changes it. Every step is checked,
and the whole state after it."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from routed_experts.core.buckets import Buckets, continuation_size
from routed_experts.core.io_struct import FinishReason
from routed_experts.core.model_worker_batch import ALL_GENERATED, ForwardMode
from routed_experts.core.server_args import ServerArgs
from routed_experts.scheduling.schedule_batch import Req, ReqState
from routed_experts.scheduling.scheduler import Scheduler
from support.numpy_device import VOCAB, NumpyDevice, expected_tokens, source

CONTEXT = 48


@dataclass(frozen=True)
class Life:
    """What happens. Arrivals: tick, common and own part of the prompt, max_tokens, choices, stops, penalised, with the
    row of the last token; events: tick, kind, pick."""

    page_size: int
    pages: int
    requests: int
    tokens: int
    chunk: int
    cache: bool
    deterministic: bool
    num_drafts: int
    draft_seed: int
    arrivals: list
    events: list


@st.composite
def lives(draw) -> Life:
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    requests = draw(st.integers(1, 4))
    tokens = draw(st.integers(requests, 24))
    arrival = st.tuples(
        st.integers(0, 12),
        st.integers(0, 16),
        st.integers(1, 8),
        st.integers(1, 24),
        st.integers(1, 3),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    )
    least = -(-CONTEXT // page_size)  # one request at full length
    return Life(
        page_size=page_size,
        pages=least + draw(st.integers(0, least)),
        requests=requests,
        tokens=tokens,
        chunk=draw(st.integers(1, tokens)),
        cache=draw(st.booleans()),
        deterministic=draw(st.booleans()),
        num_drafts=draw(st.sampled_from([0, 1, 3, 7])),
        draft_seed=draw(st.integers(0, 99)),
        arrivals=draw(st.lists(arrival, min_size=2, max_size=10)),
        events=draw(
            st.lists(
                st.tuples(
                    st.integers(0, 40), st.sampled_from(["abort", "retract", "flush", "weights"]), st.integers(0, 9)
                )
            )
        ),
    )


class Machine:
    """The engine's loop around a scheduler and a NumPy device; keeps what it needs to check every step."""

    def __init__(self, life: Life) -> None:
        self.args = ServerArgs(
            page_size=life.page_size,
            precompile_bs_paddings=(life.requests,),
            precompile_token_paddings=(life.tokens,),
            chunked_prefill_size=life.chunk,
            disable_radix_cache=not life.cache,
            deterministic=life.deterministic,
        )
        self.buckets = Buckets.from_args(self.args, context_length=CONTEXT, num_drafts=life.num_drafts)
        self.num_drafts, self.noise = life.num_drafts, np.random.default_rng(life.draft_seed)
        self.scheduler = Scheduler(self.args, self.buckets, num_pages=life.pages + 1, vocab_size=VOCAB)
        self.device = NumpyDevice(
            num_slots=(life.pages + 1) * life.page_size,
            num_request_slots=life.requests + 1,
            page_size=life.page_size,
            draft_seed=life.draft_seed,
        )
        self.pending = None
        self.ended: list[Req] = []
        self.done = {}  # by step: batches that were ahead, as the device completed them
        self.fed: dict[str, int] = {}  # of each running request: tokens fed since it was admitted
        self.admitted: list[str] = []

    @property
    def live(self) -> list[Req]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def step(self) -> None:
        if self.verifies and self.noise.random() < 0.6 and self.step_ahead():
            return
        drafts = {}
        if (self.num_drafts and self.noise.random() < 0.7) or self.verifies:
            self.finish(None)
            drafts = self.draft()
        batch = self.scheduler.schedule(drafts)
        while batch is None and self.pending is None and (victim := self.scheduler.preemption_victim()) is not None:
            event("pages ran out")
            self.retract(victim)
            batch = self.scheduler.schedule()
        assert batch is not None or self.pending is not None or not self.live, "requests are live, and none can run"
        dispatched = None
        if batch is not None:
            self.check(batch)
            dispatched = (batch, self.device.run(batch))
        self.finish(dispatched)

    def step_ahead(self) -> bool:
        """A verify step behind one that has not been read; False where the scheduler has none."""
        lengths = {req.rid: int(self.noise.integers(0, self.num_drafts + 2)) for req in self.scheduler.running}
        texts = self.texts() if self.noise.random() < 0.5 else None
        batch = self.scheduler.schedule_ahead(lengths, texts)
        if batch is None:
            return False
        event("ahead" if texts is None else "ahead with texts")
        assert (batch.continuations is None) == (texts is None) == batch.drafts_ahead
        assert batch.is_ahead and batch.mode is ForwardMode.TARGET_VERIFY and batch.origins is ALL_GENERATED
        assert batch.num_tokens <= self.buckets.verify_capacity(batch.num_requests)
        done = self.done[batch.step] = self.device.locate(batch)
        assert np.unique(done.kv_slots).size == batch.num_tokens, "two tokens of a step are written to one slot"
        assert (done.kv_slots >= self.args.page_size).all(), "a token is written to the padding page"
        self.finish((batch, self.device.run(batch)))
        return True

    def locate(self, batch):
        """What the scheduler makes of a batch that is ahead: where the device has fed it, but for ended requests."""
        located, done = self.scheduler.locate(batch), self.done.pop(batch.step)
        rows = self.scheduler._in_flight[batch.step]
        for row, first, end in zip(rows, batch.query_starts, batch.query_starts[1:], strict=False):
            if row.req.state is not ReqState.FINISHED:
                assert row.start == self.fed[row.req.rid] == done.positions[first]
                assert np.array_equal(located.positions[first:end], done.positions[first:end])
                assert np.array_equal(located.kv_slots[first:end], done.kv_slots[first:end])
        return located

    def texts(self) -> dict:
        """What may follow the tokens that the host knows, for any request: the start of that is right."""
        texts, most = {}, continuation_size(self.num_drafts)
        for req in self.scheduler.running:
            count = int(self.noise.integers(0, most + 1))
            text = np.array(expected_tokens(req.tokens[: req.num_known].tolist(), count), np.int32)
            text[int(self.noise.integers(0, count + 1)) :] = self.noise.integers(0, VOCAB)
            if self.noise.random() < 0.9:
                texts[req.rid] = text
        return texts

    @property
    def verifies(self) -> bool:
        """Whether the step in flight has drafts."""
        return self.pending is not None and self.pending[0].mode is ForwardMode.TARGET_VERIFY

    @property
    def chunks_in_flight(self) -> set:
        """The requests of steps that have not been read."""
        return {chunk.req.rid for chunks in self.scheduler._in_flight.values() for chunk in chunks}

    def draft(self) -> dict:
        """Drafts of any length, for any request; each token is right with the odds of its request."""
        drafts = {}
        for req in self.scheduler.running:
            count, odds = int(self.noise.integers(0, self.num_drafts + 3)), self.noise.random()
            ahead = expected_tokens(req.tokens[: req.num_known].tolist(), count)
            wrong = self.noise.random(count) > odds
            drafts[req.rid] = np.where(wrong, self.noise.integers(0, VOCAB, count), ahead).astype(np.int32)
        return drafts

    def finish(self, dispatched) -> None:
        done, self.pending = self.pending, dispatched
        if done is not None:
            batch, result = done
            batch = self.locate(batch) if batch.is_ahead else batch
            chunks = self.scheduler._in_flight[batch.step]
            ended = {chunk.req.rid for chunk in chunks if chunk.req.state is ReqState.FINISHED}
            committed = self.scheduler.commit(batch, result)
            if batch.mode is ForwardMode.TARGET_VERIFY:
                self.check_run(batch, chunks, committed, ended)
            for req in committed.advanced:
                if req.state is ReqState.FINISHED:
                    self.end(req)
        assert self.scheduler.check_integrity() == []

    def end(self, req: Req) -> None:
        self.scheduler.release(req)
        self.fed.pop(req.rid, None)
        self.ended.append(req)

    def retract(self, req: Req) -> None:
        self.scheduler.retract(req, None)
        self.fed.pop(req.rid, None)
        assert self.scheduler.check_integrity() == []

    def happen(self, kind: str, pick: int) -> None:
        event(kind)
        if kind == "abort" and self.live:
            req = self.live[pick % len(self.live)]
            req.finish(FinishReason(type="abort"))
            self.end(req)
        elif kind == "retract" and self.scheduler.running:
            self.finish(None)
            for req in tuple(self.scheduler.running[: -1 - pick % 2 : -1]):
                self.retract(req)
        elif kind == "flush":
            self.scheduler.pages.flush()
        elif kind == "weights":
            self.scheduler.weight_version += 1
            self.scheduler.pages.flush()
        assert self.scheduler.check_integrity() == []

    def check(self, batch) -> None:
        """What must hold of any step."""
        rows = self.scheduler._in_flight[batch.step]
        counts = [row.count for row in rows]
        assert batch.num_tokens == sum(counts)
        if batch.mode is ForwardMode.TARGET_VERIFY:
            event("drafts")
            assert batch.num_tokens <= self.buckets.verify_capacity(len(rows)) and max(counts) <= 1 + self.num_drafts
            assert all(row.start == row.req.num_known - 1 and row.req.is_prefilled for row in rows)
        else:
            assert batch.num_tokens <= self.buckets.extend[-1] <= self.args.token_paddings[-1]
            assert sum(count for count in counts if count > 1) <= self.args.prefill_limit
        assert batch.num_requests == len(rows) <= self.args.running_limit
        slots = batch.request_slots[: batch.num_requests]
        assert (slots > 0).all() and np.unique(slots).size == slots.size
        assert np.unique(batch.kv_slots).size == batch.num_tokens, "two tokens of a step are written to one slot"
        assert (batch.kv_slots >= self.args.page_size).all(), "a token is written to the padding page"
        generated = batch.positions[: batch.num_tokens] >= np.repeat([row.req.prompt_len for row in rows], counts)
        if batch.origins is ALL_GENERATED:
            assert generated.all()
        else:
            assert np.array_equal(batch.origins.generated(batch.num_tokens), generated)
        for row in rows:
            rid, start = row.req.rid, row.start
            if rid not in self.fed:  # just admitted: what it did not feed came from the cache, whole pages of it
                assert start % self.args.page_size == 0 and start < row.req.num_known
                assert start == 0 or not self.args.disable_radix_cache
                self.fed[rid] = start
                if rid not in self.admitted:
                    self.admitted.append(rid)
            assert start == self.fed[rid], f"{rid} feeds token {start} after {self.fed[rid]}"
            self.fed[rid] = start + row.count

    def check_run(self, batch, chunks, committed, ended) -> None:
        """What must hold after a step with drafts: rows are filed for the tokens that a request has, and no others."""
        live = np.ones(batch.num_tokens, bool) if committed.live is None else committed.live
        for chunk, filed in zip(chunks, np.split(live, batch.query_starts[1 : len(chunks)]), strict=True):
            req = chunk.req
            if req.rid in ended:
                assert not filed.any()
                continue
            assert filed.tolist() == [position < req.num_committed for position in chunk.start + np.arange(chunk.count)]
            assert req.num_committed == req.num_dispatched == req.num_known - (0 if req.last_row_ready else 1)
            assert req.last_row_ready == (req.source.routed_experts.include_last and req.state is ReqState.FINISHED)
            assert req.num_pending == (self.pending is not None and req.rid in self.chunks_in_flight)
            self.fed[req.rid] = req.num_dispatched


def build_sources(index, arrival):
    """The requests of one arrival, and the expected output of each."""
    _, common, own, max_tokens, choices, stops, penalised, include_last = arrival
    prompt = [*range(common), *((index * 7 + i) % VOCAB for i in range(own))]
    everything = expected_tokens(prompt, max_tokens)
    stop = [everything[len(everything) // 2]] if stops else []
    penalty = {"presence_penalty": 1.0} if penalised else {}
    made = [
        source(
            prompt,
            rid=f"{index:02}-{choice}",
            group=f"{index:02}",
            choice=choice,
            max_tokens=max_tokens,
            stops=stop,
            include_last=include_last,
            **penalty,
        )
        for choice in range(choices)
    ]
    return made, expected_tokens(prompt, max_tokens, stops=stop)


@settings(max_examples=50)
@given(life=lives())
def test_every_request_ends_with_exactly_its_tokens(life):
    live_through(life)


@pytest.mark.thorough
@settings(max_examples=200)
@given(life=lives())
def test_every_request_ends_with_exactly_its_tokens_in_200_lives(life):
    live_through(life)


def live_through(life):
    machine = Machine(life)
    expected: dict[str, list[int]] = {}
    tick, limit = 0, 60 + 40 * sum((arrival[1] + arrival[2] + arrival[3]) * arrival[4] for arrival in life.arrivals)
    while tick <= 45 or machine.live or machine.pending is not None:
        for index, arrival in enumerate(life.arrivals):
            if arrival[0] == tick:
                made, tokens = build_sources(index, arrival)
                expected |= dict.fromkeys((source.rid for source in made), tokens)
                machine.scheduler.add([Req(source) for source in made])
        for at, kind, pick in life.events:
            if at == tick:
                machine.happen(kind, pick)
        machine.step()
        tick += 1
        assert tick < limit, f"{len(machine.live)} requests starve"
    assert Counter(req.rid for req in machine.ended) == Counter(list(expected)), "each request has exactly one end"
    for req in machine.ended:
        tokens = req.output_ids.tolist()
        assert req.finish_reason is not None
        assert tokens == expected[req.rid][: len(tokens)]
        if req.finish_reason.type != "abort":
            assert tokens == expected[req.rid]
    pages = machine.scheduler.pages
    assert pages.num_available == pages.allocator.num_total
    assert pages.table.num_free == pages.table.num_total
    assert not machine.scheduler._leaders

    order = {f"{index:02}-0": (arrival[0], index) for index, arrival in enumerate(life.arrivals)}
    first_choices = [order[rid] for rid in machine.admitted if rid in order]
    assert first_choices == sorted(first_choices), "first come, first served"


@given(
    max_tokens=st.lists(st.integers(30, 40), min_size=16, max_size=16),
    cache=st.booleans(),
    page_size=st.sampled_from([1, 4]),
    num_drafts=st.sampled_from([0, 3]),
)
@settings(max_examples=8)
def test_sixteen_requests_share_pages_for_little_more_than_two(max_tokens, cache, page_size, num_drafts):
    sizes = dict(page_size=page_size, pages=round(2.3 * CONTEXT) // page_size, requests=8, tokens=16, chunk=16)
    plain = dict(deterministic=False, draft_seed=0, arrivals=[], events=[])
    life = Life(**sizes, **plain, cache=cache, num_drafts=num_drafts)
    machine = Machine(life)
    prompts = [[index, *range(index % 8)] for index in range(16)]
    reqs = [Req(source(prompts[i], rid=f"{i:02}", max_tokens=max_tokens[i])) for i in range(16)]
    machine.scheduler.add(reqs)
    num_steps = 0
    while machine.live or machine.pending is not None:
        machine.step()
        num_steps += 1
        assert num_steps < 16 * CONTEXT, "no progress"
    assert machine.scheduler.num_retracted > 0
    assert [req.output_ids.tolist() for req in reqs] == [expected_tokens(prompts[i], max_tokens[i]) for i in range(16)]
