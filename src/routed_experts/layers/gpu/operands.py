"""Operands of a product inside a GPU kernel: blocks of rows, and of a matrix of numbers or of codes and scales.

Numbers are the right operand, [I, O]. Codes are the left one, [O, I]: the compiler decodes a left operand in registers,
and a right one through shared memory. Both pass through the chip once. Measured on an H200 with 16 rows: codes as
float16 are 1.3 to 1.75 times as fast as numbers of bfloat16, codes as bfloat16 1.0 to 1.4 times; one instruction
decodes two codes to float16, and bfloat16 takes four. So rows of bfloat16 are scaled to float16 first, as a kernel.

A step of a sum is within one group of inputs. Its sum is float32, and so is the scale that it is multiplied by.

Dims: N rows, T rows of a block, I inputs, J groups of inputs, O outputs, C columns of a block, R matrices of the
stack."""

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from routed_experts.core.errors import ConfigError
from routed_experts.layers.gpu.blocks import combine_masks, load_or_zero, power_of_two
from routed_experts.layers.gpu.scaled_rows import RowScaling, ScaledRows, power_of_rows, to_float16
from routed_experts.layers.quantized import E4M3, QuantizedWeight, Weight

_OFFSETS = 2**31  # Pallas counts elements in 32 bits with a sign, in arrays of up to _NARROW bytes
_NARROW = 2**32
FEWEST_ROWS = 8  # of a product on the tensor cores
_UNROLLED_STEPS = 4  # of few rows; the loads of such steps are all on their way before the first one is multiplied


def addressable_matrices(stack: int, inputs: int, outputs: int) -> int:
    """The least length of a stack of codes, not below `stack`, that a kernel reads in full. Pallas' Triton lowering
    counts elements in 32 bits in arrays of up to 4 GiB; the second half of the codes of such a stack is out of its
    reach. A longer array has 64 bits, so the stack is padded with matrices that are never read."""
    matrix = inputs * outputs
    return stack if is_addressable(stack * matrix) else _NARROW // matrix + 1


def is_addressable(num_codes: int) -> bool:
    """Whether a kernel reads a stack of so many codes in full."""
    return not _OFFSETS < num_codes <= _NARROW


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
                f"and 4 GiB, and the GPU kernels read the first 2 GiB of it; choose another tp_size or ep_size, whose "
                f'stacks have other sizes, or quantization="none"; code that makes stacks can pad them to {needed}'
            )


def is_coded(*weights: Weight | None) -> bool:
    """Whether all matrices that exist are codes; then rows may be float16."""
    return all(isinstance(weight, QuantizedWeight) for weight in weights if weight is not None)


def product_step(weights: Any, size: int) -> int:
    """Inputs of a step: `size`, or the group of the codes if that is shorter."""
    return min(size, weights.group) if isinstance(weights, QuantizedWeight) else size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs that a block sums: `length` from `first` on (None: 0), a multiple of the group, in steps of `size`."""

    length: int
    size: int
    first: Array | None = None

    def step(self, index: Any, size: int) -> tuple[Array, Array, Array | None]:
        """The first input of that step, its inputs, and which of them exist; None if all do."""
        offset, start = index * size + jnp.arange(size), index * size
        deep = None if self.length % size == 0 else offset < self.length
        return (start, offset, deep) if self.first is None else (self.first + start, self.first + offset, deep)


def sum_products(
    x: Any,
    weights: Any,
    matrix: Array,
    rows: Array,
    row_mask: Array | None,
    columns: tuple[Array, ...],
    real: Array | None,
    *,
    inputs: Inputs,
    scaled: RowScaling | None = None,
) -> list[Float[Array, "T C"]]:
    """Rows of x times one matrix, for each of some sets of columns; float32. `row_mask` [T, 1], `real` [1, C]. Fewer
    rows than a side of the tensor cores' product, which is 8, are multiplied without them."""
    if rows.shape[0] < FEWEST_ROWS:
        return sum_few_rows(x, weights, matrix, rows, row_mask, columns, real, inputs, is_scaled=scaled is not None)
    size = product_step(weights, inputs.size)
    steps = pl.cdiv(inputs.length, size)
    is_inside = scaled is RowScaling.INSIDE and isinstance(weights, QuantizedWeight)

    def load_scales(index: Any) -> tuple[Array, ...]:
        """Those of a step, for each set of columns; none of numbers."""
        if not isinstance(weights, QuantizedWeight):
            return ()
        first, _, _ = inputs.step(jnp.minimum(index, steps - 1), size)
        at = [weights.scales.at[matrix, first // weights.group, part[:, None]] for part in columns]
        return tuple(load_or_zero(own, None if real is None else real.T) for own in at)

    def step(index: Array, carry: tuple[tuple[Array, ...], tuple[Array, ...]]) -> tuple[tuple[Array, ...], ...]:
        sums, scales = carry
        # The compiler pipelines loads of a product's operands alone, so those of scales are a step ahead here.
        following, (_, depth, deep) = load_scales(index + 1), inputs.step(index, size)
        own = _load_rows(x, rows, depth, row_mask, deep, is_inside=is_inside)
        blocks = [_load_block(weights, matrix, depth, part, deep, real, own.numbers.dtype) for part in columns]
        products = [_block_product(own, *block) for block in itertools.zip_longest(blocks, scales)]
        return tuple(total + part for total, part in zip(sums, products, strict=True)), following

    shape = (rows.shape[0], columns[0].shape[0])
    zeros = jnp.zeros(shape[::-1] if isinstance(weights, QuantizedWeight) else shape, jnp.float32)
    sums, _ = lax.fori_loop(0, steps, step, ((zeros,) * len(columns), load_scales(0)))
    return [_end_sums(total, x, weights, rows, row_mask) for total in sums]


def sum_few_rows(
    x: Any,
    weights: QuantizedWeight,
    matrix: Array,
    rows: Array,
    row_mask: Array | None,
    columns: tuple[Array, ...],
    real: Array | None,
    inputs: Inputs,
    *,
    is_scaled: bool,
) -> list[Float[Array, "T C"]]:
    """The same of few rows, number by number in float32, whose products are exact. Every code is decoded once. If
    `is_scaled`, rows of bfloat16 are scaled so that a step neither overflows nor underflows, in float32 too. A step may
    be all inputs: Triton overlaps no loads of steps without a product on the tensor cores, so all that a block has in
    flight is one step, or the steps of an unrolled loop."""
    assert isinstance(weights, QuantizedWeight) and not isinstance(x, ScaledRows), "few rows are multiplied by codes"
    count, group, size = rows.shape[0], weights.group, min(inputs.size, power_of_two(inputs.length))
    num_groups = max(size // group, 1)
    is_row = [jnp.arange(count) == index for index in range(count)]
    row_ids = [jnp.sum(jnp.where(own, rows, 0)) for own in is_row]
    exists = [None if row_mask is None else jnp.sum((own & row_mask[:, 0]).astype(jnp.int32)) > 0 for own in is_row]
    real_column = None if real is None else real.T
    end = inputs.length if inputs.first is None else inputs.first + inputs.length

    def step(index: Any, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        first, depth, deep = inputs.step(index, size)
        groups = first // group + jnp.arange(num_groups)
        is_group = None if deep is None else (groups * group < end)[None, :]
        mask = combine_masks(None if deep is None else deep[None, :], real_column)
        # All loads before the first conversion.
        codes = [_load_codes(weights, matrix, depth, part, mask) for part in columns]  # C I
        at = [weights.scales.at[matrix, groups[None, :], part[:, None]] for part in columns]
        scales = [load_or_zero(own, combine_masks(is_group, real_column)) for own in at]  # C J
        codes = [_decode(part, mask, jnp.float32) for part in codes]
        sums = []
        for row, is_real in zip(row_ids, exists, strict=True):
            own = load_or_zero(x.at[row, depth], combine_masks(is_real, deep)).astype(jnp.float32)
            power, inverse = power_of_rows(own) if is_scaled and x.dtype == jnp.bfloat16 else (None, None)
            own = (own if power is None else own * power)[None, :]
            parts = [_group_sums(part * own, num_groups) * scale for part, scale in zip(codes, scales, strict=True)]
            sums += parts if inverse is None else [part * inverse for part in parts]
        return tuple(total + part for total, part in zip(totals, sums, strict=True))

    zeros, steps = jnp.zeros((columns[0].shape[0], num_groups), jnp.float32), pl.cdiv(inputs.length, size)
    totals = (zeros,) * (count * len(columns))
    if steps <= _UNROLLED_STEPS:
        totals = functools.reduce(lambda sums, index: step(index, sums), range(steps), totals)
    else:
        totals = lax.fori_loop(0, steps, step, totals)
    sums = [jnp.sum(total, axis=1)[None, :] for total in totals]  # 1 C, row by row
    return [_stack_rows(sums[part :: len(columns)], is_row) for part in range(len(columns))]


def _group_sums(products: Float[Array, "C I"], num_groups: int) -> Float[Array, "C J"]:
    """The sum of each group of a step."""
    columns, size = products.shape
    return jnp.sum(products.reshape(columns, num_groups, size // num_groups), axis=2)


def _stack_rows(parts: list[Float[Array, "1 C"]], is_row: list[Array]) -> Float[Array, "T C"]:
    """One array of the rows; a kernel has no concatenation."""
    if len(parts) == 1:
        return parts[0]
    return functools.reduce(
        jnp.add, [jnp.where(own[:, None], part, 0.0) for own, part in zip(is_row, parts, strict=True)]
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _RowsBlock:
    """A block of rows; `inverse`: what its product is multiplied by, where it was scaled."""

    numbers: Float[Array, "T I"]
    inverse: Float[Array, "1 T"] | None = None


def _load_rows(
    x: Any, rows: Array, depth: Array, row_mask: Array | None, deep: Array | None, *, is_inside: bool
) -> _RowsBlock:
    """Those of `row_mask` [T, 1], and inputs `depth`, of which `deep` [I] exist; scaled here if `is_inside`."""
    values = x.values if isinstance(x, ScaledRows) else x
    numbers = load_or_zero(
        values.at[rows[:, None], depth[None, :]], combine_masks(row_mask, None if deep is None else deep[None, :])
    )
    if not is_inside or numbers.dtype != jnp.bfloat16:
        return _RowsBlock(numbers)
    numbers, inverse = to_float16(numbers)
    return _RowsBlock(numbers, inverse[None, :])


def _load_block(
    weights: Any, matrix: Array, depth: Array, columns: Array, deep: Array | None, real: Array | None, dtype: Any
) -> Float[Array, "I C"] | Float[Array, "C I"]:
    """A block of one matrix of the stack for rows of `dtype`: inputs `depth`, of which `deep` [I] exist, and
    `columns`, of which `real` [1, C] exist. Codes are transposed, in `dtype`, which holds them exactly."""
    if not isinstance(weights, QuantizedWeight):
        at = weights.at[matrix, depth[:, None], columns[None, :]]
        return load_or_zero(at, combine_masks(None if deep is None else deep[:, None], real))
    mask = combine_masks(None if deep is None else deep[None, :], None if real is None else real.T)
    return _decode(_load_codes(weights, matrix, depth, columns, mask), mask, dtype)


def _load_codes(
    weights: QuantizedWeight, matrix: Array, depth: Array, columns: Array, mask: Array | None
) -> Float[Array, "C I"]:
    """Codes of inputs `depth` and `columns`; those outside the mask [C, I] are not defined."""
    codes: Any = weights.codes
    at = codes.at[matrix, columns[:, None], depth[None, :]]
    return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask)


def _decode(codes: Float[Array, "C I"], mask: Array | None, dtype: Any) -> Float[Array, "C I"]:
    """The values of codes, and zeros outside the mask; after the conversion, because Triton has no constants of every
    type of codes."""
    return codes.astype(dtype) if mask is None else jnp.where(mask, codes.astype(dtype), jnp.zeros((), dtype))


def _block_product(rows: _RowsBlock, block: Array, scales: Array | None) -> Float[Array, "T C"] | Float[Array, "C T"]:
    """The rows times the block [I, C]; or [C, I] of codes, times their `scales` [C, 1], and transposed."""
    if scales is None:
        return _dot(rows.numbers, block)
    precision = lax.Precision.HIGHEST if rows.numbers.dtype == jnp.float32 else None
    product = jnp.dot(block, rows.numbers.T, precision=precision, preferred_element_type=jnp.float32) * scales
    return product if rows.inverse is None else product * rows.inverse


def _end_sums(total: Array, x: Any, weights: Any, rows: Array, row_mask: Array | None) -> Float[Array, "T C"]:
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
