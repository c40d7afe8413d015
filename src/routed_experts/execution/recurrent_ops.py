"""Attention over KV pages and recurrent states by request slot, for models that have layers of both kinds.

Dims: N padded tokens, B padded requests, H value heads, V value dim."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routed_experts.execution.forward_batch import ForwardBatch
from routed_experts.layers.delta_rule import DeltaInputs
from routed_experts.layers.paged_attend import HybridAttend, PagedAttend
from routed_experts.layers.recurrent import RecurrentInputs, select_states
from routed_experts.memory.kv_pool import HybridPool
from routed_experts.models.base.interface import SequenceOps


def hybrid_ops(paged: PagedAttend, batch: ForwardBatch) -> SequenceOps:
    """Attend to the pages of a HybridPool, and read and write its states; a request that feeds position 0 starts
    anew."""

    def recur(
        inputs: RecurrentInputs, cache: HybridPool, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N ..."], HybridPool]:
        starts, slots = batch.paged.query_starts, batch.request_slots
        fresh = batch.paged.positions[jnp.minimum(starts[:-1], batch.token_ids.shape[0] - 1)] == 0
        if paged.backend.recur is not None and isinstance(inputs, DeltaInputs):
            read, states = paged.backend.recur(inputs, cache.states, layer, slots, fresh, starts)
            return read, dataclasses.replace(cache, states=states)
        empty = inputs.shape.zeros(slots.shape[0], cache.pages.dtype)
        old = jax.tree.map(lambda leaf, own: leaf[layer, slots].reshape(own.shape), cache.states, empty)
        read, new = inputs.ragged(select_states(fresh, empty, old), starts)
        states = jax.tree.map(
            lambda leaf, rows: leaf.at[layer, slots].set(rows.reshape(-1, *leaf.shape[2:])), cache.states, new
        )
        return read, dataclasses.replace(cache, states=states)

    return SequenceOps(HybridAttend(paged=paged), recur)
