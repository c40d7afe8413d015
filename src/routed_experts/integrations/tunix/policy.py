"""Policy, a decoder in the calling convention of Tunix's models, alone (routing live) and with the rows of a batch.

Dims: B sequences, S tokens, V vocabulary, M MoE layers, K experts per token."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float32, Int, UInt

from routed_experts.core.errors import ConfigError, InvalidRequestError
from routed_experts.models.base.interface import Decoder
from routed_experts.replay import ForwardOutput, RoutedBatch, forward


class Policy(nnx.Module):
    """A decoder in the calling convention of Tunix's models: the actor, or the reference, of a cluster."""

    def __init__(self, decoder: Decoder, *, compute_dtype: str | None = None) -> None:
        """`decoder` is a loaded model with MoE layers, such as `ModelFolder.open(path).load(dtype)`.

        With `compute_dtype` its weights are cast at each call, but for those that an engine of this dtype keeps in
        float32: float32 master weights are then trained through the very weights that are served. Raises ConfigError
        for a model without MoE layers."""
        if decoder.config.capture_spec is None:
            raise ConfigError("the model has no MoE layer, so there is no routing to replay; use a model of Tunix")
        self.decoder = decoder
        self.compute_dtype = None if compute_dtype is None else jnp.dtype(compute_dtype).name

    @property
    def config(self) -> Any:
        """The decoder's config."""
        return self.decoder.config

    def __call__(
        self,
        input_tokens: Int[Array, "B S"],
        positions: Int[Array, "B S"] | None = None,
        cache: None = None,
        attention_mask: Bool[Array, "B S S"] | None = None,
        segment_ids: Int[Array, "B S"] | None = None,
        forced_routed_experts: Int[Array, "B S M K"] | None = None,
    ) -> tuple[Float32[Array, "B S V"], None]:
        """Logits of whole sequences, and no cache.

        Padding is where `segment_ids` are 0, else where `attention_mask` hides a token from itself. A token whose
        `forced_routed_experts` hold -1 is routed live, as all are without them. Raises InvalidRequestError for a
        `cache`, which this module does not keep."""
        spec = self.config.capture_spec
        if forced_routed_experts is None:
            ids = jnp.zeros((*input_tokens.shape, spec.num_moe_layers, spec.top_k), spec.dtype)
            # Hidden from the compiler, which would drop the replay's operations and so round differently.
            ids, valid = lax.optimization_barrier((ids, jnp.zeros(input_tokens.shape, bool)))
        else:
            valid = jnp.all(forced_routed_experts >= 0, axis=(2, 3))
            ids = jnp.maximum(forced_routed_experts, 0).astype(spec.dtype)
        out = self.run(input_tokens, positions, cache, attention_mask, segment_ids, ids=ids, valid=valid)
        return out.logits, None

    def run(
        self,
        input_tokens: Int[Array, "B S"],
        positions: Int[Array, "B S"] | None,
        cache: None,
        attention_mask: Bool[Array, "B S S"] | None,
        segment_ids: Int[Array, "B S"] | None,
        *,
        ids: UInt[Array, "B S M K"],
        valid: Bool[Array, "B S"],
        return_routed: bool = False,
    ) -> ForwardOutput:
        """`__call__` on rows to replay, with all that `replay.forward` returns."""
        if cache is not None:
            raise InvalidRequestError(
                "cache is given, and Policy computes whole sequences without one; sample with RoutedExpertsRollout "
                "(ClusterConfig.rollout_engine)",
                param="cache",
            )
        pad = _padding(input_tokens, attention_mask, segment_ids)
        routed = RoutedBatch(ids, valid & ~pad, pad)
        return forward(
            self.decoder if self.compute_dtype is None else _cast(self.decoder, jnp.dtype(self.compute_dtype)),
            input_tokens,
            positions=positions,
            segment_ids=segment_ids,
            routed=routed,
            return_routed=return_routed,
        )


def _cast(decoder: Any, dtype: jnp.dtype) -> Any:
    """The decoder as an engine of this dtype serves it. The gradient goes to the weights that are cast."""
    graphdef, state = nnx.split(decoder)
    arrays = [
        (path, leaf if leaf.get_metadata().get("wide", False) else leaf.replace(leaf.get_raw_value().astype(dtype)))
        for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(arrays))


class Rows(nnx.Variable[Any]):
    """Rows of a batch inside a module. No Param: neither gradients nor the optimiser see it."""


class Replayed(nnx.Module):
    """A policy together with the rows of one batch, which every call replays."""

    def __init__(self, policy: Policy, ids: UInt[Array, "B S M K"], valid: Bool[Array, "B S"]) -> None:
        self.policy, self.ids, self.valid = policy, Rows(ids), Rows(valid)

    @property
    def config(self) -> Any:
        """The policy's config."""
        return self.policy.config

    def __call__(
        self,
        input_tokens: Int[Array, "B S"],
        positions: Int[Array, "B S"] | None = None,
        cache: None = None,
        attention_mask: Bool[Array, "B S S"] | None = None,
        segment_ids: Int[Array, "B S"] | None = None,
    ) -> tuple[Float32[Array, "B S V"], None]:
        """`Policy.__call__` on these rows; a token whose row is not valid is routed live."""
        ids, valid = self.ids[...], self.valid[...]
        return self.policy.run(
            input_tokens, positions, cache, attention_mask, segment_ids, ids=ids, valid=valid
        ).logits, None


def _padding(
    tokens: Int[Array, "B S"], attention_mask: Bool[Array, "B S S"] | None, segment_ids: Int[Array, "B S"] | None
) -> Bool[Array, "B S"]:
    """Where no token is."""
    if segment_ids is not None:
        return segment_ids == 0
    if attention_mask is not None:
        return ~jnp.diagonal(attention_mask.astype(bool), axis1=-2, axis2=-1)
    return jnp.zeros(tokens.shape, bool)
