"""Projections on TPU: one layer's matrix out of the stack's array, read in place.

Without this kernel XLA relayouts the whole array before the scan (1 GB for Qwen3-30B-A3B, each step) and slices
every layer out of it. An array of numbers of one layer, such as the unembedding, which may be a transposed view,
stays with XLA; codes never do, because it would make numbers of them in memory. Dims: N tokens, R layers of the stack,
D inputs, O outputs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.linear import reference_linear
from routed_experts.layers.quantized import QuantizedWeight, Weight
from routed_experts.layers.tpu.codes import MatrixBlock, column_bytes, fetched_rows, group_of, weight_arrays

TOKEN_TILE = 256
MATRIX_BYTES = 6 << 20  # of a matrix at a time; two are in VMEM
LANES = 128
VMEM_BYTES = 48 << 20


def layered_linear(
    x: Float[Array, "N D"],
    weights: Weight,
    layer: Int[Array, ""] | int,
    dtype: Any,
    *,
    interpret: Any = False,
) -> Float[Array, "N O"]:
    """Multiply by one layer's matrix, accumulated in float32. Each matrix is read once, some columns at a time."""
    (num_tokens, inputs), (num_layers, _, outputs) = x.shape, weights.shape
    if num_layers == 1 and not isinstance(weights, QuantizedWeight):
        return reference_linear(x, weights, 0, dtype)
    parts = weight_arrays(weights)
    rows = min(num_tokens, TOKEN_TILE)
    columns = min(outputs, max(1, MATRIX_BYTES // (column_bytes(weights) * LANES)) * LANES)
    return pl.pallas_call(
        functools.partial(_kernel, group=group_of(weights), outputs=outputs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(outputs, columns), pl.cdiv(num_tokens, rows)),
            in_specs=[
                pl.BlockSpec((rows, inputs), lambda column, row, layer: (row, 0)),
                *[
                    pl.BlockSpec((1, fetched, columns), lambda column, row, layer: (layer[0], 0, column))
                    for fetched in fetched_rows(weights)
                ],
            ],
            out_specs=pl.BlockSpec((rows, columns), lambda column, row, layer: (row, column)),
        ),
        out_shape=jax.ShapeDtypeStruct((num_tokens, outputs), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_tokens * inputs * outputs,
            bytes_accessed=outputs * column_bytes(weights) + 2 * num_tokens * (inputs + outputs),
            transcendentals=0,
        ),
        interpret=interpret,
        name="layered_linear",
    )(jnp.asarray(layer, jnp.int32).reshape(1), x, *parts)


def _kernel(_: Any, x_ref: Any, *refs: Any, group: int, outputs: int) -> None:
    values_ref, *scales_ref, out_ref = refs
    num_outputs = outputs - pl.program_id(0) * values_ref.shape[2]
    scales = scales_ref[0] if group else None
    matrix = MatrixBlock(values=values_ref, scales=scales, group=group, num_outputs=num_outputs)
    out_ref[...] = matrix.product(x_ref[...]).astype(out_ref.dtype)
