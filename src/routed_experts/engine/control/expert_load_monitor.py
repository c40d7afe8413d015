"""ExpertLoadMonitor: measures how evenly recent steps loaded the devices of placed experts.

Steps count their experts on the device. Every tenth step (a sample) the counts are taken; they are read with the next
sample, when they have long been on the host, so nothing waits. The placement of that moment assigns them to devices; an
expert's slots are divided evenly among its instances. Dims: M MoE layers, E experts, V devices, F phases (prompt,
generated)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from routed_experts.core.load_metrics import device_load, eplb_balancedness, eplb_balancedness_weighted, load_imbalance
from routed_experts.core.placement import ExpertPlacement
from routed_experts.execution.replicated_expert_runner import ReplicatedExpertRunner

SAMPLE_STEPS = 10  # steps
WINDOWS = (10, 100, 1000)  # steps that balancedness is told of


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How evenly devices were loaded by the last `num_steps` steps, or by all there were. `balancedness`: mean over
    layers of mean / max device load (SGLang's); `weighted`: sum of the means / sum of the maxima (vLLM's);
    `max_over_mean`: of each MoE layer."""

    num_steps: int
    balancedness: float
    weighted: float
    max_over_mean: Float64[np.ndarray, " M"]


@dataclass(frozen=True, slots=True)
class _Sample:
    num_steps: int
    load: Int64[np.ndarray, "M E"]
    placement: ExpertPlacement


class ExpertLoadMonitor:
    """The counts of an engine's steps, for gauges and for who plans. Engine thread, but for `balance`."""

    def __init__(self, runner: ReplicatedExpertRunner) -> None:
        self._runner = runner
        self.restart()

    def restart(self) -> None:
        """Forget what was counted so far."""
        self._runner.take_counts()
        self._num_steps = 0
        self._beats = tuple[_Sample, ...]()  # bound anew, never changed: other threads read it
        self._in_flight: tuple[int, Any, ExpertPlacement, bool] | None = (
            None  # the last: whether the window has it already
        )
        self._window = self._nothing()

    def after_step(self, took_s: float) -> None:
        """Count a step; the tenth takes the counts."""
        self._num_steps += 1
        if self._num_steps == SAMPLE_STEPS:
            self._take(told=False)

    def take_window(self) -> "Callable[[], Int64[np.ndarray, 'F M E']]":
        """End a window with the last step; what is given waits for the counts of all its steps, in any thread."""
        on_its_way = self._in_flight
        if self._num_steps or on_its_way is None or on_its_way[-1]:
            self._take(told=True)
        else:  # a beat has just ended: reading it now would wait for the step in flight
            self._in_flight = (*on_its_way[:-1], True)
        assert self._in_flight is not None
        before, last, self._window = self._window, self._in_flight[1], self._nothing()
        return lambda: before + np.asarray(last)

    def balance(self) -> dict[int, Balance]:
        """By window of steps; empty before there was a load. Any thread."""
        beats = self._beats
        return {steps: told for steps in WINDOWS if (told := _balance(_last(beats, steps))) is not None}

    def _take(self, *, told: bool) -> None:
        self._arrive()
        self._in_flight, self._num_steps = (
            (self._num_steps, self._runner.take_counts(), self._runner.placement, told),
            0,
        )

    def _arrive(self) -> None:
        """Read what was taken with the last beat."""
        if self._in_flight is None:
            return
        num_steps, counts, placement, told = self._in_flight
        came = np.asarray(counts).astype(np.int64)
        if not told:
            self._window += came
        beat, before = _Sample(num_steps, came.sum(axis=0), placement), _last(self._beats, WINDOWS[-1])
        if (
            before and before[-1].placement is placement and before[-1].num_steps + num_steps <= SAMPLE_STEPS
        ):  # parts of a beat
            last = before[-1]
            before, beat = before[:-1], _Sample(last.num_steps + num_steps, last.load + beat.load, placement)
        self._beats = (*before, beat)

    def _nothing(self) -> Int64[np.ndarray, "F M E"]:
        counts = self._runner.spec.counts
        assert counts is not None, "placed experts are counted"
        return np.zeros(counts.shape, np.int64)


def _last(beats: tuple[_Sample, ...], num_steps: int) -> tuple[_Sample, ...]:
    """The fewest beats, up to the last one, that hold so many steps; all where there are fewer."""
    first = len(beats)
    while first and num_steps > 0:
        first -= 1
        num_steps -= beats[first].num_steps
    return beats[first:]


def _balance(beats: Iterable[_Sample]) -> Balance | None:
    """None without a load."""
    held = [(beat, device_load(beat.load, beat.placement)) for beat in beats]
    devices = sum(load for _, load in held)
    if isinstance(devices, int) or not devices.any():
        return None
    return Balance(
        num_steps=sum(beat.num_steps for beat, _ in held),
        balancedness=eplb_balancedness(devices),
        weighted=eplb_balancedness_weighted(devices),
        max_over_mean=np.nan_to_num(load_imbalance(devices), nan=1.0),
    )
