"""The decoder of all families: embeds, runs the layers of a FamilyConfig, normalises. Serves and trains; attention and
its cache are arguments. A block of layers runs in one kernel where there is one that can (fused_path.py), else layer by
layer. Dims: N tokens, D hidden, V vocabulary, R repeats of a block's pattern, M MoE layers, K experts per token."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from routed_experts.capture.device_cache import RoutedExpertsDeviceCache
from routed_experts.layers.cache_layout import GroupedPages
from routed_experts.layers.kernels import Kernels, RowKernels
from routed_experts.layers.lm_head import REFERENCE_HEAD, HeadProduct, LmHead
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.layers.parallel import SINGLE_DEVICE, AxisGroup
from routed_experts.layers.routing import LayerRouting
from routed_experts.models.base.interface import AttentionFn, SequenceOps, TokenRouting, checkpointed, slice_layers
from routed_experts.models.decoder.family_config import AnyMixer, FamilyConfig, LayerBlock, LayerSpec
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.decoder.fused_path import find_fused_path, run_fused
from routed_experts.models.decoder.layer_counts import LayerCounts, Progression
from routed_experts.models.decoder.layer_params import LayerParams, ParamSpec, make_params, scanned_params
from routed_experts.models.decoder.layer_parts import LayerContext, ReplayInputs


class FamilyDecoder(nnx.Module):
    """`__call__` returns hidden states of tokens; `logits` maps hidden states to scores of the vocabulary."""

    def __init__(self, config: FamilyConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.config = config
        dim, vocab = config.hidden_size, config.vocab_size

        def make(shape: tuple[int, ...], fill: float | None = None) -> nnx.Param[Array]:
            return ParamSpec(name="", shape=shape[1:], fill=fill).make(rngs, shape[0], dtype)

        self.embed = make((vocab, dim))
        self.blocks = nnx.List(
            [
                nnx.List(
                    [
                        make_params(layer.weights(config), rngs=rngs, num_layers=run.repeats, dtype=dtype)
                        for layer in run.pattern
                    ]
                )
                for run in config.blocks
            ]
        )
        self.norm = make((dim,), 1.0 - config.norm_offset)
        self.norm_bias = make((dim,), 0.0) if config.layer_norms else None
        self.head = None if config.tie_embeddings else make((dim, vocab))
        self.head_bias = make((vocab,), 0.0) if config.head_bias else None

    def logits(self, hidden: Float[Array, "N D"], *, product: HeadProduct = REFERENCE_HEAD) -> Float[Array, "N V"]:
        """Scores of the vocabulary, float32."""
        return self.lm_head().logits(hidden, product)

    def lm_head(self) -> LmHead:
        """The weights that `logits` multiplies by."""
        return LmHead(
            matrix=self.embed[...] if self.head is None else self.head[...],
            bias=None if self.head_bias is None else self.head_bias[...],
            tied=self.head is None,
            softcap=self.config.logit_softcap,
        )

    def __call__(
        self,
        tokens: Int[Array, " N"],
        positions: Int[Array, " N"],
        valid: Bool[Array, " N"],
        attend: AttentionFn | SequenceOps,
        cache: Any,
        capture: RoutedExpertsDeviceCache | None,
        *,
        kernels: Kernels,
        routed: TokenRouting | None = None,
        remat: bool = False,
    ) -> tuple[Float[Array, "N D"], Any, RoutedExpertsDeviceCache | None]:
        """Run all layers; returns normalised hidden states, the updated cache, and the capture with this step's ids in
        it."""
        inputs = tokens, positions, valid, attend, cache, capture
        hidden, cache, capture, _ = self.run_tapped(*inputs, kernels=kernels, tapped=(), routed=routed, remat=remat)
        return hidden, cache, capture

    def run_tapped(
        self,
        tokens: Int[Array, " N"],
        positions: Int[Array, " N"],
        valid: Bool[Array, " N"],
        attend: AttentionFn | SequenceOps,
        cache: Any,
        capture: RoutedExpertsDeviceCache | None,
        *,
        kernels: Kernels,
        tapped: tuple[int, ...],
        routed: TokenRouting | None = None,
        remat: bool = False,
    ) -> tuple[Float[Array, "N D"], Any, RoutedExpertsDeviceCache | None, tuple[Float[Array, "N D"], ...]]:
        """The same, and the stream behind each of the layers `tapped`, in this order; a layer may be named twice. A
        block that has such layers runs layer by layer."""
        config = self.config
        ops = attend if isinstance(attend, SequenceOps) else SequenceOps(attend)
        step = LayerContext.create(positions, valid, ops, kernels, config.rotary)
        x = embed(config, self.embed[...], tokens, kernels.group, kernels.stream_dtype)
        carry, normed = (x, cache, capture), None
        streams = jnp.zeros((len(tapped) + 1, *x.shape), x.dtype) if tapped else None  # the last one: of other layers
        counts = LayerCounts()
        for block, arrays in zip(config.blocks, self.blocks, strict=True):
            is_tapped = any(0 <= layer - block.first < block.num_layers for layer in tapped)
            kernel, normed = None if is_tapped else find_fused_path(config, block, step, routed), None
            if kernel is not None:
                carry, normed = run_fused(
                    kernel, config, block, tuple(arrays), self.norm[...], step, carry, routed, counts
                )
            else:
                replayed = None if routed is None else routed.valid
                body = self._pattern(block, arrays, step, counts, replayed, tapped if is_tapped else ())
                slices = [
                    scanned_params(layer.weights(config), repeat, kernels)
                    for layer, repeat in zip(block.pattern, arrays, strict=True)
                ]
                repeats = jnp.arange(block.repeats, dtype=jnp.int32)
                scanned = repeats, slices, _sliced_routing(routed, block, counts.moe)
                begin = (*carry, streams) if is_tapped else carry
                (x, cache, capture, *taken), _ = lax.scan(checkpointed(body) if remat else body, begin, scanned)
                carry, streams = (x, cache, capture), taken[0] if is_tapped else streams
            counts = counts.after(config, block)
        x, cache, capture = carry
        taken = () if streams is None else tuple(streams[tapped.index(layer)] for layer in tapped)
        if normed is not None:  # by the last block's kernel
            return scale_logits(config, normed), cache, capture, taken
        bias = None if self.norm_bias is None else self.norm_bias[...]
        return final_norm(config, x, self.norm[...], bias, kernels.rows), cache, capture, taken

    def _pattern(
        self,
        block: LayerBlock,
        arrays: Any,
        step: LayerContext,
        counts: LayerCounts,
        replayed: Bool[Array, " N"] | None,
        tapped: tuple[int, ...],
    ) -> Callable[[Any, Any], tuple[Any, None]]:
        """The body of a block's scan: the layers of its pattern, one after another. With `tapped` the carry ends with
        their outputs."""
        config = self.config
        cache_layers, moe_layers = counts.cache_layers(config, block), counts.moe_layers(block)
        places = _tapped_places(block, tapped)

        def body(carry: Any, scanned: Any) -> tuple[Any, None]:
            x, cache, capture, *streams = carry
            repeat, slices, ids = scanned
            moe = 0
            for index, layer in enumerate(block.pattern):
                params = LayerParams(slices[index], arrays[index], repeat, step.kernels)
                first_moe, moe_stride = moe_layers[index]
                x, cache = add_mixer(config, layer, x, params, step, cache, cache_layers[index])
                replay = None
                if isinstance(layer.feed, Sparse):
                    routed = None if ids is None or replayed is None else _layer_routing(ids, moe, replayed)
                    moe_layer = first_moe + repeat * moe_stride
                    replay = ReplayInputs(moe_layer, routed)
                    moe += 1
                x, capture = add_feed(config, layer, x, params, step, replay, capture)
                streams = [lax.dynamic_update_index_in_dim(all_, x, places[repeat, index], 0) for all_ in streams]
            return (x, cache, capture, *streams), None

        return body


def decoder_shapes(config: FamilyConfig, dtype: jnp.dtype) -> nnx.State[Any, Any]:
    """Names, shapes and dtypes of a decoder's arrays."""
    return nnx.state(nnx.eval_shape(lambda: FamilyDecoder(config, rngs=nnx.Rngs(0), dtype=dtype)))


def _tapped_places(block: LayerBlock, tapped: tuple[int, ...]) -> Int[Array, "R P"]:
    """Where the output of each layer of a block goes among those of the tapped layers; behind them if it is none."""
    layers = range(block.first, block.first + block.num_layers)
    places = [tapped.index(layer) if layer in tapped else len(tapped) for layer in layers]
    return jnp.array(places, jnp.int32).reshape(block.repeats, len(block.pattern))


def embed(
    config: FamilyConfig,
    table: Float[Array, "V D"],
    tokens: Int[Array, " N"],
    group: AxisGroup = SINGLE_DEVICE,
    dtype: jnp.dtype | None = None,
) -> Float[Array, "N D"]:
    """Input of the first layer, in `dtype`; None: in that of the table."""
    x = group.all_gather(jnp.take(table, tokens, axis=0))
    x = x if dtype is None else x.astype(dtype)
    return x * config.embed_scale if config.embed_scale != 1.0 else x


def add_to_stream(config: FamilyConfig, x: Float[Array, "N D"], y: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """Add the output of a part of a layer; one that is wider than the stream is rounded with it, once."""
    y = y * config.residual_scale if config.residual_scale != 1.0 else y
    return x + y if x.dtype == y.dtype else (x.astype(y.dtype) + y).astype(x.dtype)


def add_mixer(
    config: FamilyConfig,
    layer: LayerSpec,
    x: Float[Array, "N D"],
    params: LayerParams,
    step: LayerContext,
    cache: Any,
    cache_layers: Progression,
) -> tuple[Float[Array, "N D"], Any]:
    """The first half of a layer: add the mixer's output to the stream. `cache_layers`: the layer's number, by repeat,
    among the layers whose rows have its shape."""
    normed, (first, stride) = apply_norm(config, x, "input_norm", params), cache_layers
    mixed, cache = run_mixer(config, layer.mixer, normed, params, step, cache, first + params.index * stride)
    return add_to_stream(config, x, _output(config, layer, mixed, x.dtype, "mixer_norm", params)), cache


def add_feed(
    config: FamilyConfig,
    layer: LayerSpec,
    x: Float[Array, "N D"],
    params: LayerParams,
    step: LayerContext,
    replay: ReplayInputs | None,
    capture: RoutedExpertsDeviceCache | None,
) -> tuple[Float[Array, "N D"], RoutedExpertsDeviceCache | None]:
    """The second half of a layer: add the feed-forward output to the stream, and scale that. `replay`: of a layer with
    experts."""
    normed = x if layer.feed.reads_stream else apply_norm(config, x, "post_norm", params)
    y, capture = layer.feed.run(normed, params, step, replay, capture)
    x = add_to_stream(config, x, _output(config, layer, y, x.dtype, "feed_norm", params))
    return x * params.get("stream_scale").astype(x.dtype) if layer.scaled else x, capture


def run_mixer(
    config: FamilyConfig,
    mixer: AnyMixer,
    x: Float[Array, "N D"],
    params: LayerParams,
    step: LayerContext,
    cache: Any,
    layer: Int[Array, ""],
) -> tuple[Float[Array, "N D"], Any]:
    """Run a mixer on the pages whose rows have its shape. `layer`: its number among the layers of that shape."""
    if not isinstance(cache, GroupedPages):
        return mixer.run(x, params, step, cache, layer)
    group, attend = config.cache_group(mixer), step.attend
    step = dataclasses.replace(step, attend=attend.of_group(group)) if isinstance(attend, PagedAttend) else step
    mixed, pages = mixer.run(x, params, step, cache.arrays[group], layer)
    return mixed, cache.replace(group, pages)


def _output(
    config: FamilyConfig, layer: LayerSpec, y: Float[Array, "N D"], dtype: jnp.dtype, norm: str, params: LayerParams
) -> Float[Array, "N D"]:
    """The output of a part of a layer as it is added to the stream; one that is normed is first rounded to `dtype`."""
    return apply_norm(config, y.astype(dtype), norm, params) if layer.output_norms else y


def apply_norm(config: FamilyConfig, x: Float[Array, "N D"], name: str, params: LayerParams) -> Float[Array, "N D"]:
    """A norm of a layer, by name."""
    bias = params.get(f"{name}_bias") if config.layer_norms else None
    return _normed(config, x, params.get(name), bias, params.kernels.rows)


def final_norm(
    config: FamilyConfig,
    x: Float[Array, "N D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    rows: RowKernels,
) -> Float[Array, "N D"]:
    """Normalised output of the last layer, the input of the head, in the dtype of the weights."""
    return scale_logits(config, _normed(config, x, scale, bias, rows).astype(scale.dtype))


def scale_logits(config: FamilyConfig, normed: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """The input of the head from the normalised output of the last layer."""
    return normed * config.logit_scale if config.logit_scale != 1.0 else normed


def _normed(
    config: FamilyConfig,
    x: Float[Array, "N D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    rows: RowKernels,
) -> Float[Array, "N D"]:
    if bias is not None:
        return rows.layer_norm(x, scale, bias, eps=config.norm_eps)
    return rows.rms_norm(x, scale, eps=config.norm_eps, offset=config.norm_offset)


def _sliced_routing(routed: TokenRouting | None, block: LayerBlock, first: int) -> tuple[Array, Array | None] | None:
    """Ids and weights to replay in a block, by repeat and MoE layer of its pattern."""
    rows = slice_layers(routed, first, block.repeats * block.num_moe) if block.num_moe else None
    return jax.tree.map(lambda part: part.reshape(block.repeats, block.num_moe, *part.shape[1:]), rows)


def _layer_routing(rows: tuple[Array, Array | None], repeat: int, valid: Bool[Array, " N"]) -> LayerRouting:
    ids, weights = rows
    return LayerRouting(ids[repeat], valid, None if weights is None else weights[repeat])
