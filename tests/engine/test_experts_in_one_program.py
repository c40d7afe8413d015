"""Experts shared out with host_backend="ffi": a step is one program, the host's experts run beside it. It says what the
engine says that has all experts on the accelerator, for no, some and nearly all residents, while residents change, and
where long steps copy experts."""

import contextlib
import dataclasses
import threading

import numpy as np
import pytest

from engine.two_devices import (
    EXPERTS,
    MODEL,
    MOE_LAYERS,
    PROMPTS,
    SIZES,
    TOP_K,
    any_residents,
    ask,
    assert_same,
    assert_served,
    compile_events,
    exchange,
    hits_of,
    metrics_of,
    version_of,
)
from routed_experts import ConfigError, Engine, ExpertOffloadConfig, extract_routed_experts_from_meta_info
from routed_experts.engine.build import expert_offload
from routed_experts.execution.offload.fused_offload_runner import FusedOffloadRunner
from support.engines import assert_idle, assert_nothing_allocated
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("fast_compilation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=2, tokenizer=False, **MODEL))


@pytest.fixture(scope="module")
def undivided(folder):
    with Engine(folder, **SIZES) as engine:
        return ask(engine)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("other"), seed=9, tokenizer=False, **MODEL))


@pytest.fixture(scope="module")
def undivided_other(other):
    with Engine(other, **SIZES) as engine:
        return ask(engine)


@contextlib.contextmanager
def shared_out(folder, **experts):
    with Engine(folder, experts=ExpertOffloadConfig(host_backend="ffi", **experts), **SIZES) as engine:
        assert type(engine.components.core.runner) is FusedOffloadRunner
        yield engine
        assert_idle(engine)


def lane_of(engine):
    return engine.components.core.runner.host_side.lane


@pytest.mark.parametrize("num_resident", [0, 1, 5])
def test_any_number_of_residents_says_the_same(folder, undivided, other, undivided_other, num_resident):
    """Also after other weights have come, from disk or as arrays."""
    how = (
        {"residency": any_residents(num_resident, num_resident)}
        if num_resident % 2
        else {"kt_num_gpu_experts": num_resident}
    )
    with shared_out(folder, **how, kt_cpuinfer=1 + num_resident % 2) as engine:
        assert_same(ask(engine), undivided)
        held, hits = engine.residency()
        steps, errands = engine.components.core.num_steps, lane_of(engine).counts().num_errands
        exchange(engine, other, 5, given=num_resident % 2 == 0)
        with compile_events() as seen:
            assert_served(engine, ask(engine), undivided_other, 5)
        assert seen == []
        assert metrics_of(engine)["host_experts_seconds_total"] == lane_of(engine).counts().busy_s > 0
    rows = [
        extract_routed_experts_from_meta_info(answer).reshape(-1, MOE_LAYERS + 1, TOP_K)[:, 1:] for answer in undivided
    ]
    np.testing.assert_allclose(hits, hits_of(held, np.concatenate(rows)), atol=1e-12)
    assert errands == steps * MOE_LAYERS  # of each step and MoE layer one


@pytest.fixture(scope="module")
def engine(folder):
    """Two residents; a step of nine tokens copies the others to the accelerator."""
    with shared_out(folder, kt_num_gpu_experts=2, kt_gpu_prefill_token_threshold=9) as engine:
        yield engine


def test_swaps_under_load_change_nothing_and_compile_nothing(engine, undivided):
    ended, swapped = threading.Event(), []

    def swap():
        while not ended.is_set():
            swapped.append(engine.apply_residency(any_residents(len(swapped), 2, epoch=len(swapped) + 1)))

    with compile_events() as seen:
        thread = threading.Thread(target=swap)
        thread.start()
        answers = [ask(engine) for _ in range(4)]
        ended.set()
        thread.join()
    for answer in answers:
        assert_same(answer, undivided)
    assert len(swapped) > 3 and sum(swapped) > 8
    assert seen == []


def test_weights_and_residents_change_at_once(engine, folder, undivided, other, undivided_other):
    """The lane reads the new store from the next step on, and so does the one that scores run with."""
    wanted, version, ended, swapped = (undivided, undivided_other), version_of(engine), threading.Event(), []
    scores = []

    def swap():
        while not ended.is_set():
            swapped.append(engine.apply_residency(any_residents(len(swapped), 2, epoch=10**6 + len(swapped))))

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for number in range(1, 5):
            exchange(engine, (folder, other)[number % 2], version + number, given=number > 2)
            assert_same(ask(engine), wanted[number % 2])
            scores.append(engine.score(PROMPTS[0]))
    finally:
        ended.set()
        thread.join()
    assert_served(engine, ask(engine), undivided, version + 4)
    assert len(swapped) > 3
    for first, again in (scores[0::2], scores[1::2]):
        np.testing.assert_allclose(first.logprobs, again.logprobs, atol=1e-5, rtol=0)
    for score, weights in zip(scores, (other, folder) * 2, strict=True):
        told = [
            value
            for value, *_ in (undivided_other if weights == other else undivided)[0]["meta_info"][
                "input_token_logprobs"
            ][1:]
        ]
        np.testing.assert_allclose(score.logprobs, told, atol=1e-5, rtol=0)
    assert not np.allclose(scores[0].logprobs, scores[1].logprobs, atol=1e-3)


def test_a_long_step_sends_the_host_nothing(engine, undivided):
    engine.flush_cache()
    before, steps = lane_of(engine).counts().num_errands, engine.components.core.num_steps
    assert_same(ask(engine), undivided)
    long = 2  # of 35 tokens: 16, 16, and 3 that are below the threshold of 9
    assert (
        lane_of(engine).counts().num_errands - before == (engine.components.core.num_steps - steps - long) * MOE_LAYERS
    )


def test_in_turn_the_numbers_are_the_same(engine, undivided):
    lane_of(engine).set_signals(in_turn=True)
    assert_same(ask(engine), undivided)
    lane_of(engine).set_signals(in_turn=False)


@pytest.mark.parametrize("backend", ["ffi", "dispatch"])
def test_scores_are_those_of_an_undivided_engine(folder, backend):
    """Live, on other routes, and while residents change; requests go on beside it."""
    prompts = [PROMPTS[0], PROMPTS[1]]
    with Engine(folder, **SIZES) as whole:
        live = whole.score(prompts)
        drifted = [dataclasses.replace(out.routed_experts, ids=(out.routed_experts.ids + 1) % EXPERTS) for out in live]
        forced = whole.score(prompts, routed=drifted)
    with Engine(folder, experts=ExpertOffloadConfig(kt_num_gpu_experts=2, host_backend=backend), **SIZES) as engine:
        swapped = 0
        for seed in range(3):
            answer = engine.generate(input_ids=PROMPTS[1], sampling_params={"temperature": 0.0}, max_new_tokens=4)
            for wanted, routed in ((live, None), (forced, drifted)):
                for ours, theirs in zip(engine.score(prompts, routed=routed), wanted, strict=True):
                    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5, rtol=0)
                    np.testing.assert_array_equal(ours.routed_experts.ids, theirs.routed_experts.ids)
            swapped += engine.apply_residency(any_residents(seed, 2, epoch=seed + 1))
        assert swapped > 0 and len(answer["output_ids"]) == 4
    assert not np.allclose(live[0].logprobs, forced[0].logprobs, atol=1e-3)  # other routes are other numbers


def test_auto_is_the_faster_one_that_can_be_had(monkeypatch):
    def chosen(platform, **experts):
        return expert_offload.backend_of(ExpertOffloadConfig(kt_num_gpu_experts=2, **experts), platform)

    assert chosen("gpu")[0] == "ffi"
    assert chosen("gpu", kt_max_deferred_experts_per_token=1) == ("dispatch", "one program adds no expert late")
    for platform in ("cpu", "tpu"):
        backend, reason = chosen(platform)
        assert backend == "dispatch" and reason.endswith(f"the default device is a {platform}")
    assert chosen("gpu", host_backend="dispatch") == ("dispatch", "as asked")
    monkeypatch.setattr(expert_offload, "unavailable_reason", lambda: "no C++ compiler was found")
    assert chosen("gpu") == ("dispatch", "it needs the native library: no C++ compiler was found")


def test_the_choice_is_told_at_start(folder):
    told = []
    with Engine(folder, experts=ExpertOffloadConfig(kt_num_gpu_experts=2), on_phase=told.append, **SIZES):
        (detail,) = (phase.detail for phase in told if phase.name == "kernels")
    assert "experts on the host by dispatch: one program was measured" in detail


def test_what_cannot_be_is_refused(folder, monkeypatch):
    def build(**experts):
        with assert_nothing_allocated():
            Engine(folder, experts=ExpertOffloadConfig(kt_num_gpu_experts=2, host_backend="ffi", **experts), **SIZES)

    with pytest.raises(
        ConfigError, match=r"kt_max_deferred_experts_per_token=1 with host_backend='ffi'.*leave it at 0"
    ):
        build(kt_max_deferred_experts_per_token=1)
    with pytest.raises(ConfigError, match="kt_cpuinfer=0, but somebody must run"):
        build(kt_cpuinfer=0)
    with pytest.raises(ConfigError, match=r"kt_cpuinfer=12345 is above the [0-9]+ cores"):
        build(kt_cpuinfer=12345)
    monkeypatch.setattr(expert_offload, "unavailable_reason", lambda: "no C++ compiler was found")
    reason = "it needs the native library: no C.. compiler was found"
    with pytest.raises(ConfigError, match=rf"host_backend='ffi' cannot be had: {reason}; or take 'dispatch'"):
        build()
    with pytest.raises(ConfigError, match="host_backend='stream' is not among what exists here: auto, dispatch, ffi"):
        ExpertOffloadConfig(kt_num_gpu_experts=2, host_backend="stream")
