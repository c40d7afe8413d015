"""Engines whose experts are shared between two devices of the CPU: 0 plays the accelerator, 1 the host."""

import contextlib
import gc
import threading
from types import MappingProxyType

import jax
import jax.monitoring
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from routed_experts import (
    CheckpointError,
    ConfigError,
    Engine,
    ExpertOffloadConfig,
    InvalidRequestError,
    PlacementError,
    ResidencyMap,
    extract_routed_experts_from_meta_info,
)
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.execution.model_runner import ModelRunner
from routed_experts.formats.meta_info import record_from_meta_info
from routed_experts.models.model_folder import ModelFolder
from routed_experts.server.metrics.metrics import Metrics
from routed_experts.server.routing_store import RoutingStore
from support.engines import assert_idle, assert_nothing_allocated
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = [pytest.mark.devices(2), pytest.mark.usefixtures("fast_compilation")]

EXPERTS, TOP_K, MOE_LAYERS = 6, 2, 2
MODEL = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "num_hidden_layers": 3}  # the first one is dense
SIZES = dict(
    precompile_bs_paddings=(4,),
    precompile_token_paddings=(16,),
    context_length=96,
    max_total_tokens=512,
    skip_tokenizer_init=True,
    enable_return_routed_experts=True,
)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11] * 5, [100, 3, 200, 17, 9], [4]]
REQUEST_KWARGS = {
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 5,
    "return_routed_experts": True,
    "max_new_tokens": 7,
}
COMPILING = "/jax/core/compile/"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=2, tokenizer=False, **MODEL)


@pytest.fixture(scope="module")
def undivided(folder):
    """The answers of an engine with all experts on the accelerator."""
    with lazy_compilation(), Engine(str(folder), experts=ExpertOffloadConfig(), **SIZES) as engine:
        assert type(engine.components.core.runner) is ModelRunner  # off: as if there were no such config
        with pytest.raises(InvalidRequestError, match="all experts on the accelerator"):
            engine.apply_residency(any_residents(0, 3))
        return ask(engine)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The same model with other weights."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("other"), seed=9, tokenizer=False, **MODEL)


@pytest.fixture(scope="module")
def undivided_other(other):
    with lazy_compilation(), Engine(str(other), **SIZES) as engine:
        return ask(engine)


@pytest.fixture(scope="module")
def most_bytes():
    """On the accelerator while the weights of `engine` were loaded, beyond what was there before."""
    return []


@pytest.fixture(scope="module")
def engine(folder, most_bytes):
    """Two of six experts on the accelerator."""
    before = device_bytes()
    how = {"on_load": lambda done, total: most_bytes.append(device_bytes() - before)}
    with offload_engine(folder, how, kt_num_gpu_experts=2, kt_gpu_prefill_token_threshold=9) as engine:
        yield engine


def device_bytes():
    """Of the accelerator's arrays, each buffer once, however many arrays share it."""
    return sum(
        {a.unsafe_buffer_pointer(): a.nbytes for a in jax.live_arrays() if jax.devices()[0] in a.devices()}.values()
    )


@contextlib.contextmanager
def offload_engine(folder, how=MappingProxyType({}), **experts):
    with Engine(str(folder), experts=ExpertOffloadConfig(**experts), **SIZES, **how) as engine:
        yield engine
        assert_idle(engine)


def ask(engine):
    return [engine.generate(input_ids=ids, sampling_params={"temperature": 0.0}, **REQUEST_KWARGS) for ids in PROMPTS]


def all_logprobs(answer):
    """All of them by (place, token), those of the best five included."""
    meta = answer["meta_info"]
    sampled = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
    best = [entry for entries in (*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]) for entry in entries]
    return np.array([value for value, *_ in (*sampled, *best)])


def load_weights(folder):
    """A whole model's arrays, on device 0."""
    opened = ModelFolder.open(folder)
    return nnx.split(opened.load(opened.dtype("auto")))[1]


def weight_version(engine):
    return engine.components.core.runner.weight_version


def swap_weights(engine, folder, version, *, donate):
    """New weights, as arrays that are the engine's from now on (they are copied to where they belong, and deleted) or
    from disk."""
    if not donate:
        engine.update_weights_from_disk(folder, version=version)
        return
    state = load_weights(folder)
    with compile_events() as compiled:
        engine.update_weights(state, version=version, donate=True)
    assert compiled == []


def assert_served(engine, answers, expected, version):
    assert_same(answers, expected)
    assert {answer["meta_info"]["weight_version"] for answer in answers} == {str(version)}
    runner = engine.components.core.runner
    for group, table in runner.tables.items():  # residents are the new store's, byte for byte
        expert_rows = (
            (layer.index * EXPERTS + runner.residency.experts[layer.moe_layer]).tolist()
            for layer in runner.layers
            if layer.group == group
        )
        rows = np.array([*expert_rows], np.int64).reshape(-1)
        np.testing.assert_array_equal(table.down, np.asarray(runner.model.host[group].down)[rows])


def assert_same(answers, expected):
    for actual, reference in zip(answers, expected, strict=True):
        assert actual["output_ids"] == reference["output_ids"]
        rows = [extract_routed_experts_from_meta_info(answer) for answer in (actual, reference)]
        np.testing.assert_array_equal(*rows)
        np.testing.assert_allclose(all_logprobs(actual), all_logprobs(reference), atol=1e-5, rtol=0)


def hit_ratios(residency, rows):
    """Of each layer, the share of the rows' slots whose experts are resident."""
    return (residency.slot_of[np.arange(MOE_LAYERS)[None, :, None], rows] >= 0).mean(axis=(0, 2))


def any_residents(seed, num_resident, *, epoch=0):
    noise = np.random.default_rng(seed)
    experts = np.stack([noise.permutation(EXPERTS)[:num_resident] for _ in range(MOE_LAYERS)])
    return ResidencyMap.from_experts(experts, num_experts=EXPERTS, epoch=epoch)


@contextlib.contextmanager
def compile_events():
    """What JAX traces, lowers and compiles meanwhile."""
    events = []

    def on_event(event, duration, **_):
        if event.startswith(COMPILING):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)


def test_there_are_two_devices():
    assert len(jax.devices()) == 2


@pytest.mark.parametrize("num_resident", range(EXPERTS + 1))
def test_any_number_of_residents_gives_the_same_answers(folder, undivided, other, undivided_other, num_resident):
    """Also after other weights have come, from disk or as arrays, and with one thread or two."""
    how = (
        {"residency": any_residents(num_resident, num_resident)}
        if num_resident % 2
        else {"kt_num_gpu_experts": num_resident}
    )
    with offload_engine(folder, **how, kt_cpuinfer=1 + num_resident % 2) as engine:
        assert_same(ask(engine), undivided)
        residency, hits = engine.residency()
        core, host = engine.components.core, engine.components.core.runner.host
        steps, jobs = core.num_steps, 0 if host is None else host.queue.stats().num_jobs
        if num_resident == EXPERTS:  # no expert is on the host, and resident experts keep their slots
            assert engine.apply_residency(any_residents(1, EXPERTS, epoch=1)) == 0
            assert_same(ask(engine), undivided)
        gc.collect()  # what is left over of loading
        before = device_bytes()
        swap_weights(engine, other, 5, donate=num_resident % 2 == 0)
        assert device_bytes() == before, "the accelerator holds residents and the rest once"
        with compile_events() as compiled:
            assert_served(engine, ask(engine), undivided_other, 5)
        assert compiled == []
        busy_s = read_metrics(engine)["host_experts_seconds_total"]
        assert busy_s == (0 if host is None else host.queue.stats().busy_s)
        assert (busy_s > 0) == (num_resident < EXPERTS)
    rows = [
        extract_routed_experts_from_meta_info(answer).reshape(-1, MOE_LAYERS + 1, TOP_K)[:, 1:] for answer in undivided
    ]
    rows = np.concatenate(rows)  # the last token of each was not fed
    np.testing.assert_allclose(hits, hit_ratios(residency, rows), atol=1e-12)
    assert jobs == (0 if num_resident == EXPERTS else steps * MOE_LAYERS)  # one of each step and MoE layer


def test_host_experts_are_never_on_the_accelerator(engine, most_bytes):
    runner, expert = engine.components.core.runner, 3 * 64 * 32 * 4  # bytes of gate, up and down
    tables, stores = (jax.tree.leaves([*parts.values()]) for parts in (runner.tables, runner.model.host))
    assert sum(leaf.nbytes for leaf in tables) == MOE_LAYERS * 2 * expert
    assert sum(leaf.nbytes for leaf in stores) == MOE_LAYERS * EXPERTS * expert
    assert {device.id for leaf in stores for device in leaf.devices()} == {1}
    assert {device.id for leaf in tables for device in leaf.devices()} == {0}
    rest = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.model.state)) - MOE_LAYERS * 2 * expert
    plan = engine.components.plan
    assert (plan.weights, plan.experts_host) == (rest + MOE_LAYERS * 2 * expert, MOE_LAYERS * EXPERTS * expert)
    assert any(line.startswith("experts, host") for line in engine.memory_plan)
    assert 0 < max(most_bytes) <= rest  # while experts were loaded, only other arrays were there


def test_swaps_under_load_change_nothing_and_compile_nothing(engine, undivided):
    ended, swapped = threading.Event(), []

    def swap():
        while not ended.is_set():
            swapped.append(engine.apply_residency(any_residents(len(swapped), 2, epoch=len(swapped) + 1)))

    with compile_events() as compiled:
        thread = threading.Thread(target=swap)
        thread.start()
        answers = [ask(engine) for _ in range(4)]
        ended.set()
        thread.join()
    for answer in answers:
        assert_same(answer, undivided)
    assert len(swapped) > 3 and sum(swapped) > 8
    assert compiled == []
    assert engine.components.core.runner.num_swapped == sum(swapped)


def test_weights_and_residents_change_at_once(engine, folder, undivided, other, undivided_other):
    """Requests, swaps and updates in three threads: every answer is of one version's weights. The queues of steps and
    of scores read the new weights from the next job on."""
    expected, version, ended, swapped = (undivided, undivided_other), weight_version(engine), threading.Event(), []
    scores = []

    def swap():
        while not ended.is_set():
            swapped.append(engine.apply_residency(any_residents(len(swapped), 2, epoch=10**6 + len(swapped))))

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for number in range(1, 5):
            swap_weights(engine, (folder, other)[number % 2], version + number, donate=number > 2)
            assert_same(ask(engine), expected[number % 2])
            scores.append(engine.score(PROMPTS[0]))
    finally:
        ended.set()
        thread.join()
    assert_served(engine, ask(engine), undivided, version + 4)
    assert len(swapped) > 3
    for first, again in (scores[0::2], scores[1::2]):
        np.testing.assert_allclose(first.logprobs, again.logprobs, atol=1e-5, rtol=0)
    for score, answers in zip(scores, (undivided_other, undivided) * 2, strict=True):
        prompt = [value for value, *_ in answers[0]["meta_info"]["input_token_logprobs"][1:]]
        np.testing.assert_allclose(score.logprobs, prompt, atol=1e-5, rtol=0)
    assert not np.allclose(scores[0].logprobs, scores[1].logprobs, atol=1e-3)


@pytest.mark.parametrize("cache", ["flush", "keep"])
def test_a_running_request_goes_on_with_the_new_weights(engine, folder, other, cache):
    """Existing tokens are prefilled anew, or kept; each row is of the version in its span."""
    version = weight_version(engine)
    how = dict(sampling_params={"temperature": 0.0, "ignore_eos": True}, max_new_tokens=40, return_routed_experts=True)
    stream = engine.generate(input_ids=PROMPTS[1], stream=True, **how)
    next(stream)
    engine.pause(mode="in_place")
    engine.update_weights_from_disk(other, version=version + 1, cache=cache)
    engine.resume()
    *_, last = stream
    record, tokens = record_from_meta_info(last), [*PROMPTS[1], *last["output_ids"]]
    (first, boundary, old), (again, end, new) = record.version_spans
    assert (first, boundary, old, new) == (0, again, version, version + 1) and len(PROMPTS[1]) <= boundary < end == len(
        tokens
    ) - 1
    scored = engine.score(tokens)
    if cache == "flush":  # all that it stands on is of the new weights
        np.testing.assert_array_equal(record.ids[boundary:], scored.routed_experts.ids[boundary:-1])
    engine.update_weights_from_disk(folder, version=version + 2)
    before = engine.score(tokens)
    np.testing.assert_array_equal(record.ids[:boundary], before.routed_experts.ids[:boundary])
    assert (scored.routed_experts.ids != before.routed_experts.ids).any()


def test_weights_that_cannot_be_copied_leave_the_old_ones(engine, undivided, other):
    runner, version = engine.components.core.runner, weight_version(engine)
    key = next(key for key in runner._programs if key[0] == "write")
    program, written = runner._programs[key], []

    def fails_at_third(*args):
        written.append(args)
        if len(written) == 3:
            raise MemoryError("no room for an expert")
        return program(*args)

    runner._programs[key] = fails_at_third
    try:
        with pytest.raises(MemoryError, match="no room for an expert"):
            engine.update_weights_from_disk(other, version=version + 1)
    finally:
        runner._programs[key] = program
    assert len(written) == 3 + 2 * MOE_LAYERS, "all were written back"
    assert_served(engine, ask(engine), undivided, version)


def test_an_array_under_two_names_is_donated_once(engine, folder):
    """It is copied under both before it is deleted, and so is what others hold left alone."""
    state = {".".join(map(str, path)): leaf.get_raw_value() for path, leaf in nnx.to_flat_state(load_weights(folder))}
    pair = ["blocks.1.0.q_norm", "blocks.1.0.k_norm"]
    twice = jax.device_put(np.asarray(state[pair[0]]), jax.devices()[1])
    array, version = jax.device_put(np.asarray(state[pair[0]]), jax.devices()[1]), weight_version(engine)
    engine.update_weights(state | dict.fromkeys(pair, twice), version=version + 1, donate=True)
    runner = engine.components.core.runner
    layers = runner.model.layers[runner.layers[-1].group]
    assert twice.is_deleted() and not array.is_deleted()
    for name in pair:
        np.testing.assert_array_equal(layers[name.rsplit(".", 1)[1]], array)
    engine.update_weights_from_disk(folder, version=version + 2)


def read_metrics(engine):
    metrics = Metrics(compat=None)
    store = RoutingStore(max_bytes=1, ttl_s=1.0, clock=lambda: 0.0, call_later=lambda *_: None)
    metrics.watch(AsyncEngine(engine), store)
    lines = (line.rsplit(" ", 1) for line in metrics.text(None).decode().splitlines() if not line.startswith("#"))
    return {name.removeprefix("routed_experts_"): float(value) for name, value in lines}


def test_metrics_give_the_hit_ratio_by_layer(engine, undivided):
    ask(engine)
    engine.residency()  # the counts of the last steps
    metrics = read_metrics(engine)
    hits = [metrics[f'resident_hit_ratio{{layer="{layer}"}}'] for layer in (1, 2)]
    np.testing.assert_allclose(hits, engine.residency()[1], atol=1e-9)
    assert metrics["resident_swaps_total"] == engine.components.core.runner.num_swapped
    assert metrics["deferred_slots_total"] == 0


def test_what_cannot_be_is_refused_before_anything_is_allocated(folder, tmp_path):
    def build(experts, **args):
        with assert_nothing_allocated():
            Engine(str(folder), experts=ExpertOffloadConfig(**experts), **(SIZES | args))

    with pytest.raises(ConfigError, match="kt_num_gpu_experts=7 is above the 6 experts"):
        build({"kt_num_gpu_experts": 7})
    with pytest.raises(PlacementError, match="3 MoE layers x 6 experts does not fit a model of 2 x 6"):
        build({"residency": ResidencyMap.first_n(3, 6, 2)})
    with pytest.raises(ConfigError, match="deterministic=True with experts="):
        build({"kt_num_gpu_experts": 2}, deterministic=True)
    with pytest.raises(ConfigError, match="tp_size=2 with experts="):
        build({"kt_num_gpu_experts": 2}, tp_size=2)
    with pytest.raises(ConfigError, match=r"kt_cpuinfer=12345 is above the [0-9]+ cores"):
        build({"kt_num_gpu_experts": 2, "kt_cpuinfer": 12345})
    fewer = write_tiny_checkpoint(tmp_path / "fewer", tokenizer=False, **(MODEL | {"num_experts": 5}))
    with pytest.raises(CheckpointError, match=r"missing \(model.layers.1.mlp.experts.5.gate_proj.weight"):
        build({"kt_num_gpu_experts": 2, "kt_weight_path": str(fewer)})
    assert ExpertOffloadConfig().num_resident is None


def test_experts_come_from_the_weight_path_and_all_else_from_the_model(folder, tmp_path):
    other = write_tiny_checkpoint(tmp_path / "other", seed=3, tokenizer=False, **MODEL)
    with offload_engine(folder, kt_num_gpu_experts=2, kt_weight_path=str(other), kt_method="bf16") as engine:
        runner = engine.components.core.runner
        (stored,), (table,) = runner.model.host.values(), runner.tables.values()
        router = runner.model.layers[runner.layers[1].group]["router"]
        down = np.array(table.down)  # the table is written anew, in place
        engine.update_weights_from_disk(folder, version=1)  # with its own experts, in the host's number format
        (reloaded,) = engine.components.core.runner.model.host.values()
    own, replaced = (load_file(path / "model.safetensors") for path in (folder, other))
    at = "model.layers.{}.mlp"
    np.testing.assert_array_equal(router, np.stack([own[f"{at}.gate.weight".format(layer)].T for layer in (1, 2)]))
    experts = [
        replaced[f"{at}.experts.{expert}.down_proj.weight".format(layer)].T
        for layer in (1, 2)
        for expert in range(EXPERTS)
    ]
    half = np.stack(experts).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(stored.down, half)
    np.testing.assert_array_equal(
        down, half.reshape(MOE_LAYERS, EXPERTS, *half.shape[1:])[:, :2].reshape(-1, *half.shape[1:])
    )
    experts = [
        own[f"{at}.experts.{expert}.down_proj.weight".format(layer)].T for layer in (1, 2) for expert in range(EXPERTS)
    ]
    np.testing.assert_array_equal(reloaded.down, np.stack(experts).astype(ml_dtypes.bfloat16))
    assert table.down.dtype == np.float32  # residents have the model's dtype, and the numbers of the store


def test_what_is_not_built_is_refused_by_name(engine):
    with pytest.raises(PlacementError, match="num_resident=3; this engine's tables have 2"):
        engine.apply_residency(any_residents(0, 3))
