"""EngineContext: the shared state of an engine's control operations: its parts, its thread, and the locks that order
them."""

import contextlib
import dataclasses
import threading
from collections.abc import Generator
from typing import Any

from flax import nnx

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import ConfigError, InvalidRequestError
from routed_experts.core.weight_version import WeightVersion
from routed_experts.engine.control.components import EngineComponents
from routed_experts.engine.control.score import Scorer
from routed_experts.engine.control.served_model import ServedModel
from routed_experts.engine.loop.core import EngineCore
from routed_experts.engine.loop.engine_thread import EngineThread
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.execution.replicated_expert_runner import ReplicatedExpertRunner

_ADMISSION_CHECK_S = 1.0


def _new_set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedWeights:
    """Weights that are loaded and checked beside the served ones, and the version under which they may replace them."""

    version: WeightVersion
    state: nnx.State[Any, Any]


@dataclasses.dataclass(slots=True)
class PreparedSlot:
    """The weights that are prepared, if any. It changes under `weights_lock`."""

    weights: PreparedWeights | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """The engine that control operations act on. `weights_lock`: weights are swapped, moved or released one operation
    after another. `prepared`: while it is filled, weights are neither moved nor released nor replaced by others.
    `admission_open` is cleared while admission is held: requests wait in the queue, and scores for it."""

    components: EngineComponents
    thread: EngineThread
    scorer: Scorer
    weights_lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    prepared: PreparedSlot = dataclasses.field(default_factory=PreparedSlot)
    admission_open: threading.Event = dataclasses.field(default_factory=_new_set_event)

    def wait_for_admission(self) -> None:
        """Wait until admission is not held; returns at once where the engine has ended."""
        while not self.admission_open.wait(_ADMISSION_CHECK_S) and self.thread.is_alive:
            continue

    @property
    def core(self) -> EngineCore:
        """The core; its state changes on the engine thread alone."""
        return self.components.core

    @property
    def served_model(self) -> ServedModel:
        """The served model, with its experts where they are now."""
        runner, served = self.core.runner, self.components.served
        return (
            served.with_placement(runner.placement, runner.factor)
            if isinstance(runner, ReplicatedExpertRunner)
            else served
        )

    @property
    def offload_runner(self) -> OffloadRunner | None:
        """The runner, where some experts are on the host."""
        return self.core.runner if isinstance(self.core.runner, OffloadRunner) else None

    @contextlib.contextmanager
    def exclusive_weights(self) -> Generator[None, None, None]:
        """Hold the weights while no other operation and no score reads them."""
        with self.weights_lock, self.scorer.lock:
            yield

    def next_version(self, label: str | None, update_count: int | None = None) -> WeightVersion:
        """The version of the update that follows, under this label (None: the served one) and count (None: the next);
        under `weights_lock`. Raises WeightsMismatchError for a count that does not rise."""
        served = self.core.weight_version
        count = served.update_count + 1 if update_count is None else update_count
        self.core.runner.check_version(count)
        return WeightVersion(label=served.label if label is None else label, update_count=count)

    def check_one_process(self, operation: str, otherwise: str) -> None:
        """Raise ConfigError where the engine has several processes, which cannot be given arrays of this one."""
        group = self.components.group
        if group is not None:
            text = f"{operation} takes arrays of one process, and this engine has nnodes={group.dist.nnodes}"
            raise ConfigError(f"{text}; {otherwise}")

    def check_not_prepared(self, operation: str) -> None:
        """Raise InvalidRequestError where new weights are prepared; under `weights_lock`."""
        if self.prepared.weights is not None:
            label = short_repr(self.prepared.weights.version.label)
            text = f"{operation} while weights of version {label} are prepared"
            text = f"{text}; call commit_weights or drop_weights first"
            raise InvalidRequestError(text, param="version", code="weights_prepared")

    def check_not_released(self, operation: str) -> None:
        """Raise InvalidRequestError where memory is released."""
        if self.core.released:
            tags = ", ".join(sorted(self.core.released))
            text = f"{operation} needs memory that is released ({tags}); call resume_memory_occupation first"
            raise InvalidRequestError(text, param="tags", code="memory_released")
