"""The form in which a pool holds keys and values: floats, or e4m3 codes of 8 bits with scale 1 (float8_e4m3fn: 448 is
the largest number, there is no infinity).

A pool of codes is an array of uint8: where XLA writes a part of a float8 array on a CPU, it converts the whole array.
Rounding takes place once, at the write. Attention reads what was written for tokens of the step, too, so that no result
depends on where a prompt is cut."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from routed_experts.layers.quantized import LARGEST_E4M3

KV_CODES = jnp.dtype(jnp.uint8)
_SHIFT = 2.0**14  # neighbours of float32 are 2^-9 apart from here on, as subnormal numbers of e4m3 are
_SHIFT_BITS = 0x46800000
_BIAS = (127 - 7) << 3  # of the exponent of float32 over that of e4m3, in codes
_NAN = 0x7F


def to_stored(x: Float[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."] | UInt8[Array, "..."]:
    """Keys or values as a pool of `dtype` holds them. Codes: clipped to 448, rounded to nearest even; NaN stays one. By
    integers, which round alike on all devices and inside of kernels."""
    if dtype != KV_CODES:
        return x.astype(dtype)
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    size = lax.bitcast_convert_type(bits & 0x7FFFFFFF, jnp.float32)
    clipped = jnp.where(size > LARGEST_E4M3, LARGEST_E4M3, size)
    wide = lax.bitcast_convert_type(clipped, jnp.uint32)
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - _BIAS
    small = lax.bitcast_convert_type(clipped + _SHIFT, jnp.uint32) - _SHIFT_BITS
    code = jnp.where(clipped < 2.0**-6, small, normal)
    code = jnp.where(size == size, code, _NAN)
    return (code | ((bits >> 24) & 0x80)).astype(KV_CODES)


def from_stored(stored: Float[Array, "..."] | UInt8[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Keys or values of a pool in `dtype`; float32 and half precision have all numbers of e4m3."""
    if stored.dtype != KV_CODES:
        return stored.astype(dtype)
    return lax.bitcast_convert_type(stored, jnp.float8_e4m3fn).astype(dtype)
