"""Attention over KV pages and recurrent states by request slot, for models that have layers of both kinds.

A step runs the recurrence once and writes the states after its tokens. A verify step does not know which of its tokens
are accepted: it reads the states, leaves them, and stores each layer's inputs of the recurrence. Once its tokens are
sampled, `commit_states` runs the recurrence over the accepted ones. So between two steps a state is that of all tokens
that the request has fed, whatever the next step is. Other steps are those of an engine without drafts, and inputs never
meet the weights of a later version. The other order, in which the next step begins with the accepted inputs, reads the
states once less. But then every kind of step begins with them, and convolves them with weights that may have changed.
Dims: N padded tokens, M stored tokens, B padded requests, T layers with a state."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from routed_experts.execution.forward_batch import BatchShape, ForwardBatch, unpack
from routed_experts.layers.attention import AttentionBackend
from routed_experts.layers.delta_rule import DeltaInputs
from routed_experts.layers.paged_attend import HybridAttend, PagedAttend
from routed_experts.layers.recurrent import RecurrentInputs, RecurrentShape, select_states
from routed_experts.memory.kv_pool import HybridPool
from routed_experts.models.base.interface import SequenceOps


@dataclasses.dataclass(frozen=True, slots=True)
class _Sequences:
    """The slot of each request, which of them start anew, and where their tokens begin."""

    slots: Int[Array, " B"]
    fresh: Bool[Array, " B"]
    query_starts: Int[Array, " B1"]


def hybrid_ops(paged: PagedAttend, batch: ForwardBatch) -> SequenceOps:
    """Attend to the pages of a HybridPool, and read and write its states; a request that feeds position 0 starts anew.
    Where the pool has place for inputs, these are written in place of states."""

    def recur(
        inputs: RecurrentInputs, cache: HybridPool, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N ..."], HybridPool]:
        sequences = _sequences(batch)
        if cache.inputs is None:
            return _recur(paged.backend, inputs, cache, layer, sequences)
        copied = jax.tree.map(lambda leaf: leaf[layer, sequences.slots][None], cache.states)  # [T R ...] -> [1 B ...]
        places = jnp.arange(sequences.slots.shape[0], dtype=jnp.int32)
        read, _ = _recur(
            paged.backend,
            inputs,
            dataclasses.replace(cache, states=copied),
            jnp.int32(0),
            dataclasses.replace(sequences, slots=places),
        )
        return read, _store(inputs, cache, layer)

    return SequenceOps(HybridAttend(paged=paged), recur)


def with_inputs(pool: HybridPool, shape: RecurrentShape, num_tokens: int) -> HybridPool:
    """The pool with place for the inputs [T M ...] of a step's first `num_tokens` tokens."""
    num_layers, empty = jax.tree.leaves(pool.states)[0].shape[0], shape.no_inputs(num_tokens, pool.state_dtype)
    inputs = jax.tree.map(lambda leaf: jnp.zeros((num_layers, *leaf.shape), leaf.dtype), empty)
    return dataclasses.replace(pool, inputs=inputs)


def commit_states(
    pool: HybridPool,
    inputs: RecurrentInputs,  # of all layers: leaves [T ...]
    words: Int32[Array, " words"],
    accepted: Int[Array, " B"],
    *,
    backend: AttentionBackend,
    shape: BatchShape,
) -> HybridPool:
    """The pool with the states after a verify step: each request's first token, which is no draft, and its accepted
    drafts. `inputs` and `words` are those that the step's forward pass returned."""
    batch = unpack(words, shape)
    fed = batch.paged.query_starts
    counts = jnp.minimum(fed[1:] - fed[:-1], 1 + accepted)  # padding requests have no token
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    places = jnp.arange(inputs.mixed.shape[1], dtype=jnp.int32)
    owner = jnp.searchsorted(starts[1:], places, side="right", method="compare_all").astype(jnp.int32)
    owner = jnp.minimum(owner, counts.shape[0] - 1)
    rows = jnp.minimum(fed[owner] + places - starts[owner], places.shape[0] - 1)
    sequences = dataclasses.replace(_sequences(batch), query_starts=starts)

    def add_layer(pool: HybridPool, of_layer: tuple[Int[Array, ""], RecurrentInputs]) -> tuple[HybridPool, None]:
        layer, own = of_layer
        return _recur(backend, own.of_states(rows), pool, layer, sequences)[1], None

    layers = jnp.arange(jax.tree.leaves(pool.states)[0].shape[0], dtype=jnp.int32)
    return lax.scan(add_layer, pool, (layers, inputs))[0]


def _sequences(batch: ForwardBatch) -> _Sequences:
    """Those of a step."""
    starts = batch.paged.query_starts
    fresh = batch.paged.positions[jnp.minimum(starts[:-1], batch.token_ids.shape[0] - 1)] == 0
    return _Sequences(batch.request_slots, fresh, starts)


def _recur(
    backend: AttentionBackend,
    inputs: RecurrentInputs,
    cache: HybridPool,
    layer: Int[Array, ""],
    sequences: _Sequences,
) -> tuple[Float[Array, "N ..."], HybridPool]:
    """What tokens read, and the pool with the states after them."""
    slots, fresh, starts = sequences.slots, sequences.fresh, sequences.query_starts
    if backend.recur is not None and isinstance(inputs, DeltaInputs):
        read, states = backend.recur(inputs, cache.states, layer, slots, fresh, starts)
        return read, dataclasses.replace(cache, states=states)
    empty = inputs.shape.zeros(slots.shape[0], cache.state_dtype)
    old = jax.tree.map(lambda leaf, own: leaf[layer, slots].reshape(own.shape), cache.states, empty)
    read, new = inputs.ragged(select_states(fresh, empty, old), starts)
    states = jax.tree.map(
        lambda leaf, rows: leaf.at[layer, slots].set(rows.reshape(-1, *leaf.shape[2:])), cache.states, new
    )
    return read, dataclasses.replace(cache, states=states)


def _store(inputs: RecurrentInputs, cache: HybridPool, layer: Int[Array, ""]) -> HybridPool:
    """The pool with a layer's inputs of the first M tokens."""
    stored = jax.tree.map(
        lambda leaf, rows: leaf.at[layer].set(rows.astype(leaf.dtype)),
        cache.inputs,
        inputs.of_states(slice(cache.inputs.mixed.shape[1])),
    )
    return dataclasses.replace(cache, inputs=stored)
