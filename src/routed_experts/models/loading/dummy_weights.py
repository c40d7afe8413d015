"""Random weights for a published config, made on the device: full size without a checkpoint, for timing and memory
tests. An array's shape and name decide how it is filled.

Matrices are normal with a variance of 1 over their inputs, so that values neither grow nor fade. Matrices that write
to the residual stream are smaller, so that tokens stay as different as their embeddings and a router spreads them
over all experts. Norms are 1 and other vectors are 0. Stacked arrays are filled a matrix at a time: the noise of a
whole stack of layers would not fit in memory as well. Codes are normal, too, with scales for that variance."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from routed_experts.layers.quantized import CODE_DTYPES, E4M3, GROUPS

M = TypeVar("M", bound=nnx.Module)
_CODE_SCALE = 64.0  # standard deviation of codes, of which the largest is 448
_STREAM_ABOVE = 1 << 30  # elements; smaller arrays are drawn at once


def dummy_model(
    build: Callable[[], M],
    *,
    seed: int = 0,
    device_for: Callable[[str], Any] = lambda target: None,
    put_array: Callable[[str, Array], Array] | None = None,
) -> M:
    """The module that `build` describes, with random weights; `build` itself is only traced.
    `device_for`: the device of the array of a dotted name, None for the default one. `put_array` puts an array on its
    devices before the next is drawn."""
    graphdef, state = nnx.split(nnx.eval_shape(build))
    filled = []
    for index, (path, leaf) in enumerate(nnx.to_flat_state(state)):
        name = ".".join(map(str, path))
        device = device_for(name)
        with contextlib.nullcontext() if device is None else jax.default_device(device):
            key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), index)
            drawn = _fill(key, name, leaf.shape, leaf.dtype)
        filled.append((path, leaf.replace(drawn if put_array is None else put_array(name, drawn))))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _fill(key: Array, name: str, shape: tuple[int, ...], dtype: Any) -> Float[Array, "..."]:
    last = name.rsplit(".", 1)[-1]
    if last.endswith("norm"):
        return jnp.ones(shape, dtype)
    matrix = last.removesuffix("_scale")
    if matrix != last:  # of groups of inputs
        return jnp.full(shape, _matrix_scale(matrix, shape[-2] * GROUPS[0]) / _CODE_SCALE, dtype)
    if jnp.dtype(dtype) == CODE_DTYPES[E4M3]:
        return _normal(key, shape, jnp.dtype(dtype), _CODE_SCALE)
    if len(shape) < 2 or "bias" in last or "sink" in last:
        return jnp.zeros(shape, dtype)
    scale = 1.0 if last == "embed" else _matrix_scale(last, shape[-2])
    return _normal(key, shape, jnp.dtype(dtype), scale)


def _matrix_scale(name: str, inputs: int) -> float:
    """The standard deviation of a matrix; what layers add stays below the token's own embedding."""
    return inputs**-0.5 / (8 if name in ("out", "down", "dense_down", "shared_down") else 1)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: Array, shape: tuple[int, ...], dtype: jnp.dtype, scale: float) -> Float[Array, "..."]:
    def draw(key: Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
        return (jax.random.normal(key, shape, jnp.float32 if dtype.itemsize == 1 else dtype) * scale).astype(dtype)

    if math.prod(shape) <= _STREAM_ABOVE:
        return draw(key, shape)
    return jax.lax.map(lambda index: draw(jax.random.fold_in(key, index), shape[1:]), jnp.arange(shape[0]))
