"""Projections by a stack of matrices, one a layer.

The weights of all layers of a stack are one array [R, D, O]. A kernel that reads them in place takes the whole array
and the index of its layer, because a scan would copy a layer's matrix in order to slice it. Dims: N tokens, R layers
of the stack, D inputs, O outputs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from routed_experts.layers.quantized import QuantizedWeight, Weight


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearBackend:
    """A matrix product: (x [N D], weights [R D O], layer, dtype of the result) -> [N O], accumulated in float32. The
    weights are numbers, or codes of `Kernels.code_formats`. `takes_stacked`: it takes the weights of the whole run;
    otherwise it takes one layer's [1 D O] and layer 0. `batch_invariant`: a row's bits do not depend on the number of
    rows, nor on the others."""

    name: str
    run: Callable[[Float[Array, "N D"], Weight, Int[Array, ""] | int, Any], Float[Array, "N O"]]
    takes_stacked: bool = False
    batch_invariant: bool = False


def reference_linear(
    x: Float[Array, "N D"], weights: Weight, layer: Int[Array, ""] | int, dtype: Any
) -> Float[Array, "N O"]:
    """Slice and multiply rows in the dtype of the matrix, of codes in float32; the oracle of every other backend.
    Differentiable. A float32 matrix, such as a router's, keeps its precision on accelerators, which else round it."""
    if isinstance(weights, QuantizedWeight):
        weights, layer = weights.slice(layer, 1).dequantize(), 0
    matrix = weights[0] if weights.shape[0] == 1 else lax.dynamic_index_in_dim(weights, layer, keepdims=False)
    precision = lax.Precision.HIGHEST if matrix.dtype == jnp.float32 else None
    return jnp.dot(x.astype(matrix.dtype), matrix, precision=precision, preferred_element_type=dtype)


REFERENCE_LINEAR = LinearBackend(name="reference", run=reference_linear)
