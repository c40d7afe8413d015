"""Simulate a plan on recorded tokens: balance, hits and copies, before a server is touched.

Records are cut into steps of `step_tokens`, one record after the other; the devices of a step wait for each other.
Dims: T tokens, N tokens of a step, M MoE layers, E experts, K experts per token, V devices."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import overload

import numpy as np
from jaxtyping import Float64, Int64, UInt

from routed_experts.analysis import known_rows
from routed_experts.core.errors import PlacementError
from routed_experts.core.integers import to_int
from routed_experts.core.load_metrics import count_experts
from routed_experts.core.placement import ExpertPlacement, ResidencyMap
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.placement.arguments import check_type
from routed_experts.placement.dispatch import Dispatch, dispatcher
from routed_experts.placement.match_devices import num_copies
from routed_experts.placement.residency import AdaptiveResidency, num_promoted

STEP_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementReport:
    """A placement on a trace. `balancedness` of a layer: sum over steps of the mean device load / sum of the largest,
    the share of the layer's time that devices do not wait for each other."""

    num_tokens: int
    num_steps: int
    device_load: Float64[np.ndarray, "M V"]  # slots
    balancedness: Float64[np.ndarray, " M"]
    rerouted_slots: Int64[np.ndarray, " M"]  # without room, with dispatch "reroute": other experts would run
    copies: Int64[np.ndarray, " M"]  # from the previous placement; 0 without one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResidencyReport:
    """A residency on a trace. `hit_ratio`: share of a layer's slots whose expert was on the accelerator; `copies`:
    experts promoted."""

    num_tokens: int
    num_steps: int
    hit_ratio: Float64[np.ndarray, " M"]
    copies: Int64[np.ndarray, " M"]


@overload
def simulate(
    records: Iterable[RoutedExperts],
    plan: ExpertPlacement,
    *,
    dispatch: Dispatch = "even",
    step_tokens: int = STEP_TOKENS,
    previous: ExpertPlacement | None = None,
) -> PlacementReport: ...
@overload
def simulate(
    records: Iterable[RoutedExperts],
    plan: ResidencyMap | AdaptiveResidency,
    *,
    step_tokens: int = STEP_TOKENS,
    previous: ResidencyMap | None = None,
) -> ResidencyReport: ...
def simulate(
    records: Iterable[RoutedExperts],
    plan: ExpertPlacement | ResidencyMap | AdaptiveResidency,
    *,
    dispatch: Dispatch = "even",
    step_tokens: int = STEP_TOKENS,
    previous: ExpertPlacement | ResidencyMap | None = None,
) -> PlacementReport | ResidencyReport:
    """Run a plan, or an adaptive policy, over the known rows of records. `dispatch`: how a placement's slots choose
    among the instances of their expert. `previous`: the plan that is replaced; the move from it counts as copies.

    Raises PlacementError for arguments of other types and for records of another model than the plan's,
    RoutingAlignmentError for records of two models or none."""
    check_type("plan", plan, ExpertPlacement, ResidencyMap, AdaptiveResidency)
    if previous is not None:
        check_type("previous", previous, ExpertPlacement, ResidencyMap)
    rows, num_experts = _join_rows(records, step_tokens)
    residency = plan.residency if isinstance(plan, AdaptiveResidency) else plan
    residency.check_model(rows.shape[1], num_experts)
    if isinstance(plan, ExpertPlacement):
        if isinstance(previous, ResidencyMap):
            raise PlacementError(
                "previous is a ResidencyMap and plan an ExpertPlacement; give the placement that is replaced"
            )
        return _simulate_placement(rows, plan, dispatch, step_tokens, previous)
    if dispatch != "even":
        raise PlacementError(f"dispatch={dispatch!r} chooses among instances, and plan is a residency; leave it out")
    if isinstance(previous, ExpertPlacement):
        raise PlacementError(
            "previous is an ExpertPlacement and plan a residency; give the ResidencyMap that is replaced"
        )
    return _simulate_residency(rows, plan, step_tokens, previous)


def _simulate_placement(
    rows: UInt[np.ndarray, "T M K"],
    plan: ExpertPlacement,
    dispatch: Dispatch,
    step_tokens: int,
    previous: ExpertPlacement | None,
) -> PlacementReport:
    total = np.zeros((plan.num_layers, plan.num_devices))
    largest = np.zeros(plan.num_layers)
    rerouted = np.zeros(plan.num_layers, np.int64)
    send = dispatcher(plan, dispatch, step_tokens=min(step_tokens, len(rows)))
    for step in _steps(rows, step_tokens):
        load, without_room = send(step)
        total += load
        largest += load.max(axis=1)
        rerouted += without_room
    return PlacementReport(
        num_tokens=len(rows),
        num_steps=-(-len(rows) // step_tokens),
        device_load=total,
        balancedness=np.divide(total.mean(axis=1), largest, out=np.ones(plan.num_layers), where=largest > 0),
        rerouted_slots=rerouted,
        copies=np.zeros(plan.num_layers, np.int64) if previous is None else num_copies(previous, plan),
    )


def _simulate_residency(
    rows: UInt[np.ndarray, "T M K"],
    plan: ResidencyMap | AdaptiveResidency,
    step_tokens: int,
    previous: ResidencyMap | None,
) -> ResidencyReport:
    now = plan.residency if isinstance(plan, AdaptiveResidency) else plan
    hits = np.zeros(now.num_layers, np.int64)
    copies = np.zeros(now.num_layers, np.int64) if previous is None else num_promoted(previous, now)
    for step in _steps(rows, step_tokens):
        counts = count_experts(step, now.num_experts)
        hits += np.where(now.slot_of >= 0, counts, 0).sum(axis=1)
        if isinstance(plan, AdaptiveResidency):
            plan = plan.observe(counts, len(step))
            copies = copies + num_promoted(now, plan.residency)
            now = plan.residency
    slots = len(rows) * rows.shape[2]
    return ResidencyReport(
        num_tokens=len(rows), num_steps=-(-len(rows) // step_tokens), hit_ratio=hits / max(slots, 1), copies=copies
    )


def _steps(rows: UInt[np.ndarray, "T M K"], step_tokens: int) -> Iterator[UInt[np.ndarray, "N M K"]]:
    return (rows[low : low + step_tokens] for low in range(0, len(rows), step_tokens))


def _join_rows(records: Iterable[RoutedExperts], step_tokens: int) -> tuple[UInt[np.ndarray, "T M K"], int]:
    is_list = isinstance(records, Iterable) and not isinstance(records, RoutedExperts)
    listed = list(records) if is_list else []
    if not is_list or not all(isinstance(record, RoutedExperts) for record in listed):
        other = next((record for record in listed if not isinstance(record, RoutedExperts)), records)
        where = "records hold" if is_list else "records is"
        raise PlacementError(f"{where} {type(other).__name__}; expected a list of RoutedExperts")
    meaning = ", the tokens that devices share at a time"
    step_tokens = to_int("step_tokens", step_tokens, 1, error=PlacementError, meaning=meaning)
    rows = known_rows(*listed)
    return rows, listed[0].num_experts
