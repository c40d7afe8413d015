"""Predictor: the layers of a checkpoint that predict further tokens (multi-token prediction; NEXTN), as a draft model.

Module i is one decoder layer behind a projection of two normed inputs; PredictorSpec has the equations. It runs on the
parts of the decoder. Its experts are not recorded, and none of its routing is replayed. Dims: N tokens, D hidden of
target and draft model, M modules."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.cache_layout import CacheLayout
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.lm_head import LmHead
from routed_experts.models.base.interface import AttentionFn, SequenceOps
from routed_experts.models.base.partitioning import AxisPartition
from routed_experts.models.decoder.decoder import add_feed, add_mixer, apply_norm, final_norm, scale_logits
from routed_experts.models.decoder.family_config import FamilyConfig, LayerBlock, PredictorSpec, Recurrent
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.decoder.fused_path import find_fused_path, run_fused
from routed_experts.models.decoder.grouped_attention import GroupedAttention
from routed_experts.models.decoder.latent_attention import LatentAttention
from routed_experts.models.decoder.layer_counts import LayerCounts
from routed_experts.models.decoder.layer_params import LayerParams, make_params, scanned_params
from routed_experts.models.decoder.layer_parts import LayerContext, ReplayInputs

ARRAYS = "arrays"  # the path of the arrays in the state of a Predictor


class Predictor(nnx.Module):
    """A DraftModel of `num_modules` modules. Each has a layer of the cache of its own; calls of a `draft_index` that
    has no module run module 0."""

    def __init__(self, config: FamilyConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype, num_modules: int) -> None:
        spec = config.predictor
        assert spec is not None and 0 < num_modules <= spec.num_modules, (spec, num_modules)
        assert not config.layer_norms, "norms of a predictor have no biases"
        self.config, self.num_modules = config, num_modules
        self.arrays = make_params(spec.weights(config), rngs=rngs, num_layers=num_modules, dtype=dtype)

    @property
    def spec(self) -> PredictorSpec:
        """How it computes."""
        assert self.config.predictor is not None
        return self.config.predictor

    @property
    def cache(self) -> CacheLayout:
        """One layer for each module."""
        return self._mixer.cache(self.num_modules)

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """None, or the last layer where its raw output goes in."""
        return (self.config.num_layers - 1,) if self.spec.raw_in else ()

    def features(
        self, hidden: Float[Array, "N D"], streams: Sequence[Float[Array, "N D"]], *, kernels: Kernels
    ) -> Float[Array, "N D"]:
        """The final hidden states of the target, normed or raw."""
        del kernels
        return streams[0] if self.spec.raw_in else hidden

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
        """Run the module of `draft_index`. Returns the input of the head and the features of the next call, both in the
        dtype of the weights, and the updated cache."""
        del tokens  # embedded by the target
        config, spec = self.config, self.spec
        module = draft_index if draft_index < self.num_modules else 0
        params = self._module(module, kernels)
        dtype = params.get("hidden_norm").dtype
        inputs = {"embedding_norm": embeddings, "hidden_norm": features}
        normed = [apply_norm(config, x.astype(kernels.stream_dtype or dtype), at, params) for at, x in inputs.items()]
        pair = jnp.concatenate(normed[::-1] if spec.hidden_first else normed, axis=-1)  # [N, D] twice -> [N, 2D]
        x = params.project(pair, "projection")
        rotary = () if self._mixer.rotary is None else (self._mixer.rotary,)
        step = LayerContext.create(positions, valid, SequenceOps(attend), kernels, rotary)
        scale = params.get("output_norm") if spec.output_norm else target_norm
        block = LayerBlock(first=0, pattern=(spec.layer,), repeats=1)
        kernel = find_fused_path(config, block, step, None) if self.num_modules == 1 else None
        if kernel is not None:
            carry = (x, cache, None)
            (x, cache, _), normed = run_fused(
                kernel, config, block, (self.arrays,), scale, step, carry, None, LayerCounts()
            )
            output = scale_logits(config, normed)
        else:
            replay = ReplayInputs(jnp.zeros((), jnp.int32), None) if isinstance(spec.layer.feed, Sparse) else None
            x, cache = add_mixer(config, spec.layer, x, params, step, cache, (0, 1))
            x, _ = add_feed(config, spec.layer, x, params, step, replay, None)
            output = final_norm(config, x, scale, None, kernels.rows)
        return output, x.astype(dtype) if spec.raw_out else output, cache

    def lm_head(self, target: LmHead) -> LmHead:
        """The target's."""
        return target

    def target_ids(self) -> None:
        """Its vocabulary is the target's."""

    @property
    def _mixer(self) -> GroupedAttention | LatentAttention:
        mixer = self.spec.layer.mixer
        assert not isinstance(mixer, Recurrent), "the layer of a predictor keeps keys and values"
        return mixer

    def _module(self, module: int, kernels: Kernels) -> LayerParams:
        rows = scanned_params(self.spec.weights(self.config), self.arrays, kernels)
        sliced = {name: array[module] for name, array in rows.items()}
        return LayerParams(sliced, self.arrays, jnp.asarray(module, jnp.int32), kernels)


def predictor_partitions(config: FamilyConfig, num_modules: int, *, by_expert: bool) -> dict[str, AxisPartition]:
    """How the arrays of a Predictor are sharded, by dotted path; arrays that are not named are replicated."""
    assert config.predictor is not None
    by_name = {
        weight.name: weight.partition_in(num_modules, by_expert=by_expert)
        for weight in config.predictor.weights(config)
    }
    return {f"{ARRAYS}.{name}": partition for name, partition in by_name.items() if partition is not None}
