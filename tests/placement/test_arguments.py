"""Arguments of plans and simulations of other types are refused by name, with the type that is expected."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts import ResidencyMap, RoutedExperts, RoutingStats, placement
from routed_experts.core.errors import PlacementError

LOAD = np.arange(16.0).reshape(2, 8)
SIZES = dict(num_instances=8, num_devices=2)
PLAN, RESIDENCY = placement.eplb(LOAD, **SIZES), placement.resident(LOAD, per_layer=2)
ADAPTIVE = placement.AdaptiveResidency.start(RESIDENCY)
COSTS = dict(expert_time_s=1.0, expert_bytes=1, link_bytes_per_s=1.0)


def record():
    """Five tokens, each with two of eight experts in both layers."""
    ids = np.tile(np.arange(2, dtype=np.uint8), (5, 2, 1))
    sizes = dict(num_tokens=6, num_prompt_tokens=0, layer_ids=(0, 1), num_hidden_layers=2, num_experts=8)
    return RoutedExperts(ids=ids, start=0, version_spans=((0, 5, 0),), **sizes)


RECORDS = [record()]
WRONG = {
    "no counts": (lambda: ADAPTIVE.observe(None, 1), "load has shape []; expected [M, E]"),
    "counts of another model": (lambda: ADAPTIVE.observe(LOAD[:1], 1), "does not fit a model of 1 x 8"),
    "tokens as text": (lambda: ADAPTIVE.observe(LOAD, "4"), "num_tokens='4' must be an integer"),
    "fewer than no tokens": (lambda: ADAPTIVE.observe(LOAD, -1), "num_tokens=-1 must be an integer of at least 0"),
    "no step": (lambda: ADAPTIVE.observe(LOAD, 1, num_steps=0), "num_steps=0 must be an integer of at least 1"),
    "no routing stats": (lambda: RoutingStats.merge(iter([])), "0 routing stats"),
    "records for stats": (lambda: RoutingStats.merge(RECORDS), "parts[0] is RoutedExperts; expected RoutingStats"),
    "words for a load": (lambda: placement.eplb("x", **SIZES), "load='x' is no array of real numbers; expected [M, E]"),
    "objects for a load": (lambda: placement.resident([["a"] * 8] * 2, per_layer=2), "is no array of real numbers"),
    "ragged rows": (lambda: placement.static_coverage([[1, 2], [3]]), "load=a list of 2 is no array of real numbers"),
    "complex loads": (lambda: placement.concentration(LOAD + 1j), "is no array of real numbers"),
    "dates for a load": (lambda: placement.eplb(LOAD.astype("M8[s]"), **SIZES), "is no array of real numbers"),
    "durations for a load": (lambda: placement.eplb(LOAD.astype("m8[s]"), **SIZES), "is no array of real numbers"),
    "no load": (lambda: placement.resident(None, per_layer=2), "load has shape []; expected [M, E]"),
    "an infinite sum": (lambda: placement.eplb(LOAD * 2e306, **SIZES), "load of MoE layer 1 has an infinite sum"),
    "instances": (lambda: placement.eplb(LOAD, num_instances=8.0, num_devices=2), "num_instances=8.0 (float) must be"),
    "instances as text": (lambda: placement.eplb(LOAD, num_instances="8", num_devices=2), "num_instances='8' must be"),
    "a bool": (lambda: placement.eplb(LOAD, num_instances=True, num_devices=1), "num_instances=True must be"),
    "devices": (
        lambda: placement.eplb(LOAD, num_instances=8, num_devices=None),
        "num_devices=None must be an integer of at least 1",
    ),
    "groups": (lambda: placement.eplb(LOAD, **SIZES, num_groups=1.5), "num_groups=1.5 (float) must be"),
    "the replaced placement": (
        lambda: placement.eplb(LOAD, **SIZES, previous=3),
        "previous is int; expected ExpertPlacement",
    ),
    "replicas": (lambda: placement.rebalance(LOAD, **SIZES, max_replicas=2.0), "max_replicas=2.0 (float) must be"),
    "residents": (
        lambda: placement.resident(LOAD, per_layer=None),
        "per_layer=None must be an integer in 0..8",
    ),
    "a share of residents": (lambda: placement.resident(LOAD, per_layer=1.5), "per_layer=1.5 (float) must be"),
    "the replaced residency": (
        lambda: placement.resident(LOAD, per_layer=2, previous=PLAN),
        "previous is ExpertPlacement; expected ResidencyMap",
    ),
    "no plan": (
        lambda: placement.simulate(RECORDS, None),
        "plan is NoneType; expected ExpertPlacement or ResidencyMap or AdaptiveResidency",
    ),
    "a load for a plan": (lambda: placement.simulate(RECORDS, LOAD), "plan is ndarray; expected ExpertPlacement"),
    "no records": (lambda: placement.simulate(None, PLAN), "records is NoneType; expected a list of RoutedExperts"),
    "a record alone": (lambda: placement.simulate(RECORDS[0], PLAN), "records is RoutedExperts; expected a list of"),
    "other records": (lambda: placement.simulate([RECORDS[0], 1], PLAN), "records hold int; expected a list of"),
    "half a token": (lambda: placement.simulate(RECORDS, PLAN, step_tokens=1.5), "step_tokens=1.5 (float) must be"),
    "no tokens": (lambda: placement.simulate(RECORDS, PLAN, step_tokens=None), "step_tokens=None must be"),
    "what a simulation replaces": (
        lambda: placement.simulate(RECORDS, PLAN, previous=3),
        "previous is int; expected ExpertPlacement or ResidencyMap",
    ),
    "a time that no float holds": (
        lambda: placement.estimate_move(LOAD, PLAN, PLAN, **COSTS | dict(expert_time_s=10**400)),
        "expected a finite number of at least 0",
    ),
    "a cost that no float holds": (
        lambda: placement.ExpertCosts(host_s=10**400),
        "expected a finite number of seconds, 0 or more",
    ),
    "seconds": (
        lambda: placement.estimate_move(LOAD, PLAN, PLAN, **COSTS | dict(expert_time_s="x")),
        "expert_time_s='x' is str; expected a finite number of at least 0",
    ),
    "no bytes": (
        lambda: placement.estimate_move(LOAD, PLAN, PLAN, **COSTS | dict(expert_bytes=None)),
        "expert_bytes=None is NoneType; expected a finite number of at least 0",
    ),
    "a placement of now": (lambda: placement.estimate_move(LOAD, None, PLAN, **COSTS), "now is NoneType; expected Exp"),
    "copies": (lambda: placement.num_copies(PLAN, RESIDENCY), "new is ResidencyMap; expected ExpertPlacement"),
    "promoted": (lambda: placement.num_promoted(RESIDENCY, PLAN), "new is ExpertPlacement; expected ResidencyMap"),
    "nodes": (lambda: placement.relabel(PLAN, PLAN, num_nodes=1.0), "num_nodes=1.0 (float) must be an integer"),
    "a complex rate": (
        lambda: placement.estimate_move(LOAD, PLAN, PLAN, **COSTS | dict(link_bytes_per_s=np.array(1j))),
        "link_bytes_per_s=a ndarray of one value is ndarray; expected a finite number above 0",
    ),
    "costs": (lambda: placement.ExpertCosts(host_s="x"), "host_s='x' is str; expected a finite number of seconds"),
    "an array of costs": (lambda: placement.ExpertCosts(host_s=np.ones(1)), "is ndarray; expected a finite number"),
    "a bool of NumPy": (lambda: placement.ExpertCosts(host_s=np.array(True)), "is ndarray; expected a finite number"),
    "a start": (lambda: placement.AdaptiveResidency.start(PLAN), "residency is ExpertPlacement; expected ResidencyMap"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments_of_other_types_are_refused_by_name(case):
    call, message = WRONG[case]
    with pytest.raises(PlacementError, match=re.escape(message)):
        call()


def test_integers_and_numbers_of_numpy_are_taken():
    sizes = {name: np.int64(value) for name, value in SIZES.items()}
    assert (placement.eplb(LOAD, **sizes).physical_to_logical_map == PLAN.physical_to_logical_map).all()
    assert isinstance(placement.resident(LOAD.astype(np.int32), per_layer=np.uint8(2)), ResidencyMap)
    assert placement.simulate(iter(RECORDS), PLAN, step_tokens=np.int32(4)).num_steps == 2
    costs = {name: np.float32(value) for name, value in COSTS.items()}
    assert not placement.estimate_move(LOAD, PLAN, PLAN, **costs).pays_off


@pytest.mark.parametrize("to_array", [np.array, np.float16, jnp.asarray, jnp.bfloat16], ids=lambda make: make.__name__)
def test_arrays_without_dims_are_numbers(to_array):
    costs = {name: to_array(value) for name, value in COSTS.items()}
    assert placement.estimate_move(LOAD, PLAN, PLAN, **costs) == placement.estimate_move(LOAD, PLAN, PLAN, **COSTS)
    seconds = dict(host_s=8.0, device_s=1.0, copy_s=0.5)
    counts = np.arange(16).reshape(2, 8) * 4096
    slots = []
    for kind in (float, to_array):
        own = placement.ExpertCosts(**{name: kind(value) for name, value in seconds.items()})
        residency = placement.AdaptiveResidency.start(RESIDENCY, costs=own)
        for _ in range(16):
            residency = residency.observe(counts[:, ::-1], 4096)
        slots.append(residency.residency.experts)
    assert (slots[0] == slots[1]).all() and (slots[0] != RESIDENCY.experts).any()
