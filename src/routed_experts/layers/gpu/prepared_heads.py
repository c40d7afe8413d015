"""What the kernels share that prepare heads: qk_norm_rope.py, and halved_heads.py for the most common ones."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from routed_experts.layers.stack_traits import StackTraits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """Constants of a kernel. `frequencies` 0: no positions; `rows`: tokens of a block; `dtype`: of the model."""

    heads: int
    groups: int
    frequencies: int
    rows: int
    stride: int
    eps: float
    traits: StackTraits
    dtype: Any


def divide_by_kv_scale(value: Float[Array, "T C"], row: Array | int, arrays: Mapping[str, Any]) -> Float[Array, "T C"]:
    """Keys or values by the scale of row `row` of a slot, where the pool is codes with scales. Dims: T tokens, C
    numbers of a head."""
    if "kv_scales" not in arrays:
        return value
    return value.astype(jnp.float32) / arrays["kv_scales"][arrays["kv_layer"][0], row % 2]
