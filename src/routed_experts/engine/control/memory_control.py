"""MemoryControl: releases an engine's device memory for a trainer on the same device, and allocates it again.

Running requests return to the queue with their tokens and rows. Then the KV pool is freed, and every cached prefix with
it. Compiled programs stay, so taking memory back compiles nothing."""

import contextlib
from collections.abc import Sequence
from typing import Any

from flax import nnx

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.weight_version import WeightVersion, to_label
from routed_experts.engine.control.admission_control import AdmissionControl
from routed_experts.engine.control.context import EngineContext
from routed_experts.engine.control.weights import Weights, to_state

MEMORY_TAGS = ("kv_cache", "weights")
RUNNING_MODES = ("retract", "abort", "wait")  # what becomes of requests when memory is released


class MemoryControl:
    """The memory of one engine. Thread-safe."""

    def __init__(self, context: EngineContext, admission: AdmissionControl) -> None:
        self._context, self._admission = context, admission

    @property
    def released(self) -> tuple[str, ...]:
        """The tags that are released."""
        return tuple(tag for tag in MEMORY_TAGS if tag in self._context.core.released)

    def release(self, tags: Sequence[str], running: str) -> None:
        """`Engine.release_memory_occupation`."""
        core = self._context.core
        if self._context.offload_runner is not None:
            text = (
                "release_memory_occupation is not supported by this release on an engine with experts=; "
                "build one without it"
            )
            raise InvalidRequestError(text, param="experts")
        named = list(tags) if isinstance(tags, Sequence) and not isinstance(tags, str) else []
        unknown = next((short_repr(tag) for tag in named if not isinstance(tag, str) or tag not in MEMORY_TAGS), None)
        if not named or unknown is not None:
            received = f"tags={short_repr(tags)}" + ("" if unknown is None else f" has {unknown}, but")
            text = f"{received} must be a list of some of {', '.join(MEMORY_TAGS)}"
            raise InvalidRequestError(text, param="tags")
        chosen = frozenset(named)
        if running not in RUNNING_MODES:
            text = f"running={short_repr(running)} is unknown; choose one of {', '.join(RUNNING_MODES)}"
            raise InvalidRequestError(text, param="running")

        def release() -> None:
            if running == "abort":
                core.abort_all("aborted by a release of memory")
            core.release_memory(chosen)

        ended = self._admission.none_started() if running == "wait" else contextlib.nullcontext()
        # A score holds weights and pages of its own until it has ended.
        with ended, self._context.exclusive_weights():
            self._context.check_not_prepared("release_memory_occupation")
            self._context.thread.run_drained(release)

    def resume(self, state: Weights | None, version: object) -> None:
        """`Engine.resume_memory_occupation`."""
        core = self._context.core
        if state is not None:
            self._context.check_one_process("resume_memory_occupation(state)", "call update_weights_from_disk first")
        label = None if version is None else to_label(version, param="version")
        if state is None and label is not None:
            text = f"version={short_repr(label)} without state: it is the label of weights that are given; leave it out"
            raise InvalidRequestError(text, param="version")

        def resume(arrays: nnx.State[Any, Any] | None, new: WeightVersion) -> None:
            if not core.released:
                return
            if arrays is not None:
                core.update_weights(arrays, version=new, cache="flush")
            if "weights" in core.released:
                of_group = self._context.components.group is not None
                source = "call update_weights_from_disk" if of_group else "give state=, or call update_weights"
                text = f"the weights were released; {source} first"
                raise InvalidRequestError(text, param="state", code="weights_released")
            core.resume_memory()

        with self._context.weights_lock:
            if state is not None:
                self._context.check_not_prepared("resume_memory_occupation(state)")
            served = self._context.served_model
            arrays = None if state is None else served.device_put(to_state(state, served.arrays, served.coded_config))
            new = self._context.next_version(label)
            self._context.thread.run_drained(lambda: resume(arrays, new))
