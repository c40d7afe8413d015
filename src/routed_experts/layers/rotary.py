"""Rotary position embedding (Su et al. 2021), in the half-split form that Hugging Face checkpoints use.
Knows nothing of caches; positions are absolute token indices."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotary_angles(positions: Int[Array, " N"], *, head_dim: int, theta: float) -> tuple[Float[Array, "N C"], Float[Array, "N C"]]:
    """Give float32 cosines and sines of every position; each of the C/2 frequencies stands twice."""
    inverse = 1.0 / theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions.astype(jnp.float32)[:, None] * inverse
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(x: Float[Array, "N H C"], cos: Float[Array, "N C"], sin: Float[Array, "N C"]) -> Float[Array, "N H C"]:
    """Rotate every head of every token; computed in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    low, high = jnp.split(wide, 2, axis=-1)
    rotated = jnp.concatenate([-high, low], axis=-1)
    return (wide * cos[:, None] + rotated * sin[:, None]).astype(x.dtype)
