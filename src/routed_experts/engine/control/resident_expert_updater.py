"""ResidentExpertUpdater: exchanges the resident experts of a serving engine as its load changes. Engine thread only."""

import dataclasses
import logging

import numpy as np
from jaxtyping import Array, Int, Int64

from routed_experts.capture.routed_experts_capturer import RoutedExpertsCapturer
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.placement.residency import EVERY, AdaptiveResidency

_MAX_FAILURES = 3  # in a row: what fails so often will fail again
logger = logging.getLogger(__name__)


class ResidentExpertUpdater:
    """Every eighth step it reads the counts of some steps before, and exchanges residents where the policy finds that
    it pays. A failed swap leaves the residents as they were; after the third in a row there are no more.

    Where routing is captured the counts are those of the rows. Elsewhere they are counts of the device, as they were
    eight steps ago: newer ones would have to be waited for. A map that was applied otherwise is the new start. Rows
    that a step brought just before its counts were reset are missed."""

    def __init__(self, capturer: RoutedExpertsCapturer, runner: OffloadRunner, *, top_k: int) -> None:
        self._capturer, self._runner, self._top_k = capturer, runner, top_k
        self._in_flight: Int[Array, "F M E"] | None = None
        self._state = AdaptiveResidency.start(runner.residency)
        self._num_steps = self._num_failures = 0
        self._counted = np.zeros((runner.residency.num_layers, runner.residency.num_experts), np.int64)
        self._num_tokens = 0

    def after_step(self, took_s: float) -> None:
        """Count the step; every eighth one updates the residents. Never raises: no request depends on residents."""
        self._num_steps += 1
        if self._num_steps % EVERY or self._num_failures >= _MAX_FAILURES:
            return
        try:
            self._update()
        except Exception:
            self._num_failures += 1
            stopped = self._num_failures == _MAX_FAILURES
            outcome = "residents follow the load no more" if stopped else "the residents stay"
            logger.exception("exchanging resident experts failed, %d in a row; %s", self._num_failures, outcome)
        else:
            self._num_failures = 0

    def _update(self) -> None:
        if self._capturer.enabled:
            stats = self._capturer.routing_stats(wait=False)
            load, num_tokens = stats.load, int(stats.num_tokens.sum())
        else:
            load = self._counted + self._from_device()
            num_tokens = int(load[0].sum()) // self._top_k
        if num_tokens < self._num_tokens or (load < self._counted).any():  # reset since the last update
            self._counted, self._num_tokens = np.zeros_like(load), 0
        before = dataclasses.replace(self._state, residency=self._runner.residency)
        self._state = before.observe(load - self._counted, num_tokens - self._num_tokens, num_steps=EVERY)
        self._counted, self._num_tokens = load, num_tokens
        if self._state.residency is not before.residency:
            self._runner.apply_residency(self._state.residency)

    def _from_device(self) -> Int64[np.ndarray, "M E"]:
        """Slots of each expert in the eight steps before the last eight."""
        counts, self._in_flight = self._in_flight, self._runner.take_counts()
        return np.zeros_like(self._counted) if counts is None else np.asarray(counts).sum(axis=0, dtype=np.int64)
