"""OffloadRunner: a ModelRunner whose model's experts are partly on the host. Runs a step layer by layer, and both sides
of a layer's experts at once. Knows nothing of queues, nor of why an expert is where it is.

    accelerator   layer 0 | residents of 0         | layer 1 | residents of 1         | ...
    host                  | the others of 0        |         | the others of 1        |
                     x, ids v                  sum ^    x, ids v                  sum ^
Programs are started in that order, and none is waited for here. Only where accelerator and host are different platforms
do the copies between them wait for what they copy; by then the residents have been started."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Int64

from routed_experts.core.errors import PlacementError
from routed_experts.core.model_worker_batch import ModelWorkerBatch
from routed_experts.core.placement import ResidencyMap
from routed_experts.execution.aot_programs import RunnerConfig
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.model_runner import ModelRunner, update_owned
from routed_experts.execution.offload.offload_jobs import DevicePair, SplitJobs, numbers_of
from routed_experts.execution.offload.offload_programs import OffloadSpec
from routed_experts.execution.offload.offload_step import HostExperts
from routed_experts.execution.offload.resident_tables import Tables, exchange, refill
from routed_experts.execution.programs import ForwardOut, ProgramSpec
from routed_experts.models.offload.layers import ExpertInputs, LayerIndex, layers_at
from routed_experts.models.offload.offloaded_model import OffloadedModel, host_rows

_KEPT_TALLIES = 8  # counts of so many steps stay on the accelerator: they are read when they have long been there


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostCounts:
    """`hits`: by hidden layer, the share of slots that residents ran. `deferred`: slots whose experts came a layer
    late. `busy_s`: how long threads ran experts inside programs, those of scores too; the host's programs of a step
    that is cut are not timed."""

    hits: Mapping[int, float]
    deferred: int
    busy_s: float


class OffloadRunner(ModelRunner):
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
    ) -> None:
        super().__init__(model.rim[1], spec, config)
        self.residency, self.num_swapped, self.num_failed = (
            model.residency,
            0,
            0,
        )  # experts copied, exchanges that failed
        self.exact = not (split.deferred and split.has_host)
        self.model, self.split, self._sides, self._streams_from = model, split, sides, streams_from
        self.tables = dict(model.tables)
        self.host_sides = list[HostExperts]()  # lanes over the host's store, of this runner's steps and of others'
        self._layers = layers_at(model.config)
        self._homes = frozenset(kind for kind in model.tables if split.has_device_experts(kind))
        self._numbers = {layer: jax.device_put(numbers_of(layer), sides.device) for layer in self._layers}
        self._places = {layer: jax.device_put(np.int32(layer.place), sides.host) for layer in self._layers}
        self._tallies: collections.deque[Array] = collections.deque()
        self._counted = np.zeros((split.num_moe_layers, 3), np.int64)
        self._nothing: dict[int, Array] = {}  # by N: what a host without work gives
        self._bind(model.residency)

    def apply_residency(self, residency: ResidencyMap) -> int:
        """Run all later steps with other residents, and return how many experts were copied to the accelerator; who is
        there already keeps its slot. Nothing is compiled, and a step in flight ends with the residents that it began
        with. Raises PlacementError for a map of another model or size, and what a copy raises: then the copies before
        it hold, and all others stay who they were."""
        residency.check_model(self.residency.num_layers, self.residency.num_experts)
        if residency.num_resident != self.residency.num_resident:
            told = f"num_resident={residency.num_resident}; this engine's tables have {self.residency.num_resident} slots a layer"
            raise PlacementError(f"the map has {told}")
        wanted = residency.aligned_to(self.residency)
        before, held, new = self.residency.experts, self.residency.experts, wanted.experts
        try:
            for layer in self._layers:
                if layer.kind in self.tables:
                    exchange(self.model, self.tables, self._programs, layer, held[layer.column], new[layer.column])
        except Exception:
            self.num_failed += 1
            self._bind(ResidencyMap.from_experts(held, num_experts=residency.num_experts, epoch=self.residency.epoch))
            raise
        finally:
            copied = int(np.count_nonzero(held != before))
            self.num_swapped += copied
        self._bind(wanted)
        return copied

    def update_weights(self, state: nnx.State[Any, Any] | None, *, version: int, donate: bool = False) -> None:
        """As a ModelRunner does, with a whole model's arrays, which lie where `OffloadedModel.placed` puts them. The host's
        store is the new one's; residents are written into the tables that there are, so the accelerator holds them
        once. Raises WeightsMismatchError, and what a copy raises: then the weights before it are served on. No step,
        and no score, may be under way."""
        if state is None:
            return super().update_weights(None, version=version)
        self.check_version(version)
        new, tables, held = self.model.with_arrays(state), self.tables, self.residency.experts
        self.tables = {}  # while they hold some of both, and if they stay so, no step can run
        try:
            refill(new, tables, self._programs, self._layers, held)
        except Exception:
            refill(self.model, tables, self._programs, self._layers, held)
            self._serve(self.model, tables)
            raise
        self._serve(new, tables)
        self._weights, self.weight_version = jax.tree.leaves(new.rim[1]), version
        self._owned = update_owned(self._owned, jax.tree.leaves(state), donate=donate)

    def slot_counts(self) -> Int64[np.ndarray, "M 2"]:
        """Slots of each MoE layer since the start: those that ran on the host, and all. Waits for the step in
        flight."""
        self._note(keep=0)
        return self._counted[:, :2].copy()

    def host_counts(self) -> HostCounts:
        """Of steps that ended some steps ago; waits for nothing, any thread."""
        spec, counted = self.model.config.capture_spec, self._counted.copy()
        assert spec is not None
        hits = {
            layer: 1.0 - away / all_
            for layer, (away, all_, _) in zip(spec.layer_ids, counted.tolist(), strict=True)
            if all_
        }
        busy_s = sum(side.lane.counts().busy_s for side in tuple(self.host_sides))
        return HostCounts(hits=hits, deferred=int(counted[:, 2].sum()), busy_s=busy_s)

    def _serve(self, model: OffloadedModel, tables: Tables) -> None:
        """Bind a model's arrays; its residents are those of the tables."""
        self.model, self.tables = model, tables
        for side in self.host_sides:
            side.restock(model)
        self._bind(self.residency)

    def _bind(self, residency: ResidencyMap) -> None:
        """Make the maps that the programs take."""
        self.residency = residency
        self.slot_of = jax.device_put(residency.slot_of, self._sides.device)
        if self._streams_from is None:
            return
        away = residency.slot_of < 0
        self._away = [np.flatnonzero(row) for row in away]
        places = np.where(away, np.cumsum(away, axis=1) - 1, -1).astype(np.int32)
        self._block_slots = [jax.device_put(row, self._sides.device) for row in places]

    def _jobs(self) -> dict[tuple[object, ...], Callable[[], jax.stages.Lowered]]:
        jobs = SplitJobs(
            model=self.model,
            split=self.split,
            state=self.state,
            spec=self.spec,
            config=self.config,
            sides=self._sides,
            streams_from=self._streams_from,
        )
        return jobs.collect()

    def _forward(self, batch: ModelWorkerBatch, shape: BatchShape, packed: Any) -> ForwardOut:
        """Start all layers of a step."""
        programs, rim = self._programs, self.model.embed_head
        stream, tokens, here = programs["open", shape](rim.embed, self._last_tokens, packed)
        streams = self._streams(batch, shape)
        given, waiting = tuple[Any, ...](), list[Any]()
        for layer in self._layers:
            program, arrays = programs["layer", shape, layer.kind, len(given)], self.model.layers[layer.kind]
            stream, errand, self._pool = program(
                stream, self._pool, arrays, self._numbers[layer], here, given, self.slot_of
            )
            given = (
                () if errand is None else tuple(self._run_experts(shape, layer, here, errand, waiting, streams=streams))
            )
        counted = () if self._counts is None else (self._counts,)
        out = programs["close", shape, len(given)](rim, stream, given, tokens, here, *counted)
        self._counts = out.counts
        self._note(stream.tally)
        return out

    def _streams(self, batch: ModelWorkerBatch, shape: BatchShape) -> bool:
        """Whether a step copies the host's experts to the accelerator and runs there alone."""
        return (
            self._streams_from is not None
            and batch.num_tokens >= self._streams_from
            and not self.split.deferred_in(shape)
        )

    def _run_experts(
        self,
        shape: BatchShape,
        layer: LayerIndex,
        packed: Array,
        errand: ExpertInputs,
        waiting: list[Any],
        *,
        streams: bool,
    ) -> Sequence[Any]:
        """Start both sides of a layer's experts; what each gives is on the accelerator, or on its way. `waiting`: what
        the host still owes from the layer before, and then from this one."""
        programs, kind, given = self._programs, layer.kind, list[Any]()
        at_host = self.split.has_host and not streams
        later = () if errand.later is None or layer.column == self.split.num_moe_layers - 1 else (errand.later,)
        sent = self._sides.send((errand.fed, errand.away, errand.weights, *later)) if at_host else ()
        if kind in self._homes:
            arrays, numbers = self.model.layers[kind], self._numbers[layer]
            given.append(programs["home", shape, kind](self.tables[kind], arrays, numbers, packed, errand))
        if at_host:
            fed, away, weights, *later = self._sides.arrived(sent)
            given.append(self._sides.bring(self._at_host(shape, layer, fed, away, weights)))
            owed, waiting[:] = list(waiting), [self._at_host(shape, layer, fed, ids, weights) for ids in later]
            given += map(self._sides.bring, owed)
        elif self.split.has_host:
            rows = layer.place * self.residency.num_experts + self._away[layer.column]
            block = jax.device_put(host_rows(self.model.host[kind], rows, errand.fed.dtype), self._sides.device)
            given.append(programs["stream", shape.num_tokens, kind](block, self._block_slots[layer.column], errand))
        return given

    def _at_host(self, shape: BatchShape, layer: LayerIndex, fed: Any, ids: Any, weights: Any) -> Any:
        if isinstance(ids, np.ndarray) and (ids < 0).all():  # it had to be waited for: then no work is not done at all
            rows = shape.num_tokens
            if rows not in self._nothing:
                self._nothing[rows] = jax.device_put(np.zeros((rows, fed.shape[1]), np.float32), self._sides.device)
            return self._nothing[rows]
        program, stored = self._programs["host", shape.num_tokens, layer.kind], self.model.host[layer.kind]
        return program(stored, self._places[layer], fed, ids, weights)

    def _note(self, *tallies: Array, keep: int = _KEPT_TALLIES) -> None:
        """Keep the tallies of steps that were started, and add up those of all but the last `keep`, which may be in
        flight."""
        self._tallies.extend(tallies)
        while len(self._tallies) > keep:
            self._counted += np.asarray(self._tallies.popleft())
