"""Stream outputs are sent once an interval of the clock: tokens share them, none is lost, and the first and the last do
not wait."""

import dataclasses
import itertools

import numpy as np
import pytest

from oracles.driver import assert_all_faithful, request
from oracles.testbeds import random_prompt, tiny_testbed
from routed_experts.core.weight_version import WeightVersion
from routed_experts.engine.loop import core, request_table


class Clock:
    """Stands in for the module `time`: a step takes a second."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (core, request_table):
        monkeypatch.setattr(module, "time", clock)
    return clock


def run(clock, interval, *, rows=False, **options):
    """Outputs of a stream and their times: (seconds since the first token, output)."""
    drive = tiny_testbed(moe_backend="probed").drive()
    req = request("a", random_prompt(np.random.default_rng(0), 9), 20, stream=True, **options)
    routed = dataclasses.replace(req.source.routed_experts, stream=rows)
    req.source = dataclasses.replace(req.source, stream_interval_s=interval, routed_experts=routed)
    received = []
    take = drive._take

    def recording(batch):
        received.extend((clock.now, out) for out in batch.outs)
        take(batch)

    drive._take = recording

    def tick(step):
        clock.now += 1

    drive.run(req, before_step=tick)
    first = received[0][0]
    return drive, [(when - first, out) for when, out in received]


def test_without_an_interval_each_token_is_emitted(clock):
    _, received = run(clock, 0.0)
    assert [(when, len(out.new_token_ids)) for when, out in received] == [(float(index), 1) for index in range(20)]


def test_tokens_of_an_interval_share_an_output_and_the_first_and_the_last_do_not_wait(clock):
    _, unbatched = run(clock, 0.0)
    drive, received = run(clock, 6.0)
    first = clock.now - 19  # of the last step, which emitted the last of 20 tokens
    moments = [second for second in range(1, 19) if (first + second) % 6 == 0]  # multiples of the interval on the clock
    assert [when for when, _ in received] == [0.0, *moments, 19.0] and len(moments) == 3
    assert [len(out.new_token_ids) for _, out in received] == [1, *np.diff([0, *moments, 19])]
    tokens = [token for _, out in received for token in out.new_token_ids]
    assert tokens == [token for _, out in unbatched for token in out.new_token_ids]
    values = [value for _, out in received for value in out.output_logprobs.values]
    assert values == [value for _, out in unbatched for value in out.output_logprobs.values]
    assert_all_faithful(drive)


def test_rows_that_are_streamed_come_with_their_tokens(clock):
    _, received = run(clock, 6.0, rows=True)
    records = [out.routed_experts for _, out in received]
    assert [record.num_rows for record in records] == [9, 6, 6, 6, 1] and records[-1].num_tokens == 29
    assert [record.start for record in records] == [0, 9, 15, 21, 27]


def test_slower_steps_emit_each_token(clock):
    _, received = run(clock, 0.9)
    assert [len(out.new_token_ids) for _, out in received] == [1] * 20


@pytest.mark.parametrize(
    ("others", "stream", "waiting", "times"),
    [
        *[(0, True, 0, 1), (15, True, 0, 1), (16, True, 0, 2), (32, True, 0, 3), (48, True, 0, 4), (80, True, 0, 4)],
        *[(48, False, 0, 1), (0, True, 48, 1)],
    ],
)
def test_many_streams_at_a_time_are_sent_less_often(clock, others, stream, waiting, times):
    """Those that only wait for their end do not count, nor do those that are still in the queue."""
    book, req = request_table.RequestTable(), request("a", [5, 6], 20, stream=True)
    req.source = dataclasses.replace(req.source, stream_interval_s=2.0)
    running = [request(f"b{number}", [5 + number], 20, stream=stream) for number in range(others)]
    for added in [req, *running, *(request(f"c{number}", [5 + number], 20, stream=True) for number in range(waiting))]:
        book.add(added, None)
    book.mark_scheduled([req, *running])
    book.make_output(req, record=None, error=None, weight_version=WeightVersion())
    assert (
        next(now for now in itertools.count(clock.now) if book.should_emit(req, now))
        == (clock.now // (2 * times) + 1) * 2 * times
    )


def test_streams_are_sent_at_the_same_moments(clock):
    drive = tiny_testbed(moe_backend="probed").drive()
    reqs = {name: request(name, random_prompt(np.random.default_rng(0), 9), 20, stream=True) for name in "ab"}
    for req in reqs.values():
        req.source = dataclasses.replace(req.source, stream_interval_s=6.0)
    moments = {name: [] for name in reqs}
    take = drive._take

    def recording(batch):
        for out in batch.outs:
            moments[out.rid].append(clock.now)
        take(batch)

    drive._take = recording

    def tick(step):
        clock.now += 1
        if step == 4:
            drive.add(reqs["b"])

    drive.run(reqs["a"], before_step=tick)
    between = {
        name: times[1:-1] for name, times in moments.items()
    }  # the first token and the end have moments of their own
    assert moments["a"][0] < moments["b"][0] and all(len(times) >= 3 for times in between.values())
    assert all(now % 6 == 0 for times in between.values() for now in times)
    assert set(between["a"]) & set(between["b"])
