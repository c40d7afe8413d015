"""FusedOffloadRunner: a OffloadRunner whose steps are one program each, the host's experts running beside it on threads of their
own, if there are any. Knows nothing of queues, nor of why an expert is where it is.

A step that copies the host's experts to the accelerator is started layer by layer, as a OffloadRunner starts all of
them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from routed_experts.core.model_worker_batch import ModelWorkerBatch
from routed_experts.core.placement import ResidencyMap
from routed_experts.execution.aot_programs import RunnerConfig, sampling_jobs
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.offload.offload_jobs import DevicePair, SplitJobs, maps_of, shapes_of
from routed_experts.execution.offload.offload_programs import OffloadSpec
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.execution.offload.offload_step import HostExperts, OffloadArrays, whole_step
from routed_experts.execution.programs import ForwardOut, ProgramSpec
from routed_experts.models.offload.offloaded_model import OffloadedModel


class FusedOffloadRunner(OffloadRunner):
    """Weights, pools and compiled programs of one model on an accelerator and its host."""

    def __init__(
        self,
        model: OffloadedModel,
        split: OffloadSpec,
        spec: ProgramSpec,
        config: RunnerConfig,
        *,
        sides: DevicePair,
        streams_from: int | None,
        num_threads: int,
    ) -> None:
        assert not (split.deferred and split.has_host), "errands of a lane end before the next begins"
        super().__init__(model, split, spec, config, sides=sides, streams_from=streams_from)
        self.host_side = HostExperts.of(model, num_threads=num_threads) if split.has_host else None
        self.host_sides += [self.host_side] if self.host_side is not None else []

    def _bind(self, residency: ResidencyMap) -> None:
        super()._bind(residency)
        self._arrays = OffloadArrays.of(self.model, self.tables)

    def _jobs(self) -> dict[tuple[object, ...], Callable[[], jax.stages.Lowered]]:
        long = self._streams_from
        streaming = tuple(shape for shape in self.config.shapes if long is not None and shape.num_tokens >= long)
        cut = SplitJobs(
            model=self.model,
            split=self.split,
            state=self.state,
            spec=self.spec,
            sides=self._sides,
            streams_from=long,
            config=dataclasses.replace(self.config, shapes=streaming),
        )
        jobs = cut.collect()
        last_tokens = jax.ShapeDtypeStruct((self.config.num_request_slots,), jnp.int32)
        counted = () if self.spec.counts is None else (self.spec.counts,)
        for shape in self.config.shapes:
            args = (
                shapes_of(self._arrays),
                self.config.pool.abstract,
                last_tokens,
                shape.packed,
                maps_of(self.split),
                *counted,
            )
            program = functools.partial(whole_step, spec=self.split, shape=shape, host=self.host_side)
            out: Any = jax.eval_shape(program, *args)[1]
            jobs["whole", shape] = functools.partial(
                jax.jit(program, donate_argnums=(1, 5) if counted else (1,)).lower, *args
            )
            jobs |= sampling_jobs(self.state, self.spec, self.config, shape, out)
        return jobs

    def _forward(self, batch: ModelWorkerBatch, shape: BatchShape, packed: Any) -> ForwardOut:
        """Start a step."""
        if self._streams(batch, shape):
            return super()._forward(batch, shape, packed)
        program = self._programs["whole", shape]
        counted = () if self._counts is None else (self._counts,)
        self._pool, out, tally = program(self._arrays, self._pool, self._last_tokens, packed, self.slot_of, *counted)
        self._counts = out.counts
        self._note(tally)
        return out
