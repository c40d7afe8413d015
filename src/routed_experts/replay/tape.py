"""The tape of a training forward: which experts every token ran on, and how many of them its live router would not have chosen.
Rides where the device cache of a serving step does. Dims: N tokens, M MoE layers, K experts per token."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt8

from routed_experts.capture.device_cache import _RoutedExpertsDeviceCache
from routed_experts.core.capture_spec import CaptureSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingTape(_RoutedExpertsDeviceCache):
    """The ids of a forward, and slot misses: K minus the number of executed experts that are among the live router's K."""

    slot_miss: UInt8[Array, "M N"] | None = None

    @staticmethod
    def start(num_tokens: int, spec: CaptureSpec) -> "RoutingTape":
        """An empty tape of a forward over `num_tokens`."""
        empty = _RoutedExpertsDeviceCache.create(num_tokens, spec)
        return RoutingTape(empty.ids, spec, slot_miss=jnp.zeros((spec.num_moe_layers, num_tokens), jnp.uint8))

    def capture_fwd_routed_experts(
        self, moe_layer: int | Int[Array, ""], topk_ids: Int[Array, "N K"], native_ids: Int[Array, "N K"] | None = None
    ) -> "RoutingTape":
        """Write down one layer."""
        written = super().capture_fwd_routed_experts(moe_layer, topk_ids)
        assert self.slot_miss is not None and native_ids is not None, "a tape is given both choices"
        hits = jnp.any(topk_ids[:, :, None] == native_ids[:, None, :], axis=2)  # [N, K]
        missed = jnp.sum(~hits, axis=1, dtype=jnp.uint8)
        row = jnp.asarray(moe_layer, jnp.int32)
        slot_miss = jax.lax.dynamic_update_slice_in_dim(self.slot_miss, missed[None], row, axis=0)
        return RoutingTape(written.ids, self.spec, slot_miss=slot_miss)
