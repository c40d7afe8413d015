"""MoE layers in few kernels, for steps of few tokens, where launches count; they round where the layers do. A mixer
that no attention kernel takes from its projection to its values runs in pieces up to its last projection; the rest of
the layer is the same few kernels.

The stream is normalised where it is added to, so the carry of the scan holds it twice: as it is, and under the norm of
what comes next. Dims: N tokens, D hidden, R layers of the stack, S parts of a sum, O outputs of a projection."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from routed_experts.capture.device_cache import RoutedExpertsDeviceCache
from routed_experts.layers.attention import FusedQKV
from routed_experts.layers.kernels import (
    FusedSteps,
    NormedRows,
    RouterBiases,
    RoutingSize,
    SharedExperts,
    SlotOutputs,
    StreamNorm,
)
from routed_experts.layers.layer_stack import RunRouting
from routed_experts.layers.moe import ExpertCall
from routed_experts.layers.norm import rms_norm
from routed_experts.layers.paged_attend import AnyPagedAttend
from routed_experts.layers.quantized import ScaledRows, Weight
from routed_experts.layers.routing import LayerRouting, Routing
from routed_experts.models.decoder.family_config import FamilyConfig, LayerBlock, LayerSpec
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.decoder.grouped_attention import GroupedAttention, fused_angles
from routed_experts.models.decoder.layer_counts import LayerCounts, Progression
from routed_experts.models.decoder.layer_params import LayerParams, scanned_params, weight_stack
from routed_experts.models.decoder.layer_parts import LayerContext
from routed_experts.models.decoder.step_record import to_block, with_block

Carry = tuple[Float[Array, "N D"], Any, RoutedExpertsDeviceCache | None]  # stream, cache, capture
_NormedCarry = tuple[Float[Array, "N D"], NormedRows, Any, RoutedExpertsDeviceCache | None]


def run_fused_layers(
    fused: FusedSteps,
    config: FamilyConfig,
    block: LayerBlock,
    arrays: tuple[Mapping[str, nnx.Param[Array]], ...],
    next_norm: Float[Array, " D"],
    step: LayerContext,
    carry: Carry,
    replay: RunRouting | None,
    counts: LayerCounts,
) -> tuple[Carry, Float[Array, "N D"]]:
    """A loop over the repeats of the pattern. Its body has several layers, so that its counter and the layers' numbers
    are two launches for all of them; the numbers are one row of a table, because the compiler slices it once."""
    (x, cache, capture), kinds = carry, len(block.pattern)
    norms = [own["input_norm"][...] for own in arrays]
    following = [*norms[1:], jnp.concatenate([norms[0][1:], next_norm[None]])]
    first = [_fused_projection(layer, own, step) for layer, own in zip(block.pattern, arrays, strict=True)]
    normed = fused.normed_rows(rms_norm(x, norms[0][0], eps=config.norm_eps, offset=config.norm_offset), first[0])
    layers = [
        _FusedLayer(fused, config, layer, own, following[kind], first[(kind + 1) % kinds], step, replay, counts.moe)
        for kind, (layer, own) in enumerate(zip(block.pattern, arrays, strict=True))
    ]
    # Of each layer: its repeat, its layer of the cache, its MoE layer of the record; equal ones share a column.
    repeats: tuple[Progression, ...] = ((0, 1),) * kinds
    needed = (repeats, counts.cache_layers(config, block), counts.moe_layers(block))
    distinct = list(dict.fromkeys(needed))
    table = jnp.stack([_numbers(progressions, block.num_layers) for progressions in distinct], axis=1)

    def body(carry: _NormedCarry, row: Int[Array, " numbers"]) -> tuple[_NormedCarry, None]:
        for index in range(row.shape[0] // len(distinct)):
            repeat, layer, moe_layer = (row[index * len(distinct) + distinct.index(number)] for number in needed)
            carry = layers[index % kinds].run(carry, repeat, layer, moe_layer)
        return carry, None

    size = kinds * max(1, fused.unrolled // kinds)
    num_scanned = block.num_layers // size * size
    inner: _NormedCarry = x, normed, cache, capture
    if num_scanned:
        inner, _ = lax.scan(body, inner, table[:num_scanned].reshape(-1, size * len(distinct)))
    if num_scanned < block.num_layers:
        inner, _ = body(inner, table[num_scanned:].reshape(-1))
    x, normed, cache, capture = inner
    return (x, cache, capture), normed.plain


def _fused_projection(layer: LayerSpec, arrays: Mapping[str, nnx.Param[Array]], step: LayerContext) -> Weight | None:
    """The matrices of a mixer's first projection, where an attention kernel takes that; None of mixers in pieces."""
    mixer, attend = layer.mixer, step.attend
    assert isinstance(attend, AnyPagedAttend), attend
    is_fused = isinstance(mixer, GroupedAttention) and mixer.is_fused_by(attend.backend)
    return weight_stack(arrays, "qkv", step.kernels) if is_fused else None


def _numbers(progressions: tuple[Progression, ...], num_layers: int) -> Int[Array, " L"]:
    """The numbers of all layers in order. The device counts them: the compiler would slice a constant number by
    number."""
    counted, kinds = jnp.arange(num_layers, dtype=jnp.int32), len(progressions)
    repeat = counted // kinds
    numbers = [first + repeat * step for first, step in progressions]
    total = numbers[0]
    for kind, other in enumerate(numbers[1:], 1):
        total = jnp.where(counted % kinds == kind, other, total)
    return total


@dataclasses.dataclass(frozen=True, slots=True)
class _FusedLayer:
    """One layer of the pattern, in all of its repeats."""

    fused: FusedSteps
    config: FamilyConfig
    spec: LayerSpec
    arrays: Mapping[str, nnx.Param[Array]]
    next_norms: Float[Array, "R D"]
    next_matrices: Weight | None  # of the first projection of the next layer
    step: LayerContext
    replay: RunRouting | None
    first_moe_layer: int

    def run(
        self, carry: _NormedCarry, repeat: Int[Array, ""], layer: Int[Array, ""], moe_layer: Int[Array, ""]
    ) -> _NormedCarry:
        """Stream, its norm, cache and capture after the layer. `layer` of the cache, `moe_layer` of the record."""
        (x, normed, cache, capture), fused, feed = carry, self.fused, self.spec.feed
        assert isinstance(feed, Sparse), "the few kernels run MoE layers"
        mixed, cache = self._mix(normed, cache, repeat, layer)
        mixed = mixed if isinstance(mixed, ScaledRows) else mixed.reshape(x.shape[0], -1)
        parts = fused.product(mixed, self._matrices("out"), repeat)
        experts = RoutingSize(feed.router.num_experts, feed.router.top_k)
        norm = self._norm(self._all("post_norm"), repeat, self._matrices("gate_up"), experts)
        x, normed, logits = fused.add_parts(x, parts, self._get("out_bias"), norm, self._all("router"))
        biases = RouterBiases(logits=self._get("router_bias"), selection=self._get("selection_bias"), layer=repeat)
        recorded = to_block(capture)
        routing, recorded = fused.route(logits, self._rows(moe_layer), recorded, moe_layer, feed.router, biases)
        capture = with_block(capture, recorded)
        norm = self._norm(self.next_norms, repeat, self.next_matrices)
        x, normed = fused.add_slots(x, self._experts(normed, routing, feed, repeat), norm)
        return x, normed, cache, capture

    def _mix(
        self, normed: NormedRows, cache: Any, repeat: Int[Array, ""], layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N H C"] | Float[Array, "N O"] | ScaledRows, Any]:
        """The values of the mixer, which its last projection takes."""
        mixer, attend = self.spec.mixer, self.step.attend
        assert isinstance(attend, AnyPagedAttend), attend
        matrices = _fused_projection(self.spec, self.arrays, self.step)
        if matrices is not None:
            assert isinstance(mixer, GroupedAttention), mixer
            parts = self.fused.product(normed, matrices, repeat)
            return attend.attend_fused(self._projected(mixer, parts, repeat), cache, layer)
        specs = mixer.weights(self.config.hidden_size)
        slices = scanned_params(specs, self.arrays, self.step.kernels)
        own = {name: lax.dynamic_index_in_dim(array, repeat, keepdims=False) for name, array in slices.items()}
        params = LayerParams(own, self.arrays, repeat, self.step.kernels)
        return mixer.mix(normed.plain, params, self.step, cache, layer)

    def _projected(self, mixer: GroupedAttention, parts: Float[Array, "S N O"], repeat: Int[Array, ""]) -> FusedQKV:
        none = jnp.zeros((parts.shape[1], 0), jnp.float32)
        cos, sin = (none, none) if mixer.rotary is None else fused_angles(mixer.rotary, mixer.head_dim, self.step)
        return FusedQKV(
            qkv=parts,
            q_norm=self._get("q_norm"),
            k_norm=self._get("k_norm"),
            layer=repeat,
            cos=cos,
            sin=sin,
            eps=mixer.eps,
            bias=self._get("qkv_bias"),
            sinks=self._get("sinks"),
            head_dim=mixer.head_dim,
            traits=mixer.traits,
            dtype=self.next_norms.dtype,
            next_matrices=self._matrices("out"),
        )

    def _rows(self, moe_layer: Int[Array, ""]) -> LayerRouting | None:
        """The rows to run in place of the router's choice."""
        if self.replay is None:
            return None
        index = moe_layer - self.first_moe_layer
        return LayerRouting(lax.dynamic_index_in_dim(self.replay.ids, index, keepdims=False), self.replay.valid)

    def _experts(self, normed: NormedRows, routing: Routing, feed: Sparse, repeat: Int[Array, ""]) -> SlotOutputs:
        shared = None
        if "shared_down" in self.arrays:
            gate_up, down = self._matrices("shared_gate_up"), self._matrices("shared_down")
            shared = SharedExperts(gate_up=gate_up, down=down, gate=self._get("shared_gate"))
        call = ExpertCall(
            normed.plain,
            routing.ids,
            routing.weights,
            self.step.valid,
            self._matrices("gate_up"),
            self._matrices("down"),
            repeat,
            feed.router.num_experts,
            self._get("gate_up_bias"),
            self._get("down_bias"),
            feed.activation,
        )
        slots, slot_rows = self.fused.slots(call, shared, normed.scaled)
        return SlotOutputs(
            slots=slots,
            weights=routing.weights,
            valid=self.step.valid,
            inputs=normed.plain,
            shared=shared,
            slot_rows=slot_rows,
        )

    def _norm(
        self,
        scales: Float[Array, "R D"],
        repeat: Int[Array, ""],
        next_matrices: Weight | None,
        experts: RoutingSize | None = None,
    ) -> StreamNorm:
        config = self.config
        return StreamNorm(
            scales=scales,
            layer=repeat,
            eps=config.norm_eps,
            offset=config.norm_offset,
            residual_scale=config.residual_scale,
            next_matrices=next_matrices,
            experts=experts,
        )

    def _matrices(self, name: str) -> Weight:
        """Matrices of all repeats, of numbers or of codes."""
        return weight_stack(self.arrays, name, self.step.kernels)

    def _all(self, name: str) -> Array:
        """An array of all repeats."""
        return self.arrays[name][...]

    def _get(self, name: str) -> Array | None:
        """The same, or None where the layer has no such array."""
        return self._all(name) if name in self.arrays else None
