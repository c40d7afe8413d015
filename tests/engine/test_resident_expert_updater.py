"""Residents that follow the load while the engine serves: they change, answers do not."""

import contextlib
import itertools
import logging
import threading

import numpy as np
import pytest

from routed_experts import Engine, ExpertOffloadConfig, ResidencyMap
from routed_experts.formats.meta_info import record_from_meta_info
from routed_experts.placement import AdaptiveResidency
from routed_experts.placement.dispatch import count_experts
from support.engines import assert_idle, on_engine_thread
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("fast_compilation")

SIZES = {
    "precompile_bs_paddings": (4,),
    "precompile_token_paddings": (32,),
    "context_length": 128,
    "disable_radix_cache": True,
}
PROMPT = np.random.default_rng(0).integers(3, 313, 20).tolist()
REQUEST_KWARGS = {
    "sampling_params": {"temperature": 0.0, "ignore_eos": True},
    "max_new_tokens": 80,
    "return_routed_experts": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3))


@pytest.fixture(scope="module")
def engine(folder):
    experts = ExpertOffloadConfig(kt_num_gpu_experts=4, residency="adaptive")
    with Engine(folder, experts=experts, enable_return_routed_experts=True, **SIZES) as engine:
        yield engine
        assert_idle(engine)


@contextlib.contextmanager
def recorded_windows(engine, monkeypatch):
    """The statistics that the updater reads each time."""
    capturer, windows = engine.components.core.capturers[0], []
    read_stats = capturer.routing_stats

    def recording(**how):
        stats = read_stats(**how)
        windows.append((stats.load, stats.num_tokens.sum()))
        return stats

    monkeypatch.setattr(capturer, "routing_stats", recording)
    yield windows
    monkeypatch.undo()


def replay_policy(state, windows):
    """The maps that the policy makes of these statistics."""
    before, tokens = 0, 0
    for load, num_tokens in windows:
        state = state.observe(load - before, num_tokens - tokens, num_steps=8)
        before, tokens = load, num_tokens
    return state


def test_residents_follow_the_load_and_the_answer_stays(engine, folder, monkeypatch):
    """Each read has the counted first rows of the requests; the map is the one that the policy makes of these."""
    start = engine.residency()[0]
    with recorded_windows(engine, monkeypatch) as windows:
        answers = [
            engine.generate(input_ids=PROMPT, **REQUEST_KWARGS) for _ in range(2)
        ]  # counts come late: the second one sees the first one's
    answer, rows = answers[0], np.concatenate([record_from_meta_info(answer).ids for answer in answers])
    assert len(windows) == 20  # steps: the prompt and 79 tokens, twice
    for load, num_tokens in windows:
        np.testing.assert_array_equal(load, count_experts(rows[:num_tokens], 16))
    state = replay_policy(AdaptiveResidency.start(start), windows)
    residency, hits = engine.residency()
    assert residency.epoch == state.residency.epoch > 0
    assert (residency.slot_of == state.residency.slot_of).all() and (residency.slot_of != start.slot_of).any()
    with Engine(folder, enable_return_routed_experts=True, **SIZES) as undivided:
        plain = undivided.generate(input_ids=PROMPT, **REQUEST_KWARGS)
    for answer in answers:
        assert plain["output_ids"] == answer["output_ids"]
        assert record_from_meta_info(plain) == record_from_meta_info(answer)
    first = np.mean(record_from_meta_info(answer).ids < 4, axis=(0, 2))
    assert (hits >= first).all() and (hits > first).any()  # of all slots from the first step on


def test_no_request_waits_for_counts(engine):
    """A request ends while the thread that counts does nothing."""
    engine.flush_cache()
    go_on = threading.Event()
    blocked = engine.thread.run_between_steps(
        lambda: engine.components.core.capturers[0].host_cache._counts._worker.submit(go_on.wait, 120)
    )
    assert len(engine.generate(input_ids=PROMPT, **REQUEST_KWARGS)["output_ids"]) == 80
    assert not blocked.done()
    go_on.set()
    assert blocked.result()


def test_a_map_applied_by_a_caller_is_the_new_start(engine):
    engine.reset_routing_stats()
    worst = ResidencyMap.from_experts(
        np.argsort(engine.thread.run_between_steps(expert_rates(engine)), axis=1)[:, :4], num_experts=16, epoch=100
    )
    engine.apply_residency(worst)
    answer = engine.generate(input_ids=PROMPT, **REQUEST_KWARGS)
    residency, _ = engine.residency()
    assert residency.epoch > 100 and (residency.slot_of != worst.slot_of).any()
    busy = count_experts(record_from_meta_info(answer).ids, 16)
    assert (
        np.where(residency.slot_of >= 0, busy, 0).sum(axis=1) > np.where(worst.slot_of >= 0, busy, 0).sum(axis=1)
    ).all()


def test_an_exchange_that_fails_leaves_the_residents_and_the_requests(engine, monkeypatch, caplog):
    """Of a swap that stops half way, the copies before it hold, and the other residents stay."""
    runner, answer = engine.components.core.runner, engine.generate(input_ids=PROMPT, **REQUEST_KWARGS)
    worst = ResidencyMap.from_experts(
        np.argsort(engine.thread.run_between_steps(expert_rates(engine)), axis=1)[:, :4], num_experts=16, epoch=50
    )
    best = ResidencyMap.from_experts(
        np.argsort(-engine.thread.run_between_steps(expert_rates(engine)), axis=1)[:, :4], num_experts=16, epoch=51
    )
    engine.apply_residency(worst)
    before, swapped, failed = runner.residency, runner.num_swapped, runner.num_failed
    (key,) = [key for key in runner._programs if key[0] == "write"]
    write, calls = runner._programs[key], itertools.count()

    def breaks(*args):
        if next(calls) == 5:
            raise MemoryError("no room for an expert")
        return write(*args)

    monkeypatch.setitem(runner._programs, key, breaks)
    with pytest.raises(MemoryError, match="no room"):
        engine.apply_residency(best)
    new = best.aligned_to(before).experts
    assert (runner.residency.experts[0] == new[0]).all() and (
        runner.residency.experts[1, 0] == new[1, 0]
    )  # four copies, and one
    assert (runner.residency.experts[1, 1:] == before.experts[1, 1:]).all()
    assert (runner.num_swapped, runner.num_failed) == (swapped + 5, failed + 1)
    assert engine.generate(input_ids=PROMPT, **REQUEST_KWARGS)["output_ids"] == answer["output_ids"]

    engine.apply_residency(worst)

    def fails(*_):
        raise MemoryError("no room at all")

    monkeypatch.setattr(type(runner), "apply_residency", fails)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert engine.generate(input_ids=PROMPT, **REQUEST_KWARGS)["output_ids"] == answer["output_ids"]
    messages = [
        record.getMessage() for record in caplog.records if "exchanging resident experts failed" in record.getMessage()
    ]
    assert [line.split("; ")[1] for line in messages] == ["the residents stay"] * 2 + [
        "residents follow the load no more"
    ]


def expert_rates(engine):
    """How busy the follower takes each expert to be."""
    return lambda: engine.components.core.after_step.__self__._state.rate


def followed_late(state, record):
    """The same of counts on the device: they are sent off at every eighth step, with that in flight, and read at the
    next look."""
    rows = [record.prompt.ids, *np.split(record.generated.ids, len(record.generated.ids))]
    sent = np.zeros((0, *record.ids.shape[1:]), record.ids.dtype)
    for end in range(8, len(rows) + 1, 8):
        state = state.observe(count_experts(sent, record.num_experts), len(sent), num_steps=8)
        sent = np.concatenate(rows[end - 8 + (end > 8) : end + 1])
    return state


def test_residents_follow_the_load_where_nothing_is_recorded(engine, folder):
    with Engine(folder, experts=ExpertOffloadConfig(kt_num_gpu_experts=4, residency="adaptive"), **SIZES) as unseen:
        answer = unseen.generate(input_ids=PROMPT, **{**REQUEST_KWARGS, "return_routed_experts": False})
        residency, _ = unseen.residency()
        assert_idle(unseen)
    recorded = engine.generate(input_ids=PROMPT, **REQUEST_KWARGS)
    state = followed_late(AdaptiveResidency.start(ResidencyMap.first_n(2, 16, 4)), record_from_meta_info(recorded))
    assert residency.epoch == state.residency.epoch > 0 and (residency.slot_of == state.residency.slot_of).all()
    assert answer["output_ids"] == recorded["output_ids"]


def test_who_does_not_follow_counts_nothing(folder, engine):
    """Nor does an engine that records what it would count."""
    assert engine.components.core.runner.spec.count_spec is None
    with Engine(folder, experts=ExpertOffloadConfig(kt_num_gpu_experts=4), **SIZES) as still:
        assert on_engine_thread(still, lambda core: core.after_step) is None
        assert still.components.core.runner.spec.count_spec is None
