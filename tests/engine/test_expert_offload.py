"""An engine with experts on the host gives the answers of an engine with all of them on the accelerator: scores, long
steps that stream the host's experts, steps that defer some. Here device and host are one CPU; with two devices:
test_offload_two_devices.py."""

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest

from engine.test_offload_two_devices import (
    EXPERTS,
    MODEL,
    MOE_LAYERS,
    PROMPTS,
    REQUEST_KWARGS,
    SIZES,
    all_logprobs,
    any_residents,
    ask,
    assert_same,
    compile_events,
    offload_engine,
    read_metrics,
)
from routed_experts import ConfigError, Engine, ExpertOffloadConfig, ResidencyMap
from routed_experts.engine.control import expert_offload
from support.engines import assert_nothing_allocated
from support.family_folders import write_family
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("fast_compilation")

GREEDY = {"temperature": 0.0, "ignore_eos": True}
DEFERRED = {"mode": "defer", "rerouted_slots": 0, "dropped_slots": 0, "deferred_slots": None, "placement_epoch": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=2, tokenizer=False, **MODEL))


@pytest.fixture(scope="module")
def undivided(folder):
    with lazy_compilation(), Engine(folder, **SIZES) as engine:
        return ask(engine)


@pytest.fixture(scope="module")
def engine(folder):
    """Two residents; a step of nine tokens streams the other experts."""
    with offload_engine(folder, kt_num_gpu_experts=2, kt_gpu_prefill_token_threshold=9) as engine:
        yield engine


def host_queue(engine):
    return engine.components.core.runner.host.queue


@contextlib.contextmanager
def recorded_steps(engine):
    """The steps that the runner starts: padded tokens, and whether they stream."""
    runner, steps = engine.components.core.runner, []
    programs = runner._programs

    class Programs(dict):
        def __getitem__(self, key):
            if key[0] == "forward":
                steps.append((key[1].num_tokens, key[2]))
            return programs[key]

    runner._programs = Programs()
    try:
        yield steps
    finally:
        runner._programs = programs


def test_a_long_step_streams_the_hosts_experts(engine, undivided):
    engine.flush_cache()
    before = host_queue(engine).stats().num_jobs
    with recorded_steps(engine) as steps, compile_events() as compiled:
        assert_same(ask(engine), undivided)
    assert compiled == []
    streaming = [tokens for tokens, streams in steps if streams]
    assert streaming == [16, 16]  # of 35 tokens: 16, 16, and 3 that are below the threshold of 9
    assert len(steps) > 10
    assert host_queue(engine).stats().num_jobs - before == len(steps) * MOE_LAYERS  # a layer's experts fit one chunk


def test_in_turn_the_numbers_are_the_same(engine, undivided):
    host_queue(engine).set_signals(serial=True)
    assert_same(ask(engine), undivided)
    host_queue(engine).set_signals(serial=False)


def test_residents_change_between_streaming_steps(engine, undivided):
    for seed in range(3):
        engine.apply_residency(any_residents(seed, 2, epoch=100 + seed))
        engine.flush_cache()
        assert_same(ask(engine), undivided)


def test_scores_are_those_of_an_undivided_engine(folder):
    """Live, on other routes, and while residents change; requests go on beside it."""
    prompts = [PROMPTS[0], PROMPTS[1]]
    with lazy_compilation(), Engine(folder, **SIZES) as whole:
        live = whole.score(prompts)
        drifted = [dataclasses.replace(out.routed_experts, ids=(out.routed_experts.ids + 1) % EXPERTS) for out in live]
        forced = whole.score(prompts, routed=drifted)
    with lazy_compilation(), Engine(folder, experts=ExpertOffloadConfig(kt_num_gpu_experts=2), **SIZES) as engine:
        swapped = 0
        for seed in range(3):
            answer = engine.generate(input_ids=PROMPTS[1], sampling_params={"temperature": 0.0}, max_new_tokens=4)
            for expected, routed in ((live, None), (forced, drifted)):
                for actual, reference in zip(engine.score(prompts, routed=routed), expected, strict=True):
                    np.testing.assert_allclose(actual.logprobs, reference.logprobs, atol=1e-5, rtol=0)
                    np.testing.assert_array_equal(actual.routed_experts.ids, reference.routed_experts.ids)
            swapped += engine.apply_residency(any_residents(seed, 2, epoch=seed + 1))
        assert swapped > 0 and len(answer["output_ids"]) == 4
    assert not np.allclose(live[0].logprobs, forced[0].logprobs, atol=1e-3)  # other routes are other numbers


def ask_first(engine, prompt):
    """The logprob of the first token after a prompt, and the fields that say whether it is exact."""
    options = {"max_new_tokens": 1, "return_logprob": True}
    meta = engine.generate(input_ids=prompt, sampling_params=GREEDY, **options)["meta_info"]
    return meta["output_token_logprobs"][0][0], {name: meta[name] for name in (*DEFERRED, "exact") if name in meta}


def test_deferral_changes_decode_steps_alone_and_is_reported(folder, undivided):
    """What is deferred: tests/execution/test_offload_step.py. Scores defer nothing; steps that defer do not stream."""
    fields = {"kt_max_deferred_experts_per_token": 1, "kt_gpu_prefill_token_threshold": 1}
    sizes = SIZES | {"precompile_bs_paddings": (1, 4)}
    with Engine(folder, experts=ExpertOffloadConfig(kt_num_gpu_experts=2, **fields), **sizes) as engine:
        with recorded_steps(engine) as steps, compile_events() as compiled:
            answers = ask(engine)
            batch = engine.generate(input_ids=PROMPTS[:1] * 4, sampling_params=GREEDY, max_new_tokens=6)
        assert compiled == []
        assert {streams for tokens, streams in steps if tokens == 16} == {True}
        assert (4, False) in steps and (4, True) not in steps
        assert len({tuple(answer["output_ids"]) for answer in batch}) == 1
        engine.flush_cache()
        prompts = [PROMPTS[2], PROMPTS[0][:17]]  # the last chunk of each is one token, which a decode step runs
        first = [ask_first(engine, prompt) for prompt in prompts]
        from_the_cache = [ask_first(engine, prompt)[1] for prompt in (prompts[1], PROMPTS[2] + PROMPTS[2])]
        engine.residency()  # the counts of the last steps
        counts, before = engine.components.core.runner._slot_counts, read_metrics(engine)["deferred_slots_total"]
        assert before == counts[:, 2].sum() > 0 and counts[-1, 2] == 0  # none of the last MoE layer
        assert (counts[:, 2] <= counts[:, 0]).all()
        engine.flush_cache()
        assert [answer["output_ids"] for answer in ask(engine)] == [answer["output_ids"] for answer in answers]
        score = engine.score(PROMPTS[0])
    with lazy_compilation(), Engine(folder, **SIZES) as whole:
        expected_first = [ask_first(whole, prompt) for prompt in prompts]
    for (logprob, fields), (expected, no_fields) in zip(first, expected_first, strict=True):
        np.testing.assert_allclose(logprob, expected, atol=1e-5, rtol=0)
        assert (fields, no_fields) == (DEFERRED | {"exact": True}, {})
    assert [fields["exact"] for fields in from_the_cache] == [False, True]  # the second prompt has no page in the cache
    for actual, reference in zip(answers, undivided, strict=True):
        assert actual["meta_info"]["exact"] is False and "exact" not in reference["meta_info"]
        info, plain = (answer["meta_info"]["routed_experts_info"] for answer in (actual, reference))
        assert (info["exact"], plain["exact"], plain["placement"]) == (False, True, None)
        assert info["placement"] == DEFERRED
        assert info["placement"].items() <= actual["meta_info"].items() and "mode" not in reference["meta_info"]
        prompts = [
            [value for value, *_ in answer["meta_info"]["input_token_logprobs"][1:]] for answer in (actual, reference)
        ]
        np.testing.assert_allclose(*prompts, atol=1e-5, rtol=0)
    expected = [value for value, *_ in undivided[0]["meta_info"]["input_token_logprobs"][1:]]
    np.testing.assert_allclose(score.logprobs, expected, atol=1e-5, rtol=0)


@contextlib.contextmanager
def residents_of_steps(engine):
    """The resident experts that each step runs with, as `bytes`: of the map among the arguments of its program."""
    runner, steps = engine.components.core.runner, []
    programs = runner._programs

    class Programs(dict):
        def __getitem__(self, key):
            program = programs[key]
            if key[0] != "forward":
                return program

            def run(*args):
                steps.append(resident_bytes(args[4]))
                return program(*args)

            return run

    runner._programs = Programs()
    try:
        yield steps
    finally:
        runner._programs = programs


def resident_bytes(slot_of):
    return (np.asarray(slot_of) >= 0).tobytes()


def test_outputs_name_the_residents_that_their_last_step_ran_with(folder):
    """Also where residents change while a step is in flight: between two outputs of a stream, and after every step, as
    adaptive residents may."""
    experts = [np.full((MOE_LAYERS, 1), first) + np.arange(2) for first in range(EXPERTS - 1)]
    maps = [ResidencyMap.from_experts(ids, num_experts=EXPERTS, epoch=7 + index) for index, ids in enumerate(experts)]
    epochs = {resident_bytes(residency.slot_of): residency.epoch for residency in maps}
    fields = {"kt_num_gpu_experts": 2, "kt_max_deferred_experts_per_token": 1}
    with lazy_compilation(), offload_engine(folder, **fields) as engine:
        core = engine.components.core

        def epochs_of_a_stream(after_output):
            """The epoch of each output, and that of the residents that its last step ran with."""
            engine.flush_cache()
            with residents_of_steps(engine) as steps:
                stream = engine.generate(input_ids=PROMPTS[1], sampling_params=GREEDY, max_new_tokens=24, stream=True)
                metas = [(out["meta_info"], after_output())[0] for out in stream]
            named = [meta["placement_epoch"] for meta in metas]
            return named, [epochs[steps[meta["completion_tokens"] - 1]] for meta in metas]

        engine.apply_residency(maps[0])
        swaps = itertools.cycle(maps)
        named, ran = epochs_of_a_stream(lambda: engine.apply_residency(next(swaps)))
        assert named == ran and len(set(ran)) > 1
        core.after_step = lambda elapsed_s: core.runner.apply_residency(next(swaps))
        named, ran = epochs_of_a_stream(lambda: None)
        assert named == ran and len(set(ran)) > 1
        core.after_step = None


def test_weights_of_several_groups_of_moe_layers_are_updated(tmp_path):
    """Layers with a state and layers that attend have tables of their own. An engine without experts= is the oracle."""
    old, new = (write_family(tmp_path / str(seed), "qwen3-next", seed=seed) for seed in (0, 1))
    sizes = {name: value for name, value in SIZES.items() if name != "enable_return_routed_experts"}
    options = REQUEST_KWARGS | {"input_ids": PROMPTS[1], "return_routed_experts": False, "sampling_params": GREEDY}
    with lazy_compilation(), Engine(str(new), **sizes) as undivided:
        expected = undivided.generate(**options)
    with lazy_compilation(), Engine(str(old), experts=ExpertOffloadConfig(kt_num_gpu_experts=1), **sizes) as engine:
        assert len(engine.components.core.runner.tables) > 1
        before = engine.generate(**options)
        engine.update_weights_from_disk(new, version=1)
        after = engine.generate(**options)
    assert after["output_ids"] == expected["output_ids"] != before["output_ids"]
    np.testing.assert_allclose(all_logprobs(after), all_logprobs(expected), atol=1e-5, rtol=0)


def test_the_start_log_names_where_experts_run(folder):
    phases = []
    experts = ExpertOffloadConfig(kt_num_gpu_experts=2, kt_cpuinfer=1)
    with lazy_compilation(), Engine(folder, experts=experts, on_phase=phases.append, **SIZES):
        (detail,) = (phase.detail for phase in phases if phase.name == "kernels")
    assert "4 of 6 experts of a layer on 1 threads of the host" in detail


def test_what_cannot_be_is_refused(folder, monkeypatch):
    def build(**experts):
        with assert_nothing_allocated():
            Engine(folder, experts=ExpertOffloadConfig(kt_num_gpu_experts=2, **experts), **SIZES)

    with pytest.raises(ConfigError, match="kt_cpuinfer=0, but the host's experts need a thread"):
        build(kt_cpuinfer=0)
    with pytest.raises(ConfigError, match=r"kt_cpuinfer=12345 is above the [0-9]+ cores"):
        build(kt_cpuinfer=12345)
    monkeypatch.setattr(expert_offload, "unavailable_reason", lambda: "no C++ compiler was found; install one")
    message = r"with the native library, which cannot be built: no C\+\+ compiler was found; install one"
    with pytest.raises(ConfigError, match=message):
        build()


def test_without_experts_on_the_host_no_library_is_needed(folder, undivided, monkeypatch):
    monkeypatch.setattr(expert_offload, "unavailable_reason", lambda: "no C++ compiler was found; install one")
    with Engine(folder, experts=ExpertOffloadConfig(kt_num_gpu_experts=EXPERTS), **SIZES) as engine:
        assert_same(ask(engine), undivided)


def test_a_tpu_is_refused_by_name():
    message = "experts= runs the host's experts beside a CPU or an NVIDIA GPU, and the default device is a tpu"
    with pytest.raises(ConfigError, match=message):
        expert_offload.check_platform("tpu", needs_library=False)
