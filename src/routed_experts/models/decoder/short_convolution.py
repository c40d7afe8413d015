"""Layers of LFM2 that mix tokens by a short convolution: b, c and u are projected, c * convolved(b * u) is projected
back. The state of a request is its last W - 1 inputs of the convolution. Dims: N tokens, D hidden, W taps."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routed_experts.layers.short_conv import ConvInputs, ConvShape
from routed_experts.models.base.partitioning import ParallelConfig
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.layer_params import LayerParams, ParamKind, ParamSpec
from routed_experts.models.decoder.layer_parts import CheckpointScope, LayerContext


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution:
    """A gated causal convolution over the last tokens, in place of attention. `biased`: the convolution and both
    projections have biases."""

    shape: ConvShape
    biased: bool = False

    @property
    def needs(self) -> frozenset[str]:
        """No backend feature is required: it runs as array code."""
        return frozenset()

    @property
    def stack_needs(self) -> frozenset[str]:
        """Features that a kernel of whole layers must have for it, in words."""
        return frozenset({"a recurrent state"})

    def shard(self, parallel: ParallelConfig) -> "ShortConvolution":
        """Replicated on every device."""
        return self

    def weights(self, hidden: int) -> tuple[ParamSpec, ...]:
        """b, c and u; the convolution; out; and their biases."""
        biases = {"bcu_bias": 3 * hidden, "conv_bias": hidden, "out_bias": hidden} if self.biased else {}
        return (
            ParamSpec(name="bcu", shape=(hidden, 3 * hidden), kind=ParamKind.MATRIX),
            ParamSpec(name="conv", shape=(hidden, 1, self.shape.width)),
            ParamSpec(name="out", shape=(hidden, hidden), kind=ParamKind.MATRIX),
            *(ParamSpec(name=name, shape=(size,), fill=0.0) for name, size in biases.items()),
        )

    def sources(self, hidden: int, scope: CheckpointScope) -> Iterator[WeightSource]:
        """conv.in_proj, conv.conv and conv.out_proj."""
        names = {"bcu": "in_proj", "conv": "conv", "out": "out_proj"}
        for weight in self.weights(hidden):
            array, _, bias = weight.name.partition("_")
            name = f"conv.{names[array]}.{bias or 'weight'}"
            yield scope.source(
                name, weight.shape[::-1] if weight.kind is ParamKind.MATRIX else weight.shape, weight.name
            )

    def run(
        self, x: Float[Array, "N D"], params: LayerParams, step: LayerContext, cache: Any, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N D"], Any]:
        """Mix and project."""
        values, cache = self.mix(x, params, step, cache, layer)
        return params.project(values, "out"), cache

    def mix(
        self, x: Float[Array, "N D"], params: LayerParams, step: LayerContext, cache: Any, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N D"], Any]:
        """Project, convolve with the state, multiply."""
        assert step.recur is not None, "this model keeps a state; give SequenceOps with `recur`"
        b, c, u = jnp.split(params.project(x, "bcu"), 3, axis=-1)
        bias = params.get("conv_bias") if self.biased else None
        convolved, cache = step.recur(ConvInputs(b * u, params.get("conv")[:, 0], bias, self.shape), cache, layer)
        return c * convolved, cache
