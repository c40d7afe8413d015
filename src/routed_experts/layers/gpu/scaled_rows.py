"""Rows of bfloat16 as float16, times powers of two, for products with codes: whole rows by the kernel that makes them
(residual.py) or by one of their own; in parts, each with its own power, by attention, whose blocks make a head of a
row; of a product of few rows, by the product's kernel, step by step (sums.py).

A row's largest number is taken to [2^14, 2^15), just below the largest float16, and its sums are multiplied by the
inverse, which is exact. float16 has more bits than bfloat16, but ends at 2^-24: numbers of a row from 2^-31 of its
largest on are exact, and smaller ones are off by up to 2^-39 of its largest. Rows below 2^-112 are multiplied by 2^126;
no number of such a row is below 2^-7 then, so all are exact. The same holds for a part, and for the inputs of a step.

Dims: N rows, D numbers of a row, T rows of a block, I inputs of a step or of a part."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.gpu.blocks import combine_masks, load_or_zero, power_of_two
from routed_experts.layers.quantized import ScaledRows

_LARGEST = 14  # exponent of a row's largest number
_BIAS = 127  # of exponents of float32
_BLOCK = 4096  # numbers of a block of the kernel
_MOST_ROWS = 16  # of a block
PART_UNIT = 64  # numbers of which a part has a multiple: products of fewer inputs are slower


Rows = Float[Array, "N D"] | ScaledRows


def _exponent(exponent: Array) -> Array:
    """Two to that power, float32."""
    return lax.bitcast_convert_type((exponent + _BIAS) << 23, jnp.float32)


def power_of_rows(x: Float[Array, "... I"]) -> tuple[Float[Array, " ..."], Float[Array, " ..."]]:
    """Each row's power of two, and the inverse; x is float32. A row with a number that is not finite keeps it."""
    largest = lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=-1), jnp.int32) >> 23
    power = jnp.minimum(_LARGEST + _BIAS - largest, _BIAS - 1)  # 2^-126 is the last inverse with a full exponent
    return _exponent(power), _exponent(-power)


def to_float16(x: Float[Array, "... I"]) -> tuple[Float[Array, "... I"], Float[Array, " ..."]]:
    """Each row times its power of two, and the inverse of the power."""
    wide = x.astype(jnp.float32)
    power, inverse = power_of_rows(wide)
    return (wide * power[..., None]).astype(jnp.float16), inverse


def _scale(x: Any, scaled: Any, *, size: int) -> None:
    """Block of `size` rows."""
    num_rows, dim = x.shape
    rows, lanes = pl.program_id(0) * size + jnp.arange(size), jnp.arange(power_of_two(dim))
    inside = None if num_rows % size == 0 else rows < num_rows
    mask = combine_masks(
        None if inside is None else inside[:, None], None if lanes.shape[0] == dim else (lanes < dim)[None, :]
    )
    at = rows[:, None], lanes[None, :]
    own, back = to_float16(load_or_zero(x.at[at], mask))
    plgpu.store(scaled.values.at[at], own, mask=mask)
    plgpu.store(scaled.inverse.at[0, rows], back, mask=inside)


def scaled_shape(num_rows: int, dim: int, *, parts: int = 1) -> ScaledRows:
    """Shapes and dtypes of that many scaled rows."""
    values: Any = jax.ShapeDtypeStruct((num_rows, dim), jnp.float16)
    inverse: Any = jax.ShapeDtypeStruct((parts, num_rows), jnp.float32)
    return ScaledRows(values, inverse)


def scale_rows(x: Float[Array, "N D"], *, interpret: bool) -> ScaledRows:
    """The rows for a product with codes. One launch. A row with a number that is not finite has no finite sum."""
    num_rows, dim = x.shape
    size = min(max(_BLOCK // power_of_two(dim), 1), _MOST_ROWS, power_of_two(num_rows))
    return pl.pallas_call(
        lambda x, scaled: _scale(x, scaled, size=size),
        scaled_shape(num_rows, dim),
        grid=(pl.cdiv(num_rows, size),),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="scale_rows",
    )(x)


def _scale_at(x: Any, at: Any, valid: Any, scaled: Any, *, size: int, per_row: int) -> None:
    """Block of `size` slots, whose rows have their numbers in `at`."""
    slots, dim = pl.program_id(0) * size + jnp.arange(size), x.shape[1]
    lanes = jnp.arange(power_of_two(dim))
    exists = slots < at.shape[0]
    mask = exists & plgpu.load(valid.at[slots // per_row], mask=exists, other=False)
    rows = jnp.where(mask, plgpu.load(at.at[slots], mask=mask, other=0), x.shape[0] + slots)  # no row twice
    block, inside = (rows[:, None], lanes[None, :]), combine_masks(mask[:, None], (lanes < dim)[None, :])
    own, back = to_float16(load_or_zero(x.at[block], inside))
    plgpu.store(scaled.values.at[block], own, mask=inside)
    plgpu.store(scaled.inverse.at[0, rows], back, mask=mask)


def scale_rows_at(
    x: Float[Array, "P D"], at: Int[Array, "N K"], valid: Bool[Array, " N"], *, interpret: bool
) -> ScaledRows:
    """The rows that `at` has where it is `valid`, in their places; the others are not defined. One launch."""
    (num_rows, per_row), dim = at.shape, x.shape[1]
    slots = num_rows * per_row
    size = min(max(_BLOCK // power_of_two(dim), 1), _MOST_ROWS, power_of_two(slots))
    return pl.pallas_call(
        functools.partial(_scale_at, size=size, per_row=per_row),
        scaled_shape(x.shape[0], dim),
        grid=(pl.cdiv(slots, size),),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="scale_rows_at",
    )(x, at.reshape(-1), valid)


def rows_for_codes(x: Rows, *, interpret: bool) -> Rows:
    """Scaled if they are bfloat16, which saves the decoder three of four instructions and adds a launch; float16,
    float32 and scaled rows need no scaling."""
    return x if isinstance(x, ScaledRows) or x.dtype != jnp.bfloat16 else scale_rows(x, interpret=interpret)
