"""Block sizes that Triton accepts, and loads without masks where no mask is needed."""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`; every array in a Triton kernel has such a size."""
    return 1 << max(size - 1, 0).bit_length()


NARROWEST_PRODUCT = 16  # any side of a product on the tensor cores


def product_width(size: int) -> int:
    """The block of a side of a product: a power of two that the tensor cores take."""
    return max(NARROWEST_PRODUCT, power_of_two(size))


def combine_masks(*masks: Array | None) -> Array | None:
    """Conjunction of the masks that are not None; None if all are."""
    present = [mask for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, present) if present else None


def load_or_zero(ref: Any, mask: Array | None) -> Array:
    """A load with zeros where the mask is false, or a plain one: a mask that is always true would still cost
    registers."""
    return plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=0.0)


def rounded(value: Array, dtype: Any) -> Array:
    """`value` as an array of the model's dtype would hold it, in float32."""
    return value.astype(dtype).astype(jnp.float32)


def scaled_step(size: int, dtype: Any) -> int:
    """`size`, which was measured best for two bytes an element, for elements of another size: as many bytes a step."""
    return max(16, size * 2 // jnp.dtype(dtype).itemsize)
