"""ExpertLoadMonitor: measures how evenly recent steps loaded the devices of placed experts.

Steps count their experts on the device. Every tenth step (a sample) the counts are taken; they are read with the next
sample, when they have long been on the host, so no thread blocks. The placement of that moment assigns them to devices;
an expert's slots are divided evenly among its instances. Dims: M MoE layers, E experts, V devices, F phases (prompt,
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
WINDOWS = (10, 100, 1000)  # steps of each balancedness window


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBalance:
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
    """Collects expert counts of steps, for gauges and for the rebalancer. Engine thread only, except `balance`."""

    def __init__(self, runner: ReplicatedExpertRunner) -> None:
        self._runner = runner
        self.restart()

    def restart(self) -> None:
        """Discard all counts."""
        self._runner.take_counts()
        self._num_steps = 0
        self._samples = tuple[_Sample, ...]()  # bound anew, never changed: other threads read it
        self._in_flight: tuple[int, Any, ExpertPlacement, bool] | None = (
            None  # steps, counts, placement, whether the window has them
        )
        self._window = self._nothing()

    def after_step(self, took_s: float) -> None:
        """Count a step; every tenth fetches the counts."""
        self._num_steps += 1
        if self._num_steps == SAMPLE_STEPS:
            self._take(in_window=False)

    def close_window(self) -> "Callable[[], Int64[np.ndarray, 'F M E']]":
        """End a window with the last step. The returned function waits for its counts; any thread may call it."""
        in_flight = self._in_flight
        if self._num_steps or in_flight is None or in_flight[-1]:
            self._take(in_window=True)
        else:  # a sample has just ended: reading it now would wait for the step in flight
            self._in_flight = (*in_flight[:-1], True)
        assert self._in_flight is not None
        before, last, self._window = self._window, self._in_flight[1], self._nothing()
        return lambda: before + np.asarray(last)

    def balance(self) -> dict[int, DeviceBalance]:
        """Balance by window of steps; empty before the first load. Any thread."""
        samples = self._samples
        return {steps: balance for steps in WINDOWS if (balance := _balance(_last(samples, steps))) is not None}

    def _take(self, *, in_window: bool) -> None:
        self._arrive()
        self._in_flight, self._num_steps = (
            (self._num_steps, self._runner.take_counts(), self._runner.placement, in_window),
            0,
        )

    def _arrive(self) -> None:
        """Read the counts of the last sample."""
        if self._in_flight is None:
            return
        num_steps, counts, placement, in_window = self._in_flight
        received = np.asarray(counts).astype(np.int64)
        if not in_window:
            self._window += received
        sample, before = _Sample(num_steps, received.sum(axis=0), placement), _last(self._samples, WINDOWS[-1])
        if (
            before and before[-1].placement is placement and before[-1].num_steps + num_steps <= SAMPLE_STEPS
        ):  # parts of a sample
            last = before[-1]
            before, sample = before[:-1], _Sample(last.num_steps + num_steps, last.load + sample.load, placement)
        self._samples = (*before, sample)

    def _nothing(self) -> Int64[np.ndarray, "F M E"]:
        counts = self._runner.spec.counts
        assert counts is not None, "placed experts are counted"
        return np.zeros(counts.shape, np.int64)


def _last(samples: tuple[_Sample, ...], num_steps: int) -> tuple[_Sample, ...]:
    """The fewest last samples with at least `num_steps` steps; all where there are fewer."""
    first = len(samples)
    while first and num_steps > 0:
        first -= 1
        num_steps -= samples[first].num_steps
    return samples[first:]


def _balance(samples: Iterable[_Sample]) -> DeviceBalance | None:
    """Balance of the samples; None without a load."""
    loads = [(sample, device_load(sample.load, sample.placement)) for sample in samples]
    devices = sum(load for _, load in loads)
    if isinstance(devices, int) or not devices.any():
        return None
    return DeviceBalance(
        num_steps=sum(sample.num_steps for sample, _ in loads),
        balancedness=eplb_balancedness(devices),
        weighted=eplb_balancedness_weighted(devices),
        max_over_mean=np.nan_to_num(load_imbalance(devices), nan=1.0),
    )
