"""Linear attention layers of Qwen3-Next and Qwen3.5: projections, the gated delta rule, a gated norm, a projection.
The state of a request does not grow with its length; it is stored beside the pages. Dims: N tokens, D hidden, H value
heads, J key heads, K key dim, V value dim, Q channels of the convolution, W its width."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routed_experts.layers.delta_rule import DeltaInputs, DeltaShape
from routed_experts.layers.norm import rms_norm
from routed_experts.models.base.partitioning import ParallelConfig
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.layer_params import LayerParams, ParamKind, ParamSpec
from routed_experts.models.decoder.layer_parts import CheckpointScope, LayerContext


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaAttention:
    """`by_key_head`: a checkpoint has two projections, whose outputs are grouped by key head (Qwen3-Next);
    else four, one for each purpose (Qwen3.5), of which queries, keys and values are one."""

    shape: DeltaShape
    eps: float
    by_key_head: bool

    @property
    def needs(self) -> frozenset[str]:
        """Array code; no backend feature is required."""
        return frozenset()

    def shard(self, parallel: ParallelConfig) -> "DeltaAttention":
        """Replicated on every device."""
        return self

    @property
    def value_width(self) -> int:
        """All value heads."""
        return self.shape.value_heads * self.shape.value_dim

    def weights(self, hidden: int) -> tuple[ParamSpec, ...]:
        """Queries, keys, values and gates; learning rates and decays; the convolution; what decays; the norm; out."""
        shape = self.shape
        return (
            ParamSpec(name="qkvz", shape=(hidden, shape.channels + self.value_width), kind=ParamKind.MATRIX),
            ParamSpec(name="ba", shape=(hidden, 2 * shape.value_heads), kind=ParamKind.MATRIX),
            ParamSpec(name="conv", shape=(shape.channels, 1, shape.width)),
            ParamSpec(name="dt_bias", shape=(shape.value_heads,), wide=True, fill=1.0),
            ParamSpec(name="a_log", shape=(shape.value_heads,), wide=True, fill=0.0),
            ParamSpec(name="delta_norm", shape=(shape.value_dim,), fill=1.0),
            ParamSpec(name="out", shape=(self.value_width, hidden), kind=ParamKind.MATRIX),
        )

    def sources(self, hidden: int, scope: CheckpointScope) -> Iterator[WeightSource]:
        """In either layout."""
        shape, heads = self.shape, self.shape.value_heads
        if self.by_key_head:
            parts = {"qkvz": (("qkvz", shape.channels + self.value_width),), "ba": (("ba", 2 * heads),)}
        else:
            parts = {"qkvz": (("qkv", shape.channels), ("z", self.value_width)), "ba": (("b", heads), ("a", heads))}
        for to, tensors in parts.items():
            offset = 0
            for name, rows in tensors:
                yield scope.source(f"linear_attn.in_proj_{name}.weight", (rows, hidden), to, offset=offset)
                offset += rows
        yield scope.source("linear_attn.conv1d.weight", (shape.channels, 1, shape.width), "conv")
        yield scope.source("linear_attn.dt_bias", (heads,), "dt_bias")
        yield scope.source("linear_attn.A_log", (heads,), "a_log")
        yield scope.source("linear_attn.norm.weight", (shape.value_dim,), "delta_norm")
        yield scope.source("linear_attn.out_proj.weight", (hidden, self.value_width), "out")

    def run(
        self, x: Float[Array, "N D"], params: LayerParams, step: LayerContext, cache: Any, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N D"], Any]:
        """Project, update and read the state, norm, project."""
        assert step.recur is not None, "this model keeps a state; give SequenceOps with `recur`"
        mixed, gates, rates, steps = self._parts(params.project(x, "qkvz"), params.project(x, "ba"))
        decay = -jnp.exp(params.get("a_log")) * jax.nn.softplus(steps.astype(jnp.float32) + params.get("dt_bias"))
        beta = jax.nn.sigmoid(rates.astype(jnp.float32))
        read, cache = step.recur(DeltaInputs(mixed, decay, beta, params.get("conv")[:, 0], self.shape), cache, layer)
        normed = rms_norm(read.astype(x.dtype), params.get("delta_norm"), eps=self.eps)
        gated = (normed.astype(jnp.float32) * jax.nn.silu(gates.astype(jnp.float32))).astype(x.dtype)
        return params.project(gated.reshape(x.shape[0], -1), "out"), cache

    def _parts(
        self, qkvz: Float[Array, "N O"], ba: Float[Array, "N O"]
    ) -> tuple[Float[Array, "N Q"], Float[Array, "N H V"], Float[Array, "N H"], Float[Array, "N H"]]:
        """Inputs of the convolution, gates, learning rates, steps of the decay."""
        shape, rows = self.shape, qkvz.shape[0]
        if not self.by_key_head:
            mixed, gates = jnp.split(qkvz, [shape.channels], axis=-1)
            rates, steps = jnp.split(ba, 2, axis=-1)
            return mixed, gates.reshape(rows, shape.value_heads, -1), rates, steps
        width = self.value_width // shape.key_heads
        grouped = qkvz.reshape(rows, shape.key_heads, -1)
        bounds = (0, shape.key_dim, 2 * shape.key_dim, 2 * shape.key_dim + width)
        # One slice a head: XLA on CPU (jaxlib 0.10.2) gives wrong numbers for bfloat16 slices of all heads that are
        # reshaped, put side by
        # side and then padded in one fusion (tests/models/test_delta_attention.py).
        spans = [(head, low, high) for low, high in itertools.pairwise(bounds) for head in range(shape.key_heads)]
        mixed = jnp.concatenate([grouped[:, head, low:high] for head, low, high in spans], axis=-1)
        gates = grouped[:, :, bounds[-1] :].reshape(rows, shape.value_heads, -1)
        rates, steps = (part.reshape(rows, -1) for part in jnp.split(ba.reshape(rows, shape.key_heads, -1), 2, axis=-1))
        return mixed, gates, rates, steps
