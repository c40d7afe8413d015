"""A step of a model whose experts are shared out, as one program: the host's experts are errands of a lane that begin
and end inside it. A pure function of arrays but for the lane. Knows nothing of pools' owners or of devices.

    embed -> [ attention, router -> begin -> residents -> end -> both added ] for each layer -> normed -> scores

Layers of a run are scanned, so the program does not grow with depth. Dims: N padded tokens, R request slots, D hidden,
M MoE layers, E experts."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int, Int32

from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.offload.offload_programs import OffloadSpec, close_step, open_step, step_of
from routed_experts.execution.programs import ForwardOut
from routed_experts.layers.expert_slots import ExpertTable
from routed_experts.layers.native.host_expert_queue import HostExpertQueue
from routed_experts.layers.routing import LayerRouting
from routed_experts.memory.kv_pool import HybridPool
from routed_experts.models.base.interface import TokenRouting
from routed_experts.models.decoder.layer_parts import LayerContext
from routed_experts.models.offload.layers import (
    LayerGroup,
    LayerIndexArrays,
    Stream,
    add_expert_outputs,
    attention_and_router,
    device_experts,
    layers_at,
)
from routed_experts.models.offload.offloaded_model import EmbedHeadArrays, OffloadedModel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OffloadArrays:
    """What the accelerator holds: the rim, and of the layers by run and by place in its pattern. A layer without
    experts has no table."""

    rim: EmbedHeadArrays
    layers: tuple[tuple[dict[str, Array], ...], ...]
    tables: tuple[tuple[ExpertTable | None, ...], ...]

    @staticmethod
    def of(model: OffloadedModel, tables: Mapping[LayerGroup, ExpertTable]) -> "OffloadArrays":
        """A parted model's, with the tables that it has now."""
        kinds = [
            [LayerGroup(run=run, index=index) for index in range(len(one.pattern))]
            for run, one in enumerate(model.config.blocks)
        ]
        return OffloadArrays(
            model.embed_head,
            tuple(tuple(model.layers[kind] for kind in run) for run in kinds),
            tuple(tuple(tables.get(kind) for kind in run) for run in kinds),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostExperts:
    """The lane of a parted model, and the numbers of its stores there."""

    lane: HostExpertQueue
    stores: Mapping[LayerGroup, int]

    @staticmethod
    def of(model: OffloadedModel, *, num_threads: int) -> "HostExperts":
        """Open a lane for a parted model."""
        lane = HostExpertQueue([*model.host.values()], num_experts=model.residency.num_experts, num_threads=num_threads)
        return HostExperts(lane=lane, stores={kind: number for number, kind in enumerate(model.host)})

    def restock(self, model: OffloadedModel) -> None:
        """Run another model's experts from now on; no errand may be under way."""
        self.lane.restock([model.host[kind] for kind in self.stores])


def whole_step(
    arrays: OffloadArrays,
    pool: Any,  # as KVPoolSpec.abstract says
    last_tokens: Int[Array, " R"],
    packed: Int32[Array, " words"],
    slot_of: Int32[Array, "M E"],
    counts: Int32[Array, "F M E"] | None = None,
    routed: TokenRouting | None = None,
    *,
    spec: OffloadSpec,
    shape: BatchShape,
    host: HostExperts | None,
) -> tuple[Any, ForwardOut, Int32[Array, "M 3"]]:
    """Run all layers, without a host where no expert is there, and on the ids of `routed` where they are valid; returns
    the pool, the outputs of `programs.forward`, and the tally of the step's slots."""
    stream, tokens, packed = open_step(arrays.rim.embed, last_tokens, packed, spec=spec, shape=shape)
    step = step_of(spec, packed, shape, recurrent=isinstance(pool, HybridPool))
    for number in range(len(spec.config.blocks)):
        body = _pattern(number, arrays, step, slot_of, spec, host)
        (stream, pool), _ = lax.scan(body, (stream, pool), (_numbers(number, spec), _routed(number, spec, routed)))
    out = close_step(arrays.rim, stream, (), tokens, packed, counts, spec=spec, shape=shape)
    return pool, out, stream.tally


def _numbers(run: int, spec: OffloadSpec) -> tuple[LayerIndexArrays, ...]:
    """Of each place in a run's pattern the numbers of its layers, [repeats]."""
    layers, width = (
        [layer for layer in layers_at(spec.config) if layer.kind.run == run],
        len(spec.config.blocks[run].pattern),
    )

    def column(name: str, index: int) -> Any:
        return np.array([getattr(layer, name) for layer in layers[index::width]], np.int32)

    return tuple(
        LayerIndexArrays(*(column(name, index) for name in ("place", "ordinal", "column"))) for index in range(width)
    )


def _routed(run: int, spec: OffloadSpec, routed: TokenRouting | None) -> tuple[LayerRouting | None, ...]:
    """Of each place in a run's pattern what its layers are to replay, [repeats, ...]; None for layers without
    experts."""
    pattern = spec.config.blocks[run].pattern
    if routed is None:
        return (None,) * len(pattern)
    layers = [layer for layer in layers_at(spec.config) if layer.kind.run == run]

    def of_place(index: int) -> LayerRouting | None:
        columns = np.array([layer.column for layer in layers[index :: len(pattern)]], np.int32)
        if columns[0] < 0:
            return None
        ids, weights = (
            None if rows is None else jnp.moveaxis(rows[:, columns], 1, 0) for rows in (routed.ids, routed.weights)
        )
        assert ids is not None
        return LayerRouting(ids, jnp.broadcast_to(routed.valid, (len(columns), *routed.valid.shape)), weights)

    return tuple(of_place(index) for index in range(len(pattern)))


def _pattern(
    number: int,
    arrays: OffloadArrays,
    step: LayerContext,
    slot_of: Int32[Array, "M E"],
    spec: OffloadSpec,
    host: HostExperts | None,
) -> Callable[[Any, Any], tuple[Any, None]]:
    """The body of a run's scan: the layers of its pattern, one after another."""

    def body(
        carry: Any, scanned: tuple[tuple[LayerIndexArrays, ...], tuple[LayerRouting | None, ...]]
    ) -> tuple[Any, None]:
        stream, pool = carry
        numbers, routed = scanned
        for index, own in enumerate(numbers):
            kind, weights = LayerGroup(run=number, index=index), arrays.layers[number][index]
            stream, errand, pool = attention_and_router(
                spec.config, kind, weights, own, stream, (), step, pool, slot_of, routed=routed[index]
            )
            if errand is None:
                continue
            given: list[Float32[Array, "N D"]] = []
            if host is not None:
                fed = host.lane.begin(errand.fed, own.place, errand.away, errand.weights, store=host.stores[kind])
                errand = dataclasses.replace(errand, fed=fed)
            if spec.has_device_experts(kind):
                table = arrays.tables[number][index]
                assert table is not None, kind
                given.append(
                    device_experts(spec.config, kind, table, weights, own, errand, step, size=spec.num_resident)
                )
            if host is not None:
                last, away = host.lane.end(given.pop() if given else errand.fed)
                given = [last, away] if spec.has_device_experts(kind) else [away]
            stream = Stream(add_expert_outputs(spec.config, stream.x, given), stream.capture, stream.tally)
        return (stream, pool), None

    return body
