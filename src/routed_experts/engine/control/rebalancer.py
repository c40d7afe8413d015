"""Rebalancer: moves the experts of a serving engine with the load: counts -> plan -> cost estimate -> moves.

    engine thread   step | step, sends its window's counts to the host | step ... step | a few layers move | step ...
    own thread                                          waits for them, plans, estimates ^
A plan that fails, or that is not worth its copies, leaves the experts where they are; no request is affected."""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from jaxtyping import Float, Int

from routed_experts.core.errors import EngineDeadError
from routed_experts.core.placement import ExpertPlacement
from routed_experts.core.placement_config import PlacementConfig
from routed_experts.core.routing_stats import recent_load
from routed_experts.engine.control.expert_load_monitor import ExpertLoadMonitor
from routed_experts.execution.replicated_expert_runner import ReplicatedExpertRunner
from routed_experts.placement.cost_model import MoveEstimate, estimate_move
from routed_experts.placement.plan import eplb

logger = logging.getLogger(__name__)
_WINDOWS = 32  # that are averaged


class Rebalancer:
    """Plans for every window of `rebalance_every` steps; while one is planned, the next one grows.

    `move_estimate`: of the last plan; `last_move_s`: from the first layer of its last move to the last one, with the
    steps between them."""

    def __init__(
        self, config: PlacementConfig, runner: ReplicatedExpertRunner, watch: ExpertLoadMonitor, *, top_k: int
    ) -> None:
        self.num_rebalanced = self.num_skipped = self.num_failed = 0
        self.move_estimate: MoveEstimate | None = None
        self.last_move_s: float | None = None
        self._config, self._runner, self._watch, self._top_k = config, runner, watch, top_k
        self._apply: Callable[[ExpertPlacement, int], int | None] | None = None
        self._windows: deque[Int[np.ndarray, "F M E"]] = deque(maxlen=_WINDOWS)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rebalancer")  # its thread begins with the first window
        self._planning: Future[None] | None = None
        self._num_steps, self._seconds = 0, 0.0
        self._plan(
            np.ones((runner.placement.num_layers, runner.placement.num_experts))
        )  # what cannot be planned is refused now

    def start(self, apply: Callable[[ExpertPlacement, int], int | None]) -> None:
        """Move experts by this from now on, which any thread may call; it gives None where nothing can be moved now."""
        self._apply = apply

    def restart(self) -> None:
        """Begin the window anew."""
        self._num_steps, self._seconds = 0, 0.0

    def after_step(self, took_s: float) -> None:
        """Count a step that took so long; with the last one of a window, send its counts off. Engine thread."""
        self._num_steps, self._seconds = self._num_steps + 1, self._seconds + took_s
        busy = self._planning is not None and not self._planning.done()
        if self._num_steps < self._config.rebalance_every or busy or self._apply is None:
            return
        seconds, self._num_steps, self._seconds = self._seconds, 0, 0.0
        self._planning = self._worker.submit(self._plan_and_move, self._watch.close_window(), seconds, self._apply)

    def join(self) -> None:
        """Wait until the current plan is done."""
        if self._planning is not None:
            self._planning.result()

    def close(self) -> None:
        """End the planner thread; the engine thread has stopped."""
        self._worker.shutdown(cancel_futures=True)

    def _plan_and_move(
        self,
        counts: "Callable[[], Int[np.ndarray, 'F M E']]",
        seconds: float,
        apply: Callable[[ExpertPlacement, int], int | None],
    ) -> None:
        """Plan for a window's counts, and move experts if that pays off."""
        try:
            self._windows.append(counts())
            if not self._windows[-1].any():
                return
            config, current = self._config, self._runner.placement
            load = recent_load(np.stack(self._windows), self._top_k)
            plan = self._plan(load)
            move_estimate = estimate_move(
                load,
                current,
                plan,
                expert_time_s=seconds * config.expert_share,
                expert_bytes=self._runner.expert_bytes,
                link_bytes_per_s=config.link_bytes_per_s,
            )
            logger.debug("a window of %.3f s: %s", seconds, move_estimate)
            self.move_estimate = move_estimate
            if not move_estimate.pays_off:
                self.num_skipped += 1
                return
            start_time = time.monotonic()
            if apply(plan, config.layers_per_step) is None:
                logger.debug("memory is released: no experts to move")
                return
            self.num_rebalanced, self.last_move_s = self.num_rebalanced + 1, time.monotonic() - start_time
        except EngineDeadError:
            logger.debug("the engine ended while a placement was planned")
        except Exception:
            self.num_failed += 1
            logger.exception(
                "the experts stay where they are: planning for a window of %.3f s, or moving them, failed", seconds
            )

    def _plan(self, load: Float[np.ndarray, "M E"]) -> ExpertPlacement:
        """Plan a placement for this load, as close to the current one as possible. Raises PlacementError, or
        ConfigError without SciPy."""
        current, nodes = (
            self._runner.placement,
            {"num_groups": self._config.num_groups, "num_nodes": self._config.num_nodes},
        )
        return eplb(
            load, num_instances=current.num_instances, num_devices=current.num_devices, previous=current, **nodes
        )
