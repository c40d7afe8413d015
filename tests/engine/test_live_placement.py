"""Engines whose experts are placed on two CPU devices: under capacities, and following the load."""

import collections
import contextlib
import dataclasses
import logging

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental import io_callback

from oracles.selection import Case, plain_selection
from routed_experts import (
    CaptureUnsupportedError,
    ConfigError,
    Engine,
    ExpertPlacement,
    InvalidRequestError,
    PlacementConfig,
    PlacementError,
    extract_routed_experts_from_meta_info,
)
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.engine.build.backends import BackendRegistry
from routed_experts.formats.meta_info import record_from_meta_info
from routed_experts.layers.balanced_selection.checks import expert_capacity
from routed_experts.layers.balanced_selection.reference import sequential_selection
from routed_experts.layers.routing import selection_scores
from routed_experts.models.base.sharding import AXIS
from routed_experts.models.model_folder import ModelFolder
from routed_experts.placement import rebalance
from routed_experts.server.metrics.metrics import Metrics
from routed_experts.server.routing_store import RoutingStore
from support.engines import assert_idle, assert_nothing_allocated
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

pytestmark = [pytest.mark.devices(2), pytest.mark.usefixtures("fast_compilation")]

EXPERTS, TOP_K, MOE_LAYERS = 16, 4, 2
ONE_EACH = ExpertPlacement.identity(MOE_LAYERS, EXPERTS, 2)
WITH_SPARES = rebalance(
    np.random.default_rng(5).gamma(0.5, size=(MOE_LAYERS, EXPERTS)), num_instances=20, num_devices=2
)
SIZES = dict(
    page_size=4, context_length=96, precompile_bs_paddings=(4,), precompile_token_paddings=(32,), max_total_tokens=512
)
ENGINE_KWARGS = dict(tp_size=2, ep_size=2, skip_tokenizer_init=True, **SIZES)
PROMPTS = [
    np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist() for seed, length in enumerate((30, 5, 17, 1))
]
ASK = dict(sampling_params={"temperature": 0.0, "ignore_eos": True}, max_new_tokens=10, return_logprob=True)


@dataclasses.dataclass(frozen=True)
class Note:
    """One layer of one step, as a router decided it."""

    scores: np.ndarray
    valid: np.ndarray
    replicas: np.ndarray
    ids: np.ndarray
    instances: np.ndarray
    weights: np.ndarray
    changed: np.ndarray


class TappedRegistry(BackendRegistry):
    """The engine's backends; what routers decide under capacities is noted, on device 0."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "notes", [])

    def choose(self, *args, **kwargs):
        kernels, attention = super().choose(*args, **kwargs)
        inner = kernels.group.rerouter

        def tapped(logits, valid, capacities, spec, bias):
            routing, rerouted = inner(logits, valid, capacities, spec, bias)
            scores = selection_scores(logits, spec=spec, bias=bias)
            parts = (scores, valid, capacities.replicas, routing.ids, routing.instances, routing.weights, rerouted)
            io_callback(self._note, None, lax.axis_index(AXIS), *parts, ordered=False)
            return routing, rerouted

        return dataclasses.replace(kernels, group=dataclasses.replace(kernels.group, rerouter=tapped)), attention

    def _note(self, rank, *parts):
        if int(rank) == 0:
            self.notes.append(Note(*map(np.array, parts)))

    def take(self):
        jax.effects_barrier()
        notes = self.notes[:]
        self.notes.clear()
        return notes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(
        write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=False, num_hidden_layers=MOE_LAYERS + 1)
    )


@contextlib.contextmanager
def serving(folder, placement, **overrides):
    with Engine(
        folder, placement=placement, **({"enable_return_routed_experts": True} | ENGINE_KWARGS | overrides)
    ) as engine:
        yield engine
        assert_idle_but_for_cache(engine)


def assert_idle_but_for_cache(engine):
    engine.flush_cache()
    assert_idle(engine)


@pytest.fixture(scope="module")
def alone(folder):
    """The answers of one device without a placement."""
    alone = ENGINE_KWARGS | dict(tp_size=1, ep_size=1)
    with lazy_compilation(), Engine(folder, enable_return_routed_experts=True, **alone) as engine:
        return engine.generate(input_ids=PROMPTS, return_routed_experts=True, **ASK)


@pytest.fixture(scope="module")
def following(folder, tmp_path_factory):
    """Experts that follow the load, from one instance each, in order of the ids: the plan of a file."""
    plan = tmp_path_factory.mktemp("plans") / "plan.npz"
    ONE_EACH.save(plan)
    with serving(folder, PlacementConfig(plan=plan, rebalance_every=6, layers_per_step=2), self_check=True) as engine:
        engine.counted_before, engine.steps_before = expert_counts(engine), engine.components.rebalancer._num_steps
        yield engine


@pytest.fixture(scope="module")
def rerouting(folder):
    """Capacities, at first without bound; an instance each. With the tap."""
    registry = TappedRegistry()
    with serving(
        folder, PlacementConfig(plan=ONE_EACH, mode="reroute", capacity_factor="inf"), registry=registry
    ) as engine:
        engine.registry = registry
        yield engine


@contextlib.contextmanager
def compile_events():
    events = []

    def on_event(event, duration, **_):
        if event.startswith("/jax/core/compile/"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)


def ask(engine, prompts=PROMPTS, **more):
    return engine.generate(input_ids=prompts, return_routed_experts=True, **(ASK | more))


def routed_rows(answers):
    return [
        extract_routed_experts_from_meta_info(answer).reshape(-1, MOE_LAYERS + 1, TOP_K)[:, 1:] for answer in answers
    ]


def all_logprobs(answer):
    return [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]


def assert_same(answers, expected, *, atol):
    for answer, reference in zip(answers, expected, strict=True):
        assert answer["output_ids"] == reference["output_ids"]
        np.testing.assert_allclose(all_logprobs(answer), all_logprobs(reference), rtol=0, atol=atol)
    for answer, reference in zip(routed_rows(answers), routed_rows(expected), strict=True):
        np.testing.assert_array_equal(answer, reference)


def read_metrics(engine):
    metrics = Metrics(compat=None)
    metrics.watch(
        AsyncEngine(engine), RoutingStore(max_bytes=1, ttl_s=1.0, clock=lambda: 0.0, call_later=lambda *_: None)
    )
    lines = (line.rsplit(" ", 1) for line in metrics.text(None).decode().splitlines() if not line.startswith("#"))
    return {name.removeprefix("routed_experts_"): float(value) for name, value in lines}


def test_unbounded_capacities_change_nothing_to_the_last_bit(alone, following, rerouting):
    """Before anything has moved, an expert has one instance in both: even the order of sums is the same."""
    assert following.placement_stats().epoch == 0
    plain = ask(following, max_new_tokens=3)
    bounded = ask(rerouting, max_new_tokens=3)
    assert_same(bounded, plain, atol=0)
    for answer in bounded:
        counts = {"rerouted_slots": 0, "dropped_slots": 0, "deferred_slots": 0}
        expected = {"exact": True, "mode": "reroute", **counts, "placement_epoch": 0}
        assert {name: answer["meta_info"][name] for name in expected} == expected
    rerouting.flush_cache()
    assert_same(ask(rerouting), alone, atol=1e-4)
    rerouting.flush_cache()
    rerouting.registry.take()


def assert_as_defined(notes, factor, num_instances, *, overflows):
    """Every layer of every step is what the sequence decides, by the library's own and by one that shares no code with
    it."""
    for note in notes:
        room = expert_capacity(int(note.valid.sum()), TOP_K, num_instances, factor)
        exhausted = "overflow" if overflows else "drop"
        sequence = sequential_selection(
            note.scores, note.scores, note.replicas, room, k=TOP_K, valid=note.valid, on_exhausted=exhausted
        )
        plain = plain_selection(Case(note.scores, note.replicas, room, note.valid, None), TOP_K, overflows=overflows)
        for ids, instances in ((sequence.logical_ids, sequence.instance_ids), (plain[0], plain[1])):
            np.testing.assert_array_equal(note.ids[note.valid], ids[note.valid])
            np.testing.assert_array_equal(note.instances[note.valid], instances[note.valid])
        best = np.argsort(-note.scores, axis=1, kind="stable")[:, :TOP_K]
        foreign = (note.ids[:, :, None] != best[:, None, :]).all(axis=2) & (note.ids >= 0)
        expected = np.where(note.valid[:, None], np.stack([foreign.sum(1), (note.ids < 0).sum(1)], axis=1), 0)
        np.testing.assert_array_equal(note.changed, expected)
        at_ids = np.where(note.ids < 0, 0.0, np.take_along_axis(note.scores, np.maximum(note.ids, 0), axis=1))
        shared = at_ids / np.maximum(at_ids.sum(axis=1, keepdims=True), 1e-20)
        np.testing.assert_allclose(note.weights[note.valid], shared[note.valid], atol=1e-6)


def test_bounded_steps_are_the_sequence_and_rows_are_what_ran(alone, rerouting):
    """Factors change while it serves, and compile nothing; every answer and the counts report the rerouting."""
    before = rerouting.placement_stats()
    with compile_events() as compiled:
        by_factor = {}
        for factor in ("1", "5/4", 3.5):
            rerouting.set_capacity_factor(factor)
            by_factor[factor] = ask(rerouting)
            rerouting.flush_cache()
            notes = rerouting.registry.take()
            assert_as_defined(notes, factor, EXPERTS, overflows=True)
            ran = collections.Counter(tuple(row) for note in notes for row in note.ids[note.valid].tolist())
            recorded = np.concatenate(routed_rows(by_factor[factor])).reshape(-1, TOP_K)
            assert ran == collections.Counter(map(tuple, recorded.tolist()))
            rerouted = sum(note.changed.sum(axis=0) for note in notes)
            metas = [answer["meta_info"] for answer in by_factor[factor]]
            assert rerouted.tolist() == [
                sum(meta[name] for meta in metas) for name in ("rerouted_slots", "dropped_slots")
            ]
            assert all(meta["exact"] == (meta["rerouted_slots"] == 0) for meta in metas)
            assert rerouted[1] == 0 and (rerouted[0] > 0 or factor == 3.5)
    assert not compiled, compiled
    assert any(left["output_ids"] != right["output_ids"] for left, right in zip(by_factor["1"], alone, strict=True))
    stats = rerouting.placement_stats()
    total = sum(answer["meta_info"]["rerouted_slots"] for answers in by_factor.values() for answer in answers)
    assert stats.rerouted_slots - before.rerouted_slots == total > 0 and stats.dropped_slots == 0
    metrics = read_metrics(rerouting)
    assert (metrics["rerouted_slots_total"], metrics["dropped_slots_total"]) == (stats.rerouted_slots, 0)


def test_a_rerouted_cached_prefix_is_reported_to_its_readers(rerouting):
    """Pages of a pass that was changed; and the score of a text keeps to no capacity."""
    rerouting.set_capacity_factor(1)
    (first,) = ask(rerouting, [PROMPTS[0]], max_new_tokens=1)
    rerouting.set_capacity_factor("inf")
    (second,) = ask(rerouting, [[*PROMPTS[0][:24], 7, 8]], max_new_tokens=1)
    meta = second["meta_info"]
    assert meta["cached_tokens"] >= 20
    notes = rerouting.registry.take()
    (changed,) = (
        {tuple(row): count for row, count in zip(n.ids.tolist(), n.changed[:, 0].tolist(), strict=True)}
        for n in notes[:1]
    )
    assert first["meta_info"]["rerouted_slots"] > 0 and changed
    in_prefix = routed_rows([second])[0][: meta["cached_tokens"]]
    np.testing.assert_array_equal(in_prefix, routed_rows([first])[0][: meta["cached_tokens"]])
    prefix = [sum(note.changed[: meta["cached_tokens"], 0].sum() for note in notes[:MOE_LAYERS])]
    assert meta["rerouted_slots"] == prefix[0] and meta["exact"] == (prefix[0] == 0)
    rerouting.flush_cache()
    rerouting.set_capacity_factor(1)
    scored = rerouting.score(PROMPTS[0])
    rerouting.set_capacity_factor("inf")
    exact = rerouting.score(PROMPTS[0])
    np.testing.assert_array_equal(scored.routed_experts.ids, exact.routed_experts.ids)
    np.testing.assert_array_equal(scored.logprobs, exact.logprobs)


def test_a_cached_page_is_behind_the_pages_that_its_pass_computed(rerouting):
    """Two requests compute the same first page in one step. That of the second one was changed or not as those beside
    it decided, so its second page is not cached behind the first page of the other."""
    page, ask_one = SIZES["page_size"], ASK | {"max_new_tokens": 1}
    rerouting.flush_cache()
    rerouting.set_capacity_factor(1)
    shared = PROMPTS[0][: 2 * page]
    batch = [[*shared[:page], token] for token in (5, 6, 7)] + [[*shared, 8]]
    each = [ASK["sampling_params"] | {"max_new_tokens": length} for length in (1, 1, 1, 2)]
    rerouting.generate(input_ids=batch, sampling_params=each)
    rerouting.set_capacity_factor("inf")
    (later,) = rerouting.generate(input_ids=[[*shared, 9]], **ask_one)
    assert later["meta_info"]["cached_tokens"] == page
    rerouting.flush_cache()


def test_a_retracted_request_reports_the_rerouting_of_all_its_passes(rerouting):
    """Tokens that were generated on passes of before stay what they are, and those passes count."""
    rerouting.flush_cache()
    rerouting.registry.take()
    rerouting.set_capacity_factor(1)
    scheduler = rerouting.components.core.ranks[0]
    before = scheduler.num_retracted
    stream = rerouting.generate(
        input_ids=PROMPTS[0], stream=True, **(ASK | {"max_new_tokens": 50, "return_routed_experts": True})
    )
    next(stream)
    rerouting.pause(mode="retract")
    assert scheduler.num_retracted == before + 1
    rerouting.resume()
    *_, last = stream
    changed = sum(note.changed[:, 0].sum() for note in rerouting.registry.take())
    assert last["meta_info"]["completion_tokens"] == 50
    assert last["meta_info"]["rerouted_slots"] == changed > 0 and last["meta_info"]["exact"] is False
    info = last["meta_info"]["routed_experts_info"]
    assert info["exact"] is False and info["placement"]["rerouted_slots"] == changed
    assert info["placement"].items() <= last["meta_info"].items()
    assert info["placement"]["placement_epoch"] == rerouting.placement_stats().epoch
    record = record_from_meta_info(last["meta_info"])
    assert not record[3:9].exact and record[3:9].placement == info["placement"]
    assert rerouting.components.core.rerouting._own == {}
    rerouting.flush_cache()


def test_an_answer_names_the_placement_that_ran_its_last_step(rerouting, monkeypatch):
    """While layers are moved, that of the placement before; from the last layer on, the new one."""
    before, named = rerouting.placement_stats().epoch, []
    thread, run_drained = rerouting.thread, rerouting.thread.run_drained

    def run_and_ask(function):
        result = run_drained(function)
        answer = rerouting.generate(input_ids=PROMPTS[1], sampling_params={"temperature": 0.0}, max_new_tokens=1)
        named.append(answer["meta_info"]["placement_epoch"])
        return result

    monkeypatch.setattr(thread, "run_drained", run_and_ask)
    other = rebalance(
        np.arange(1.0, 1 + MOE_LAYERS * EXPERTS).reshape(MOE_LAYERS, EXPERTS), num_instances=EXPERTS, num_devices=2
    )
    rerouting.apply_placement(dataclasses.replace(other, epoch=before + 5))
    assert named == [before] * (MOE_LAYERS - 1) + [before + 5]
    monkeypatch.undo()
    rerouting.apply_placement(dataclasses.replace(ONE_EACH, epoch=before))
    rerouting.flush_cache()
    rerouting.registry.take()


def expert_counts(engine):
    """Of the steps since they were taken last."""
    return engine.thread.run_drained(engine.components.load_monitor.close_window)()


def test_slots_are_dropped_and_counted_where_nothing_is_captured(folder):
    """Replicas, slots that stay empty, and counts on the device of all that ran, with capture off."""
    registry = TappedRegistry()
    config = PlacementConfig(
        plan=WITH_SPARES, mode="reroute", capacity_factor="1/2", on_exhausted="drop", rebalance_every=10**6
    )
    with serving(folder, config, registry=registry, enable_return_routed_experts=False) as engine:
        with compile_events() as compiled:
            answers = engine.generate(input_ids=PROMPTS, **ASK)
        notes, counts = registry.take(), expert_counts(engine)
        assert engine.components.core.capturers[0].enabled is False and not compiled
        assert_as_defined(notes, "1/2", 20, overflows=False)
        ran = np.concatenate([note.ids[note.valid].ravel() for note in notes])
        np.testing.assert_array_equal(counts.sum(axis=(0, 1)), np.bincount(ran[ran >= 0], minlength=EXPERTS))
        dropped = sum(int(note.changed[:, 1].sum()) for note in notes)
        assert dropped == sum(answer["meta_info"]["dropped_slots"] for answer in answers) == int((ran < 0).sum()) > 0
        assert engine.placement_stats().dropped_slots == dropped == read_metrics(engine)["dropped_slots_total"]
        assert not expert_counts(engine).any()
        follower = engine.components.rebalancer
        follower._config = dataclasses.replace(
            config, rebalance_every=4
        )  # from now on the experts follow what they ran
        with compile_events() as compiled:
            for _ in range(3):
                engine.generate(input_ids=PROMPTS, **ASK)
                follower.join()
        stats = engine.placement_stats()
        assert stats.rebalances + stats.skipped > 0 and stats.failed == 0 and not compiled
        assert_as_defined(registry.take(), "1/2", 20, overflows=False)


def test_experts_follow_a_skewed_load_and_outputs_stay_the_same(alone, following):
    """Counts on the device are those of the rows, experts move while requests run, then what is planned is not worth a
    copy; tokens and rows are those of one device, and nothing compiles."""
    following.flush_cache()
    core, follower = following.components.core, following.components.rebalancer
    follower.join()
    before = following.placement_stats()
    with compile_events() as compiled:
        for _ in range(6):
            assert_same(ask(following), alone, atol=1e-4)
            following.flush_cache()
            follower.join()
    assert not compiled, compiled
    stats = following.placement_stats()
    assert stats.rebalances > 0 and stats.copies > before.copies and stats.epoch > 0 and stats.failed == 0
    assert (core.runner.placement.physical_to_logical_map != ONE_EACH.physical_to_logical_map).any()
    assert stats.skipped > before.skipped, "the load has not changed since the experts moved"
    metrics = read_metrics(following)
    expected = {
        "eplb_rebalances_total": stats.rebalances,
        "eplb_skipped_total": stats.skipped,
        "expert_copies_total": stats.copies,
    }
    assert {name: metrics[name] for name in expected} == expected
    move_estimate = stats.move_estimate  # of the last plan
    assert metrics["eplb_gate_gain_seconds"] == pytest.approx(move_estimate.gain_s)
    assert metrics["eplb_gate_cost_seconds"] == pytest.approx(move_estimate.cost_s)
    assert (metrics["eplb_gate_worth"], metrics["eplb_gate_copies"]) == (move_estimate.pays_off, move_estimate.copies)
    assert metrics['eplb_gate_balancedness{placement="now"}'] == pytest.approx(move_estimate.balancedness_now)
    assert 0 < metrics["eplb_last_move_seconds"] == pytest.approx(stats.last_move_s)


def test_codes_and_scales_follow_the_load_and_a_push_finds_them_where_they_are(folder, tmp_path):
    """As one device of codes, while experts move and after a push of plain weights to the moved ones."""
    other = write_tiny_checkpoint(tmp_path, seed=1, tokenizer=False, num_hidden_layers=MOE_LAYERS + 1)
    pushed = nnx.state(ModelFolder.open(other).load(jnp.dtype("float32")))
    codes = dict(enable_return_routed_experts=True, quantization="fp8_block")
    with lazy_compilation(), Engine(folder, **ENGINE_KWARGS | codes | dict(tp_size=1, ep_size=1)) as single:
        expected = ask(single)
        single.update_weights_from_disk(other)
        expected_later = ask(single)
    config = PlacementConfig(plan=ONE_EACH, rebalance_every=6, layers_per_step=2)
    with lazy_compilation(), serving(folder, config, **codes) as engine:
        shapes = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(engine.components.served.arrays)}
        assert shapes["blocks.1.0.gate_up"].dtype == jnp.float8_e4m3fn and "blocks.1.0.gate_up_scale" in shapes
        for _ in range(3):
            assert_same(ask(engine), expected, atol=1e-4)
            engine.flush_cache()
            engine.components.rebalancer.join()
        stats = engine.placement_stats()
        assert stats.rebalances > 0 and stats.copies > 0 and stats.failed == 0
        engine.update_weights(pushed)
        assert_same(ask(engine), expected_later, atol=1e-4)
    assert [answer["output_ids"] for answer in expected_later] != [answer["output_ids"] for answer in expected]


def test_what_the_self_check_ran_is_no_load(following):
    assert any(phase.name == "self-check" for phase in following.phases)
    assert not following.counted_before.any() and following.steps_before == 0


@contextlib.contextmanager
def holding_still(engine):
    """Experts stay where they are, and the test takes the counts."""
    follower = engine.components.rebalancer
    follower.join()
    config = follower._config
    follower._config = dataclasses.replace(config, rebalance_every=10**6)
    try:
        yield
    finally:
        follower._config = config


def test_balancedness_is_that_of_the_rows(following):
    """Of all steps, by loops over rows and devices; where experts are placed at all, steps are counted."""
    loop, watch, runner = following.thread, following.components.load_monitor, following.components.core.runner
    with holding_still(following):
        loop.run_drained(watch.restart)
        assert following.placement_stats().balance == {}
        answers = [answer for seed in range(3) for answer in ask(following, [[*PROMPTS[seed], seed + 7], PROMPTS[3]])]
        for _ in range(2):  # what is taken is read when something is taken after it
            expert_counts(following)
        stats = following.placement_stats()
    following.flush_cache()
    placement, load = runner.placement, np.zeros((MOE_LAYERS, 2))
    computed_rows = [
        rows[meta["cached_tokens"] :]
        for rows, meta in zip(routed_rows(answers), (reply["meta_info"] for reply in answers), strict=True)
    ]
    for row in np.concatenate(computed_rows):
        for layer in range(MOE_LAYERS):
            for expert in row[layer]:
                instances = np.flatnonzero(placement.physical_to_logical_map[layer] == expert)
                for instance in instances:
                    load[layer, instance // (placement.num_instances // 2)] += 1 / len(instances)
    window = stats.balance[1000]
    assert window.balancedness == pytest.approx(np.mean(load.mean(axis=1) / load.max(axis=1)), abs=1e-5)
    assert window.weighted == pytest.approx(load.mean(axis=1).sum() / load.max(axis=1).sum())
    np.testing.assert_allclose(window.max_over_mean, load.max(axis=1) / load.mean(axis=1))
    metrics = read_metrics(following)
    assert metrics['eplb_balancedness{window="1000"}'] == pytest.approx(window.balancedness)
    assert metrics['eplb_balancedness_weighted{window="1000"}'] == pytest.approx(window.weighted)
    by_layer = [metrics[f'device_load_max_over_mean{{layer="{layer}"}}'] for layer in stats.layer_ids]
    assert by_layer == pytest.approx(window.max_over_mean.tolist())


@pytest.mark.parametrize("tag", ["kv_cache", "weights"])
def test_released_memory_is_no_failure(following, tag):
    """A plan with a gain that moves nothing is neither a move nor an error."""
    follower, runner = following.components.rebalancer, following.components.core.runner
    with holding_still(following):
        following.release_memory_occupation((tag,))
        before = following.placement_stats()
        follower._windows.clear()
        skewed = np.zeros((2, MOE_LAYERS, EXPERTS), np.int64)
        for layer, experts in enumerate(
            runner.placement.physical_to_logical_map[:, : runner.placement.num_instances // 2]
        ):
            skewed[1, layer, experts] = 1000  # one device has it all
        follower._plan_and_move(lambda: skewed, 1e6, follower._apply)
        after = following.placement_stats()
        if tag == "weights":
            following.update_weights_from_disk(following.server_args.model_path)
        following.resume_memory_occupation()
    assert after.move_estimate.pays_off
    assert (after.failed, after.rebalances, after.epoch) == (before.failed, before.rebalances, before.epoch)


def test_counts_on_the_device_are_those_of_the_rows(following):
    """By phase, layer and expert."""
    with holding_still(following):
        expert_counts(following)
        answers = ask(following)
        counted = expert_counts(following)
    following.flush_cache()
    expected = np.zeros((2, MOE_LAYERS, EXPERTS), int)
    for prompt, rows in zip(PROMPTS, routed_rows(answers), strict=True):
        for phase, part in enumerate((rows[: len(prompt)], rows[len(prompt) :])):
            for layer in range(MOE_LAYERS):
                expected[phase, layer] += np.bincount(part[:, layer].ravel(), minlength=EXPERTS)
    np.testing.assert_array_equal(counted, expected)


def test_a_plan_that_fails_ends_nothing(alone, following, caplog, monkeypatch):
    follower = following.components.rebalancer

    def fail(*_):
        raise PlacementError("no plan today")

    monkeypatch.setattr(follower, "_plan", fail)
    before = following.placement_stats()
    with caplog.at_level(logging.ERROR):
        assert_same(ask(following), alone, atol=1e-4)
        follower.join()
    following.flush_cache()
    assert following.placement_stats().failed > before.failed and "no plan today" in caplog.text
    assert read_metrics(following)["eplb_failed_total"] == following.placement_stats().failed


def test_what_cannot_be_is_refused_before_anything_is_allocated(folder, following, tmp_path):
    def build(placement, **args):
        with assert_nothing_allocated():
            Engine(folder, placement=placement, **(ENGINE_KWARGS | args))

    bounded = dict(plan=ONE_EACH, mode="reroute", capacity_factor=1)
    with pytest.raises(ConfigError, match="deterministic=True with placement="):
        build(PlacementConfig(**bounded), deterministic=True)
    with pytest.raises(CaptureUnsupportedError, match="on_exhausted='drop' leaves slots empty"):
        build(PlacementConfig(**bounded, on_exhausted="drop"), enable_return_routed_experts=True)
    with pytest.raises(PlacementError, match="num_devices=2, but tp_size=1"):
        build(ONE_EACH, tp_size=1, ep_size=1)
    with pytest.raises(ConfigError, match=r"nowhere.npz' is no file; give the .npz"):
        build(tmp_path / "nowhere.npz")
    with pytest.raises(InvalidRequestError, match="have no capacities"):
        following.set_capacity_factor(2)
