"""EAGLE-3 head: one layer over three or more streams of the target (Li et al. 2025), read from a folder of its own.

    f = fc [z1; z2; ..]         z: the residual stream after a tapped layer, raw; with `fc_norm` each is normed first
    r = f, or g of the call before;    u = RMS(r; hidden_norm);    v = RMS(e; input_layernorm)
    g = (norm_before_residual ? u : r) + Attn([v; u]), and the layer's network on top
    scores = lm_head(RMS(g; norm)), or lm_head(g) without `norm_output`;    recycled: g

Dims: N tokens, D width of the head, T width of the target, F width of features (D), S streams, V vocabulary, W draft
vocabulary."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.cache_layout import CacheLayout
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.lm_head import LmHead
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.interface import AttentionFn
from routed_experts.models.base.partitioning import AxisPartition, ParallelConfig, embedding_partition
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.layer_params import ParamSpec
from routed_experts.models.decoder.layer_parts import CheckpointScope
from routed_experts.models.drafts.llama_layer import LlamaLayer, layer_context, read_llama_layer

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_INPUT_NORMS = ("hidden_norm", "input_layernorm")
_FIXED_SWITCHES: Mapping[str, bool] = MappingProxyType(  # of `eagle_config`: other values are other heads
    {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "norm_before_fc": False,
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """`layer_ids`: as config.json has them, in either convention; empty: not given. `tapped_layers`: the target's
    layers whose outputs are read, once they are known. `own_embedding`, `own_head`, `has_token_map`: which arrays the
    folder brings; they follow from its tensors."""

    layer: LlamaLayer
    target_size: int
    vocab_size: int
    draft_vocab_size: int
    layer_ids: tuple[int, ...] = ()
    tapped_layers: tuple[int, ...] = ()
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = True
    own_embedding: bool = False
    own_head: bool = True
    has_token_map: bool = False

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.layer.hidden_size

    @property
    def cache(self) -> CacheLayout:
        """Keys and values of one layer."""
        return self.layer.attention.cache(1)

    def shard(self, parallel: ParallelConfig) -> "Eagle3Config":
        """The head as one of several devices runs it."""
        return dataclasses.replace(self, layer=self.layer.shard(parallel))

    def partitions(self) -> dict[str, AxisPartition]:
        """How arrays are sharded, by dotted path; arrays that are not named are replicated."""
        own = {"embed": self.own_embedding, "head": self.own_head}
        vocabulary = embedding_partition(self.hidden_size, tied=False)
        return self.layer.partitions("layer") | {name: vocabulary[name] for name, has in own.items() if has}

    def sources(self) -> Iterator[WeightSource]:
        """The table of names, in the spelling `midlayer.` without a prefix."""
        dim, streams = self.hidden_size, len(self.tapped_layers)
        fc = (dim, streams * self.target_size)
        yield WeightSource(name="fc.weight", shape=fc, target="fc", index=(0,), transpose=True)
        for index in range(streams if self.fc_norm else 0):
            yield WeightSource(
                name=f"fc_norm.{index}.weight", shape=(self.target_size,), target="fc_norm", index=(index,)
            )
        yield from self.layer.sources(CheckpointScope(target="layer", row=0, prefix="midlayer."))
        if self.norm_output:
            yield WeightSource(name="norm.weight", shape=(dim,), target="norm")
        if self.own_head:
            shape = (self.draft_vocab_size, dim)
            yield WeightSource(name="lm_head.weight", shape=shape, target="head", transpose=True)
        if self.own_embedding:
            yield WeightSource(name="embed_tokens.weight", shape=(self.vocab_size, dim), target="embed")


class Eagle3Head(nnx.Module):
    """A DraftModel. `token_ids` [W] int32: the target's id of each draft id."""

    def __init__(self, config: Eagle3Config, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.config = config
        dim, streams, target = config.hidden_size, len(config.tapped_layers), config.target_size

        def make(shape: tuple[int, ...], fill: float | None = None) -> nnx.Param[Array]:
            return ParamSpec(name="", shape=shape[1:], fill=fill).make(rngs, shape[0], dtype)

        self.fc = make((1, streams * target, dim))
        self.fc_norm = make((streams, target), 1.0) if config.fc_norm else None
        self.layer = config.layer.make(rngs, dtype)
        self.norm = make((dim,), 1.0) if config.norm_output else None
        self.head = make((dim, config.draft_vocab_size)) if config.own_head else None
        self.embed = make((config.vocab_size, dim)) if config.own_embedding else None
        ids = jnp.arange(config.draft_vocab_size, dtype=jnp.int32)
        self.token_ids = nnx.Param(ids) if config.has_token_map else None

    @property
    def cache(self) -> CacheLayout:
        """Keys and values of one layer."""
        return self.config.cache

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs `features` takes."""
        return self.config.tapped_layers

    def features(
        self, hidden: Float[Array, "N T"], streams: Sequence[Float[Array, "N T"]], *, kernels: Kernels
    ) -> Float[Array, "N F"]:
        """fc of the streams, in the dtype of the residual stream; `hidden` is not read."""
        assert len(streams) == len(self.tapped_layers), (len(streams), self.tapped_layers)
        dtype = kernels.stream_dtype or self.fc[...].dtype
        parts = [stream.astype(dtype) for stream in streams]
        if self.fc_norm is not None:
            scales, eps = self.fc_norm[...], self.config.layer.eps
            parts = [kernels.rows.rms_norm(part, scales[index], eps=eps) for index, part in enumerate(parts)]
        return kernels.linear.run(jnp.concatenate(parts, axis=-1), self.fc[...], 0, dtype)

    def __call__(
        self,
        features: Float[Array, "N F"],
        embeddings: Float[Array, "N T"],
        positions: Int[Array, " N"],
        valid: Bool[Array, " N"],
        attend: AttentionFn,
        cache: Any,
        *,
        draft_index: int,
        target_norm: Float[Array, " T"],
        kernels: Kernels,
        tokens: Int[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "N D"], Float[Array, "N F"], Any]:
        """Run the layer; the same one for every draft, without the target's norm. A head with a table of embeddings of
        its own reads `tokens`, not `embeddings`."""
        config, layer = self.config, self.config.layer
        params = layer.params(self.layer, kernels)
        step = layer_context(positions, valid, attend, kernels, layer.attention.rotary)
        if self.embed is not None:
            assert tokens is not None, "a head with its own table of embeddings needs the successors' ids"
            embeddings = kernels.group.all_gather(jnp.take(self.embed[...], tokens, axis=0))
        normed = layer.norm(features, "hidden_norm", params)
        embedded = layer.norm(embeddings.astype(features.dtype), "input_layernorm", params)
        residual = normed if config.norm_before_residual else features
        both = jnp.concatenate([embedded, normed], axis=-1)  # [N, 2D]
        stream, cache = layer.run(residual, both, params, step, cache, 0)
        scored = stream if self.norm is None else kernels.rows.rms_norm(stream, self.norm[...], eps=layer.eps)
        return scored.astype(self.fc[...].dtype), stream, cache

    def lm_head(self, target: LmHead) -> LmHead:
        """Its own scores of the draft vocabulary, or the target's."""
        return target if self.head is None else LmHead(matrix=self.head[...])

    def target_ids(self) -> Int[Array, " W"] | None:
        """The target's id of each draft id; None where they are the same."""
        return None if self.token_ids is None else self.token_ids[...]


def read_eagle3(reader: ConfigReader) -> Eagle3Config:
    """Read config.json. A CheckpointError names what is missing, and heads that are built otherwise."""
    inner = reader.section("transformer_layer_config") if reader.has("transformer_layer_config") else reader
    inner.require(inner.int("num_hidden_layers", default=1) == 1, "num_hidden_layers", "1 layer of an EAGLE-3 head")
    eagle = reader.section("eagle_config")
    for section in (reader, eagle):
        for switch, value in _FIXED_SWITCHES.items():
            section.require(section.bool(switch, default=value) is value, switch, _no_such_head(value))
    layer = read_llama_layer(inner, input_norms=_INPUT_NORMS, doubled=True)
    vocab, ids = inner.int("vocab_size", minimum=1), reader.ints(LAYER_IDS, default=())
    nested = eagle.ints(LAYER_IDS, default=ids)
    eagle.require(not ids or nested == ids, LAYER_IDS, f"{list(ids)}, as at the top level")
    return Eagle3Config(
        layer=layer,
        target_size=reader.int("target_hidden_size", minimum=1, default=layer.hidden_size),
        vocab_size=vocab,
        draft_vocab_size=reader.int("draft_vocab_size", minimum=1, maximum=vocab, default=vocab),
        layer_ids=nested,
        fc_norm=reader.bool("fc_norm", default=False),
        norm_before_residual=reader.bool("norm_before_residual", default=False),
        norm_output=reader.bool("norm_output", default=True),
    )


def _no_such_head(value: bool) -> str:
    return f"{'true' if value else 'false'}: EAGLE-3 heads of the other kind are not served"
