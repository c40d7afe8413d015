"""Where experts live: ExpertPlacement, their instances on devices, and ResidencyMap, the experts on the accelerator.

Both are per MoE layer, by logical expert id, frozen, and checked when they are made; a change is a new value with a
higher epoch. Dims: M MoE layers, E experts, I expert instances, J replica positions of an expert, V devices, N resident
experts of a layer."""

import os
from dataclasses import dataclass, fields
from types import MappingProxyType

import numpy as np
from jaxtyping import Int, Int32

from routed_experts.core.errors import PlacementError
from routed_experts.core.integers import to_int
from routed_experts.core.npz_io import read_arrays, write_arrays

_PLACEMENT_SPECS = MappingProxyType(
    {
        "physical_to_logical_map": (np.int32, 2),
        "logical_to_physical_map": (np.int32, 3),
        "logical_replica_count": (np.int32, 2),
        "num_devices": (np.int64, 0),
        "epoch": (np.int64, 0),
    }
)
_RESIDENCY_SPECS = MappingProxyType({"slot_of": (np.int32, 2), "num_resident": (np.int64, 0), "epoch": (np.int64, 0)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertPlacement:
    """Which instance holds which expert; instance i lives on device i // (I / V).

    The two maps are inverses of each other: `logical_to_physical_map` lists the instances of each expert and then -1.
    Raises PlacementError for maps with gaps, an expert without an instance, an instance of two experts or of none, or
    uneven devices."""

    physical_to_logical_map: Int32[np.ndarray, "M I"]
    logical_to_physical_map: Int32[np.ndarray, "M E J"]
    logical_replica_count: Int32[np.ndarray, "M E"]
    num_devices: int
    epoch: int = 0

    def __post_init__(self) -> None:
        _check_shapes(self)
        _check_replicas(self)
        for array in (self.physical_to_logical_map, self.logical_to_physical_map, self.logical_replica_count):
            array.setflags(write=False)

    @staticmethod
    def from_instances(
        physical_to_logical_map: Int[np.ndarray, "M I"],
        *,
        num_experts: int,
        num_devices: int,
        max_replicas: int | None = None,
        epoch: int = 0,
    ) -> "ExpertPlacement":
        """Make the placement of these instances; an expert's instances are listed in ascending order. J is
        `max_replicas`, or else min(16, I - E + 1), or more if an expert has more; keep it from plan to plan, and the
        shapes stay. Raises PlacementError."""
        for name, value, least in (
            ("num_experts", num_experts, 1),
            ("num_devices", num_devices, 1),
            ("max_replicas", 1 if max_replicas is None else max_replicas, 1),
            ("epoch", epoch, 0),
        ):
            to_int(name, value, least, error=PlacementError)
        checked = _as_integers("physical_to_logical_map", physical_to_logical_map)
        if checked.ndim != 2 or checked.size == 0:
            raise PlacementError(
                f"physical_to_logical_map has shape {list(checked.shape)}; expected [M, I], a row of instances a MoE "
                "layer"
            )
        physical_to_logical = checked
        if physical_to_logical.min() < 0 or physical_to_logical.max() >= num_experts:
            wrong = physical_to_logical[(physical_to_logical < 0) | (physical_to_logical >= num_experts)][0]
            raise PlacementError(
                f"physical_to_logical_map holds expert {wrong}; expected 0 to {num_experts - 1} in every instance"
            )
        physical_to_logical = checked.astype(np.int32)
        num_layers, num_instances = physical_to_logical.shape
        layers = np.arange(num_layers)[:, None]
        counts = np.bincount(
            (layers * num_experts + physical_to_logical).ravel(), minlength=num_layers * num_experts
        ).reshape(num_layers, num_experts)
        most = int(counts.max())
        width = max(default_max_replicas(num_instances, num_experts), most) if max_replicas is None else max_replicas
        if width < most:
            raise PlacementError(f"an expert has {most} instances, above max_replicas={width}; raise it to {most}")
        order = np.argsort(physical_to_logical, axis=1, kind="stable")  # instances by expert, then by instance
        experts = np.take_along_axis(physical_to_logical, order, axis=1)
        rank = np.arange(num_instances) - np.take_along_axis(np.cumsum(counts, axis=1) - counts, experts, axis=1)
        logical_to_physical = np.full((num_layers, num_experts, width), -1, np.int32)
        logical_to_physical[layers, experts, rank] = order
        return ExpertPlacement(
            physical_to_logical_map=physical_to_logical,
            logical_to_physical_map=logical_to_physical,
            logical_replica_count=counts.astype(np.int32),
            num_devices=int(num_devices),
            epoch=int(epoch),
        )

    @staticmethod
    def identity(num_layers: int, num_experts: int, num_devices: int) -> "ExpertPlacement":
        """One instance an expert, in order of the ids: what a model has before it is placed."""
        physical_to_logical = np.broadcast_to(np.arange(num_experts, dtype=np.int32), (num_layers, num_experts))
        return ExpertPlacement.from_instances(physical_to_logical, num_experts=num_experts, num_devices=num_devices)

    @property
    def num_layers(self) -> int:
        """M."""
        return self.physical_to_logical_map.shape[0]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.logical_replica_count.shape[1]

    @property
    def num_instances(self) -> int:
        """I."""
        return self.physical_to_logical_map.shape[1]

    @property
    def instances_per_device(self) -> int:
        """I / V."""
        return self.num_instances // self.num_devices

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .npz that `read` reads. Raises WriteError."""
        _save(self, path)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> "ExpertPlacement":
        """Read what `save` wrote. Raises RoutingFormatError for another file, PlacementError for maps that do not fit
        each other."""
        arrays = read_arrays(path, _PLACEMENT_SPECS, what="placement")
        return ExpertPlacement(
            physical_to_logical_map=arrays["physical_to_logical_map"],
            logical_to_physical_map=arrays["logical_to_physical_map"],
            logical_replica_count=arrays["logical_replica_count"],
            num_devices=int(arrays["num_devices"]),
            epoch=int(arrays["epoch"]),
        )

    def check_model(self, num_layers: int, num_experts: int) -> None:
        """Raise PlacementError unless this is a placement for a model of so many MoE layers and experts."""
        _check_model("placement", (self.num_layers, self.num_experts), (num_layers, num_experts))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResidencyMap:
    """Which N experts of each layer are on the accelerator, and in which slot of its table; the others are on the host.

    `slot_of` is -1 for an expert on the host. Raises PlacementError unless each layer fills the slots 0..N-1, each
    once."""

    slot_of: Int32[np.ndarray, "M E"]
    num_resident: int
    epoch: int = 0

    def __post_init__(self) -> None:
        slot_of = self.slot_of
        if slot_of.ndim != 2 or slot_of.size == 0 or slot_of.dtype != np.int32:
            raise PlacementError(
                f"slot_of is {slot_of.dtype}{list(slot_of.shape)}; expected int32[M, E], a row of experts a MoE layer"
            )
        _check_resident(self.num_resident, slot_of.shape[1])
        _check_epoch(self.epoch)
        ordered = np.sort(slot_of, axis=1)[:, ::-1][
            :, : self.num_resident + 1
        ]  # the used slots, downwards, and one more
        expected = np.arange(self.num_resident - 1, -2, -1)[: ordered.shape[1]]
        wrong = np.flatnonzero((ordered != expected).any(axis=1))
        if wrong.size:
            layer = int(wrong[0])
            used = np.sort(slot_of[layer][slot_of[layer] != -1]).tolist()
            raise PlacementError(
                f"slot_of of MoE layer {layer} uses the slots {used}; expected each of 0 to {self.num_resident - 1} "
                "once and -1 elsewhere"
            )
        slot_of.setflags(write=False)

    @staticmethod
    def from_experts(experts: Int[np.ndarray, "M N"], *, num_experts: int, epoch: int = 0) -> "ResidencyMap":
        """Make the map in which expert `experts[m, s]` is in slot s of MoE layer m. Raises PlacementError."""
        experts = _as_integers("experts", experts)
        if experts.ndim != 2 or experts.shape[0] == 0:
            raise PlacementError(
                f"experts has shape {list(experts.shape)}; expected [M, N], the resident experts of each MoE layer"
            )
        num_resident = experts.shape[1]
        _check_resident(num_resident, num_experts)
        if experts.size and (experts.min() < 0 or experts.max() >= num_experts):
            wrong = experts[(experts < 0) | (experts >= num_experts)][0]
            raise PlacementError(f"experts holds {wrong}; expected ids of 0 to {num_experts - 1}")
        slot_of = np.full((experts.shape[0], num_experts), -1, np.int32)
        np.put_along_axis(slot_of, experts.astype(np.intp), np.arange(num_resident, dtype=np.int32)[None], axis=1)
        return ResidencyMap(slot_of=slot_of, num_resident=num_resident, epoch=epoch)

    @staticmethod
    def first_n(num_layers: int, num_experts: int, num_resident: int) -> "ResidencyMap":
        """Experts 0..N-1 of every layer, each in the slot of its id."""
        _check_resident(num_resident, num_experts)
        return ResidencyMap.from_experts(np.tile(np.arange(num_resident), (num_layers, 1)), num_experts=num_experts)

    @property
    def num_layers(self) -> int:
        """M."""
        return self.slot_of.shape[0]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.slot_of.shape[1]

    @property
    def experts(self) -> Int32[np.ndarray, "M N"]:
        """The expert in each slot of each layer: the inverse of `slot_of`."""
        return np.argsort(self.slot_of, axis=1, kind="stable")[:, self.num_experts - self.num_resident :].astype(
            np.int32
        )

    def aligned_to(self, previous: "ResidencyMap") -> "ResidencyMap":
        """Return the same residents with those of `previous`, a map of the same sizes, in their slots: the fewest
        copies. A new resident takes its slot in this map if that becomes free, else any free one. Raises PlacementError
        for a map of other sizes."""
        ours, theirs = ((each.num_layers, each.num_experts, each.num_resident) for each in (self, previous))
        if ours != theirs:
            sizes = ["{} MoE layers x {} experts, {} resident".format(*each) for each in (ours, theirs)]
            raise PlacementError(
                f"a residency map of {sizes[0]} cannot be aligned to one of {sizes[1]}; give maps of the same sizes"
            )
        experts, target = previous.experts, self.experts
        leaves = np.take_along_axis(self.slot_of, experts.astype(np.intp), axis=1) < 0  # [M, N]
        comes = np.take_along_axis(previous.slot_of, target.astype(np.intp), axis=1) < 0
        experts = np.where(leaves & comes, target, experts)
        for layer in range(self.num_layers):  # as many slots are free as residents have none
            experts[layer, leaves[layer] & ~comes[layer]] = target[layer, comes[layer] & ~leaves[layer]]
        return ResidencyMap.from_experts(experts, num_experts=self.num_experts, epoch=self.epoch)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .npz that `read` reads. Raises WriteError."""
        _save(self, path)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> "ResidencyMap":
        """Read what `save` wrote. Raises RoutingFormatError for another file, PlacementError for a map that cannot
        be."""
        arrays = read_arrays(path, _RESIDENCY_SPECS, what="residency map")
        return ResidencyMap(
            slot_of=arrays["slot_of"], num_resident=int(arrays["num_resident"]), epoch=int(arrays["epoch"])
        )

    def check_model(self, num_layers: int, num_experts: int) -> None:
        """Raise PlacementError unless this is a map for a model of so many MoE layers and experts."""
        _check_model("residency map", (self.num_layers, self.num_experts), (num_layers, num_experts))


def _save(plan: ExpertPlacement | ResidencyMap, path: str | os.PathLike[str]) -> None:
    write_arrays(path, {field.name: np.asarray(getattr(plan, field.name)) for field in fields(plan)})


def default_max_replicas(num_instances: int, num_experts: int) -> int:
    """Return the default J: what the spare instances allow one expert, at most 16."""
    return min(16, num_instances - num_experts + 1)


def _check_shapes(placement: ExpertPlacement) -> None:
    physical_to_logical, logical_to_physical, counts = (
        placement.physical_to_logical_map,
        placement.logical_to_physical_map,
        placement.logical_replica_count,
    )
    shapes = [array.shape for array in (physical_to_logical, logical_to_physical, counts)]
    dtypes = f"{physical_to_logical.dtype}, {logical_to_physical.dtype}, {counts.dtype}"
    maps = f"maps of shapes {', '.join(str(list(shape)) for shape in shapes)} and dtypes {dtypes}"
    fits = (
        (physical_to_logical.ndim, logical_to_physical.ndim) == (2, 3)
        and logical_to_physical.shape[:2] == counts.shape
        and physical_to_logical.shape[:1] == counts.shape[:1]
    )
    if (
        not fits
        or min(physical_to_logical.size, logical_to_physical.size) == 0
        or any(array.dtype != np.int32 for array in (physical_to_logical, logical_to_physical, counts))
    ):
        raise PlacementError(
            f"{maps}; expected int32 physical_to_logical_map [M, I], logical_to_physical_map [M, E, J], count [M, E]"
        )
    num_instances, num_experts = physical_to_logical.shape[1], counts.shape[1]
    if num_instances < num_experts:
        raise PlacementError(
            f"{num_instances} instances for {num_experts} experts; expected at least one each, {num_experts} or more"
        )
    if placement.num_devices < 1 or num_instances % placement.num_devices:
        raise PlacementError(
            f"num_devices={placement.num_devices} does not divide {num_instances} instances; every device has as many"
        )
    _check_epoch(placement.epoch)


def _check_replicas(placement: ExpertPlacement) -> None:
    """Check that the lists end after `counts` entries and name every instance once, under its expert."""
    physical_to_logical, logical_to_physical, counts = (
        placement.physical_to_logical_map,
        placement.logical_to_physical_map,
        placement.logical_replica_count,
    )
    num_layers, num_instances = physical_to_logical.shape
    wrong = np.argwhere((counts < 1) | (counts > logical_to_physical.shape[2]))
    if wrong.size:
        layer, expert = wrong[0]
        raise PlacementError(
            f"MoE layer {layer}: expert {expert} has {counts[layer, expert]} instances; expected 1 to "
            f"{logical_to_physical.shape[2]}, the listed positions"
        )
    real = np.arange(logical_to_physical.shape[2]) < counts[:, :, None]  # [M, E, J]
    wrong = np.argwhere(
        np.where(real, (logical_to_physical < 0) | (logical_to_physical >= num_instances), logical_to_physical != -1)
    )
    if wrong.size:
        layer, expert, _ = wrong[0]
        raise PlacementError(
            f"MoE layer {layer}: expert {expert} has {counts[layer, expert]} instances and the list "
            f"{logical_to_physical[layer, expert].tolist()}; "
            f"expected that many of 0 to {num_instances - 1} without a gap, and -1 after them"
        )
    layers, experts, positions = np.nonzero(real)
    instances = logical_to_physical[layers, experts, positions]
    wrong = np.flatnonzero(physical_to_logical[layers, instances] != experts)
    if wrong.size:
        layer, expert, instance = layers[wrong[0]], experts[wrong[0]], instances[wrong[0]]
        raise PlacementError(
            f"MoE layer {layer}: instance {instance} is listed for expert {expert}, but holds "
            f"{physical_to_logical[layer, instance]}; "
            "expected maps that are inverses of each other"
        )
    named = np.bincount(layers * num_instances + instances, minlength=num_layers * num_instances).reshape(
        num_layers, num_instances
    )
    wrong = np.argwhere(named != 1)
    if wrong.size:
        layer, instance = wrong[0]
        raise PlacementError(
            f"MoE layer {layer}: instance {instance} is listed {named[layer, instance]} times; expected once"
        )


def _check_resident(num_resident: int, num_experts: int) -> None:
    if not 0 <= num_resident <= num_experts:
        raise PlacementError(
            f"num_resident={num_resident} experts of a layer; expected 0 to {num_experts}, all there are"
        )


def _check_epoch(epoch: int) -> None:
    if epoch < 0:
        raise PlacementError(f"epoch={epoch}; expected 0 or more, rising with every change")


def _check_model(name: str, ours: tuple[int, int], model: tuple[int, int]) -> None:
    if ours != model:
        raise PlacementError(
            f"a {name} of {ours[0]} MoE layers x {ours[1]} experts does not fit a model of {model[0]} x {model[1]}; "
            "plan it from this model's routing"
        )


def _as_integers(name: str, values: object) -> Int[np.ndarray, "..."]:
    """An array of integers. Raises PlacementError for other numbers, and for rows of several lengths."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise PlacementError(f"{name} is no array ({error}); give rows of one length, of expert ids") from error
    if array.dtype.kind not in "iu":
        raise PlacementError(f"{name} has dtype {array.dtype}; expected integers: expert ids")
    return array
