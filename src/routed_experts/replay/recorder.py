"""RoutingRecorder, the capture of a training forward, where a serving step has its device cache.

It records which experts every token ran on, how many of them its live router would not have chosen and, on request, how
evenly experts are used. Dims: N tokens, M MoE layers, K experts per token, E experts."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, UInt8

from routed_experts.capture.device_cache import RoutedExpertsDeviceCache
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.replay.balance import BalanceOn, RouterBalance


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BalanceRecorder:
    """Counts and summed probabilities so far, and which tokens are counted."""

    counts: Int[Array, "M E"]
    sums: Float[Array, "M E"]
    counted: Bool[Array, " N"]
    on: BalanceOn = dataclasses.field(metadata={"static": True})

    @staticmethod
    def start(counted: Bool[Array, " N"], spec: CaptureSpec, on: BalanceOn) -> "BalanceRecorder":
        """Start without counts."""
        shape = (spec.num_moe_layers, spec.num_experts)
        return BalanceRecorder(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), counted, on)

    def add_layer(
        self, layer: Int[Array, ""], ids: Int[Array, "N K"], probabilities: Float[Array, "N E"]
    ) -> "BalanceRecorder":
        """Return the counts with one more layer."""
        counted = self.counted[:, None]
        counts = jnp.zeros(self.counts.shape[1], jnp.int32).at[ids].add(counted.astype(jnp.int32))
        sums = jnp.sum(jnp.where(counted, probabilities, 0.0), axis=0)
        counts = lax.dynamic_update_slice_in_dim(self.counts, counts[None], layer, axis=0)
        return dataclasses.replace(
            self, counts=counts, sums=lax.dynamic_update_slice_in_dim(self.sums, sums[None], layer, axis=0)
        )

    def result(self) -> RouterBalance:
        """Return the counts and the mean probabilities."""
        num_tokens = jnp.sum(self.counted, dtype=jnp.int32)
        return RouterBalance(self.counts, self.sums / jnp.maximum(num_tokens, 1).astype(jnp.float32), num_tokens)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingRecorder(RoutedExpertsDeviceCache):
    """The ids of a forward, and slot misses: K minus the number of executed experts that are among the live router's
    K."""

    slot_miss: UInt8[Array, "M N"] | None = None
    balance: BalanceRecorder | None = None

    @staticmethod
    def start(num_tokens: int, spec: CaptureSpec, balance: BalanceRecorder | None = None) -> "RoutingRecorder":
        """Start an empty record of a forward over `num_tokens`."""
        empty = RoutedExpertsDeviceCache.create(num_tokens, spec)
        slot_miss = jnp.zeros((spec.num_moe_layers, num_tokens), jnp.uint8)
        return RoutingRecorder(empty.ids, spec, weights=empty.weights, slot_miss=slot_miss, balance=balance)

    def capture_fwd_routed_experts(
        self,
        moe_layer: int | Int[Array, ""],
        topk_ids: Int[Array, "N K"],
        native_ids: Int[Array, "N K"] | None = None,
        probabilities: Callable[[], Float[Array, "N E"]] | None = None,
        weights: Float32[Array, "N K"] | None = None,
    ) -> "RoutingRecorder":
        """Record one layer."""
        recorder = super().capture_fwd_routed_experts(moe_layer, topk_ids, weights=weights)
        assert self.slot_miss is not None and native_ids is not None, "a recorder needs both choices"
        hits = jnp.any(topk_ids[:, :, None] == native_ids[:, None, :], axis=2)  # [N, K]
        missed = jnp.sum(~hits, axis=1, dtype=jnp.uint8)
        row, balance = jnp.asarray(moe_layer, jnp.int32), self.balance
        slot_miss = lax.dynamic_update_slice_in_dim(self.slot_miss, missed[None], row, axis=0)
        if balance is not None:
            assert probabilities is not None, "a balance recorder needs the router's probabilities"
            balance = balance.add_layer(row, native_ids if balance.on == "native" else topk_ids, probabilities())
        own = {"slot_miss": slot_miss, "balance": balance}
        return dataclasses.replace(self, ids=recorder.ids, weights=recorder.weights, **own)
