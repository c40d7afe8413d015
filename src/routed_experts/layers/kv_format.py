"""The form in which a pool holds keys and values: floats, or e4m3 codes of 8 bits (float8_e4m3fn: 448 is the largest
number, there is no infinity). A number is its code times the scale of its layer, one for keys and one for values, where
there are scales (KVScales); else it is the code.

A pool of codes is an array of uint8: where XLA writes a part of a float8 array on a CPU, it converts the whole array.
Rounding takes place once, at the write. Attention reads what was written for tokens of the step, too, so that no result
depends on where a prompt is cut."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from routed_experts.layers.quantized import e4m3_bits

KV_CODES = jnp.dtype(jnp.uint8)
LayerScales = tuple[tuple[float, float], ...]  # of keys and of values, by layer


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVScales:
    """Scales of an array of codes: of keys and of values of all its layers, float32, and the layer that attends. Codes
    are those of numbers divided by the scale. Scores are multiplied by that of keys, and sums of values by that of
    values, both in float32: queries of half precision are never rounded with a scale. Dims: L layers, N tokens, H
    heads, G kv heads, C head dim."""

    values: Float[Array, "L 2"]
    layer: Int[Array, ""]

    def of_layer(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The scales of keys and of values."""
        own = lax.dynamic_index_in_dim(self.values, self.layer, keepdims=False)
        return own[0], own[1]

    def divide(
        self, keys: Float[Array, "N G C"], values: Float[Array, "N G C"]
    ) -> tuple[Float[Array, "N G C"], Float[Array, "N G C"]]:
        """What codes are made of, float32."""
        of_keys, of_values = self.of_layer()
        return _quotient(keys.astype(jnp.float32), of_keys), _quotient(values.astype(jnp.float32), of_values)

    def around(
        self, run: Callable[[Float[Array, "N H C"]], Float[Array, "N H C"]], queries: Float[Array, "N H C"]
    ) -> Float[Array, "N H C"]:
        """Attention over codes by `run`, which takes queries of float32 and applies no scales."""
        of_keys, of_values = self.of_layer()
        return (run(queries.astype(jnp.float32) * of_keys) * of_values).astype(queries.dtype)


def _quotient(x: Float[Array, "..."], divisor: Float[Array, ""]) -> Float[Array, "..."]:
    """Rounded once. XLA multiplies by the inverse of a divisor that is alike for many numbers, which rounds twice; so
    the divisor depends on the number."""
    return x / jnp.where(x == 0, 1.0, divisor)
