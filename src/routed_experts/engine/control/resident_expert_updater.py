"""Follows the load with the resident experts while the engine serves: where captured routing, a policy and the runner
meet. Knows no request and no weight. Engine thread only."""

import dataclasses
import logging

import numpy as np
from jaxtyping import Array, Int, Int64

from routed_experts.capture.routed_experts_capturer import RoutedExpertsCapturer
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.placement.residency import EVERY, AdaptiveResidency

_MOST_FAILURES = 3  # in a row: what fails so often will fail again
logger = logging.getLogger(__name__)


class ResidentExpertUpdater:
    """Every eighth step it looks at what was routed some steps before, as far as it is counted, and exchanges residents
    where the policy says that it pays. An exchange that fails leaves the residents that were there; after the third in
    a row it looks no more.

    Where routing is captured it looks at the rows; else at counts of the device, as they were eight steps ago: those
    are on the host by now, and newer ones would have to be waited for. A map that somebody else applied is where it
    goes on from. Rows that a step brought just before its counts were reset are missed."""

    def __init__(self, capturer: RoutedExpertsCapturer, runner: OffloadRunner, *, top_k: int) -> None:
        self._capturer, self._runner, self._top_k = capturer, runner, top_k
        self._on_their_way: Int[Array, "F M E"] | None = None
        self._state = AdaptiveResidency.start(runner.residency)
        self._num_steps = self._num_failures = 0
        self._counted = np.zeros((runner.residency.num_layers, runner.residency.num_experts), np.int64)
        self._num_tokens = 0

    def after_step(self, took_s: float) -> None:
        """Count the step; with every eighth, look. Never raises: no request depends on where experts are."""
        self._num_steps += 1
        if self._num_steps % EVERY or self._num_failures >= _MOST_FAILURES:
            return
        try:
            self._look()
        except Exception:
            self._num_failures += 1
            how = (
                "residents follow the load no more"
                if self._num_failures == _MOST_FAILURES
                else "those that were there stay"
            )
            logger.exception("exchanging resident experts failed, %d in a row; %s", self._num_failures, how)
        else:
            self._num_failures = 0

    def _look(self) -> None:
        if self._capturer.enabled:
            stats = self._capturer.routing_stats(wait=False)
            load, num_tokens = stats.load, int(stats.num_tokens.sum())
        else:
            load = self._counted + self._from_device()
            num_tokens = int(load[0].sum()) // self._top_k
        if num_tokens < self._num_tokens or (load < self._counted).any():  # reset since the last look
            self._counted, self._num_tokens = np.zeros_like(load), 0
        before = dataclasses.replace(self._state, residency=self._runner.residency)
        self._state = before.observe(load - self._counted, num_tokens - self._num_tokens, num_steps=EVERY)
        self._counted, self._num_tokens = load, num_tokens
        if self._state.residency is not before.residency:
            self._runner.apply_residency(self._state.residency)

    def _from_device(self) -> Int64[np.ndarray, "M E"]:
        """The slots of the eight steps before the last eight, of each expert."""
        arrived, self._on_their_way = self._on_their_way, self._runner.take_counts()
        return np.zeros_like(self._counted) if arrived is None else np.asarray(arrived).sum(axis=0, dtype=np.int64)
