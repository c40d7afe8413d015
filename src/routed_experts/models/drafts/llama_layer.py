"""One layer of a draft head, a Llama layer whose first norms differ: its arrays, their tensors, and the two additions
to the stream. Dims: N tokens, D hidden, I input width of queries, keys and values."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from routed_experts.layers.kernels import Kernels
from routed_experts.layers.rotary import RotarySpec
from routed_experts.models.base.config_reader import MAX_HEAD_DIM, ConfigReader
from routed_experts.models.base.interface import AttentionFn, SequenceOps
from routed_experts.models.base.partitioning import AxisPartition, ParallelConfig
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.feed_forward import Dense
from routed_experts.models.decoder.grouped_attention import GroupedAttention
from routed_experts.models.decoder.layer_params import LayerParams, ParamSpec, make_params, scanned_params
from routed_experts.models.decoder.layer_parts import CheckpointScope, LayerContext

_POST_NORM = ("post_norm", "post_attention_layernorm")
_OUTPUTS = ("out", "out_bias")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLayer:
    """A layer of a draft head: attention and a dense feed-forward, as in Llama. `input_norms`: array and tensor of each
    norm ahead of attention; what these norms read is up to the head."""

    hidden_size: int
    input_width: int
    attention: GroupedAttention
    feed: Dense
    eps: float
    input_norms: tuple[tuple[str, str], ...] = ()

    @property
    def _norms(self) -> tuple[tuple[str, str], ...]:
        return (*self.input_norms, _POST_NORM)

    def weights(self) -> tuple[ParamSpec, ...]:
        """All arrays of the layer."""
        norms = (ParamSpec(name=name, shape=(self.hidden_size,), fill=1.0) for name, _ in self._norms)
        inputs, outputs = (self.attention.weights(width) for width in (self.input_width, self.hidden_size))
        pairs = zip(inputs, outputs, strict=True)
        attention = (narrow if wide.name in _OUTPUTS else wide for wide, narrow in pairs)
        return (*norms, *attention, *self.feed.weights(self.hidden_size))

    def sources(self, scope: CheckpointScope) -> Iterator[WeightSource]:
        """The tensors of the layer."""
        for name, tensor in self._norms:
            yield scope.source(f"{tensor}.weight", (self.hidden_size,), name)
        inputs, outputs = (self.attention.sources(width, scope) for width in (self.input_width, self.hidden_size))
        for wide, narrow in zip(inputs, outputs, strict=True):
            yield narrow if wide.target.rpartition(".")[2] in _OUTPUTS else wide
        yield from self.feed.sources(self.hidden_size, scope)

    def partitions(self, at: str) -> dict[str, AxisPartition]:
        """How arrays below the dotted path `at` are sharded; arrays that are not named are replicated."""
        named = ((weight.name, weight.partition_in(1, by_expert=False)) for weight in self.weights())
        return {f"{at}.{name}": partition for name, partition in named if partition is not None}

    def shard(self, parallel: ParallelConfig) -> "LlamaLayer":
        """What one device does of it."""
        return dataclasses.replace(self, attention=self.attention.shard(parallel), feed=self.feed.shard(parallel))

    def make(self, rngs: nnx.Rngs, dtype: jnp.dtype) -> nnx.Dict[Any]:
        """Fresh arrays, each a stack of one layer."""
        return make_params(self.weights(), rngs=rngs, num_layers=1, dtype=dtype)

    def params(self, arrays: nnx.Dict[Any], kernels: Kernels) -> LayerParams:
        """The arrays as the parts of the layer take them."""
        sliced = {name: array[0] for name, array in scanned_params(self.weights(), arrays, kernels).items()}
        return LayerParams(sliced, arrays, jnp.zeros((), jnp.int32), kernels)

    def norm(self, x: Float[Array, "N D"], name: str, params: LayerParams) -> Float[Array, "N D"]:
        """A norm of the layer, by the name of its array."""
        return params.kernels.rows.rms_norm(x, params.get(name), eps=self.eps)

    def run(
        self,
        residual: Float[Array, "N D"],
        x: Float[Array, "N I"],
        params: LayerParams,
        step: LayerContext,
        cache: Any,
        layer: int,
    ) -> tuple[Float[Array, "N D"], Any]:
        """Add the attention of x to the residual, and to that the network of its norm. `layer`: of the cache."""
        mixed, cache = self.attention.run(x, params, step, cache, jnp.full((), layer, jnp.int32))
        stream = _add(residual, mixed)
        y, _ = self.feed.run(self.norm(stream, _POST_NORM[0], params), params, step, None, None)
        return _add(stream, y), cache


def layer_context(
    positions: Array, valid: Array, attend: AttentionFn, kernels: Kernels, rotary: RotarySpec | None
) -> LayerContext:
    """Inputs that the layers of a head share."""
    specs = () if rotary is None else (rotary,)
    return LayerContext.create(positions, valid, SequenceOps(attend), kernels, specs)


def read_llama_layer(reader: ConfigReader, *, input_norms: tuple[str, ...], doubled: bool) -> LlamaLayer:
    """Read a layer's sizes. `input_norms`: tensors, each named as its array is; `doubled`: queries, keys and values
    have inputs of twice the hidden size. A CheckpointError names what is missing or not served."""
    hidden, heads = reader.int("hidden_size", minimum=1), reader.int("num_attention_heads", minimum=1)
    kv_heads = reader.int("num_key_value_heads", minimum=1, default=heads)
    reader.require(heads % kv_heads == 0, "num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    head_dim = reader.int("head_dim", minimum=2, maximum=MAX_HEAD_DIM, default=max(2, hidden // heads))
    reader.require(head_dim % 2 == 0, "head_dim", "an even number: rotary positions turn pairs")
    reader.require(reader.str("hidden_act", default="silu") == "silu", "hidden_act", "'silu'")
    for switch in ("mlp_bias", "use_sliding_window"):
        reader.require(not reader.bool(switch, default=False), switch, "false")
    bias, eps = reader.bool("attention_bias", default=False), reader.float("rms_norm_eps", default=1e-6)
    reader.require(eps >= 0, "rms_norm_eps", "a number of at least 0")
    attention = GroupedAttention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=read_rotary(reader, head_dim).spec,
        eps=eps,
        bias_in=bias,
        bias_out=bias,
    )
    return LlamaLayer(
        hidden_size=hidden,
        input_width=2 * hidden if doubled else hidden,
        attention=attention,
        feed=Dense(width=reader.int("intermediate_size", minimum=1)),
        eps=eps,
        input_norms=tuple((name, name) for name in input_norms),
    )


def _add(x: Float[Array, "N D"], y: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """Add the output of a part of the layer, which may be wider than the stream; the sum is rounded once."""
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
