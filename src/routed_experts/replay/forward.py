"""The training forward: whole sequences through the module that also serves, with live or replayed routing.
Knows nothing of losses or optimisers. Differentiable; ids are inputs, so scan, remat and sharding see the same ids.
Dims: B sequences, S tokens of a sequence, M MoE layers, K experts per token, V vocabulary."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from routed_experts.capture.device_cache import _RoutedExpertsDeviceCache
from routed_experts.layers.attention import causal_attention
from routed_experts.layers.attention_traits import AttentionTraits
from routed_experts.layers.attention_variants import causal_variant
from routed_experts.layers.delta_rule import DeltaInputs, delta_whole
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MOE_BACKENDS, MoeBackend
from routed_experts.models.interface import Decoder, SequenceOps, TokenRouting


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutedBatch:
    """Rows to replay, aligned with the tokens of a batch. Ids of a row that is not valid are never read; such a token goes to
    the live router. `pad` marks places that hold no token, on either side, and that no token sees; a place is never both."""

    ids: UInt[Array, "B S M K"]
    valid: Bool[Array, "B S"]
    pad: Bool[Array, "B S"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forward:
    """Logits float32, and the executed ids when they were asked for (logical, score order as executed)."""

    logits: Float[Array, "B S V"]
    ids: UInt[Array, "B S M K"] | None


def forward(
    model: Decoder,
    tokens: Int[Array, "B S"],
    *,
    positions: Int[Array, "B S"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    routed: RoutedBatch | None = None,
    return_routed: bool = False,
    backend: MoeBackend = MOE_BACKENDS["grouped"],
    remat: bool = False,
) -> Forward:
    """Score whole sequences causally. `routed=None` is another trace; new ids or a new `valid` never retrace."""
    batch, length = tokens.shape
    segments = segment_ids
    if routed is not None:  # a place without a token is a segment of its own: padding may stand on either side
        segments = jnp.where(routed.pad, -1, 0 if segment_ids is None else segment_ids)
    where = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length)) if positions is None else positions

    def attend(
        queries: Float[Array, "N H C"],
        keys: Float[Array, "N G C"],
        values: Float[Array, "N G V"] | None,
        cache: None,
        layer: Int[Array, ""],
        traits: AttentionTraits | None = None,
    ) -> tuple[Float[Array, "N H V"], None]:
        q, k = (x.reshape(batch, length, *x.shape[1:]) for x in (queries, keys))
        v = None if values is None else values.reshape(batch, length, *values.shape[1:])
        if traits is None:
            assert v is not None, "rows without values are latent, and say so in their traits"
            return causal_attention(q, k, v, segments).reshape(queries.shape), cache
        return causal_variant(q, k, v, segments, traits).reshape(*queries.shape[:2], -1), cache

    def recur(inputs: DeltaInputs, cache: None, layer: Int[Array, ""]) -> tuple[Float[Array, "N H V"], None]:
        return delta_whole(inputs, segments, batch), cache

    spec = model.config.capture_spec
    capture = _RoutedExpertsDeviceCache.create(tokens.size, spec) if return_routed and spec is not None else None
    replay = None if routed is None else TokenRouting(routed.ids.reshape(tokens.size, *routed.ids.shape[2:]), routed.valid.reshape(-1))
    valid = jnp.ones(tokens.size, bool) if routed is None else ~routed.pad.reshape(-1)
    kernels = Kernels(moe=backend)
    ops = attend if model.config.cache.recurrent is None else SequenceOps(attend, recur)
    hidden, _, capture = model(
        tokens.reshape(-1), where.reshape(-1), valid, ops, None, capture, kernels=kernels, routed=replay, remat=remat
    )
    ids = None
    if capture is not None and spec is not None:
        ids = capture.rows().reshape(batch, length, spec.num_moe_layers, spec.top_k)
    return Forward(model.logits(hidden).reshape(batch, length, -1), ids)
