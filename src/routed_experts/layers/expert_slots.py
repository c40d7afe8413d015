"""Runs the expert slots of a step whose experts are in one table; the others run elsewhere.

A slot outside the table is no row of the backend's and costs no product. Its output is set to 0 before it is weighted,
so that a NaN does not propagate. Dims: N tokens, K experts per token, T experts of the table in one layer, R layers,
D hidden, F expert width."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from routed_experts.layers.moe import ExpertCall, MoeBackend


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertTable:
    """T experts of every layer of a group. T may be 0: then the arrays have no rows."""

    gate_up: Float[Array, "RT D 2F"]
    down: Float[Array, "RT F D"]


def run_slots(
    x: Float[Array, "N D"],
    slots: Int[Array, "N K"],
    weights: Float[Array, "N K"],
    table: ExpertTable,
    layer: Int[Array, ""],
    *,
    size: int,
    backend: MoeBackend,
) -> Float32[Array, "N D"]:
    """Sum the weighted outputs of the slots that are not -1; the others add nothing. `slots` index the T=`size` experts
    of `layer`. The sums are float32, so that those of two tables are added before they are rounded."""
    (num_rows, top_k), first = slots.shape, layer * size
    if size == 0:
        return jnp.zeros(x.shape, jnp.float32)
    valid, gate_up, down = slots.reshape(-1) >= 0, table.gate_up, table.down
    if not backend.takes_stacked:
        gate_up, down = (lax.dynamic_slice_in_dim(array, first, size) for array in (gate_up, down))
        first = jnp.zeros_like(first)
    call = ExpertCall(
        x=jnp.repeat(x.astype(gate_up.dtype), top_k, axis=0),  # a slot is a row, valid or not
        ids=jnp.maximum(slots.reshape(-1, 1), 0),
        weights=jnp.ones((num_rows * top_k, 1), jnp.float32),
        valid=valid,
        gate_up=gate_up,
        down=down,
        first_expert=first,
        num_experts=size,
    )
    outputs = jnp.where(valid[:, None], backend.run(call).astype(jnp.float32), 0.0)
    return jnp.sum(outputs.reshape(num_rows, top_k, -1) * weights.astype(jnp.float32)[..., None], axis=1)
