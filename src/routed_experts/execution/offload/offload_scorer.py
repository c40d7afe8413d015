"""SplitForward: `programs.forward` of a model whose experts are shared out, for steps beside those that are served:
scores. Knows nothing of queues.

A step is one program whatever the served ones are, with a lane of its own, for it may run at the same time as they."""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax

from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.execution.offload.offload_step import HostExperts, OffloadArrays, whole_step
from routed_experts.execution.programs import ForwardOut, ProgramSpec

Between = Callable[
    [Callable[[], Any]], Any
]  # runs a function between two steps, where tables are not exchanged, and gives its result


class SplitForward:
    """Programs are made at a shape's first use, in the caller's thread."""

    def __init__(self, runner: OffloadRunner, between_steps: Between, *, num_threads: int) -> None:
        self._runner, self._between_steps = runner, between_steps
        self._host = HostExperts.of(runner.model, num_threads=num_threads) if runner.split.has_host else None
        runner.host_sides += (
            [self._host] if self._host is not None else []
        )  # it has new weights when the runner has them
        self._programs: dict[tuple[object, ...], jax.stages.Compiled] = {}
        self._making = threading.Lock()

    def __call__(
        self, state: Any, pool: Any, last_tokens: Any, packed: Any, routed: Any, *, spec: ProgramSpec, shape: BatchShape
    ) -> tuple[Any, ForwardOut]:
        """Run all layers with the residents of now. `state`, the weights that a score was begun with, are those of the
        runner."""
        del state
        rest = (pool, last_tokens, packed)
        with self._making:
            program = self._program(rest, routed, spec, shape)

        def start() -> tuple[Any, ForwardOut]:  # an exchange of residents donates the tables: here none is under way
            arrays = OffloadArrays.of(self._runner.model, self._runner.tables)
            pool, out, _ = program(arrays, *rest, self._runner.slot_of, None, routed)
            return pool, out

        return self._between_steps(start)

    def _program(self, rest: tuple[Any, ...], routed: Any, spec: ProgramSpec, shape: BatchShape) -> jax.stages.Compiled:
        key = (shape, spec.num_pages, spec.samples, routed is not None)
        if key not in self._programs:
            split = dataclasses.replace(self._runner.split, num_pages=spec.num_pages, deferred=0, samples=spec.samples)
            step = functools.partial(whole_step, spec=split, shape=shape, host=self._host)
            arrays = (
                OffloadArrays.of(self._runner.model, self._runner.tables),
                *rest,
                self._runner.slot_of,
                None,
                routed,
            )
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays)
            self._programs[key] = jax.jit(step, donate_argnums=(1,)).lower(*shapes).compile()
        return self._programs[key]
