"""OffloadRunner: a ModelRunner of a model whose experts are partly on the host. Each step is one program.

    device   layer 0 | experts in the table |   | layer 1 | experts in the table |   | ...
    host             | the other experts    |   |         | the other experts    |   |
                     submit              wait             submit              wait

Which experts are in the tables is an argument of the programs: it changes between steps, and nothing is compiled.
Dims: M MoE layers, N resident experts of a layer."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Format
from jaxtyping import Array, Int32, Int64

from routed_experts.core.errors import PlacementError
from routed_experts.core.model_worker_batch import ModelWorkerBatch
from routed_experts.core.placement import ResidencyMap
from routed_experts.execution.aot_programs import RunnerConfig, sampling_jobs
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.model_runner import ModelRunner, update_owned
from routed_experts.execution.offload.offload_step import HostExperts, OffloadArrays, OffloadSpec, offload_step
from routed_experts.execution.programs import ForwardOut
from routed_experts.layers.expert_slots import ExpertTable
from routed_experts.models.base.weight_format import format_of
from routed_experts.models.offload.layers import LayerGroup, LayerIndex, layer_indices
from routed_experts.models.offload.offloaded_model import OffloadedModel, gather_host_rows, write_rows

_IN_FLIGHT = 8  # steps whose slot counts stay on the device until their copy to the host has ended


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadStats:
    """Statistics of experts on the host, over some steps. `hits`: by hidden layer, the share of slots whose experts
    were resident. `deferred`: slots that were added a layer late. `busy_s`: seconds for which the host's threads ran
    experts, those of scores included."""

    hits: Mapping[int, float]
    deferred: int
    busy_s: float


class OffloadRunner(ModelRunner):
    """Weights, pools and compiled programs of one model on a device and its host. A step of at least `stream_threshold`
    tokens streams the weights of the host's experts to the device and computes there alone; None: no step does."""

    def __init__(
        self,
        model: OffloadedModel,
        spec: OffloadSpec,
        config: RunnerConfig,
        *,
        device: Any,
        stream_threshold: int | None,
        num_threads: int,
    ) -> None:
        super().__init__(model.layerless[1], spec.program, config)
        self.exact = not (spec.num_deferred and spec.has_host)
        self.model, self.offload, self.num_threads = model, spec, num_threads
        self.tables = dict(model.tables)
        self.layers = layer_indices(model.config)
        self.num_swapped = self.num_failed = 0  # experts copied to the device, and exchanges that failed
        self._device, self._stream_threshold = device, stream_threshold
        self._queues = list[HostExperts]()  # of this runner's steps, and of others over the same experts
        self.host = self.open_host_experts()
        self._pending_counts: collections.deque[Array] = collections.deque()
        self._slot_counts = np.zeros((spec.num_moe_layers, 3), np.int64)
        self._bind(model.residency)

    def open_host_experts(self) -> HostExperts | None:
        """Open another queue over the experts on the host (None: all are on the device). It follows every change of
        weights."""
        if not self.offload.has_host:
            return None
        host = HostExperts.open(self.model, num_threads=self.num_threads)
        self._queues.append(host)
        return host

    @property
    def placement_epoch(self) -> int:
        """That of the map of resident experts."""
        return self.residency.epoch

    def apply_residency(self, residency: ResidencyMap) -> int:
        """Run all later steps with other resident experts, and return how many were copied to the device. Experts that
        stay resident keep their slots, and nothing is compiled. Raises PlacementError for a map of another model or
        size, and what a copy raises: then the copies before it hold, and the other slots keep their experts."""
        residency.check_model(self.residency.num_layers, self.residency.num_experts)
        if residency.num_resident != self.residency.num_resident:
            slots = f"this engine's tables have {self.residency.num_resident} slots a layer"
            raise PlacementError(f"the map has num_resident={residency.num_resident}; {slots}")
        aligned = residency.aligned_to(self.residency)
        before, current, new = self.residency.experts, self.residency.experts, aligned.experts
        try:
            self._swap_residents(current, new)
        except Exception:
            self.num_failed += 1
            self._bind(
                ResidencyMap.from_experts(current, num_experts=residency.num_experts, epoch=self.residency.epoch)
            )
            raise
        finally:
            copied = int(np.count_nonzero(current != before))
            self.num_swapped += copied
        self._bind(aligned)
        return copied

    def update_weights(self, state: nnx.State[Any, Any] | None, *, version: int, donate: bool = False) -> None:
        """As a ModelRunner does, with arrays of a full model where `OffloadedModel.device_put` puts them. Residents are
        written into the tables that exist, so the device holds them once. Raises WeightsMismatchError, and what a copy
        raises: then the weights before it are served on. No step, and no score, may be under way."""
        if state is None:
            return super().update_weights(None, version=version)
        self.check_version(version)
        new, tables = self.model.with_arrays(state), self.tables
        self.tables = {}  # while they hold some of both, and if they stay so, no step can run
        try:
            self._reload_residents(new, tables)
        except Exception:
            self._reload_residents(self.model, tables)
            self._serve(self.model, tables)
            raise
        self._serve(new, tables)
        self._weights, self.weight_version = jax.tree.leaves(new.layerless[1]), version
        self._owned = update_owned(self._owned, jax.tree.leaves(state), donate=donate)

    def slot_counts(self) -> Int64[np.ndarray, "M 2"]:
        """Slots of each MoE layer since the start: those whose experts were on the host, and all. Waits for the step in
        flight."""
        self._add_counts(in_flight=0)
        return self._slot_counts[:, :2].copy()

    def offload_stats(self) -> OffloadStats:
        """Counts up to some steps ago; does not block. Any thread."""
        spec, counts = self.model.config.capture_spec, self._slot_counts.copy()
        assert spec is not None
        layers = zip(spec.layer_ids, counts.tolist(), strict=True)
        hits = {layer: 1.0 - on_host / all_slots for layer, (on_host, all_slots, _) in layers if all_slots}
        busy_s = sum(host.queue.stats().busy_s for host in tuple(self._queues))
        return OffloadStats(hits=hits, deferred=int(counts[:, 2].sum()), busy_s=busy_s)

    def _serve(self, model: OffloadedModel, tables: dict[LayerGroup, ExpertTable]) -> None:
        """Run a model's arrays from the next step on, with the residents that its tables hold."""
        self.model, self.tables = model, tables
        for host in self._queues:
            host.swap_weights(model)
        self._bind(self.residency)

    def _bind(self, residency: ResidencyMap) -> None:
        """Make the arguments of the programs."""
        self.residency = residency
        self.slot_of = jax.device_put(residency.slot_of, self._device)
        self._arrays = OffloadArrays.create(self.model, self.tables)

    def _swap_residents(self, current: Int32[np.ndarray, "M N"], new: Int32[np.ndarray, "M N"]) -> None:
        """Write the experts of all slots that change, and note each in `held`. A table is donated to each write and
        rebound after it, so a write that fails leaves what was written before."""
        for layer in self._table_layers(self.tables):
            slots, experts = current[layer.moe_layer], new[layer.moe_layer]
            for slot in np.flatnonzero(slots != experts).tolist():
                self._write(self.model, self.tables, layer, slot, int(experts[slot]))
                slots[slot] = experts[slot]

    def _reload_residents(self, model: OffloadedModel, tables: dict[LayerGroup, ExpertTable]) -> None:
        """Write every resident again from a model's experts on the host, and wait for the copies."""
        for layer in self._table_layers(tables):
            for slot, expert in enumerate(self.residency.experts[layer.moe_layer].tolist()):
                self._write(model, tables, layer, slot, expert)
        jax.block_until_ready([*tables.values()])

    def _write(
        self, model: OffloadedModel, tables: dict[LayerGroup, ExpertTable], layer: LayerIndex, slot: int, expert: int
    ) -> None:
        """Copy an expert of a model's host store into a slot of its layer."""
        group, table = layer.group, tables[layer.group]
        row = np.array([layer.index * model.residency.num_experts + expert])
        block = gather_host_rows(model.host[group], row, table.gate_up.dtype)
        first = np.int32(layer.index * model.residency.num_resident + slot)
        tables[group] = self._programs["write", group](table, block, first)

    def _table_layers(self, tables: Mapping[LayerGroup, ExpertTable]) -> Iterable[LayerIndex]:
        return (layer for layer in self.layers if layer.group in tables)

    def _jobs(self) -> dict[tuple[object, ...], Callable[[], jax.stages.Lowered]]:
        jobs: dict[tuple[object, ...], Callable[[], jax.stages.Lowered]] = {}
        last_tokens = jax.ShapeDtypeStruct((self.config.num_request_slots,), jnp.int32)
        counts = () if self.spec.counts is None else (self.spec.counts,)
        for shape in self.config.shapes:
            pool = self.config.pool.abstract
            args = (_shapes(self._arrays), pool, last_tokens, shape.packed, self.offload.slot_map, *counts)
            step = functools.partial(offload_step, spec=self.offload, shape=shape, host=self.host)
            for streams in range(1 + self._may_stream(shape.num_tokens, shape)):
                program = functools.partial(step, streams=bool(streams))
                run = jax.jit(program, donate_argnums=(1, 5) if counts else (1,))
                jobs["forward", shape, bool(streams)] = functools.partial(run.lower, *args)
            out: Any = jax.eval_shape(step, *args)[1]
            jobs |= sampling_jobs(self.state, self.spec, self.config, shape, out, later=self._later_jobs)
        if self.offload.num_resident:
            for group, table in self.model.tables.items():
                block = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), table)
                args = (_shapes(table), block, jax.ShapeDtypeStruct((), jnp.int32))
                jobs["write", group] = functools.partial(write_rows.lower, *args)
        return jobs

    def _forward(self, batch: ModelWorkerBatch | None, shape: BatchShape, packed: Any) -> ForwardOut:
        assert batch is not None, "one process"
        program = self._programs["forward", shape, self._may_stream(batch.num_tokens, shape)]
        counts = () if self._counts is None else (self._counts,)
        args = (self._arrays, self._pool, self._last_tokens, packed, self.slot_of, *counts)
        self._pool, out, slot_counts = program(*args)
        self._counts = out.counts
        self._add_counts(slot_counts)
        return out

    def _may_stream(self, num_tokens: int, shape: BatchShape) -> bool:
        """Whether a step of so many tokens streams the host's experts; steps that defer experts do not."""
        threshold = self._stream_threshold if self.offload.has_host else None
        return threshold is not None and num_tokens >= threshold and not self.offload.deferred_in(shape)

    def _add_counts(self, *slot_counts: Array, in_flight: int = _IN_FLIGHT) -> None:
        """Keep the slot counts of steps that were started, and sum those of all but the last `in_flight` steps."""
        self._pending_counts.extend(slot_counts)
        while len(self._pending_counts) > in_flight:
            self._slot_counts += np.asarray(self._pending_counts.popleft())


def _shapes(tree: Any) -> Any:
    """Shapes and dtypes of arrays, without their devices: programs are compiled for the default one. Those in an order
    of their own keep it."""

    def shape(array: Array) -> jax.ShapeDtypeStruct:
        own_format = format_of(array)
        own = own_format if isinstance(own_format, Format) else None
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=own)

    return jax.tree.map(shape, tree)
