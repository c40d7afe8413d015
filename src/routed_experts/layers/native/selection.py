"""Balanced expert selection by the native kernel: the sequence itself, in C++.
Knows nothing of platforms. Dims as in layers/balanced_selection/steps.py."""

import jax
import jax.numpy as jnp

from routed_experts.layers.balanced_selection.steps import Assignment, SelectionInputs
from routed_experts.layers.native.ffi_targets import register_ffi_targets


def native_selection(slate: SelectionInputs, top_k: int, *, overflows: bool) -> Assignment:
    """Select one slot after another; there are no rounds. The kernel refuses a table or a source that points
    outside."""
    assert register_ffi_targets()
    slots, count = jax.ShapeDtypeStruct((slate.scores.shape[0], top_k), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    run = jax.ffi.ffi_call("RexSelect", [slots, slots, count, count])
    parts = (slate.scores, slate.replica_order, slate.capacity, slate.source, slate.valid)
    ids, instances, rerouted, overflowed = run(*parts, overflows=overflows)
    zero = jnp.int32(0)
    return Assignment(ids, instances, rerouted, overflowed, zero, zero)
