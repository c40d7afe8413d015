"""The layers of a FamilyDecoder with offloaded experts: attention and router, then the experts on each side, then the
sum.

    residual -> attention, router -> ExpertInputs -> experts of the table -+-> summed, rounded once -> residual
                                                  -> experts elsewhere ----+

The numbers are those of models/decoder/decoder.py, up to the order in which a token's expert outputs are summed.
Dims: N tokens, D hidden, M MoE layers, E experts of a layer, K experts per token."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from routed_experts.capture.device_cache import RoutedExpertsDeviceCache
from routed_experts.layers.expert_slots import ExpertTable, run_slots
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.routing import LayerRouting
from routed_experts.models.decoder.decoder import add_to_stream, apply_norm
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec, Recurrent
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.decoder.layer_params import LayerParams, ParamKind, takes_stacked
from routed_experts.models.decoder.layer_parts import LayerContext, ReplayInputs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share stacked arrays: those at one position in the pattern of a block."""

    block: int
    position: int

    def spec(self, config: FamilyConfig) -> LayerSpec:
        """The parts of these layers."""
        return config.blocks[self.block].pattern[self.position]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerIndex:
    """One layer. `index`: in the arrays of its group; `cache_index`: among the layers with KV pages, or those with a
    recurrent state; `moe_layer`: among the MoE layers, -1 for a dense one."""

    group: LayerGroup
    index: int
    cache_index: int
    moe_layer: int


def layer_indices(config: FamilyConfig) -> tuple[LayerIndex, ...]:
    """All layers, in order."""
    layers: list[LayerIndex] = []
    num_attending = num_recurrent = num_moe = 0
    for number, block in enumerate(config.blocks):
        for index in range(block.repeats):
            for position, layer in enumerate(block.pattern):
                recurrent, sparse = isinstance(layer.mixer, Recurrent), isinstance(layer.feed, Sparse)
                layers.append(
                    LayerIndex(
                        group=LayerGroup(block=number, position=position),
                        index=index,
                        cache_index=num_recurrent if recurrent else num_attending,
                        moe_layer=num_moe if sparse else -1,
                    )
                )
                num_recurrent, num_attending = num_recurrent + recurrent, num_attending + (not recurrent)
                num_moe += sparse
    return tuple(layers)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerIndexArrays:
    """The numbers of a LayerIndex as arrays, so that a scan runs the layers of a group with one program."""

    index: Int32[Array, ""]
    cache_index: Int32[Array, ""]
    moe_layer: Int32[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residual:
    """State carried from layer to layer. `slot_counts`: by MoE layer, this step's slots with experts outside the table,
    all slots, and the deferred slots."""

    x: Float[Array, "N D"]
    capture: RoutedExpertsDeviceCache | None
    slot_counts: Int32[Array, "M 3"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertInputs:
    """Inputs of a layer's experts. `table_slots` index the table; `host_ids` are the experts outside it, but for those
    in `deferred_ids`, which the next MoE layer adds. -1 is no slot; padding has none. `shared_input`: what shared
    experts read, where it differs from `x`."""

    x: Float[Array, "N D"]
    table_slots: Int32[Array, "N K"]
    host_ids: Int32[Array, "N K"]
    deferred_ids: Int32[Array, "N K"] | None
    weights: Float[Array, "N K"]
    shared_input: Float[Array, "N D"] | None


def attention_and_router(
    config: FamilyConfig,
    group: LayerGroup,
    arrays: Mapping[str, Array],
    layer: LayerIndexArrays,
    residual: Residual,
    step: LayerContext,
    cache: Any,
    slot_of: Int32[Array, "M E"],
    *,
    num_deferred: int = 0,
    may_defer: Bool[Array, " N"] | None = None,
    routed: LayerRouting | None = None,
) -> tuple[Residual, ExpertInputs | None, Any]:
    """Run a layer up to its experts (None: a dense layer, run to its end). `slot_of`: each expert's slot in the table,
    -1 outside it. Rows of `routed` that are valid are executed as they are. Of a token's `num_deferred` lightest
    experts those outside the table are deferred, except in the last MoE layer, and only of tokens of `may_defer` (None:
    of all)."""
    spec = group.spec(config)
    params = _layer_params(config, spec, arrays, layer.index, step.kernels)
    normed = apply_norm(config, residual.x, "input_norm", params)
    mixed, cache = spec.mixer.run(normed, params, step, cache, layer.cache_index)
    x = add_to_stream(config, residual.x, mixed)
    normed = apply_norm(config, x, "post_norm", params)
    if not isinstance(spec.feed, Sparse):
        y, capture = spec.feed.run(normed, params, step, None, residual.capture)
        return Residual(add_to_stream(config, x, y), capture, residual.slot_counts), None, cache
    replay = ReplayInputs(layer.moe_layer, routed)
    expert_input, routing, capture = spec.feed.route_and_record(normed, params, step, replay, residual.capture)
    slots = lax.dynamic_index_in_dim(slot_of, layer.moe_layer, keepdims=False)[routing.ids]
    valid = step.valid[:, None]
    host_ids, deferred_ids = jnp.where(valid & (slots < 0), routing.ids.astype(jnp.int32), -1), None
    counts = [jnp.sum(host_ids >= 0, dtype=jnp.int32), jnp.sum(step.valid, dtype=jnp.int32) * routing.ids.shape[1]]
    if num_deferred:
        deferred = lightest(routing.weights, num_deferred) & (layer.moe_layer < slot_of.shape[0] - 1)
        if may_defer is not None:
            deferred = deferred & may_defer[:, None]
        host_ids, deferred_ids = jnp.where(deferred, -1, host_ids), jnp.where(deferred, host_ids, -1)
        counts.append(jnp.sum(deferred_ids >= 0, dtype=jnp.int32))
    else:
        counts.append(jnp.zeros((), jnp.int32))
    inputs = ExpertInputs(
        x=expert_input,
        table_slots=jnp.where(valid, slots, -1),
        host_ids=host_ids,
        deferred_ids=deferred_ids,
        weights=routing.weights,
        shared_input=normed if spec.feed.weight_inputs and spec.feed.shared_width else None,
    )
    slot_counts = residual.slot_counts.at[layer.moe_layer].add(jnp.stack(counts))
    return Residual(x, capture, slot_counts), inputs, cache


def lightest(weights: Float[Array, "N K"], count: int) -> Bool[Array, "N K"]:
    """The `count` slots of the smallest weights of each token; of equal weights the last slots."""
    own, other = weights[:, :, None], weights[:, None, :]
    slots = jnp.arange(weights.shape[1])
    before = (other < own) | ((other == own) & (slots[None, :] > slots[:, None]))
    return jnp.sum(before, axis=-1) < count


def device_experts(
    config: FamilyConfig,
    group: LayerGroup,
    table: ExpertTable,
    arrays: Mapping[str, Array],
    layer: LayerIndexArrays,
    inputs: ExpertInputs,
    step: LayerContext,
    *,
    size: int,
) -> Float32[Array, "N D"]:
    """The weighted sums of the slots in the table of `size` experts a layer, and of the shared experts."""
    spec = group.spec(config)
    assert isinstance(spec.feed, Sparse), group
    y = run_slots(inputs.x, inputs.table_slots, inputs.weights, table, layer.index, size=size, backend=step.kernels.moe)
    params = _layer_params(config, spec, arrays, layer.index, step.kernels)
    shared = spec.feed.run_shared(inputs.x if inputs.shared_input is None else inputs.shared_input, params)
    return y if shared is None else y + shared.astype(jnp.float32)


def add_expert_outputs(
    config: FamilyConfig, x: Float[Array, "N D"], partial_sums: Sequence[Float32[Array, "N D"]]
) -> Float[Array, "N D"]:
    """Add the partial sums of a layer's experts to the residual, rounded once."""
    return add_to_stream(config, x, sum(partial_sums[1:], start=partial_sums[0]).astype(x.dtype))


def _layer_params(
    config: FamilyConfig, spec: LayerSpec, arrays: Mapping[str, Array], index: Int32[Array, ""], kernels: Kernels
) -> LayerParams:
    """One layer's weights but its experts: slices, or the stacked arrays for kernels that read in place."""
    weights = [
        weight for weight in spec.weights(config) if weight.kind is not ParamKind.EXPERTS and weight.name in arrays
    ]
    sliced = {
        weight.name: lax.dynamic_index_in_dim(arrays[weight.name], index, keepdims=False)
        for weight in weights
        if not takes_stacked(weight, kernels)
    }
    return LayerParams(sliced, arrays, index, kernels)
