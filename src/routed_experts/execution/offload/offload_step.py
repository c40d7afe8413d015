"""The compiled step of a model with experts on the host: one program, inside which host jobs are submitted and awaited.

    embed -> [ attention, router -> submit host experts -> device experts -> wait -> sums added ] a layer -> norm, head

In most steps the host computes its experts; some of generated tokens may be deferred, and are added one MoE layer
later. In a streaming step the host copies their weights to the device, chunk by chunk, and the device computes them.

Layers of a block are scanned, so the program does not grow with depth. A pure function of arrays but for the queue.
Dims: N padded tokens, R request slots, D hidden, M MoE layers, E experts, C experts of a chunk, K experts per token."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from routed_experts.capture.device_cache import create_device_cache
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.execution.forward_batch import BatchShape, ForwardBatch, num_sampler_words, unpack
from routed_experts.execution.programs import ForwardOut, ProgramSpec
from routed_experts.execution.recurrent_ops import hybrid_ops
from routed_experts.layers.expert_slots import ExpertTable, run_slots
from routed_experts.layers.moe import MoeBackend
from routed_experts.layers.native.host_expert_queue import HostExpertQueue
from routed_experts.layers.routing import LayerRouting
from routed_experts.memory.kv_pool import HybridPool
from routed_experts.models.base.interface import SequenceOps, TokenRouting
from routed_experts.models.decoder.decoder import embed, final_norm
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.decoder.layer_parts import LayerContext
from routed_experts.models.offload.layers import (
    ExpertInputs,
    LayerGroup,
    LayerIndexArrays,
    Residual,
    add_expert_outputs,
    attention_and_router,
    device_experts,
    layer_indices,
)
from routed_experts.models.offload.offloaded_model import EmbedHeadArrays, OffloadedModel

_CHUNK_BYTES = 128 << 20  # of streamed weights: bounds the staging buffers on the host and the copy on the device


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSpec:
    """Static values of all steps of an offloaded model. `num_resident`: experts of a layer in the device tables;
    `num_deferred`: slots of a generated token that a decode step may add one MoE layer late."""

    program: ProgramSpec
    config: FamilyConfig
    num_moe_layers: int
    num_experts: int
    num_resident: int
    num_deferred: int = 0

    @property
    def has_host(self) -> bool:
        """Whether any expert runs on the host."""
        return self.num_resident < self.num_experts

    @property
    def slot_map(self) -> jax.ShapeDtypeStruct:
        """Shape of the map from experts to table slots."""
        return jax.ShapeDtypeStruct((self.num_moe_layers, self.num_experts), jnp.int32)

    def deferred_in(self, shape: BatchShape) -> int:
        """Slots of a generated token that a step of this shape may defer."""
        return self.num_deferred if self.has_host and shape.mode is ForwardMode.DECODE else 0

    def has_device_experts(self, group: LayerGroup) -> bool:
        """Whether the device computes any expert of these layers."""
        feed = group.spec(self.config).feed
        return isinstance(feed, Sparse) and (self.num_resident > 0 or feed.shared_width > 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OffloadArrays:
    """The weights on the device; those of layers by block and position in its pattern. A dense layer has no table."""

    embed_head: EmbedHeadArrays
    layers: tuple[tuple[dict[str, Array], ...], ...]
    tables: tuple[tuple[ExpertTable | None, ...], ...]

    @staticmethod
    def create(model: OffloadedModel, tables: Mapping[LayerGroup, ExpertTable]) -> "OffloadArrays":
        """The arrays of a model, with the tables as they are now."""
        groups = [
            [LayerGroup(block=number, position=position) for position in range(len(block.pattern))]
            for number, block in enumerate(model.config.blocks)
        ]
        return OffloadArrays(
            model.embed_head,
            tuple(tuple(model.layers[group] for group in block) for block in groups),
            tuple(tuple(tables.get(group) for group in block) for block in groups),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunks:
    """A layer's experts on the host, cut into chunks to stream. `ids`: the experts of each chunk, -1 at the end of the
    last; `slots`: a token's slots as positions in the chunks, -1 for those of the device table."""

    ids: Int[Array, "chunks C"]
    slots: Int[Array, "N K"]

    @staticmethod
    def create(inputs: ExpertInputs, on_host: Bool[Array, " E"], num_host: int, max_size: int) -> "_Chunks":
        """Chunks of equal size, at most `max_size`, of the `num_host` experts that are `on_host`."""
        num_chunks = -(-num_host // max_size)
        size = -(-num_host // num_chunks)
        (ids,) = jnp.nonzero(on_host, size=num_chunks * size, fill_value=-1)
        position = jnp.cumsum(on_host, dtype=jnp.int32) - 1
        slots = jnp.where(inputs.host_ids >= 0, position[jnp.maximum(inputs.host_ids, 0)], -1)
        return _Chunks(ids.astype(jnp.int32).reshape(num_chunks, size), slots)

    def slots_in(self, chunk: Int[Array, ""] | int) -> Int[Array, "N K"]:
        """Slots of the experts of one chunk, as positions in it; -1 for all others."""
        size = self.ids.shape[1]
        slots = self.slots - chunk * size
        return jnp.where((slots >= 0) & (slots < size), slots, -1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostExperts:
    """The queue of a model's experts on the host, and the number of each layer group's store there."""

    queue: HostExpertQueue
    stores: Mapping[LayerGroup, int]
    max_chunk: int  # experts whose weights are streamed at once

    @staticmethod
    def open(model: OffloadedModel, *, num_threads: int) -> "HostExperts":
        """Open a queue over a model's experts on the host."""
        stores = [*model.host.values()]
        expert_bytes = max(sum(array.nbytes // array.shape[0] for array in (s.gate_up, s.down)) for s in stores)
        return HostExperts(
            queue=HostExpertQueue(stores, num_experts=model.residency.num_experts, num_threads=num_threads),
            stores={group: number for number, group in enumerate(model.host)},
            max_chunk=max(1, _CHUNK_BYTES // expert_bytes),
        )

    def swap_weights(self, model: OffloadedModel) -> None:
        """Run another model's experts from now on; no job may be under way."""
        self.queue.swap_weights([model.host[group] for group in self.stores])

    def submit(self, group: LayerGroup, layer: Int[Array, ""], inputs: ExpertInputs) -> ExpertInputs:
        """Submit a layer's experts on the host; those that are deferred are a job of their own."""
        queue, store, weights = self.queue, self.stores[group], inputs.weights
        x = queue.submit(inputs.x, layer, inputs.host_ids, weights, store=store)
        if inputs.deferred_ids is not None:
            x = queue.submit(x, layer, inputs.deferred_ids, weights, store=store, deferred=True)
        return dataclasses.replace(inputs, x=x)

    def submit_empty(self, x: Float[Array, "N D"]) -> Float[Array, "N D"]:
        """Submit a deferred job without experts, for the first MoE layer to wait for."""
        ids, weights = jnp.full((x.shape[0], 1), -1, jnp.int32), jnp.zeros((x.shape[0], 1), jnp.float32)
        return self.queue.submit(x, jnp.zeros((), jnp.int32), ids, weights, store=0, deferred=True)

    def stream(
        self, group: LayerGroup, layer: Int[Array, ""], inputs: ExpertInputs, chunks: _Chunks, moe: MoeBackend
    ) -> Float32[Array, "N D"]:
        """Run the experts of all chunks on the device. The first chunk has been submitted; each of the others is copied
        while the device computes the one before it."""
        queue, store, (num_chunks, size) = self.queue, self.stores[group], chunks.ids.shape

        def run(x: Float[Array, "N D"], chunk: Int[Array, ""] | int) -> tuple[Array, Float32[Array, "N D"]]:
            x, table = queue.wait_weights(x, size, store=store)
            table = jax.tree.map(lambda array: array.astype(x.dtype), table)
            slots, only_layer = chunks.slots_in(chunk), jnp.zeros((), jnp.int32)
            return x, run_slots(x, slots, inputs.weights, table, only_layer, size=size, backend=moe)

        def body(carry: tuple[Array, Array], scanned: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
            (x, y), (chunk, next_ids) = carry, scanned
            x, partial_sum = run(queue.submit_weights(x, layer, next_ids, store=store), chunk)
            return (x, y + partial_sum), None

        numbers = jnp.arange(num_chunks - 1, dtype=jnp.int32)
        (x, y), _ = lax.scan(body, (inputs.x, jnp.zeros(inputs.x.shape, jnp.float32)), (numbers, chunks.ids[1:]))
        return y + run(x, num_chunks - 1)[1]


def offload_step(
    arrays: OffloadArrays,
    pool: Any,  # shapes: KVPoolSpec.abstract
    last_tokens: Int[Array, " R"],
    packed: Int32[Array, " words"],
    slot_of: Int32[Array, "M E"],
    counts: Int32[Array, "F M E"] | None = None,
    routed: TokenRouting | None = None,
    *,
    spec: OffloadSpec,
    shape: BatchShape,
    host: HostExperts | None,
    streams: bool = False,
) -> tuple[Any, ForwardOut, Int32[Array, "M 3"]]:
    """Run all layers over the tokens of a step, on the ids of `routed` where they are valid. `host` None: all experts
    are on the device; `streams`: the device runs those of the host, too. Returns the pool, the outputs of
    `programs.forward`, and the slot counts of the step."""
    program, batch = spec.program, unpack(packed, shape)
    tokens = batch.resolve_tokens(last_tokens)
    recorded = program.count_spec if program.capture is None else program.capture
    capture = create_device_cache(recorded, shape.num_tokens)
    slot_counts = jnp.zeros((spec.num_moe_layers, 3), jnp.int32)
    layers = _Layers(
        arrays=arrays,
        slot_of=slot_of,
        context=_layer_context(program, spec.config, batch, recurrent=isinstance(pool, HybridPool)),
        spec=spec,
        host=host,
        streams=streams,
        num_deferred=0 if streams else spec.deferred_in(shape),
        generated=batch.generated,
    )
    x = embed(spec.config, arrays.embed_head.embed, tokens)
    residual, pool = layers.run(Residual(x, capture, slot_counts), pool, routed)
    norms, kernels = arrays.embed_head, program.kernels
    hidden = final_norm(spec.config, residual.x, norms.norm, norms.norm_bias, kernels.rows)
    capture, paged = residual.capture, batch.paged
    rows = None if capture is None or program.capture is None else capture.rows()
    if capture is not None and counts is not None:
        counts = capture.count_experts(counts, paged.valid, batch.generated)
    last_hidden = batch.of_last_tokens(hidden)
    logits = arrays.embed_head.lm_head.logits(last_hidden, program.kernels.lm_head) if program.with_logits else None
    words = packed[: num_sampler_words(shape.num_requests)]
    return pool, ForwardOut(hidden, logits, tokens, words, rows, counts), residual.slot_counts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Layers:
    """The layers of a step while it is traced."""

    arrays: OffloadArrays
    slot_of: Int32[Array, "M E"]
    context: LayerContext
    spec: OffloadSpec
    host: HostExperts | None
    streams: bool
    num_deferred: int
    generated: Bool[Array, " N"]  # the last token of a prompt may be in a decode step: it defers nothing

    def run(self, residual: Residual, pool: Any, routed: TokenRouting | None) -> tuple[Residual, Any]:
        """Scan the layers of each block. A deferred job is always outstanding: of the MoE layer before, or an empty one
        at first. The last MoE layer defers nothing, so its job adds nothing."""
        host = self.host if self.num_deferred else None
        if host is not None:
            residual = dataclasses.replace(residual, x=host.submit_empty(residual.x))
        for number in range(len(self.spec.config.blocks)):
            scanned = _layer_indices(number, self.spec.config), _layer_routing(number, self.spec.config, routed)
            (residual, pool), _ = lax.scan(self._pattern(number), (residual, pool), scanned)
        if host is not None:
            residual = dataclasses.replace(residual, x=host.queue.wait(residual.x, deferred=True)[0])
        return residual, pool

    def _pattern(self, number: int) -> Callable[[Any, Any], tuple[Any, None]]:
        """The body of a block's scan: the layers of its pattern, one after another."""

        def body(
            carry: Any, scanned: tuple[tuple[LayerIndexArrays, ...], tuple[LayerRouting | None, ...]]
        ) -> tuple[Any, None]:
            residual, pool = carry
            for position, (layer, routed) in enumerate(zip(*scanned, strict=True)):
                group = LayerGroup(block=number, position=position)
                residual, pool = self._layer(group, layer, residual, pool, routed)
            return (residual, pool), None

        return body

    def _layer(
        self, group: LayerGroup, layer: LayerIndexArrays, residual: Residual, pool: Any, routed: LayerRouting | None
    ) -> tuple[Residual, Any]:
        config, weights = self.spec.config, self.arrays.layers[group.block][group.position]
        args = (config, group, weights, layer, residual, self.context, pool, self.slot_of)
        residual, inputs, pool = attention_and_router(
            *args, num_deferred=self.num_deferred, may_defer=self.generated, routed=routed
        )
        if inputs is not None:
            partial_sums = self._run_experts(group, layer, inputs)
            residual = dataclasses.replace(residual, x=add_expert_outputs(config, residual.x, partial_sums))
        return residual, pool

    def _run_experts(
        self, group: LayerGroup, layer: LayerIndexArrays, inputs: ExpertInputs
    ) -> list[Float32[Array, "N D"]]:
        """The sums of a layer's experts on the device, of those on the host, and of those deferred a layer before."""
        host, spec = self.host, self.spec
        if host is None:
            return self._device_sums(group, layer, inputs)
        if self.streams:
            on_host = lax.dynamic_index_in_dim(self.slot_of, layer.moe_layer, keepdims=False) < 0
            chunks = _Chunks.create(inputs, on_host, spec.num_experts - spec.num_resident, host.max_chunk)
            x = host.queue.submit_weights(inputs.x, layer.index, chunks.ids[0], store=host.stores[group])
            inputs = dataclasses.replace(inputs, x=x)
            sums = self._device_sums(group, layer, inputs)
            return [*sums, host.stream(group, layer.index, inputs, chunks, spec.program.kernels.moe)]
        inputs = host.submit(group, layer.index, inputs)
        sums = self._device_sums(group, layer, inputs)
        # A wait has to follow its submission. The sum does, unless it is of shared experts alone, on other inputs.
        follows = bool(sums) and (spec.num_resident > 0 or inputs.shared_input is None)
        after, on_host = host.queue.wait(sums.pop() if follows else inputs.x)
        late: list[Float32[Array, "N D"]] = []
        if self.num_deferred:
            after, deferred = host.queue.wait(after, deferred=True)
            late.append(deferred)
        return [*([after] if follows else sums), on_host, *late]

    def _device_sums(
        self, group: LayerGroup, layer: LayerIndexArrays, inputs: ExpertInputs
    ) -> list[Float32[Array, "N D"]]:
        """One sum, or none where the device has no expert of the layer."""
        if not self.spec.has_device_experts(group):
            return []
        table = self.arrays.tables[group.block][group.position]
        weights = self.arrays.layers[group.block][group.position]
        assert table is not None, group
        how = (self.spec.config, group, table, weights, layer, inputs, self.context)
        return [device_experts(*how, size=self.spec.num_resident)]


def _layer_context(program: ProgramSpec, config: FamilyConfig, batch: ForwardBatch, *, recurrent: bool) -> LayerContext:
    """Inputs shared by the layers of a step; `recurrent`: some of them keep a state."""
    attend = program.attend(batch.paged)
    ops = hybrid_ops(attend, batch) if recurrent else SequenceOps(attend)
    return LayerContext.create(batch.paged.positions, batch.paged.valid, ops, program.kernels, config.rotary)


def _layer_indices(block: int, config: FamilyConfig) -> tuple[LayerIndexArrays, ...]:
    """By position in a block's pattern, the indices of its layers, [repeats]."""
    layers, width = (
        [layer for layer in layer_indices(config) if layer.group.block == block],
        len(config.blocks[block].pattern),
    )

    def column(name: str, position: int) -> Any:
        return np.array([getattr(layer, name) for layer in layers[position::width]], np.int32)

    names = ("index", "cache_index", "moe_layer")
    return tuple(LayerIndexArrays(*(column(name, position) for name in names)) for position in range(width))


def _layer_routing(block: int, config: FamilyConfig, routed: TokenRouting | None) -> tuple[LayerRouting | None, ...]:
    """By position in a block's pattern, the rows that its layers replay, [repeats, ...]; None for dense layers."""
    indices = _layer_indices(block, config)
    if routed is None:
        return (None,) * len(indices)

    def of_layers(moe_layers: Int32[np.ndarray, " repeats"]) -> LayerRouting | None:
        if moe_layers[0] < 0:
            return None
        ids, weights = (
            None if rows is None else jnp.moveaxis(rows[:, moe_layers], 1, 0) for rows in (routed.ids, routed.weights)
        )
        assert ids is not None
        return LayerRouting(ids, jnp.broadcast_to(routed.valid, (len(moe_layers), *routed.valid.shape)), weights)

    return tuple(of_layers(np.asarray(layer.moe_layer)) for layer in indices)
