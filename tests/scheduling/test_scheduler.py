"""Scheduling order: single facts of the policy, without a device. Random schedules of many requests:
test_scheduler_machine.py."""

import numpy as np

from routed_experts.core.buckets import Buckets
from routed_experts.core.io_struct import FinishReason
from routed_experts.core.model_worker_batch import FROM_DEVICE, ForwardMode
from routed_experts.core.server_args import ServerArgs
from routed_experts.scheduling.schedule_batch import Req, ReqState
from routed_experts.scheduling.scheduler import Scheduler
from support.numpy_device import VOCAB, NumpyDevice, expected_logprob, expected_tokens, source

PAGE = 4


class Bench:
    """A scheduler with a NumPy device behind it. `step` schedules, runs and reads at once; nothing stays in flight."""

    def __init__(self, *, pages=64, context=64, requests=4, tokens=16, num_drafts=0, **args) -> None:
        settings = {"page_size": PAGE, "precompile_bs_paddings": (requests,), "precompile_token_paddings": (tokens,)}
        self.args = ServerArgs(**(settings | args))
        buckets = Buckets.from_args(self.args, context_length=context, num_drafts=num_drafts)
        self.scheduler = Scheduler(self.args, buckets, num_pages=pages + 1, vocab_size=VOCAB)
        self.device = NumpyDevice(
            num_slots=(pages + 1) * PAGE, num_request_slots=self.args.running_limit + 1, page_size=PAGE
        )

    def add(self, *sources):
        reqs = [Req(source) for source in sources]
        self.scheduler.add(reqs)
        return reqs if len(reqs) > 1 else reqs[0]

    def step(self):
        batch = self.scheduler.schedule()
        assert batch is not None
        self.commit(batch, self.device.run(batch))
        return batch

    def commit(self, batch, result):
        committed = self.scheduler.commit(batch, result)
        for req in committed.advanced:
            if req.state is ReqState.FINISHED:
                self.scheduler.release(req)
        assert self.scheduler.check_integrity() == []
        return committed

    def finish(self, req):
        while req.state is not ReqState.FINISHED:
            self.step()
        return req.output_ids.tolist()


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_one_request_follows_the_rule():
    bench = Bench()
    req = bench.add(source(prompt(11), max_tokens=9))
    assert bench.finish(req) == expected_tokens(prompt(11), 9)
    assert req.finish_reason == FinishReason(type="length", length=9)


def test_a_long_prompt_is_cut_into_chunks_and_samples_once():
    bench = Bench(chunked_prefill_size=5)
    req = bench.add(source(prompt(13), max_tokens=1))
    batches = [bench.step() for _ in range(3)]
    assert [batch.num_tokens for batch in batches] == [5, 5, 3]
    assert [batch.samples for batch in batches] == [(False,), (False,), (True,)]
    assert req.output_ids.tolist() == expected_tokens(prompt(13), 1)


def test_decode_tokens_come_before_prompt_chunks_and_share_the_step():
    bench = Bench(tokens=8)
    first = bench.add(source(prompt(6), rid="a", max_tokens=8))
    bench.step()
    bench.add(source(prompt(20, 1), rid="b"))
    batch = bench.step()
    assert (batch.num_tokens, batch.num_requests, batch.mode) == (8, 2, ForwardMode.EXTEND)
    assert np.diff(batch.query_starts[:3]).tolist() == [1, 7]  # one decode token, the rest of the budget for the prompt
    assert batch.request_slots[0] == first.slot


def test_a_token_that_the_host_has_not_read_is_taken_from_the_device():
    bench = Bench()
    req = bench.add(source(prompt(5), max_tokens=4))
    in_flight = bench.scheduler.schedule()
    pending = bench.device.run(in_flight)
    batch = bench.scheduler.schedule()  # before the first step has been read
    assert batch.mode is ForwardMode.DECODE and batch.token_ids[0] == FROM_DEVICE
    after = bench.device.run(batch)
    bench.commit(in_flight, pending)
    bench.commit(batch, after)
    assert bench.finish(req) == expected_tokens(prompt(5), 4)


def test_no_step_is_dispatched_for_a_last_token():
    bench = Bench()
    bench.add(source(prompt(5), max_tokens=2))
    first = bench.scheduler.schedule()
    result = bench.device.run(first)
    second = bench.scheduler.schedule()
    assert second is not None
    assert bench.scheduler.schedule() is None  # two tokens are sampled or under way: that is all there may be
    bench.commit(first, result)
    bench.commit(second, bench.device.run(second))
    assert not bench.scheduler.running


def test_a_stop_token_ends_a_request_and_stays_in_the_output():
    outputs = expected_tokens(prompt(6), 12)
    stop = outputs[4]
    bench = Bench()
    req = bench.add(source(prompt(6), max_tokens=12, stops=[stop]))
    assert bench.finish(req) == outputs[: outputs.index(stop) + 1]
    assert req.finish_reason == FinishReason(type="stop", matched=stop)


def test_a_stop_token_before_min_tokens_does_not_end_a_request():
    outputs = expected_tokens(prompt(6), 12)
    bench = Bench()
    req = bench.add(source(prompt(6), max_tokens=12, min_tokens=12, stops=[outputs[0], outputs[-1]]))
    assert bench.finish(req) == outputs
    assert req.finish_reason == FinishReason(type="stop", matched=outputs[-1])


def test_first_come_is_first_served():
    bench = Bench(requests=2)
    reqs = bench.add(*(source(prompt(4, i), rid=str(i), max_tokens=3) for i in range(6)))
    order = []
    while bench.scheduler.waiting or bench.scheduler.running:
        bench.step()
        order += [req.rid for req in bench.scheduler.running if req.rid not in order]
    assert order == [req.rid for req in reqs]


def test_a_request_too_large_for_now_is_not_overtaken():
    bench = Bench(pages=6)
    bench.add(source(prompt(8), rid="runs", max_tokens=8))
    bench.step()
    bench.add(source(prompt(20, 1), rid="large", max_tokens=4), source(prompt(2, 2), rid="small", max_tokens=2))
    while "large" in [req.rid for req in bench.scheduler.waiting]:
        assert "small" not in [req.rid for req in bench.scheduler.running]
        bench.step()
    assert [req.rid for req in bench.scheduler.running] == ["large"]


def test_a_page_is_left_for_each_that_runs_before_another_comes_in():
    """Or the new request would be retracted as soon as they grow."""
    bench = Bench(pages=6)
    runs = bench.add(source(prompt(8), rid="runs", max_tokens=8))
    bench.step()
    bench.add(source(prompt(12, 1), rid="waits", max_tokens=4))
    bench.step()
    assert bench.scheduler.running == [runs] and bench.scheduler.pages.num_available == 3
    fits = Bench(pages=7)
    fits.add(source(prompt(8), rid="runs", max_tokens=8))
    fits.step()
    fits.add(source(prompt(12, 1), rid="comes", max_tokens=4))
    fits.step()
    assert [req.rid for req in fits.scheduler.running] == ["runs", "comes"] and fits.scheduler.num_retracted == 0


def test_choices_of_one_prompt_wait_for_the_first_and_share_its_pages():
    bench = Bench()
    reqs = bench.add(*(source(prompt(11), rid=str(i), group="g", choice=i, max_tokens=4) for i in range(3)))
    bench.step()
    assert bench.scheduler.running == [reqs[0]]
    bench.step()
    assert bench.scheduler.running == reqs
    assert [req.cached_tokens for req in reqs] == [0, 8, 8]
    tables = [bench.scheduler.pages.table.pages[req.slot, :2].tolist() for req in reqs]
    assert tables[0] == tables[1] == tables[2]


def test_choices_do_not_wait_where_nothing_is_shared():
    bench = Bench(disable_radix_cache=True)
    reqs = bench.add(*(source(prompt(4), rid=str(i), group="g", choice=i) for i in range(3)))
    bench.step()
    assert bench.scheduler.running == reqs and [req.cached_tokens for req in reqs] == [0, 0, 0]


def test_choices_go_on_when_the_first_is_aborted_before_its_prompt_was_read():
    bench = Bench()
    first, second = bench.add(*(source(prompt(11), rid=str(i), group="g", choice=i) for i in range(2)))
    first.finish(FinishReason(type="abort"))
    bench.scheduler.release(first)
    assert bench.finish(second) == expected_tokens(prompt(11), 4)


def test_a_second_request_finds_the_first_in_the_cache():
    bench = Bench()
    bench.finish(bench.add(source(prompt(10), rid="a")))
    req = bench.add(source([*prompt(10), 1], rid="b"))
    batch = bench.step()
    assert req.cached_tokens == 8 and batch.num_tokens == 3
    assert bench.finish(req) == expected_tokens([*prompt(10), 1], 4)


def test_the_last_prompt_token_is_never_taken_from_the_cache():
    bench = Bench()
    bench.finish(bench.add(source(prompt(8), rid="a")))
    req = bench.add(source(prompt(8), rid="b"))
    assert bench.finish(req) == expected_tokens(prompt(8), 4) and req.cached_tokens == 4


def test_other_keys_other_weights_and_penalties_find_nothing():
    bench = Bench()
    bench.finish(bench.add(source(prompt(12), rid="a", extra_key="one")))
    for changed in ({"extra_key": "two"}, {"extra_key": None}, {"extra_key": "one", "presence_penalty": 0.5}):
        req = bench.add(source(prompt(12), rid="b", **changed))
        bench.finish(req)
        assert req.cached_tokens == 0
    bench.scheduler.weight_version = 1
    req = bench.add(source(prompt(12), rid="c", extra_key="one"))
    bench.finish(req)
    assert req.cached_tokens == 0


def test_prompt_logprobs_are_whole_although_the_prefix_is_cached():
    bench = Bench(chunked_prefill_size=5)
    tokens = prompt(14)
    bench.finish(bench.add(source(tokens, rid="a")))
    for start in (0, 1, 4, 5, 8, 13):
        req = bench.add(source(tokens, rid="b", logprob_start=start))
        bench.finish(req)
        expected = {
            position: expected_logprob(tokens[:position], tokens[position]) for position in range(max(start, 1), 14)
        }
        assert {position: value for position, (value, _) in req.input_logprobs.items() if position >= start} == expected
        assert req.cached_tokens <= max(start - 1, 0)
        assert req.output_logprobs == [
            expected_logprob(tokens + expected_tokens(tokens, 4)[:i], expected_tokens(tokens, 4)[i]) for i in range(4)
        ]


def test_the_last_admitted_goes_back_first_and_to_the_head_of_the_queue():
    bench = Bench()
    reqs = bench.add(*(source(prompt(4, i), rid=str(i), max_tokens=8) for i in range(3)))
    bench.step()
    waiting = bench.add(source(prompt(4, 9), rid="late"))
    for expected in (reqs[2], reqs[1]):
        victim = bench.scheduler.preemption_victim()
        assert victim is expected
        bench.scheduler.retract(victim, None)
    assert bench.scheduler.preemption_victim() is None  # never the only one
    assert list(bench.scheduler.waiting) == [reqs[1], reqs[2], waiting]
    assert [bench.finish(req) for req in reqs] == [expected_tokens(prompt(4, i), 8) for i in range(3)]


def test_a_retracted_request_keeps_its_tokens_and_is_prefilled_with_them():
    bench = Bench(disable_radix_cache=True)
    first, second = bench.add(source(prompt(4), rid="a", max_tokens=9), source(prompt(5, 1), rid="b", max_tokens=9))
    for _ in range(4):
        bench.step()
    bench.scheduler.retract(second, None)
    assert second.output_ids.tolist() == expected_tokens(prompt(5, 1), 4) and second.num_pages == 0
    batch = bench.step()
    assert batch.num_tokens == 1 + 9  # a decode token, and prompt and output of the other anew
    assert bench.finish(second) == expected_tokens(prompt(5, 1), 9) and bench.finish(first) == expected_tokens(
        prompt(4), 9
    )


def test_rows_of_a_request_that_ended_in_flight_are_not_live():
    bench = Bench()
    first, second = bench.add(source(prompt(3), rid="a"), source(prompt(4, 1), rid="b"))
    batch = bench.scheduler.schedule()
    first.finish(FinishReason(type="abort"))
    bench.scheduler.release(first)
    committed = bench.commit(batch, bench.device.run(batch))
    assert committed.live.tolist() == [False] * 3 + [True] * 4
    assert first.num_output == 0 and second.num_output == 1


def test_pages_of_a_request_that_ended_in_flight_serve_the_next():
    bench = Bench(pages=2, requests=2)
    first = bench.add(source(prompt(6), rid="a", max_tokens=2))
    batch = bench.scheduler.schedule()
    first.finish(FinishReason(type="abort"))
    bench.scheduler.release(first)
    result = bench.device.run(batch)
    second = bench.add(source(prompt(6, 1), rid="b", max_tokens=2))
    following = bench.scheduler.schedule()
    bench.commit(batch, result)
    bench.commit(following, bench.device.run(following))
    assert bench.finish(second) == expected_tokens(prompt(6, 1), 2)


def test_an_idle_scheduler_has_nothing_to_run():
    assert Bench().scheduler.schedule() is None


def verify(bench, **drafts):
    """A verify step in flight, of requests with so many drafts each; they are random ones."""
    batch = bench.scheduler.schedule({rid: np.zeros(count, np.int32) for rid, count in drafts.items()})
    assert batch.mode is ForwardMode.TARGET_VERIFY
    return batch


def two_that_decode(**options):
    bench = Bench(num_drafts=3, **options)
    reqs = bench.add(source(prompt(7), rid="a", max_tokens=20), source(prompt(5, 1), rid="b", max_tokens=20))
    bench.step()
    return bench, *reqs


def test_a_step_ahead_counts_from_where_the_slots_stand_and_is_located_once_they_are_known():
    bench, a, b = two_that_decode()
    first = verify(bench, a=3, b=1)
    batch = bench.scheduler.schedule_ahead({"a": 2, "b": 3})
    assert batch.is_ahead and batch.query_starts[:3].tolist() == [0, 3, 7]
    assert batch.positions[:7].tolist() == [0, 1, 2, 0, 1, 2, 3] and batch.seq_lens[:2].tolist() == [3, 4]
    assert (batch.token_ids[:7] == FROM_DEVICE).all()
    assert (a.num_pending, b.num_pending) == (2, 2)
    bench.commit(first, bench.device.run(first))
    located = bench.scheduler.locate(batch)
    assert located.positions[:7].tolist() == [
        *(a.num_known - 1 + place for place in range(3)),
        *(b.num_known - 1 + place for place in range(4)),
    ]
    assert located.seq_lens[:2].tolist() == [a.num_known + 2, b.num_known + 3]
    for req, positions, slots in ((a, (0, 3), located.kv_slots[:3]), (b, (0, 4), located.kv_slots[3:])):
        start, end = (req.num_known - 1 + place for place in positions)
        assert slots.tolist() == bench.scheduler.pages.kv_slots(req, start, end).tolist()


def test_a_step_ahead_has_the_texts_of_its_requests_behind_their_known_tokens():
    bench, a, b = two_that_decode()
    verify(bench, a=3, b=1)
    batch = bench.scheduler.schedule_ahead({"a": 2, "b": 3}, {"b": np.array([5, 6, 7, 8], np.int32)})
    assert batch.continuations.shape == (batch.request_slots.size, 1 + 7), "of 3 drafts a step"
    assert batch.continuations[:2].tolist() == [[a.num_known] + [-1] * 7, [b.num_known, 5, 6, 7, 8, -1, -1, -1]]
    assert not batch.drafts_ahead


def test_no_step_is_ahead_of_one_without_drafts_or_of_none():
    bench, *_ = two_that_decode()
    assert bench.scheduler.schedule_ahead({"a": 2}) is None
    bench.scheduler.schedule()
    assert bench.scheduler.schedule_ahead({"a": 2}) is None


def test_a_step_ahead_without_any_draft_is_none():
    bench, *_ = two_that_decode()
    verify(bench, a=3)
    assert bench.scheduler.schedule_ahead({}) is None


def test_no_step_is_ahead_while_a_request_waits_that_could_be_admitted():
    bench, *_ = two_that_decode(requests=3)
    verify(bench, a=1)
    bench.add(source(prompt(4), rid="c"), source(prompt(4), rid="d"))
    assert bench.scheduler.schedule_ahead({"a": 2}) is None
    full, *_ = two_that_decode(requests=2)
    verify(full, a=1)
    full.add(source(prompt(4), rid="c"))
    assert full.scheduler.schedule_ahead({"a": 2}) is not None


def test_a_request_that_may_be_at_its_end_is_left_out_of_a_step_ahead():
    bench = Bench(num_drafts=3)
    bench.add(source(prompt(7), rid="a", max_tokens=6), source(prompt(5, 1), rid="b", max_tokens=20))
    bench.step()
    verify(bench, a=3, b=3)  # then a may have 5 of its 6 tokens: it feeds the last but one, and no draft
    batch = bench.scheduler.schedule_ahead({"a": 3, "b": 3})
    assert np.diff(batch.query_starts[:3]).tolist() == [1, 4]
    late = Bench(num_drafts=3)
    late.add(source(prompt(7), rid="a", max_tokens=5), source(prompt(5, 1), rid="b", max_tokens=20))
    late.step()
    verify(late, a=3, b=3)
    assert late.scheduler.schedule_ahead({"a": 3, "b": 3}).num_requests == 1


def test_no_step_is_ahead_while_stop_tokens_are_banned():
    bench = Bench(num_drafts=3)
    bench.add(source(prompt(7), rid="a", max_tokens=20, min_tokens=8, stops=[3]))
    bench.step()
    verify(bench, a=2)
    assert bench.scheduler.schedule_ahead({"a": 2}) is None


def test_a_request_that_found_no_page_for_the_verify_step_is_not_where_its_slot_stands():
    """The device does not know its length: it was left out of the last verify step."""
    bench, *_ = two_that_decode(pages=5, disable_radix_cache=True)
    allocator = bench.scheduler.pages.allocator
    for _ in range(3):
        bench.step()
    assert allocator.num_free == 0  # a has fed 10 tokens and holds 3 pages, b 8: its next one needs a third page
    batch = verify(bench, a=1)
    assert batch.num_requests == 1
    b = bench.scheduler.running[1]
    bench.scheduler.pages.grow = lambda *_: True  # pages have come back
    assert bench.scheduler.schedule_ahead({"a": 1, b.rid: 1}) is None
