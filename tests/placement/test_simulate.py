"""Plans on recorded routing: what replay reports is what a loop over steps and slots finds."""

import functools
import itertools
import re

import jax
import numpy as np
import pytest

from placement.cases import skewed_record
from routed_experts import placement
from routed_experts.core.errors import PlacementError, RoutingAlignmentError
from routed_experts.core.placement import ExpertPlacement, ResidencyMap
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.layers.balanced_selection.checks import expert_capacity
from routed_experts.layers.balanced_selection.reference import sequential_selection
from routed_experts.layers.balanced_selection.waterfill import waterfill_replicas
from routed_experts.placement import AdaptiveResidency

pytestmark = pytest.mark.usefixtures("fast_compilation")

LOGITS = np.random.default_rng(5).normal(0, 1.2, (3, 16))


@pytest.fixture(scope="module")
def records():
    rng = np.random.default_rng(6)
    return [skewed_record(rng, LOGITS, tokens, prompt_len=tokens // 2) for tokens in (150, 70, 45)]


def test_a_placement_is_judged_step_by_step(records):
    plan = placement.eplb(RoutingStats.from_records(records), num_instances=20, num_devices=4)
    report = placement.simulate(records, plan, step_tokens=64)
    rows = np.concatenate([record.ids for record in records])
    total, largest = np.zeros((3, 4)), np.zeros(3)
    for low in range(0, 265, 64):
        step = np.zeros((3, 4))
        for layer in range(3):
            for expert in rows[low : low + 64, layer].ravel():
                for instance in np.flatnonzero(plan.physical_to_logical_map[layer] == expert):
                    step[layer, instance // 5] += 1 / plan.logical_replica_count[layer, expert]
        total += step
        largest += step.max(axis=1)
    assert (report.num_tokens, report.num_steps) == (265, 5)
    assert np.allclose(report.device_load, total) and np.allclose(report.balancedness, total.mean(axis=1) / largest)
    assert not report.copies.any()


def test_a_plan_balances_the_trace_that_it_was_made_from(records):
    stats = RoutingStats.from_records(records)
    before = placement.simulate(records, ExpertPlacement.identity(3, 16, 4), step_tokens=10**6)
    after = placement.simulate(records, placement.eplb(stats, num_instances=20, num_devices=4), step_tokens=10**6)
    assert (after.balancedness > before.balancedness).all() and (after.balancedness > 0.99).all()
    assert placement.eplb_balancedness(after.device_load) == pytest.approx(after.balancedness.mean(), abs=1e-6)


@pytest.mark.parametrize("dispatch", ["waterfill", "reroute"])
def test_a_recorded_step_is_sent_as_the_serving_operators_send_it(records, dispatch):
    """The operators' own references, layer by layer and step by step."""
    plan = placement.eplb(RoutingStats.from_records(records), num_instances=20, num_devices=4)
    report = placement.simulate(records, plan, dispatch=dispatch, step_tokens=64)
    rows = np.concatenate([record.ids for record in records]).astype(np.int32)
    fill = jax.jit(functools.partial(waterfill_replicas, num_devices=4, num_instances=20))
    total, largest, unsent = np.zeros((3, 4)), np.zeros(3), np.zeros(3)
    for low, layer in itertools.product(range(0, 265, 64), range(3)):
        ids, order = rows[low : low + 64, layer], plan.logical_to_physical_map[layer]
        if dispatch == "waterfill":
            instances = np.asarray(fill(ids, order))
        else:
            capacity, scores = expert_capacity(len(ids), 4, 20, 1.25), np.full((len(ids), 16), -np.inf, np.float32)
            np.put_along_axis(scores, ids, np.float32([4, 3, 2, 1])[None], axis=1)
            instances = sequential_selection(scores, scores, order, capacity, k=4, on_exhausted="drop").instance_ids
        device = np.bincount(instances[instances >= 0] // 5, minlength=4)
        total[layer] += device
        largest[layer] += device.max()
        unsent[layer] += np.count_nonzero(instances < 0)
    assert (report.device_load == total).all() and np.allclose(report.balancedness, total.mean(axis=1) / largest)
    assert (report.rerouted_slots == unsent).all() and unsent.any() == (dispatch == "reroute")
    even = placement.simulate(records, plan, step_tokens=64)
    assert (report.balancedness > even.balancedness).all() or dispatch == "reroute"


def test_a_plan_that_follows_another_counts_its_copies(records):
    first = placement.eplb(RoutingStats.from_records(records[:1]), num_instances=20, num_devices=4)
    stats = RoutingStats.from_records(records[1:])
    plan = placement.eplb(stats, num_instances=20, num_devices=4, previous=first)
    loose = placement.eplb(stats, num_instances=20, num_devices=4)
    assert plan.epoch == first.epoch + 1
    copies = placement.simulate(records, plan, previous=first).copies
    assert (copies == placement.num_copies(first, plan)).all() and copies.sum() < placement.num_copies(
        first, loose
    ).sum()
    recent = placement.eplb(stats.recent_load, num_instances=20, num_devices=4)
    assert recent.num_instances == 20


def test_a_residency_is_judged_slot_by_slot(records):
    plan = placement.resident(RoutingStats.from_records(records[:1]), per_layer=5)
    rows = np.concatenate([record.ids for record in records])
    for resident in (plan, ResidencyMap.first_n(3, 16, 0), ResidencyMap.first_n(3, 16, 16)):
        report = placement.simulate(records, resident, previous=ResidencyMap.first_n(3, 16, resident.num_resident))
        hits = [np.isin(rows[:, layer], resident.experts[layer]).mean() for layer in range(3)]
        assert np.allclose(report.hit_ratio, hits)
        assert report.copies.tolist() == [int((row >= resident.num_resident).sum()) for row in resident.experts]


def test_a_policy_is_run_as_an_engine_would(records):
    """Each step meets the map that the steps before it made."""
    state = AdaptiveResidency.start(ResidencyMap.first_n(3, 16, 4))
    report = placement.simulate(records, state, step_tokens=4)
    rows, hits = np.concatenate([record.ids for record in records]), np.zeros(3)
    for low in range(0, 265, 4):
        step = rows[low : low + 4]
        hits += [np.isin(step[:, layer], state.residency.experts[layer]).sum() for layer in range(3)]
        state = state.observe(
            np.stack([np.bincount(step[:, layer].ravel(), minlength=16) for layer in range(3)]), len(step)
        )
    assert np.allclose(report.hit_ratio, hits / (265 * 4))
    assert state.residency.epoch > 0 and report.copies.sum() >= state.residency.epoch


def test_a_trace_of_another_model_is_refused(records):
    for plan in (
        ExpertPlacement.identity(3, 15, 3),
        ResidencyMap.first_n(2, 16, 3),
        AdaptiveResidency.start(ResidencyMap.first_n(3, 8, 3)),
    ):
        with pytest.raises(PlacementError, match=re.escape("does not fit a model of 3 x 16")):
            placement.simulate(records, plan)
    other = skewed_record(np.random.default_rng(0), LOGITS[:, :8], 9)
    with pytest.raises(RoutingAlignmentError, match="expected records of one model"):
        placement.simulate([*records, other], ExpertPlacement.identity(3, 16, 4))
    with pytest.raises(RoutingAlignmentError, match="there are no records"):
        placement.simulate([], ExpertPlacement.identity(3, 16, 4))


def test_wrong_words_are_refused(records):
    plan = ExpertPlacement.identity(3, 16, 4)
    with pytest.raises(PlacementError, match="dispatch='odd'; choose one of even, waterfill, reroute"):
        placement.simulate(records, plan, dispatch="odd")
    with pytest.raises(PlacementError, match="step_tokens=0 must be an integer of at least 1"):
        placement.simulate(records, plan, step_tokens=0)
    with pytest.raises(PlacementError, match="previous is a ResidencyMap"):
        placement.simulate(records, plan, previous=ResidencyMap.first_n(3, 16, 4))
    with pytest.raises(PlacementError, match="dispatch='odd' chooses among instances"):
        placement.simulate(records, ResidencyMap.first_n(3, 16, 4), dispatch="odd")
    with pytest.raises(PlacementError, match="previous is an ExpertPlacement"):
        placement.simulate(records, ResidencyMap.first_n(3, 16, 4), previous=plan)
