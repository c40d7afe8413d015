"""ExpertPlacement and ResidencyMap: what they accept is consistent, and what is not is refused by name."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routed_experts.core.errors import ConfigError, PlacementError, RoutingFormatError
from routed_experts.core.placement import ExpertPlacement, ResidencyMap


@st.composite
def instance_maps(draw):
    num_layers, num_experts, num_devices = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    num_instances = num_devices * draw(st.integers(-(-num_experts // num_devices), 6))
    spare = draw(
        st.lists(
            st.integers(0, num_experts - 1), min_size=num_instances - num_experts, max_size=num_instances - num_experts
        )
    )
    rows = [draw(st.permutations([*range(num_experts), *spare])) for _ in range(num_layers)]
    return np.array(rows), num_experts, num_devices


@given(instance_maps())
def test_a_placement_lists_every_instance_under_the_expert_it_holds(case):
    instances_by_layer, num_experts, num_devices = case
    placement = ExpertPlacement.from_instances(instances_by_layer, num_experts=num_experts, num_devices=num_devices)
    for layer, row in enumerate(instances_by_layer.tolist()):
        for expert in range(num_experts):
            instances = [i for i, logical in enumerate(row) if logical == expert]
            listed = placement.logical_to_physical_map[layer, expert].tolist()
            assert listed == instances + [-1] * (len(listed) - len(instances))
            assert placement.logical_replica_count[layer, expert] == len(instances)
    assert placement.instances_per_device * num_devices == instances_by_layer.shape[1] == placement.num_instances
    assert not placement.physical_to_logical_map.flags.writeable and instances_by_layer.flags.writeable


def test_the_identity_holds_each_expert_once_in_order():
    placement = ExpertPlacement.identity(2, 6, 3)
    assert placement.physical_to_logical_map.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert placement.logical_to_physical_map.tolist() == [[[0], [1], [2], [3], [4], [5]]] * 2
    assert (placement.num_layers, placement.num_experts, placement.instances_per_device, placement.epoch) == (
        2,
        6,
        2,
        0,
    )


def changed(name, *at, value):
    """A sound placement of 3 experts on 4 instances with one number changed."""
    sound = ExpertPlacement.from_instances(np.array([[0, 1, 2, 1]]), num_experts=3, num_devices=2)
    array = getattr(sound, name).copy()
    array[at] = value
    return lambda: dataclasses.replace(sound, **{name: array})


def sized(**sizes):
    """Two experts on two instances, with other sizes."""
    return lambda: ExpertPlacement.from_instances(np.array([[0, 1]]), **(dict(num_experts=2, num_devices=1) | sizes))


WRONG_PLACEMENTS = {
    "experts as text": (sized(num_experts="2"), "num_experts='2' must be an integer of at least 1"),
    "half a device": (sized(num_devices=0.5), "num_devices=0.5 (float) must be an integer of at least 1"),
    "no device for instances": (sized(num_devices=0), "num_devices=0 must be"),
    "a share of replicas": (sized(max_replicas=1.5), "max_replicas=1.5 (float) must be an integer"),
    "a time as an epoch": (sized(epoch=-1), "epoch=-1 must be an integer of at least 0"),
    "expert without an instance": (
        lambda: ExpertPlacement.from_instances(np.array([[0, 0]]), num_experts=2, num_devices=1),
        "expert 1 has 0 instances",
    ),
    "id that is no expert": (
        lambda: ExpertPlacement.from_instances(np.array([[0, 2]]), num_experts=2, num_devices=1),
        "holds expert 2; expected 0 to 1",
    ),
    "numbers that are no ids": (
        lambda: ExpertPlacement.from_instances(np.array([[0.9, 1.2]]), num_experts=2, num_devices=1),
        "physical_to_logical_map has dtype float64; expected integers",
    ),
    "id that int32 does not hold": (
        lambda: ExpertPlacement.from_instances(np.array([[0, 2**32]]), num_experts=1, num_devices=1),
        "holds expert 4294967296",
    ),
    "rows of several lengths": (
        lambda: ExpertPlacement.from_instances([[0, 1], [0]], num_experts=2, num_devices=1),
        "physical_to_logical_map is no array",
    ),
    "hole in the instances": (
        lambda: ExpertPlacement.from_instances(np.array([[0, -1]]), num_experts=1, num_devices=1),
        "holds expert -1",
    ),
    "too few instances": (
        lambda: ExpertPlacement.from_instances(np.array([[0]]), num_experts=2, num_devices=1),
        "1 instances for 2 experts",
    ),
    "uneven devices": (
        lambda: ExpertPlacement.from_instances(np.array([[0, 1, 1]]), num_experts=2, num_devices=2),
        "num_devices=2 does not divide 3",
    ),
    "no device": (lambda: ExpertPlacement.identity(1, 2, 0), "num_devices=0"),
    "more replicas than positions": (
        lambda: ExpertPlacement.from_instances(np.array([[0, 0, 0]]), num_experts=1, num_devices=1, max_replicas=2),
        "3 instances, above max_replicas=2",
    ),
    "one dimension": (
        lambda: ExpertPlacement.from_instances(np.array([0, 1]), num_experts=2, num_devices=1),
        "shape [2]; expected [M, I]",
    ),
    "gap in a list": (changed("logical_to_physical_map", 0, 1, 0, value=-1), "list [-1, 3]"),
    "instance out of range": (changed("logical_to_physical_map", 0, 1, 1, value=4), "expected that many of 0 to 3"),
    "list that ends too late": (changed("logical_to_physical_map", 0, 0, 1, value=0), "list [0, 0]"),
    "count that is too small": (
        changed("logical_replica_count", 0, 1, value=1),
        "expert 1 has 1 instances and the list [1, 3]",
    ),
    "maps that disagree": (
        changed("physical_to_logical_map", 0, 3, value=0),
        "instance 3 is listed for expert 1, but holds 0",
    ),
    "instance listed twice": (changed("logical_to_physical_map", 0, 1, 1, value=1), "instance 1 is listed 2 times"),
    "epoch": (lambda: dataclasses.replace(ExpertPlacement.identity(1, 2, 1), epoch=-1), "epoch=-1"),
    "dtype": (
        lambda: dataclasses.replace(ExpertPlacement.identity(1, 2, 1), logical_replica_count=np.ones((1, 2), np.int64)),
        "dtypes int32, int32, int64",
    ),
    "another model": (
        lambda: ExpertPlacement.identity(2, 4, 1).check_model(3, 4),
        "2 MoE layers x 4 experts does not fit a model of 3 x 4",
    ),
}


@pytest.mark.parametrize("name", WRONG_PLACEMENTS)
def test_a_wrong_placement_is_refused_by_name(name):
    make, match = WRONG_PLACEMENTS[name]
    with pytest.raises(PlacementError, match=re.escape(match)) as refused:
        make()
    assert isinstance(refused.value, ConfigError)


@given(st.data())
def test_a_residency_map_and_its_list_of_experts_are_inverses(data):
    num_layers, num_experts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 7))
    num_resident = data.draw(st.integers(0, num_experts))
    rows = [data.draw(st.permutations(range(num_experts)))[:num_resident] for _ in range(num_layers)]
    residency = ResidencyMap.from_experts(
        np.array(rows, np.int64).reshape(num_layers, num_resident), num_experts=num_experts
    )
    assert residency.experts.tolist() == [list(row) for row in rows]
    assert residency.num_resident == num_resident
    for row, slots in zip(rows, residency.slot_of.tolist(), strict=True):
        assert slots == [row.index(expert) if expert in row else -1 for expert in range(num_experts)]


def test_the_first_experts_sit_in_the_slots_of_their_ids():
    assert ResidencyMap.first_n(2, 4, 3).slot_of.tolist() == [[0, 1, 2, -1]] * 2
    assert ResidencyMap.first_n(1, 2, 0).slot_of.tolist() == [[-1, -1]]


@given(st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_who_stays_keeps_the_slot(num_resident, seed):
    noise = np.random.default_rng(seed)
    old, new = (
        ResidencyMap.from_experts(np.stack([noise.permutation(9)[:num_resident] for _ in range(3)]), num_experts=9)
        for _ in range(2)
    )
    aligned = new.aligned_to(old)
    for layer in range(3):
        stay = set(old.experts[layer]) & set(new.experts[layer])
        assert set(aligned.experts[layer]) == set(new.experts[layer])
        assert all(aligned.slot_of[layer, expert] == old.slot_of[layer, expert] for expert in stay)
        assert (aligned.experts[layer] != old.experts[layer]).sum() == num_resident - len(stay)
        left = {int(old.slot_of[layer, expert]) for expert in set(old.experts[layer]) - stay}
        for expert in set(new.experts[layer]) - stay:  # the slot of the new map, if it is free
            assert (
                aligned.slot_of[layer, expert] == new.slot_of[layer, expert]
                or int(new.slot_of[layer, expert]) not in left
            )


def slots(*rows, num_resident=2, epoch=0):
    return lambda: ResidencyMap(slot_of=np.array(rows, np.int32), num_resident=num_resident, epoch=epoch)


WRONG_MAPS = {
    "slot used twice": (
        slots([0, 1, -1], [1, 1, -1]),
        "MoE layer 1 uses the slots [1, 1]; expected each of 0 to 1 once",
    ),
    "slot left empty": (slots([0, -1, -1]), "uses the slots [0]"),
    "slot past the last": (slots([0, 2, -1]), "uses the slots [0, 2]"),
    "three in two slots": (slots([0, 1, 1]), "uses the slots [0, 1, 1]"),
    "negative slot": (slots([0, 1, -2]), "uses the slots [-2, 0, 1]"),
    "one resident too many": (slots([0, 1, 2]), "uses the slots [0, 1, 2]"),
    "more than there are": (slots([0, 1], num_resident=3), "num_resident=3 experts of a layer; expected 0 to 2"),
    "fewer than none": (lambda: ResidencyMap.first_n(1, 4, -1), "num_resident=-1"),
    "first, more than there are": (
        lambda: ResidencyMap.first_n(1, 4, 5),
        "num_resident=5 experts of a layer; expected 0 to 4",
    ),
    "expert out of range": (
        lambda: ResidencyMap.from_experts(np.array([[4]]), num_experts=4),
        "experts holds 4; expected ids of 0 to 3",
    ),
    "numbers that are no ids": (
        lambda: ResidencyMap.from_experts(np.array([[0.7, 1.6]]), num_experts=4),
        "experts has dtype float64; expected integers",
    ),
    "expert named twice": (lambda: ResidencyMap.from_experts(np.array([[1, 1]]), num_experts=4), "uses the slots [1]"),
    "shape": (lambda: ResidencyMap.from_experts(np.array([1, 2]), num_experts=4), "shape [2]; expected [M, N]"),
    "dtype": (
        lambda: ResidencyMap(slot_of=np.array([[0, -1]]), num_resident=1),
        "slot_of is int64[1, 2]; expected int32[M, E]",
    ),
    "epoch": (slots([0, 1], epoch=-1), "epoch=-1"),
    "aligned to another model": (
        lambda: ResidencyMap.first_n(3, 6, 2).aligned_to(ResidencyMap.first_n(2, 6, 2)),
        "3 MoE layers x 6 experts, 2 resident cannot be aligned to one of 2 MoE layers x 6 experts, 2 resident",
    ),
    "aligned to another number": (
        lambda: ResidencyMap.first_n(3, 6, 2).aligned_to(ResidencyMap.first_n(3, 6, 3)),
        "6 experts, 2 resident cannot be aligned to one of 3 MoE layers x 6 experts, 3 resident; give maps of the same",
    ),
    "another model": (
        lambda: ResidencyMap.first_n(2, 4, 1).check_model(2, 8),
        "2 MoE layers x 4 experts does not fit a model of 2 x 8",
    ),
}


@pytest.mark.parametrize("name", WRONG_MAPS)
def test_a_wrong_residency_map_is_refused_by_name(name):
    make, match = WRONG_MAPS[name]
    with pytest.raises(PlacementError, match=re.escape(match)):
        make()


def test_plans_round_trip_through_files(tmp_path):
    placement = ExpertPlacement.from_instances(
        np.array([[0, 1, 2, 1], [2, 2, 1, 0]]), num_experts=3, num_devices=2, max_replicas=3, epoch=7
    )
    residency = ResidencyMap.from_experts(np.array([[2, 0], [1, 2]]), num_experts=3, epoch=5)
    for plan in (placement, residency):
        plan.save(tmp_path / "plan.npz")
        read = type(plan).read(tmp_path / "plan.npz")
        for field in dataclasses.fields(plan):
            assert np.array_equal(getattr(read, field.name), getattr(plan, field.name)), field.name
            assert type(getattr(read, field.name)) is type(getattr(plan, field.name))


def test_a_file_without_a_plan_is_refused(tmp_path):
    file = tmp_path / "plan.npz"
    ResidencyMap.first_n(1, 3, 2).save(file)
    with pytest.raises(RoutingFormatError, match=r"plan\.npz holds no placement"):
        ExpertPlacement.read(file)
    file.write_bytes(b"nothing")
    with pytest.raises(RoutingFormatError, match=r"plan\.npz holds no residency map"):
        ResidencyMap.read(file)
    np.savez(file, slot_of=np.zeros((1, 3), np.int64), num_resident=2, epoch=0)
    with pytest.raises(RoutingFormatError, match="slot_of is int64 of 2 dims; expected int32 of 2"):
        ResidencyMap.read(file)
    np.savez(file, slot_of=np.zeros((1, 3), np.int32), num_resident=2, epoch=0)
    with pytest.raises(PlacementError, match="uses the slots"):
        ResidencyMap.read(file)
