"""The form in which a pool holds keys and values: floats, or e4m3 codes of 8 bits with scale 1 (float8_e4m3fn: 448 is
the largest number, there is no infinity).

A pool of codes is an array of uint8: where XLA writes a part of a float8 array on a CPU, it converts the whole array.
Rounding takes place once, at the write. Attention reads what was written for tokens of the step, too, so that no result
depends on where a prompt is cut."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from routed_experts.layers.quantized import e4m3_bits

KV_CODES = jnp.dtype(jnp.uint8)


def to_stored(x: Float[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."] | UInt8[Array, "..."]:
    """Keys or values as a pool of `dtype` holds them. Codes: as `e4m3_bits` rounds."""
    if dtype != KV_CODES:
        return x.astype(dtype)
    return e4m3_bits(x)


def from_stored(stored: Float[Array, "..."] | UInt8[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Keys or values of a pool in `dtype`; float32 and half precision have all numbers of e4m3."""
    if stored.dtype != KV_CODES:
        return stored.astype(dtype)
    return lax.bitcast_convert_type(stored, jnp.float8_e4m3fn).astype(dtype)
