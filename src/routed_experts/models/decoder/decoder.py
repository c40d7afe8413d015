"""The decoder of all families but Qwen3-MoE's own: embeds, runs the layers of a FamilyConfig, normalises. Serves and
trains; attention and its cache are arguments. Dims: N tokens, D hidden, V vocabulary, R repeats of a block's pattern,
M MoE layers, K experts per token."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from routed_experts.capture.device_cache import RoutedExpertsDeviceCache
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.linear import REFERENCE_LINEAR, LinearBackend
from routed_experts.layers.norm import layer_norm, rms_norm
from routed_experts.layers.parallel import SINGLE_DEVICE, AxisGroup
from routed_experts.layers.routing import LayerRouting
from routed_experts.models.base.interface import AttentionFn, SequenceOps, TokenRouting, checkpointed, slice_layers
from routed_experts.models.decoder.delta_attention import DeltaAttention
from routed_experts.models.decoder.family_config import FamilyConfig, LayerBlock
from routed_experts.models.decoder.feed_forward import Sparse
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

    def logits(self, hidden: Float[Array, "N D"], *, linear: LinearBackend = REFERENCE_LINEAR) -> Float[Array, "N V"]:
        """Scores of the vocabulary, float32."""
        return lm_logits(hidden, self.lm_head(), None if self.head_bias is None else self.head_bias[...], linear)

    def lm_head(self) -> Float[Array, "D V"]:
        """The matrix that `logits` multiplies by."""
        return self.embed[...].T if self.head is None else self.head[...]

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
        config = self.config
        ops = attend if isinstance(attend, SequenceOps) else SequenceOps(attend)
        step = LayerContext(
            positions, valid, ops.attend, ops.recur, kernels, {spec: spec.cos_sin(positions) for spec in config.rotary}
        )
        x = embed(config, self.embed[...], tokens, kernels.group)
        first_moe = first_attending = first_recurrent = 0
        for run, arrays in zip(config.blocks, self.blocks, strict=True):
            num_moe = sum(isinstance(layer.feed, Sparse) for layer in run.pattern)
            body = self._pattern(
                run,
                arrays,
                step,
                (first_moe, first_attending, first_recurrent),
                None if routed is None else routed.valid,
            )
            slices = [
                scanned_params(layer.weights(config), repeat, kernels)
                for layer, repeat in zip(run.pattern, arrays, strict=True)
            ]
            ids = slice_layers(routed, first_moe, run.repeats * num_moe) if num_moe else None
            ids = jax.tree.map(
                lambda rows, run=run, num_moe=num_moe: rows.reshape(run.repeats, num_moe, *rows.shape[1:]), ids
            )
            repeats = jnp.arange(run.repeats, dtype=jnp.int32)
            (x, cache, capture), _ = lax.scan(
                checkpointed(body) if remat else body, (x, cache, capture), (repeats, slices, ids)
            )
            first_moe += run.repeats * num_moe
            first_attending += run.repeats * run.num_attending
            first_recurrent += run.repeats * (len(run.pattern) - run.num_attending)
        bias = None if self.norm_bias is None else self.norm_bias[...]
        return final_norm(config, x, self.norm[...], bias), cache, capture

    def _pattern(
        self,
        run: LayerBlock,
        arrays: Any,
        step: LayerContext,
        first: tuple[int, int, int],
        replayed: Bool[Array, " N"] | None,
    ) -> Callable[[Any, Any], tuple[Any, None]]:
        """The body of a run's scan: the layers of its pattern, one after another."""
        num_moe = sum(isinstance(layer.feed, Sparse) for layer in run.pattern)
        config, residual_scale = self.config, self.config.residual_scale

        def body(carry: Any, scanned: Any) -> tuple[Any, None]:
            x, cache, capture = carry
            repeat, slices, ids = scanned
            moe = 0
            for index, layer in enumerate(run.pattern):
                params = LayerParams(slices[index], arrays[index], repeat, step.kernels)
                kind = int(
                    isinstance(layer.mixer, DeltaAttention)
                )  # attention layers and recurrent layers are counted separately
                same_kind = [isinstance(other.mixer, DeltaAttention) == bool(kind) for other in run.pattern]
                ordinal = first[1 + kind] + repeat * sum(same_kind) + sum(same_kind[:index])
                mixed, cache = layer.mixer.run(
                    apply_norm(config, x, "input_norm", params), params, step, cache, ordinal
                )
                x = x + (mixed * residual_scale if residual_scale != 1.0 else mixed)
                replay = None
                if isinstance(layer.feed, Sparse):
                    routed = None if ids is None or replayed is None else _layer_routing(ids, moe, replayed)
                    replay = ReplayInputs(first[0] + repeat * num_moe + moe, routed)
                    moe += 1
                y, capture = layer.feed.run(apply_norm(config, x, "post_norm", params), params, step, replay, capture)
                x = x + (y * residual_scale if residual_scale != 1.0 else y)
            return (x, cache, capture), None

        return body


def embed(
    config: FamilyConfig, table: Float[Array, "V D"], tokens: Int[Array, " N"], group: AxisGroup = SINGLE_DEVICE
) -> Float[Array, "N D"]:
    """Input of the first layer."""
    x = group.all_gather(jnp.take(table, tokens, axis=0))
    return x * config.embed_scale if config.embed_scale != 1.0 else x


def apply_norm(config: FamilyConfig, x: Float[Array, "N D"], name: str, params: LayerParams) -> Float[Array, "N D"]:
    """A norm of a layer, by name."""
    return _normed(config, x, params.get(name), params.get(f"{name}_bias") if config.layer_norms else None)


def final_norm(
    config: FamilyConfig, x: Float[Array, "N D"], scale: Float[Array, " D"], bias: Float[Array, " D"] | None
) -> Float[Array, "N D"]:
    """Normalised output of the last layer, the input of the head."""
    x = _normed(config, x, scale, bias)
    return x * config.logit_scale if config.logit_scale != 1.0 else x


def lm_logits(
    hidden: Float[Array, "N D"], head: Float[Array, "D V"], bias: Float[Array, " V"] | None, linear: LinearBackend
) -> Float[Array, "N V"]:
    """Logits of hidden states, float32."""
    scores = linear.run(hidden, head[None], 0, jnp.float32)
    return scores if bias is None else scores + bias.astype(jnp.float32)


def _normed(
    config: FamilyConfig, x: Float[Array, "N D"], scale: Float[Array, " D"], bias: Float[Array, " D"] | None
) -> Float[Array, "N D"]:
    if bias is not None:
        return layer_norm(x, scale, bias, eps=config.norm_eps)
    return rms_norm(x, scale, eps=config.norm_eps, offset=config.norm_offset)


def _layer_routing(rows: tuple[Array, Array | None], repeat: int, valid: Bool[Array, " N"]) -> LayerRouting:
    ids, weights = rows
    return LayerRouting(ids[repeat], valid, None if weights is None else weights[repeat])
