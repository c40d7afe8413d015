"""Rotary positions inside GPU kernels: the first 2F dims of a row are pairs that turn by the angles of its token.

Dims: N tokens of the angles, T rows of a block, C columns of a block, at least 2F, F frequencies."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int


def rotate(
    value: Float[Array, "T C"],
    load: Callable[[Int[Array, " C"]], Float[Array, "T C"]],
    angles: tuple[Any, Any],
    tokens: Int[Array, " T"],
    inside: Bool[Array, "T 1"],
    frequencies: int,
    *,
    interleaved: bool,
) -> Float[Array, "T C"]:
    """The rows with their first 2F columns rotated, float32. `load` gives other columns of `value`; `angles` are the
    references of cosines and sines [N F], read where `inside`. A pair is two halves of the dims, or neighbours."""
    lanes = jnp.arange(value.shape[1])
    if interleaved:
        partners, frequency, is_first = lanes ^ 1, lanes // 2, lanes % 2 == 0
    else:
        is_first = lanes < frequencies
        partners, frequency = jnp.where(is_first, lanes + frequencies, lanes - frequencies), lanes % frequencies
    partners, frequency = (jnp.where(lanes < 2 * frequencies, index, 0) for index in (partners, frequency))
    is_rotated = inside & (lanes < 2 * frequencies)[None, :]
    cosines, sines = (
        plgpu.load(side.at[tokens[:, None], frequency[None, :]], mask=is_rotated, other=0.0) for side in angles
    )
    rotated = value * cosines + load(partners) * jnp.where(is_first[None, :], -sines, sines)
    return jnp.where(is_rotated, rotated, value)
