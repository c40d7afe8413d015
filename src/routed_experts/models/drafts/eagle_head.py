"""EAGLE-1 and EAGLE-2 head: Llama layers over the target's final hidden states (Li et al. 2024), read from a folder of
its own. EAGLE-2 differs in how drafts are searched alone.

    x = fc [e; h] + b;    layer 0 without a norm ahead of attention;    scores = the target's head(g);    recycled: g

h is behind the target's final norm, and g imitates it. Dims: N tokens, D width of the head and of the target, L layers,
V vocabulary."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.cache_layout import CacheLayout
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.lm_head import LmHead
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.interface import AttentionFn
from routed_experts.models.base.partitioning import AxisPartition, ParallelConfig
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.layer_params import ParamSpec
from routed_experts.models.decoder.layer_parts import CheckpointScope
from routed_experts.models.drafts.llama_layer import LlamaLayer, layer_context, read_llama_layer

_INPUT_NORM = "input_layernorm"
_MAX_LAYERS = 64  # of a head; those that are published have one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """The layers and sizes of an EAGLE or EAGLE-3 head. `bias`: fc has one. All layers but the first norm the input of
    attention."""

    layers: tuple[LlamaLayer, ...]
    vocab_size: int
    bias: bool = True

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.layers[0].hidden_size

    @property
    def cache(self) -> CacheLayout:
        """Keys and values of all layers."""
        return self.layers[0].attention.cache(len(self.layers))

    def shard(self, parallel: ParallelConfig) -> "EagleConfig":
        """The head as one of several devices runs it."""
        return dataclasses.replace(self, layers=tuple(layer.shard(parallel) for layer in self.layers))

    def partitions(self) -> dict[str, AxisPartition]:
        """How arrays are sharded, by dotted path; arrays that are not named are replicated."""
        named = dict[str, AxisPartition]()
        for index, layer in enumerate(self.layers):
            named |= layer.partitions(f"layers.{index}")
        return named

    def sources(self) -> Iterator[WeightSource]:
        """The table of names, without a prefix."""
        dim = self.hidden_size
        yield WeightSource(name="fc.weight", shape=(dim, 2 * dim), target="fc", index=(0,), transpose=True)
        if self.bias:
            yield WeightSource(name="fc.bias", shape=(dim,), target="fc_bias")
        for index, layer in enumerate(self.layers):
            yield from layer.sources(CheckpointScope(target=f"layers.{index}", row=0, prefix=f"layers.{index}."))


class EagleHead(nnx.Module):
    """A DraftModel; embedding and head are the target's."""

    def __init__(self, config: EagleConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.config = config
        dim = config.hidden_size
        self.fc = ParamSpec(name="", shape=(2 * dim, dim)).make(rngs, 1, dtype)
        self.fc_bias = ParamSpec(name="", shape=(), fill=0.0).make(rngs, dim, dtype) if config.bias else None
        self.layers = nnx.List([layer.make(rngs, dtype) for layer in config.layers])

    @property
    def cache(self) -> CacheLayout:
        """Keys and values of all layers."""
        return self.config.cache

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """None: the final hidden states are the features."""
        return ()

    def features(
        self, hidden: Float[Array, "N D"], streams: Sequence[Float[Array, "N D"]], *, kernels: Kernels
    ) -> Float[Array, "N D"]:
        """The hidden states, in the dtype of the residual stream."""
        return hidden.astype(kernels.stream_dtype or self.fc[...].dtype)

    def __call__(
        self,
        features: Float[Array, "N D"],
        embeddings: Float[Array, "N D"],
        positions: Int[Array, " N"],
        valid: Bool[Array, " N"],
        attend: AttentionFn,
        cache: Any,
        *,
        draft_index: int,
        target_norm: Float[Array, " D"],
        kernels: Kernels,
        tokens: Int[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "N D"], Float[Array, "N D"], Any]:
        """Run the layers; the same ones for every draft, without the target's norm."""
        step = layer_context(positions, valid, attend, kernels, self.config.layers[0].attention.rotary)
        both = jnp.concatenate([embeddings.astype(features.dtype), features], axis=-1)  # [N, 2D]
        stream = kernels.linear.run(both, self.fc[...], 0, features.dtype)
        stream = stream if self.fc_bias is None else stream + self.fc_bias[...].astype(stream.dtype)
        for index, (layer, arrays) in enumerate(zip(self.config.layers, self.layers, strict=True)):
            params = layer.params(arrays, kernels)
            x = layer.norm(stream, _INPUT_NORM, params) if layer.input_norms else stream
            stream, cache = layer.run(stream, x, params, step, cache, index)
        return stream.astype(self.fc[...].dtype), stream, cache

    def lm_head(self, target: LmHead) -> LmHead:
        """The target's."""
        return target

    def target_ids(self) -> Int[Array, " W"] | None:
        """None: the vocabulary is the target's."""
        return None


def read_eagle(reader: ConfigReader) -> EagleConfig:
    """Read config.json. A CheckpointError names what is missing or not served."""
    first = read_llama_layer(reader, input_norms=(), doubled=False)
    other = dataclasses.replace(first, input_norms=((_INPUT_NORM, _INPUT_NORM),))
    count = reader.int("num_hidden_layers", minimum=1, maximum=_MAX_LAYERS, default=1)
    return EagleConfig(
        layers=(first, *[other] * (count - 1)),
        vocab_size=reader.int("vocab_size", minimum=1),
        bias=reader.bool("bias", default=True),
    )
