"""Random weights for a published config, made on the device: full size without a checkpoint, for timing and memory
tests. An array's shape and name decide how it is filled.

Matrices are normal with a variance of 1 over their inputs, so that values neither grow nor fade. Matrices that write
to the residual stream are smaller, so that tokens stay as different as their embeddings and a router spreads them
over all experts. Norms are 1 and other vectors are 0. Stacked arrays are filled a matrix at a time: the noise of a
whole stack of layers would not fit in memory as well. Codes of e4m3 are normal, too, and those of 4 bits all alike
frequent, with scales for that variance."""

import contextlib
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, UInt8

from routed_experts.layers.quantized import CODE_DTYPES, CODE_VALUES, E4M3, GROUPS, INT4, SCALE, SPANS, inputs_of_byte

M = TypeVar("M", bound=nnx.Module)
# Standard deviations of codes: of e4m3, of which the largest is 448; and of those of 4 bits, all alike frequent.
_CODE_SCALES = {E4M3: 64.0} | {
    form: statistics.pstdev(0.0 if value == -8 else value for value in values) for form, values in CODE_VALUES.items()
}
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
    leaves = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    filled = []
    for index, (name, (path, leaf)) in enumerate(leaves.items()):
        device = device_for(name)
        with contextlib.nullcontext() if device is None else jax.default_device(device):
            key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), index)
            _, codes = leaves.get(name.removesuffix(SCALE), (path, leaf))
            drawn = _fill(key, name, leaf.shape, leaf.dtype) if codes is leaf else _scales(name, leaf, codes)
        filled.append((path, leaf.replace(drawn if put_array is None else put_array(name, drawn))))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _fill(key: Array, name: str, shape: tuple[int, ...], dtype: Any) -> Float[Array, "..."]:
    last = name.rsplit(".", 1)[-1]
    if last.endswith("norm"):
        return jnp.ones(shape, dtype)
    if jnp.dtype(dtype) == CODE_DTYPES[E4M3]:
        return _normal(key, shape, jnp.dtype(dtype), _CODE_SCALES[E4M3])
    if jnp.dtype(dtype).itemsize == 1:  # two codes of 4 bits
        bits = _random_bytes(key, shape)
        if jnp.dtype(dtype) == CODE_DTYPES[INT4]:
            bits = _balanced(bits & 15) | _balanced(bits >> 4) << 4
        return lax.bitcast_convert_type(bits, dtype)
    if len(shape) < 2 or "bias" in last or "sink" in last:
        return jnp.zeros(shape, dtype)
    scale = 1.0 if last == "embed" else _matrix_scale(last, shape[-2])
    return _normal(key, shape, jnp.dtype(dtype), scale)


def _random_bytes(key: Array, shape: tuple[int, ...]) -> UInt8[Array, "..."]:
    """Four of each word that is drawn: `jax.random.bits` draws a word for a byte."""
    count = math.prod(shape)
    words = jax.random.bits(key, (math.ceil(count / 4),), jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[:count].reshape(shape)


def _balanced(codes: Array) -> Array:
    """Bits of int4, with 0 in place of -8, which has no counterpart: where the mean is not 0, all tokens become
    alike."""
    lowest, zero = (CODE_VALUES[INT4].index(value) for value in (-8.0, 0.0))
    return jnp.where(codes == lowest, jnp.uint8(zero), codes)


def _scales(name: str, scales: Any, codes: Any) -> Float[Array, "..."]:
    """Scales for the groups of inputs of a matrix of codes, in either order of its sides."""
    form = next(form for form, dtype in CODE_DTYPES.items() if dtype == codes.dtype)
    # As QuantizedWeight.create does, but for the order of the sides, which an array does not tell.
    numbers, (num_groups, num_spans) = math.prod(codes.shape[-2:]) * inputs_of_byte(form), scales.shape[-2:]
    sizes = (numbers // (span * num_spans) for span in SPANS if span * num_spans in codes.shape[-2:])
    inputs = next(size for size in sizes if any(math.ceil(size / group) == num_groups for group in GROUPS))
    matrix = name.rsplit(".", 1)[-1].removesuffix(SCALE)
    return jnp.full(scales.shape, _matrix_scale(matrix, inputs) / _CODE_SCALES[form], scales.dtype)


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
