"""The residual stream on a GPU: add a layer's output, in parts or in slots, and normalise the sum, as one kernel.

Rounded as the plain code rounds: the addend is one array of the model's dtype, so is the sum, and `rms_norm` reads
that. Dims: N tokens, D hidden, S parts of a sum, K experts per token, R layers of the stack."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.gpu.blocks import load_or_zero, power_of_two


def _add_and_norm(
    x: Any, addend: Callable[[Array], Array], scales: Any, layer: Any, stream: Any, normed: Any, *, eps: float
) -> None:
    """Finish a row; `addend` loads the addend of the given columns. All loads are issued before the first result is
    used."""
    row, dim = pl.program_id(0), x.shape[1]
    lanes = jnp.arange(power_of_two(dim))
    real = None if lanes.shape[0] == dim else lanes < dim
    zero = None if real is None else 0.0
    scale = plgpu.load(scales.at[layer[0], lanes], mask=real, other=zero)
    old = plgpu.load(x.at[row, lanes], mask=real, other=zero)
    total = old + addend(lanes).astype(x.dtype)
    wide = total.astype(jnp.float32) if real is None else jnp.where(real, total.astype(jnp.float32), 0.0)
    inverse = jax.lax.rsqrt(jnp.sum(wide * wide, axis=0) / dim + eps)
    plgpu.store(stream.at[row, lanes], total, mask=real)
    plgpu.store(normed.at[row, lanes], (wide * inverse).astype(x.dtype) * scale, mask=real)


def _of_parts(x: Any, parts: Any, scales: Any, layer: Any, stream: Any, normed: Any, *, eps: float) -> None:
    row = pl.program_id(0)

    def addend(lanes: Array) -> Array:
        mask = None if lanes.shape[0] == x.shape[1] else lanes < x.shape[1]
        return functools.reduce(
            jnp.add, [load_or_zero(parts.at[part, row, lanes], mask) for part in range(parts.shape[0])]
        )

    _add_and_norm(x, addend, scales, layer, stream, normed, eps=eps)


def _of_slots(
    x: Any, slots: Any, weights: Any, valid: Any, scales: Any, layer: Any, stream: Any, normed: Any, *, eps: float
) -> None:
    row, top_k = pl.program_id(0), weights.shape[1]

    def addend(lanes: Array) -> Array:
        mask = None if lanes.shape[0] == x.shape[1] else lanes < x.shape[1]
        loaded = [load_or_zero(slots.at[row * top_k + k, lanes], mask).astype(jnp.float32) for k in range(top_k)]
        total = functools.reduce(jnp.add, [part * weights[row, k] for k, part in enumerate(loaded)])
        return jnp.where(valid[row], total, 0.0)  # slots of padding rows were never written

    _add_and_norm(x, addend, scales, layer, stream, normed, eps=eps)


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
    """x plus the weighted slots in executed order, and its norm by the layer's scale; to rows of padding nothing is
    added."""
    return _call(
        _of_slots, "add_slots", x, slots, weights, valid, scales, layer.reshape(1), eps=eps, interpret=interpret
    )
