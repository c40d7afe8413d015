"""Rotary angles of whole heads, each of the C/2 frequencies twice, as `apply_rotary` and FusedQKV take them."""

import jax.numpy as jnp
import numpy as np

from routed_experts.layers.rotary import RotarySpec


def head_cos_sin(positions, *, head_dim, theta):
    """Cosines and sines [N, C] of every position, float32."""
    spec = RotarySpec(inverse=tuple((1 / theta ** (np.arange(0, head_dim, 2) / head_dim)).tolist()))
    cos, sin = (jnp.tile(part, (1, 2)) for part in spec.cos_sin(positions))
    return cos, sin
