"""OffloadScorer: `programs.forward` for scores of a model whose experts are partly on the host.

Scores run beside the served steps, so they have a queue of their own. They defer and stream nothing."""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax

from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.execution.offload.offload_step import OffloadArrays, offload_step
from routed_experts.execution.programs import ForwardOut, ProgramSpec

# Runs a function between two steps, when no table is written, and returns its result.
BetweenSteps = Callable[[Callable[[], Any]], Any]


class OffloadScorer:
    """Programs are compiled at a shape's first use, in the caller's thread."""

    def __init__(self, runner: OffloadRunner, between_steps: BetweenSteps) -> None:
        self._runner, self._between_steps = runner, between_steps
        self._host = runner.open_host_experts()
        self._programs: dict[tuple[object, ...], jax.stages.Compiled] = {}
        self._compiling = threading.Lock()

    def __call__(
        self, state: Any, pool: Any, last_tokens: Any, packed: Any, routed: Any, *, spec: ProgramSpec, shape: BatchShape
    ) -> tuple[Any, ForwardOut]:
        """Run all layers with the current residents. `state`, the weights that the score was begun with, are those of
        the runner."""
        del state
        step = (pool, last_tokens, packed)
        with self._compiling:
            program = self._program(step, routed, spec, shape)

        def start() -> tuple[Any, ForwardOut]:  # a swap of residents donates the tables: no swap is under way here
            pool, out, _ = program(*self._args(step, routed))
            return pool, out

        return self._between_steps(start)

    def _args(self, step: tuple[Any, ...], routed: Any) -> tuple[Any, ...]:
        runner = self._runner
        return OffloadArrays.create(runner.model, runner.tables), *step, runner.slot_of, None, routed

    def _program(self, step: tuple[Any, ...], routed: Any, spec: ProgramSpec, shape: BatchShape) -> jax.stages.Compiled:
        key = (shape, spec.num_pages, spec.with_logits, jax.tree.structure(routed))
        if key not in self._programs:
            offload = dataclasses.replace(self._runner.offload, program=spec, num_deferred=0)
            program = functools.partial(offload_step, spec=offload, shape=shape, host=self._host)
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._args(step, routed))
            self._programs[key] = jax.jit(program, donate_argnums=(1,)).lower(*shapes).compile()
        return self._programs[key]
