"""ExpertLoadMonitor: windows of steps, over a runner with given counts, against loops over steps."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from routed_experts.core.placement import ExpertPlacement
from routed_experts.engine.control.expert_load_monitor import ExpertLoadMonitor

LAYERS, EXPERTS = 2, 8
PLACEMENTS = [ExpertPlacement.identity(LAYERS, EXPERTS, num_devices) for num_devices in (2, 2)]


class Late:
    """Counts that include the step in flight: reading them waits for its end."""

    def __init__(self, counts, runner):
        self._counts, self._runner, self._ready = counts, runner, len(runner.steps) + 1

    def __array__(self, dtype=None, copy=None):
        assert len(self._runner.steps) >= self._ready, "somebody waits for the step in flight"
        return self._counts


class Counting:
    """Steps as a runner counts them."""

    def __init__(self):
        self.spec = SimpleNamespace(counts=jax.ShapeDtypeStruct((2, LAYERS, EXPERTS), np.int32))
        self.placement, self.steps, self.held = PLACEMENTS[0], [], np.zeros((2, LAYERS, EXPERTS), np.int32)

    def step(self, rng):
        self.steps.append(rng.integers(0, 9, (2, LAYERS, EXPERTS)).astype(np.int32))
        self.held = self.held + self.steps[-1]

    def take_counts(self):
        counts, self.held = self.held, np.zeros_like(self.held)
        return Late(counts, self)


@pytest.mark.parametrize("every", [10**6, 1, 7, 10, 25])
def test_windows_are_the_last_steps_and_nothing_is_lost(every):
    """A load balancer takes a window every `every` steps: it has each step once, and the gauges cover the steps they
    name."""
    rng, runner = np.random.default_rng(every), Counting()
    watch, readers = ExpertLoadMonitor(runner), []
    for step in range(1, 1301):
        if step == 700:
            runner.placement = PLACEMENTS[1]
        runner.step(rng)
        watch.after_step(0.001)
        if step % every == 0:
            readers.append(watch.close_window())
    runner.steps.append(None)  # one more has ended, and is not looked at
    windows = [np.asarray(read()) for read in readers]
    runner.steps.append(None)
    for index, window in enumerate(windows):
        np.testing.assert_array_equal(window, sum(runner.steps[index * every : (index + 1) * every]))
    watch.close_window()
    runner.steps.append(None)
    watch.close_window()
    balance, steps = watch.balance(), runner.steps[:1300]
    assert set(balance) == {10, 100, 1000}
    for expected, report in balance.items():
        assert expected <= report.num_steps < expected + 20, "few parts of beats"
        load = np.zeros((LAYERS, 2))
        for counts in steps[-report.num_steps :]:
            load += counts.sum(axis=0).reshape(LAYERS, 2, EXPERTS // 2).sum(axis=2)
        assert report.balancedness == pytest.approx(np.mean(load.mean(axis=1) / load.max(axis=1)), abs=1e-6)
        np.testing.assert_allclose(report.max_over_mean, load.max(axis=1) / load.mean(axis=1))
    assert len(watch._samples) < 320, "memory is bounded, however short the windows are"


def test_no_balance_is_reported_before_a_load_and_after_a_restart():
    runner = Counting()
    watch = ExpertLoadMonitor(runner)
    for _ in range(30):
        runner.steps.append(None)  # nothing is counted
        watch.after_step(0.001)
    assert watch.balance() == {}
    for _ in range(30):
        runner.step(np.random.default_rng(0))
        watch.after_step(0.001)
    assert watch.balance()[10].num_steps == 10
    watch.restart()
    read = watch.close_window()
    runner.step(np.random.default_rng(1))
    assert watch.balance() == {} and not read().any()
