"""Linear attention layers of Qwen3-Next, Qwen3.5 and Ling 3.0: projections, the gated delta rule, a gated norm, a
projection. The state of a request does not grow with its length; it is stored beside the pages. Dims: N tokens, D
hidden, H value heads, J key heads, K key dim, V value dim, Q channels of the convolution, W its width, X decays of a
token."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routed_experts.layers.delta_rule import DeltaInputs, DeltaShape
from routed_experts.models.base.partitioning import ParallelConfig
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.layer_params import LayerParams, ParamKind, ParamSpec
from routed_experts.models.decoder.layer_parts import CheckpointScope, LayerContext

_GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}
# below the layer: where tensors are, and the names of a projection, the convolution, the norm and the last projection
_TOGETHER = ("linear_attn", "in_proj_{}", "conv1d", "norm", "out_proj")
_SEPARATE = ("attention", "{}_proj", "{}_conv1d", "o_norm", "dense")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaAttention:
    """Linear attention by the gated delta rule, whose state has a fixed size.

    `layout` of a checkpoint: "key heads", two projections whose outputs are grouped by key head (Qwen3-Next);
    "purposes", four, of which queries, keys and values are one (Qwen3.5); or "separate", six (Ling 3.0). `gate`: the
    activation that multiplies the normalised output. `lower_bound`: of a decay, which is then a sigmoid of it; 0 for
    decays by softplus."""

    shape: DeltaShape
    eps: float
    layout: str
    gate: str = "silu"
    lower_bound: float = 0.0

    @property
    def needs(self) -> frozenset[str]:
        """No backend feature is required: a backend without `recur` runs it as array code."""
        return frozenset()

    @property
    def stack_needs(self) -> frozenset[str]:
        """Features that a kernel of whole layers must have for it, in words."""
        return frozenset({"a recurrent state"})

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
            ParamSpec(name="ba", shape=(hidden, shape.value_heads + shape.num_decays), kind=ParamKind.MATRIX),
            *(
                ParamSpec(name=name, shape=(channels, 1, shape.width), wide=self.layout == "separate")
                for name, channels in self._convolutions.items()
            ),
            ParamSpec(name="dt_bias", shape=(shape.num_decays,), wide=True, fill=1.0),
            ParamSpec(name="a_log", shape=(shape.value_heads,), wide=True, fill=0.0),
            ParamSpec(name="delta_norm", shape=(shape.value_dim,), fill=1.0),
            ParamSpec(name="out", shape=(self.value_width, hidden), kind=ParamKind.MATRIX),
        )

    def sources(self, hidden: int, scope: CheckpointScope) -> Iterator[WeightSource]:
        """In each layout."""
        shape, heads, keys = self.shape, self.shape.value_heads, self.shape.key_heads * self.shape.key_dim
        at, projection, conv, norm, out = _SEPARATE if self.layout == "separate" else _TOGETHER
        if self.layout == "separate":
            qkvz = (("q", keys), ("k", keys), ("v", self.value_width), ("g", self.value_width))
            parts = {"qkvz": qkvz, "ba": (("b", heads), ("f", shape.num_decays))}
        elif self.layout == "key heads":
            parts = {"qkvz": (("qkvz", shape.channels + self.value_width),), "ba": (("ba", 2 * heads),)}
        else:
            parts = {"qkvz": (("qkv", shape.channels), ("z", self.value_width)), "ba": (("b", heads), ("a", heads))}
        for to, tensors in parts.items():
            offset = 0
            for name, rows in tensors:
                yield scope.source(f"{at}.{projection.format(name)}.weight", (rows, hidden), to, offset=offset)
                offset += rows
        for name, channels in self._convolutions.items():
            tensor = conv.format(name.partition("_")[2])
            yield scope.source(f"{at}.{tensor}.weight", (channels, 1, shape.width), name)
        yield scope.source(f"{at}.dt_bias", (shape.num_decays,), "dt_bias")
        yield scope.source(f"{at}.A_log", (heads,), "a_log")
        yield scope.source(f"{at}.{norm}.weight", (shape.value_dim,), "delta_norm")
        yield scope.source(f"{at}.{out}.weight", (hidden, self.value_width), "out")

    @property
    def _convolutions(self) -> dict[str, int]:
        """The arrays of the convolution and their channels."""
        if self.layout != "separate":
            return {"conv": self.shape.channels}
        keys = self.shape.key_heads * self.shape.key_dim
        return {"conv_q": keys, "conv_k": keys, "conv_v": self.value_width}

    def run(
        self, x: Float[Array, "N D"], params: LayerParams, step: LayerContext, cache: Any, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N D"], Any]:
        """Mix and project."""
        values, cache = self.mix(x, params, step, cache, layer)
        return params.project(values, "out"), cache

    def mix(
        self, x: Float[Array, "N D"], params: LayerParams, step: LayerContext, cache: Any, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N HV"], Any]:
        """Project, update and read the state, norm, gate."""
        assert step.recur is not None, "this model keeps a state; give SequenceOps with `recur`"
        mixed, gates, rates, steps = self._parts(params.project(x, "qkvz"), params.project(x, "ba"))
        shifted = (steps.astype(jnp.float32) + params.get("dt_bias")).reshape(x.shape[0], self.shape.value_heads, -1)
        rate = jnp.exp(params.get("a_log"))[:, None]
        bounded = self.lower_bound * jax.nn.sigmoid(rate * shifted) if self.lower_bound else None
        decay = (-rate * jax.nn.softplus(shifted) if bounded is None else bounded).reshape(x.shape[0], -1)
        beta = jax.nn.sigmoid(rates.astype(jnp.float32))
        kernel = jnp.concatenate([params.get(name)[:, 0] for name in self._convolutions])
        read, cache = step.recur(DeltaInputs(mixed, decay, beta, kernel, self.shape), cache, layer)
        normed = params.kernels.rows.rms_norm(read.astype(x.dtype), params.get("delta_norm"), eps=self.eps)
        gated = (normed.astype(jnp.float32) * _GATES[self.gate](gates.astype(jnp.float32))).astype(x.dtype)
        return gated.reshape(x.shape[0], -1), cache

    def _parts(
        self, qkvz: Float[Array, "N O"], ba: Float[Array, "N O"]
    ) -> tuple[Float[Array, "N Q"], Float[Array, "N H V"], Float[Array, "N H"], Float[Array, "N X"]]:
        """Inputs of the convolution, gates, learning rates, steps of the decay."""
        shape, rows = self.shape, qkvz.shape[0]
        if self.layout != "key heads":
            mixed, gates = jnp.split(qkvz, [shape.channels], axis=-1)
            rates, steps = jnp.split(ba, [shape.value_heads], axis=-1)
            return mixed, gates.reshape(rows, shape.value_heads, -1), rates, steps
        width = self.value_width // shape.key_heads
        grouped = qkvz.reshape(rows, shape.key_heads, -1)
        bounds = (0, shape.key_dim, 2 * shape.key_dim, 2 * shape.key_dim + width)
        # One slice a head: XLA on CPU (jaxlib 0.10.2) gives wrong numbers for bfloat16 slices of all heads that are
        # reshaped, concatenated and then padded in one fusion (tests/models/test_delta_attention.py).
        spans = [(head, low, high) for low, high in itertools.pairwise(bounds) for head in range(shape.key_heads)]
        mixed = jnp.concatenate([grouped[:, head, low:high] for head, low, high in spans], axis=-1)
        gates = grouped[:, :, bounds[-1] :].reshape(rows, shape.value_heads, -1)
        rates, steps = (part.reshape(rows, -1) for part in jnp.split(ba.reshape(rows, shape.key_heads, -1), 2, axis=-1))
        return mixed, gates, rates, steps
