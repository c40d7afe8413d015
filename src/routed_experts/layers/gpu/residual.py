"""The residual stream on a GPU: add what a matrix gave, in parts or in slots, and normalise the sum, as one kernel.
Knows nothing of what was added.

Rounded as the plain code rounds: what is added is one array of the model's dtype, so is the sum, and `rms_norm` takes that.
Dims: N tokens, D hidden, S parts of a sum, K experts per token, R layers of the run."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.gpu.blocks import power_of_two


def _add_and_norm(x: Any, added: Array, scales: Any, layer: Any, stream: Any, normed: Any, *, eps: float) -> None:
    """Finish a row whose addend [D] has been made."""
    row, dim = pl.program_id(0), x.shape[1]
    lanes = jnp.arange(power_of_two(dim))
    real = None if lanes.shape[0] == dim else lanes < dim
    zero = None if real is None else 0.0
    total = plgpu.load(x.at[row, lanes], mask=real, other=zero) + added.astype(x.dtype)
    plgpu.store(stream.at[row, lanes], total, mask=real)
    wide = total.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.sum(wide * wide, axis=0) / dim + eps)
    scale = plgpu.load(scales.at[layer[0], lanes], mask=real, other=zero)
    plgpu.store(normed.at[row, lanes], (wide * inverse).astype(x.dtype) * scale, mask=real)


def _of_parts(x: Any, parts: Any, scales: Any, layer: Any, stream: Any, normed: Any, *, eps: float) -> None:
    row, lanes = pl.program_id(0), jnp.arange(power_of_two(x.shape[1]))
    real = lanes < x.shape[1]
    loaded = [plgpu.load(parts.at[part, row, lanes], mask=real, other=0.0) for part in range(parts.shape[0])]
    _add_and_norm(x, functools.reduce(jnp.add, loaded), scales, layer, stream, normed, eps=eps)


def _of_slots(x: Any, slots: Any, weights: Any, valid: Any, scales: Any, layer: Any, stream: Any, normed: Any, *, eps: float) -> None:
    row, lanes = pl.program_id(0), jnp.arange(power_of_two(x.shape[1]))
    top_k, kept = weights.shape[1], valid[pl.program_id(0)]
    real = (lanes < x.shape[1]) & kept  # slots of padding rows were never written
    loaded = [plgpu.load(slots.at[row * top_k + k, lanes], mask=real, other=0.0).astype(jnp.float32) for k in range(top_k)]
    scaled = [part * jnp.where(kept, weights[row, k], 0.0) for k, part in enumerate(loaded)]
    _add_and_norm(x, functools.reduce(jnp.add, scaled), scales, layer, stream, normed, eps=eps)


def _call(
    kernel: Callable[..., None], name: str, x: Float[Array, "N D"], *args: Array, eps: float, interpret: bool
) -> tuple[Float[Array, "N D"], Float[Array, "N D"]]:
    num_rows, dim = x.shape
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    stream, normed = pl.pallas_call(
        functools.partial(kernel, eps=eps),
        (shape, shape),
        grid=(num_rows,),
        compiler_params=plgpu.CompilerParams(num_warps=8 if dim >= 2048 else 4, num_stages=1),
        interpret=interpret,
        name=name,
    )(x, *args)
    return stream, normed


def add_parts(
    x: Float[Array, "N D"],
    parts: Float[Array, "S N D"],
    scales: Float[Array, "R D"],
    layer: Int[Array, ""],
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "N D"], Float[Array, "N D"]]:
    """x plus the sum of the parts, and its norm by the layer's scale."""
    return _call(_of_parts, "add_parts", x, parts, scales, layer.reshape(1), eps=eps, interpret=interpret)


def add_slots(
    x: Float[Array, "N D"],
    slots: Float[Array, "NK D"],
    weights: Float[Array, "N K"],
    valid: Bool[Array, " N"],
    scales: Float[Array, "R D"],
    layer: Int[Array, ""],
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "N D"], Float[Array, "N D"]]:
    """x plus the weighted slots in executed order, and its norm by the layer's scale; to rows of padding nothing is added."""
    return _call(_of_slots, "add_slots", x, slots, weights, valid, scales, layer.reshape(1), eps=eps, interpret=interpret)
