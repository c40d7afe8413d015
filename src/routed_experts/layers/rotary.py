"""Rotary position embedding (Su et al. 2021), in the half-split form that most Hugging Face checkpoints use, or in
pairs. Positions are absolute token indices. Dims: N tokens, H heads, C head dim, F frequencies."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def apply_rotary(x: Float[Array, "N H C"], cos: Float[Array, "N C"], sin: Float[Array, "N C"]) -> Float[Array, "N H C"]:
    """Rotate every head of every token; computed in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    low, high = jnp.split(wide, 2, axis=-1)
    rotated = jnp.concatenate([-high, low], axis=-1)
    return (wide * cos[:, None] + rotated * sin[:, None]).astype(x.dtype)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """Frequencies as numbers, with the scaling applied. The first 2F dims of a head are rotated, the others are
    not.

    `interleaved`: dims 2i and 2i + 1 are a pair, instead of i and i + F. `magnitude` multiplies queries and keys
    (yarn)."""

    inverse: tuple[float, ...]
    magnitude: float = 1.0
    interleaved: bool = False

    def cos_sin(self, positions: Int[Array, " N"]) -> tuple[Float[Array, "N F"], Float[Array, "N F"]]:
        """Cosines and sines of every position, float32."""
        rotated = positions.astype(jnp.float32)[:, None] * jnp.asarray(self.inverse, jnp.float32)
        return jnp.cos(rotated) * self.magnitude, jnp.sin(rotated) * self.magnitude

    def apply(
        self, x: Float[Array, "N H C"], angles: tuple[Float[Array, "N F"], Float[Array, "N F"]]
    ) -> Float[Array, "N H C"]:
        """Rotate every head of every token; computed in float32, returned in x's dtype and with its dims where they
        were."""
        (cos, sin), size = (part[:, None] for part in angles), 2 * len(self.inverse)
        wide, rest = x[..., :size].astype(jnp.float32), x[..., size:]
        if self.interleaved:
            low, high = wide[..., 0::2], wide[..., 1::2]
            rotated = jnp.stack([low * cos - high * sin, high * cos + low * sin], axis=-1).reshape(wide.shape)
        else:
            low, high = jnp.split(wide, 2, axis=-1)
            rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
        return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1) if rest.shape[-1] else rotated.astype(x.dtype)
