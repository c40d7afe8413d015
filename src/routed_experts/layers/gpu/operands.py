"""Operands of a product inside a GPU kernel: blocks of rows, and of a matrix of numbers or of codes and scales.

Numbers are the right operand, [I, O]. Codes are the left one, [O, I]: the compiler decodes a left operand in registers,
and a right one through shared memory. Both pass through the chip once. Measured on an H200 with 16 rows: codes as
float16 are 1.3 to 1.75 times as fast as numbers of bfloat16, codes as bfloat16 1.0 to 1.4 times; one instruction
decodes two codes to float16, and bfloat16 takes four. So rows of bfloat16 are scaled to float16 first, as a kernel.

A step of a sum is within one group of inputs. Its sum is float32, and so is the scale that it is multiplied by.

Dims: N rows, T rows of a block, I inputs, J groups of inputs, O outputs, C columns of a block, R matrices of the
stack."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from routed_experts.core.errors import ConfigError
from routed_experts.layers.gpu.blocks import combine_masks, load_or_zero
from routed_experts.layers.gpu.scaled_rows import ScaledRows
from routed_experts.layers.quantized import E4M3, QuantizedWeight, Weight

_OFFSETS = 2**31  # Pallas counts elements in 32 bits with a sign, in arrays of up to _NARROW bytes
_NARROW = 2**32


def addressable_matrices(stack: int, inputs: int, outputs: int) -> int:
    """The least length of a stack of codes, not below `stack`, that a kernel reads in full. Pallas' Triton lowering
    counts elements in 32 bits in arrays of up to 4 GiB; the second half of the codes of such a stack is out of its
    reach. A longer array has 64 bits, so the stack is padded with matrices that are never read."""
    matrix = inputs * outputs
    return stack if not _OFFSETS < stack * matrix <= _NARROW else _NARROW // matrix + 1


def check_weights(*weights: Weight | None) -> None:
    """Raise ConfigError for codes that the kernels cannot read."""
    for weight in weights:
        if not isinstance(weight, QuantizedWeight):
            continue
        if weight.format != E4M3 or not weight.outputs_first:
            order = "[R, O, I]" if weight.outputs_first else "[R, I, O]"
            raise ConfigError(
                f"codes are {weight.format} {order}; the GPU kernels take {E4M3} [R, O, I]; "
                "convert them when they are loaded"
            )
        needed = addressable_matrices(*weight.shape)
        if needed != weight.shape[0]:
            raise ConfigError(
                f"a stack of {weight.shape[0]} matrices of {weight.shape[1]} x {weight.shape[2]} codes has between 2 "
                f"and 4 GiB, and the GPU kernels read the first 2 GiB of it; pad the stack to {needed} matrices"
            )


def is_coded(*weights: Weight | None) -> bool:
    """Whether all matrices that exist are codes; then rows may be float16."""
    return all(isinstance(weight, QuantizedWeight) for weight in weights if weight is not None)


def product_step(weights: Any, size: int) -> int:
    """Inputs of a step: `size`, or the group of the codes if that is shorter."""
    return min(size, weights.group) if isinstance(weights, QuantizedWeight) else size


def begin_sums(weights: Any, rows: int, columns: int) -> Float[Array, "T C"] | Float[Array, "C T"]:
    """Zeros: of codes transposed, as their product is."""
    return jnp.zeros((columns, rows) if isinstance(weights, QuantizedWeight) else (rows, columns), jnp.float32)


def load_rows(x: Any, rows: Array, depth: Array, row_mask: Array | None, deep: Array | None) -> Float[Array, "T I"]:
    """A block of rows as they are held: those of `row_mask` [T, 1], and inputs `depth`, of which `deep` [I] exist."""
    values = x.values if isinstance(x, ScaledRows) else x
    return load_or_zero(
        values.at[rows[:, None], depth[None, :]], combine_masks(row_mask, None if deep is None else deep[None, :])
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A part of a matrix. Codes are transposed, with the values' dtype of the rows, which holds them exactly; `scales`
    are those of their group."""

    numbers: Float[Array, "I C"] | Float[Array, "C I"]
    scales: Float[Array, "C 1"] | None = None


def load_block(
    weights: Any,
    matrix: Array,
    first: Array,
    depth: Array,
    columns: Array,
    deep: Array | None,
    real: Array | None,
    dtype: Any,
) -> Block:
    """A block of one matrix of the stack for rows of `dtype`: inputs `depth` from `first` on, of which `deep` [I]
    exist, and `columns`, of which `real` [1, C] exist."""
    if not isinstance(weights, QuantizedWeight):
        at = weights.at[matrix, depth[:, None], columns[None, :]]
        return Block(load_or_zero(at, combine_masks(None if deep is None else deep[:, None], real)))
    real_column = None if real is None else real.T
    codes: Any = weights.codes
    at = codes.at[matrix, columns[:, None], depth[None, :]]
    mask = combine_masks(None if deep is None else deep[None, :], real_column)
    # Before the product, which waits for its operands, so that it is on its way meanwhile.
    scales = load_or_zero(weights.scales.at[matrix, first // weights.group, columns[:, None]], real_column)
    if mask is None:
        return Block(plgpu.load(at).astype(dtype), scales)
    # Zeros after the conversion: Triton has no constants of every type of codes.
    return Block(jnp.where(mask, plgpu.load(at, mask=mask).astype(dtype), jnp.zeros((), dtype)), scales)


def block_product(rows: Float[Array, "T I"], block: Block) -> Float[Array, "T C"] | Float[Array, "C T"]:
    """The rows times the block; of codes transposed, and multiplied by the scales."""
    if block.scales is None:
        return _dot(rows, block.numbers)
    precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    return jnp.dot(block.numbers, rows.T, precision=precision, preferred_element_type=jnp.float32) * block.scales


def end_sums(total: Array, x: Any, weights: Any, rows: Array, row_mask: Array | None) -> Float[Array, "T C"]:
    """The sums by row, of rows as they were before they were scaled. `row_mask` [T, 1]."""
    if not isinstance(weights, QuantizedWeight):
        return total
    return total.T * load_or_zero(x.inverse.at[rows[:, None]], row_mask) if isinstance(x, ScaledRows) else total.T


def _dot(rows: Float[Array, "N D"], matrix: Float[Array, "D O"]) -> Float[Array, "N O"]:
    """In float32. A wider matrix than the rows (a float32 router) keeps its precision: as three matrices of bfloat16,
    whose sum it is, because a product of float32 would round it to a shorter format."""
    if rows.dtype == matrix.dtype:
        return jnp.dot(rows, matrix, preferred_element_type=jnp.float32)
    if rows.dtype != jnp.bfloat16:
        rows = rows.astype(jnp.float32)
        return jnp.dot(rows, matrix, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    total = None
    for _ in range(3):
        part = matrix.astype(jnp.bfloat16)
        matrix = matrix - part.astype(jnp.float32)
        product = jnp.dot(rows, part, preferred_element_type=jnp.float32)
        total = product if total is None else total + product
    assert total is not None
    return total
