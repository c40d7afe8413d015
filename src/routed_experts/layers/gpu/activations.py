"""Activations of experts inside a GPU kernel: in float32, rounded to the model's dtype where `ACTIVATIONS` rounds."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from routed_experts.layers.gpu.blocks import rounded


def sigmoid(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """In float32; Triton has no operation of that name."""
    return 1.0 / (1.0 + jnp.exp(-x))


def _silu(gate: Array, up: Array, dtype: Any) -> Array:
    return rounded(gate * sigmoid(gate), dtype) * up


def _clamped_swiglu(gate: Array, up: Array, dtype: Any) -> Array:
    slope = float(np.asarray(1.702, dtype))  # plain code multiplies by a number of the array's dtype
    gate, up = jnp.minimum(gate, 7.0), jnp.minimum(jnp.maximum(up, -7.0), 7.0)
    opened = rounded(gate * rounded(sigmoid(rounded(gate * slope, dtype)), dtype), dtype)
    return opened * rounded(up + 1.0, dtype)


def _tanh_gelu(gate: Array, up: Array, dtype: Any) -> Array:
    # (1 + tanh(u)) / 2 is the sigmoid of 2u, and Triton has no tanh
    inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate * gate * gate)
    return rounded(gate * sigmoid(2.0 * inner), dtype) * up


_ACTIVATIONS: Mapping[str, Callable[[Array, Array, Any], Array]] = MappingProxyType(
    {"silu": _silu, "clamped swiglu": _clamped_swiglu, "tanh gelu": _tanh_gelu}
)


def activate(gate: Float[Array, "N F"], up: Float[Array, "N F"], activation: str, dtype: Any) -> Float[Array, "N F"]:
    """One of ACTIVATIONS, by name, of float32 that hold values of `dtype`; the last product is not rounded, which
    the store does."""
    return _ACTIVATIONS[activation](gate, up, dtype)
