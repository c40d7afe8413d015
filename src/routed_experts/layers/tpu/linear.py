"""Projections on TPU: one layer's matrix out of the stack's array, read in place.

Without this kernel XLA relayouts the whole array before the scan (1 GB for Qwen3-30B-A3B, each step) and slices
every layer out of it. An array of one layer, such as the unembedding, which may be a transposed view, stays with
XLA. Dims: N tokens, R layers of the stack, D inputs, O outputs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.linear import reference_linear

TOKEN_TILE = 256
MATRIX_BYTES = 6 << 20  # of a matrix at a time; two are in VMEM
LANES = 128
VMEM_BYTES = 48 << 20


def layered_linear(
    x: Float[Array, "N D"],
    weights: Float[Array, "R D O"],
    layer: Int[Array, ""] | int,
    dtype: Any,
    *,
    interpret: Any = False,
) -> Float[Array, "N O"]:
    """Multiply by one layer's matrix, accumulated in float32. Each matrix is read once, some columns at a time."""
    (num_tokens, inputs), (num_layers, _, outputs) = x.shape, weights.shape
    if num_layers == 1:
        return reference_linear(x, weights, 0, dtype)
    rows = min(num_tokens, TOKEN_TILE)
    columns = min(outputs, max(1, MATRIX_BYTES // (inputs * weights.dtype.itemsize * LANES)) * LANES)
    return pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(outputs, columns), pl.cdiv(num_tokens, rows)),
            in_specs=[
                pl.BlockSpec((rows, inputs), lambda column, row, layer: (row, 0)),
                pl.BlockSpec((1, inputs, columns), lambda column, row, layer: (layer[0], 0, column)),
            ],
            out_specs=pl.BlockSpec((rows, columns), lambda column, row, layer: (row, column)),
        ),
        out_shape=jax.ShapeDtypeStruct((num_tokens, outputs), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_tokens * inputs * outputs,
            bytes_accessed=inputs * outputs * weights.dtype.itemsize + 2 * num_tokens * (inputs + outputs),
            transcendentals=0,
        ),
        interpret=interpret,
        name="layered_linear",
    )(jnp.asarray(layer, jnp.int32).reshape(1), x, weights)


def _kernel(_: Any, x_ref: Any, weights_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.dot(x_ref[...], weights_ref[0], preferred_element_type=jnp.float32).astype(out_ref.dtype)
