"""Residents that follow the load while the engine serves: they change, answers do not."""

import numpy as np
import pytest

from routed_experts import Engine, ExpertsConfig, ResidencyMap
from routed_experts.capture.meta_info import record_from_meta_info
from routed_experts.placement import AdaptiveResidency
from routed_experts.placement.dispatch import count_experts
from serving import assert_idle, on_engine_thread
from tiny import write_tiny_checkpoint

SIZES = {"precompile_bs_paddings": (4,), "precompile_token_paddings": (32,), "context_length": 128, "disable_radix_cache": True}
PROMPT = np.random.default_rng(0).integers(3, 313, 20).tolist()
SAID = {"sampling_params": {"temperature": 0.0, "ignore_eos": True}, "max_new_tokens": 80, "return_routed_experts": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3))


@pytest.fixture(scope="module")
def engine(folder):
    experts = ExpertsConfig(kt_num_gpu_experts=4, residency="adaptive")
    with Engine(folder, experts=experts, enable_return_routed_experts=True, **SIZES) as engine:
        yield engine
        assert_idle(engine)


def followed(state, record):
    """What the policy makes of a request that was alone: a prompt in one step, then a token a step; a look every eighth."""
    rows = [record.prompt.ids, *np.split(record.generated.ids, len(record.generated.ids))]
    for low in range(0, len(rows) // 8 * 8, 8):
        look = np.concatenate(rows[low : low + 8])
        state = state.observe(count_experts(look, record.num_experts), len(look), num_steps=8)
    return state


def test_residents_follow_the_load_and_the_answer_stays(engine, folder):
    """The map is the one that the policy makes of the captured rows; a reset of the counts in between changes nothing."""
    answer = engine.generate(input_ids=PROMPT, **SAID)
    state = followed(AdaptiveResidency.start(ResidencyMap.first(2, 16, 4)), record_from_meta_info(answer))
    held, hits = engine.residency()
    assert held.epoch == state.residency.epoch > 0
    assert (held.slot_of == state.residency.slot_of).all() and (held.slot_of != ResidencyMap.first(2, 16, 4).slot_of).any()
    with Engine(folder, enable_return_routed_experts=True, **SIZES) as undivided:
        plain = undivided.generate(input_ids=PROMPT, **SAID)
    assert plain["output_ids"] == answer["output_ids"]
    assert record_from_meta_info(plain) == record_from_meta_info(answer)
    first = np.mean(record_from_meta_info(answer).ids < 4, axis=(0, 2))
    assert (hits > first).all()  # of all slots from the first step on


def test_a_map_that_somebody_applies_is_where_it_goes_on_from(engine):
    engine.reset_routing_stats()
    worst = ResidencyMap.of(np.argsort(engine._loop.call(rate_of(engine)), axis=1)[:, :4], num_experts=16, epoch=100)
    engine.apply_residency(worst)
    answer = engine.generate(input_ids=PROMPT, **SAID)
    held, _ = engine.residency()
    assert held.epoch > 100 and (held.slot_of != worst.slot_of).any()
    busy = count_experts(record_from_meta_info(answer).ids, 16)
    assert (np.where(held.slot_of >= 0, busy, 0).sum(axis=1) > np.where(worst.slot_of >= 0, busy, 0).sum(axis=1)).all()


def rate_of(engine):
    """How busy the follower takes each expert to be."""
    return lambda: engine._assembly.core._after_step.__self__._state.rate


def followed_late(state, record):
    """The same of counts on the device: they are sent off at every eighth step, with that in flight, and read at the next look."""
    rows = [record.prompt.ids, *np.split(record.generated.ids, len(record.generated.ids))]
    sent = np.zeros((0, *record.ids.shape[1:]), record.ids.dtype)
    for end in range(8, len(rows) + 1, 8):
        state = state.observe(count_experts(sent, record.num_experts), len(sent), num_steps=8)
        sent = np.concatenate(rows[end - 8 + (end > 8) : end + 1])
    return state


def test_residents_follow_the_load_where_nothing_is_recorded(engine, folder):
    with Engine(folder, experts=ExpertsConfig(kt_num_gpu_experts=4, residency="adaptive"), **SIZES) as unseen:
        answer = unseen.generate(input_ids=PROMPT, **{**SAID, "return_routed_experts": False})
        held, _ = unseen.residency()
        assert_idle(unseen)
    recorded = engine.generate(input_ids=PROMPT, **SAID)
    state = followed_late(AdaptiveResidency.start(ResidencyMap.first(2, 16, 4)), record_from_meta_info(recorded))
    assert held.epoch == state.residency.epoch > 0 and (held.slot_of == state.residency.slot_of).all()
    assert answer["output_ids"] == recorded["output_ids"]


def test_who_does_not_follow_counts_nothing(folder, engine):
    """Nor does an engine that records what it would count."""
    assert engine._assembly.core.runner.spec.counted is None
    with Engine(folder, experts=ExpertsConfig(kt_num_gpu_experts=4), **SIZES) as still:
        assert on_engine_thread(still, lambda core: core._after_step) is None
        assert still._assembly.core.runner.spec.counted is None
