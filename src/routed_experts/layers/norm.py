"""Root-mean-square normalisation (Zhang and Sennrich 2019), and layer normalisation (Ba et al. 2016)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed_experts.layers.parallel import SINGLE_DEVICE, AxisGroup


def rms_norm(
    x: Float[Array, "... D"],
    scale: Float[Array, " D"],
    *,
    eps: float,
    offset: float = 0.0,
    group: AxisGroup = SINGLE_DEVICE,
) -> Float[Array, "... D"]:
    """Normalise the last axis in float32, cast to x's dtype, then multiply by `scale`. With an `offset`, which is added
    to the scale, multiply in float32 and cast last: half precision would round 1 + w. With a `group`, x is one device's
    part of the axis."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(group.all_mean(jnp.mean(wide * wide, axis=-1, keepdims=True)) + eps)
    if offset:
        return (wide * inverse * (scale.astype(jnp.float32) + offset)).astype(x.dtype)
    return (wide * inverse).astype(x.dtype) * scale.astype(x.dtype)


def layer_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"], bias: Float[Array, " D"], *, eps: float
) -> Float[Array, "... D"]:
    """Centre and normalise the last axis in float32, times `scale`, plus `bias`; in x's dtype."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
