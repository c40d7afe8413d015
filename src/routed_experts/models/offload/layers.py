"""A FamilyDecoder cut at its experts: the layers one by one, each as what comes before the experts run and what comes
after. Knows nothing of devices, and not where the experts are that a table lacks.

    embed -> [ what the experts gave is added -> attention, router -> errand ] for each layer -> added, normed

The numbers are those of models/decoder/decoder.py, up to the order in which the outputs of a token's experts are summed.
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
from routed_experts.models.decoder.decoder import apply_norm
from routed_experts.models.decoder.delta_attention import DeltaAttention
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.decoder.layer_params import LayerParams, ParamKind, takes_stacked
from routed_experts.models.decoder.layer_parts import LayerContext, ReplayInputs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share arrays: those at one place of a run's pattern."""

    run: int
    index: int

    def of(self, config: FamilyConfig) -> LayerSpec:
        """What such a layer is made of."""
        return config.blocks[self.run].pattern[self.index]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerIndex:
    """One layer: its kind, its place in the arrays of that kind, its number among those that attend (or keep a state),
    and among the MoE layers (-1: it is none)."""

    kind: LayerGroup
    place: int
    ordinal: int
    column: int


def layers_at(config: FamilyConfig) -> tuple[LayerIndex, ...]:
    """All layers, in order."""
    found: list[LayerIndex] = []
    attending = recurrent = columns = 0
    for number, run in enumerate(config.blocks):
        for place in range(run.repeats):
            for index, layer in enumerate(run.pattern):
                keeps_state, sparse = isinstance(layer.mixer, DeltaAttention), isinstance(layer.feed, Sparse)
                ordinal, column = recurrent if keeps_state else attending, columns if sparse else -1
                found.append(
                    LayerIndex(kind=LayerGroup(run=number, index=index), place=place, ordinal=ordinal, column=column)
                )
                recurrent, attending, columns = recurrent + keeps_state, attending + (not keeps_state), columns + sparse
    return tuple(found)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerIndexArrays:
    """The numbers of a LayerIndex, as arrays, so that the layers of a kind share a program."""

    place: Int32[Array, ""]
    ordinal: Int32[Array, ""]
    column: Int32[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """What goes from layer to layer. `tally`: of each MoE layer, the slots of this step that were not the table's, all
    slots, and those that were added a layer late."""

    x: Float[Array, "N D"]
    capture: RoutedExpertsDeviceCache | None
    tally: Int32[Array, "M 3"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertInputs:
    """What the experts of a layer are sent. Of the executed ids, `slots` are those in the table and `away` the others,
    by expert; those among them that may wait for the next MoE layer are `later`, where any may. -1 stands for what is
    not theirs, padding included. `normed`: what shared experts are fed, where that is another."""

    fed: Float[Array, "N D"]
    slots: Int32[Array, "N K"]
    away: Int32[Array, "N K"]
    later: Int32[Array, "N K"] | None
    weights: Float[Array, "N K"]
    normed: Float[Array, "N D"] | None


def attention_and_router(
    config: FamilyConfig,
    kind: LayerGroup,
    arrays: Mapping[str, Array],
    numbers: LayerIndexArrays,
    stream: Stream,
    given: Sequence[Float32[Array, "N D"]],
    step: LayerContext,
    cache: Any,
    slot_of: Int32[Array, "M E"],
    *,
    deferred: int = 0,
    routed: LayerRouting | None = None,
) -> tuple[Stream, ExpertInputs | None, Any]:
    """Add what the experts of the layer before gave, attend, and route (rows of `routed` that are valid: as they say);
    a layer without experts runs to its end, and sends nothing. Of a token's `deferred` lightest experts those that are
    away may wait, but in the last MoE layer."""
    layer, scale = kind.of(config), config.residual_scale
    params = _view(config, layer, arrays, numbers.place, step.kernels)
    x = add_expert_outputs(config, stream.x, given)
    mixed, cache = layer.mixer.run(apply_norm(config, x, "input_norm", params), params, step, cache, numbers.ordinal)
    x = x + (mixed * scale if scale != 1.0 else mixed)
    normed = apply_norm(config, x, "post_norm", params)
    if not isinstance(layer.feed, Sparse):
        y, capture = layer.feed.run(normed, params, step, None, stream.capture)
        return Stream(x + (y * scale if scale != 1.0 else y), capture, stream.tally), None, cache
    fed, routing, capture = layer.feed.route_and_record(
        normed, params, step, ReplayInputs(numbers.column, routed), stream.capture
    )
    slots = lax.dynamic_index_in_dim(slot_of, numbers.column, keepdims=False)[routing.ids]
    valid = step.valid[:, None]
    away, later = jnp.where(valid & (slots < 0), routing.ids.astype(jnp.int32), -1), None
    counted = [jnp.sum(away >= 0, dtype=jnp.int32), jnp.sum(step.valid, dtype=jnp.int32) * routing.ids.shape[1]]
    if deferred:
        waits = lightest(routing.weights, deferred) & (numbers.column < slot_of.shape[0] - 1)
        away, later = jnp.where(waits, -1, away), jnp.where(waits, away, -1)
    late = jnp.zeros((), jnp.int32) if later is None else jnp.sum(later >= 0, dtype=jnp.int32)
    errand = ExpertInputs(
        fed=fed,
        slots=jnp.where(valid, slots, -1),
        away=away,
        later=later,
        weights=routing.weights,
        normed=normed if layer.feed.weight_inputs and layer.feed.shared_width else None,
    )
    return Stream(x, capture, stream.tally.at[numbers.column].add(jnp.stack([*counted, late]))), errand, cache


def lightest(weights: Float[Array, "N K"], count: int) -> Bool[Array, "N K"]:
    """The `count` slots of the smallest weights of each token; of equal ones those that stand last."""
    own, other = weights[:, :, None], weights[:, None, :]
    places = jnp.arange(weights.shape[1])
    before = (other < own) | ((other == own) & (places[None, :] > places[:, None]))
    return jnp.sum(before, axis=-1) < count


def device_experts(
    config: FamilyConfig,
    kind: LayerGroup,
    table: ExpertTable,
    arrays: Mapping[str, Array],
    numbers: LayerIndexArrays,
    errand: ExpertInputs,
    step: LayerContext,
    *,
    size: int,
) -> Float32[Array, "N D"]:
    """The slots whose experts are in the table of `size` experts a layer, and the experts that every token runs."""
    layer = kind.of(config)
    assert isinstance(layer.feed, Sparse), kind
    y = run_slots(errand.fed, errand.slots, errand.weights, table, numbers.place, size=size, backend=step.kernels.moe)
    params = _view(config, layer, arrays, numbers.place, step.kernels)
    shared = layer.feed.run_shared(errand.fed if errand.normed is None else errand.normed, params)
    return y if shared is None else y + shared.astype(jnp.float32)


def add_expert_outputs(
    config: FamilyConfig, x: Float[Array, "N D"], given: Sequence[Float32[Array, "N D"]]
) -> Float[Array, "N D"]:
    """Add what the experts gave, here and elsewhere; rounded once."""
    if not given:
        return x
    y = sum(given[1:], start=given[0]).astype(x.dtype)
    return x + (y * config.residual_scale if config.residual_scale != 1.0 else y)


def _view(
    config: FamilyConfig, layer: LayerSpec, arrays: Mapping[str, Array], place: Int32[Array, ""], kernels: Kernels
) -> LayerParams:
    """One layer's weights but its experts: slices, and for kernels that read in place the arrays of its kind."""
    weights = [
        weight for weight in layer.weights(config) if weight.kind is not ParamKind.EXPERTS and weight.name in arrays
    ]
    sliced = {
        w.name: lax.dynamic_index_in_dim(arrays[w.name], place, keepdims=False)
        for w in weights
        if not takes_stacked(w, kernels)
    }
    return LayerParams(sliced, arrays, place, kernels)
