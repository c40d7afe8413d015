"""The order of a weight's dimensions in a device's memory.

A TPU holds an array in tiles of 128 lanes, and by itself chooses the order that pads least. Of a weight of 2,880
columns it puts another dimension innermost, and a program that reads rows then copies the whole weight in each step.
Such weights are placed in the order of their dimensions; padding takes at most 127 columns. So are stacks of few rows,
such as the scales of codes: a kernel's operands have that order, and others are copied whole. Programs are compiled
for the formats that weights have. On several devices the order is the TPU's own."""

from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding
from jaxtyping import Array

LANES, SUBLANES = 128, 32  # SUBLANES: of bytes; of float32 8


def weight_format(sharding: Sharding, shape: tuple[int, ...]) -> Sharding | Format:
    """Where a weight of this shape is placed, and in which order where the device's own choice may be another."""
    is_ragged = len(shape) > 1 and shape[-1] > LANES and shape[-1] % LANES != 0
    is_ragged = is_ragged or (len(shape) == 3 and shape[-2] % SUBLANES != 0)
    if not (is_ragged and len(sharding.device_set) == 1 and _is_tpu(sharding)):
        return sharding
    return Format(Layout(tuple(range(len(shape)))), sharding)


def placed(array: Array) -> Array:
    """The array in the order of `weight_format`; the array itself, where that is the device's own choice, or where the
    array is on no device."""
    if not isinstance(array, jax.Array):
        return array
    own_format = weight_format(array.sharding, array.shape)
    return jax.device_put(array, own_format) if isinstance(own_format, Format) else array


def format_of(leaf: Any) -> Any:
    """Where an array, or the shape of one, is placed, and on a TPU in which order."""
    return leaf.format if leaf.sharding is not None and _is_tpu(leaf.sharding) else leaf.sharding


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype, devices and order of an array, or of the shape of one."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=format_of(leaf))


def _is_tpu(sharding: Sharding) -> bool:
    return any(device.platform == "tpu" for device in sharding.device_set)
