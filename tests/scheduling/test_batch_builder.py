"""From rows to padded arrays, against a loop that places one token at a time."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.core.buckets import Buckets
from routed_experts.core.io_struct import RoutingOptions
from routed_experts.core.model_worker_batch import FROM_DEVICE, MAX_BIAS, ForwardMode, SamplingMode
from routed_experts.core.server_args import ServerArgs
from routed_experts.memory.req_to_token_pool import ReqToTokenPool
from routed_experts.scheduling.batch_builder import BatchBuilder
from routed_experts.scheduling.schedule_batch import Req, ScheduledChunk
from support.numpy_device import source

PAGE, CONTEXT, VOCAB, LIMIT = 4, 32, 97, 6
BUCKETS = Buckets.from_args(
    ServerArgs(page_size=PAGE, precompile_bs_paddings=(2, LIMIT), precompile_token_paddings=(8, 64)),
    context_length=CONTEXT,
)


def make_builder():
    table = ReqToTokenPool(LIMIT + 1, BUCKETS.table_width)
    return BatchBuilder(BUCKETS, table, num_request_slots=LIMIT + 1, page_size=PAGE, vocab_size=VOCAB), table


def enter(builder, table, req, pages):
    """Give a request a slot and pages, as the scheduler does."""
    req.slot = table.allocate()
    table.set_pages(req.slot, 0, np.asarray(pages, np.int32))
    builder.register(req)
    return req


def running(builder, table, *, prompt_len=6, generated=0, pages=None, asks=True, **sampling):
    options = RoutingOptions(enabled=asks)
    req = Req(dataclasses.replace(source(range(prompt_len), rid="r", max_tokens=8, **sampling), routed_experts=options))
    req.num_known += generated
    req.tokens[prompt_len : prompt_len + generated] = np.arange(generated) + 50
    return enter(builder, table, req, range(1, 9) if pages is None else pages)


@st.composite
def row_plans(draw):
    """(prompt length, generated, start, count, pending) of up to LIMIT rows; a pending row feeds a token that the host
    has not read."""
    plans = []
    for _ in range(draw(st.integers(1, LIMIT))):
        prompt_len, generated = draw(st.integers(1, 16)), draw(st.integers(0, 7))
        known = prompt_len + generated
        if draw(st.booleans()) and generated < 8:
            plans.append((prompt_len, generated, known, 1, True))
            continue
        start = draw(st.integers(0, known - 1))
        plans.append((prompt_len, generated, start, draw(st.integers(1, min(known - start, 10))), False))
    return plans, draw(st.integers(0, 2**32 - 1))


@settings(max_examples=100)
@given(planned=row_plans())
def test_arrays_equal_a_loop_over_tokens(planned):
    plans, seed = planned
    builder, table = make_builder()
    pages = np.random.default_rng(seed).permutation(np.arange(1, 8 * LIMIT + 1)).reshape(LIMIT, 8)
    rows, expected = [], []
    for index, (prompt_len, generated, start, count, pending) in enumerate(plans):
        req = Req(source(range(index, index + prompt_len), rid=str(index), max_tokens=8))
        req.num_known += generated
        req.tokens[prompt_len : req.num_known] = np.arange(generated) + 60
        req.num_pending = int(pending)
        enter(builder, table, req, pages[index])
        rows.append(ScheduledChunk(req, start, count, samples=start + count >= req.num_known))
        for position in range(start, start + count):
            token = FROM_DEVICE if position >= req.num_known else int(req.tokens[position])
            expected.append((index, position, token, int(pages[index][position // PAGE]) * PAGE + position % PAGE))
    batch = builder.build(rows, step=3)
    total, all_single = len(expected), all(row.count == 1 for row in rows)
    assert (batch.step, batch.num_tokens, batch.num_requests) == (3, total, len(rows))
    assert batch.mode is (ForwardMode.DECODE if all_single else ForwardMode.EXTEND)
    got = zip(batch.token_rows[:total], batch.positions[:total], batch.token_ids[:total], batch.kv_slots, strict=True)
    assert [tuple(map(int, values)) for values in got] == expected
    for padded in (batch.token_rows, batch.positions, batch.token_ids):
        assert not padded[total:].any()
    ends = np.cumsum([row.count for row in rows])
    assert batch.query_starts.tolist() == [0, *ends, *[total] * (batch.request_slots.size - len(rows))]
    assert (
        batch.seq_lens[: len(rows)].tolist() == [row.start + row.count for row in rows]
        and not batch.seq_lens[len(rows) :].any()
    )
    assert np.array_equal(batch.page_table[: len(rows)], pages[: len(rows)]) and not batch.page_table[len(rows) :].any()
    assert batch.request_slots[len(rows) :].tolist() == [0] * (batch.request_slots.size - len(rows))
    assert batch.samples == tuple(row.samples for row in rows)
    assert (batch.token_ids.size, batch.request_slots.size) == BUCKETS.shape(total, len(rows), all_decode=all_single)[
        1:
    ]


def test_parameters_of_each_row_stand_in_its_columns_and_padding_is_neutral():
    builder, table = make_builder()
    given_ = {
        "temperature": 0.5,
        "top_p": 0.25,
        "min_p": 0.125,
        "top_k": 7,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 2.0,
        "seed": (5 << 32) + 9,
    }
    req = running(builder, table, choice=3, **given_)
    plain = running(builder, table, temperature=0.0, pages=range(11, 19))
    sampling = builder.build([ScheduledChunk(plain, 0, 6, True), ScheduledChunk(req, 0, 6, True)], step=0).sampling
    assert [float(getattr(sampling, name)[1]) for name in ("temperature", "top_p", "min_p")] == [0.5, 0.25, 0.125]
    assert [float(getattr(sampling, name)[1]) for name in ("presence", "frequency", "repetition")] == [1.5, -0.5, 2.0]
    assert (int(sampling.top_k[1]), int(sampling.choice[1]), int(sampling.prompt_len[1])) == (7, 3, 6)
    assert sampling.seed[1].tolist() == [5, 9] and sampling.position[:2].tolist() == [6, 6]
    for row in (0, 2):  # greedy, and padding
        neutral = [
            float(getattr(sampling, name)[row])
            for name in ("temperature", "presence", "frequency", "repetition", "top_p", "min_p")
        ]
        assert neutral == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def comparable_fields(batch):
    """The fields of a batch in a form that compares."""
    fields = dataclasses.asdict(batch)
    return {name: np.asarray(value).tolist() for name, value in (fields | fields.pop("sampling")).items()}


def test_what_steps_of_the_same_requests_share_is_made_anew_for_others_in_their_slots():
    """Each step equals that of a builder that built no step before: prompts, then the same rows again, in another
    order, fewer, and after another request was given the slot of one of them."""
    builder, table = make_builder()
    first = running(builder, table, temperature=0.5, seed=3)
    second = running(builder, table, temperature=0.25, top_k=4, asks=False, pages=range(11, 19))
    requests = [first, second]

    def assert_as_if_built_first(*reqs, step):
        rows = [ScheduledChunk(req, 5 + step, 1, True) if step else ScheduledChunk(req, 0, 6, True) for req in reqs]
        fresh = BatchBuilder(BUCKETS, table, num_request_slots=LIMIT + 1, page_size=PAGE, vocab_size=VOCAB)
        for req in requests:
            fresh.register(req)
        assert comparable_fields(builder.build(rows, step=step)) == comparable_fields(fresh.build(rows, step=step))

    assert_as_if_built_first(first, second, step=0)
    assert_as_if_built_first(first, second, step=1)
    assert_as_if_built_first(second, first, step=2)
    assert_as_if_built_first(first, step=3)
    table.free(first.slot)
    third = running(builder, table, temperature=1.5, seed=4, asks=False, pages=range(21, 29))
    assert third.slot == first.slot
    requests = [third, second]
    assert_as_if_built_first(third, step=4)
    assert_as_if_built_first(third, second, step=5)


@pytest.mark.parametrize(
    ("sampling", "mode"),
    [
        ({"temperature": 0.0}, SamplingMode.GREEDY),
        ({"temperature": 0.0, "top_p": 0.5}, SamplingMode.GREEDY),
        ({}, SamplingMode.RANDOM),
        ({"top_k": 4}, SamplingMode.FILTERED),
        ({"min_p": 0.1}, SamplingMode.FILTERED),
        ({"presence_penalty": 0.1}, SamplingMode.FULL),
        ({"temperature": 0.0, "logit_bias": {1: 1.0}}, SamplingMode.FULL),
        ({"temperature": 0.0, "min_tokens": 2}, SamplingMode.FULL),
    ],
)
def test_the_mode_is_the_cheapest_that_serves_all_rows(sampling, mode):
    builder, table = make_builder()
    rows = [ScheduledChunk(running(builder, table, **sampling), 0, 6, True)]
    assert builder.build(rows, step=0).sampling_mode is mode
    greedy = ScheduledChunk(running(builder, table, temperature=0.0, pages=range(11, 19)), 0, 6, True)
    assert builder.build([greedy, *rows], step=0).sampling_mode is mode
    assert builder.build([greedy], step=0).sampling_mode is SamplingMode.GREEDY


def test_bias_holds_requested_entries_and_stops_until_min_tokens():
    builder, table = make_builder()
    req = running(builder, table, min_tokens=2, stops=[9, 4], logit_bias={7: 2.5})
    other = running(builder, table, pages=range(11, 19))
    sampling = builder.build([ScheduledChunk(req, 0, 6, True), ScheduledChunk(other, 0, 6, True)], step=0).sampling
    assert sampling.bias_ids.shape == (LIMIT, MAX_BIAS)
    assert sampling.bias_ids[0, :4].tolist() == [7, 4, 9, VOCAB] and sampling.bias_values[0, :4].tolist() == [
        2.5,
        -np.inf,
        -np.inf,
        0.0,
    ]
    assert (sampling.bias_ids[1:] == VOCAB).all() and not sampling.bias_values[1:].any()
    req.num_known, req.num_pending = req.prompt_len + 1, 1  # two tokens are there, one of them not read yet
    sampling = builder.build([ScheduledChunk(req, 7, 1, True)], step=1).sampling
    assert sampling.bias_ids[0, :2].tolist() == [7, VOCAB]


def test_targets_are_the_next_prompt_tokens_where_logprobs_are_requested():
    builder, table = make_builder()
    asks = running(builder, table, prompt_len=6, logprob_start=0)
    silent = running(builder, table, prompt_len=5, pages=range(11, 19))
    batch = builder.build([ScheduledChunk(silent, 0, 5, True), ScheduledChunk(asks, 0, 4, False)], step=0)
    assert batch.prompt_targets[5:9].tolist() == [1, 2, 3, 4]
    batch = builder.build([ScheduledChunk(asks, 4, 2, True)], step=1)
    assert batch.prompt_targets[:2].tolist() == [5, 0]  # the last prompt token has no successor in the prompt
    assert builder.build([ScheduledChunk(silent, 0, 5, True)], step=2).prompt_targets is None


def test_a_single_prompt_token_that_wants_scores_takes_no_decode_program():
    builder, table = make_builder()
    asks = running(builder, table, prompt_len=6, logprob_start=0)
    assert builder.build([ScheduledChunk(asks, 3, 1, False)], step=0).mode is ForwardMode.EXTEND
    assert builder.build([ScheduledChunk(asks, 5, 1, True)], step=0).mode is ForwardMode.DECODE
