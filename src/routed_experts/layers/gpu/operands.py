"""Operands of a product inside a GPU kernel: blocks of rows, and of a matrix of numbers or of codes and scales.

Numbers are the right operand, [I, O]. Codes are the left one, [O, I]: the compiler decodes a left operand in registers,
and a right one through shared memory. Both pass through the chip once. Measured on an H200 with 16 rows: codes as
float16 are 1.3 to 1.75 times as fast as numbers of bfloat16, codes as bfloat16 1.0 to 1.4 times; one instruction
decodes two codes to float16, and bfloat16 takes four. So rows of bfloat16 are scaled to float16 first (scaled_rows.py),
but for codes of e2m1 and many rows an expert (packed_codes.py).

Dims: N rows, T rows of a block, I inputs, J groups of inputs, O outputs, C columns of a block, R matrices of the
stack."""

import dataclasses
import enum
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from routed_experts.core.errors import ConfigError
from routed_experts.layers.gpu.blocks import combine_masks, load_or_zero
from routed_experts.layers.gpu.packed_codes import RUNS
from routed_experts.layers.gpu.scaled_rows import ScaledRows
from routed_experts.layers.quantized import CODE_VALUES, E2M1, E4M3, INT4, QuantizedWeight, Weight, inputs_of_byte

_OFFSETS = 2**31  # Pallas counts elements in 32 bits with a sign, in arrays of up to _NARROW bytes
_NARROW = 2**32


def addressable_matrices(stack: int, code_bytes: int) -> int:
    """The least length of a stack of codes, not below `stack`, that a kernel reads in full, of matrices of so many
    bytes. Pallas' Triton lowering counts elements in 32 bits in arrays of up to 4 GiB; the second half of the codes of
    such a stack is out of its reach. A longer array has 64 bits, so the stack is padded with matrices that are never
    read."""
    return stack if is_addressable(stack * code_bytes) else _NARROW // code_bytes + 1


def is_addressable(num_bytes: int) -> bool:
    """Whether a kernel reads a stack of so many bytes of codes in full."""
    return not _OFFSETS < num_bytes <= _NARROW


def check_weights(*weights: Weight | None) -> None:
    """Raise ConfigError for codes that the kernels cannot read."""
    for weight in weights:
        if not isinstance(weight, QuantizedWeight):
            continue
        if not weight.outputs_first or (is_packed(weight) and weight.run not in RUNS):
            order = "[R, O, I]" if weight.outputs_first else "[R, I, O]"
            packed = f", in runs of {weight.run}" if is_packed(weight) else ""
            raise ConfigError(
                f"codes are {weight.format} {order}{packed}; the GPU kernels take [R, O, I], those of 4 bits in runs "
                f"of {', '.join(map(str, RUNS))}; convert them when they are loaded"
            )
        stack, inputs, outputs = weight.shape
        needed = addressable_matrices(stack, inputs * outputs // inputs_of_byte(weight.format))
        if needed != stack:
            raise ConfigError(
                f"a stack of {stack} matrices of {inputs} x {outputs} {weight.format} codes has between 2 and 4 GiB, "
                "and the GPU kernels read the first 2 GiB of it; choose another tp_size or ep_size, whose stacks have "
                f'other sizes, or quantization="none"; code that makes stacks can pad them to {needed}'
            )


def is_packed(weights: Any) -> bool:
    """Whether they are codes of 4 bits, two a byte."""
    return isinstance(weights, QuantizedWeight) and weights.format in CODE_VALUES


class MatrixKind(enum.Enum):
    """What the matrices of a product are: numbers, or codes of a format, whose rows may be float16."""

    NUMBERS = "numbers"
    E4M3 = E4M3
    INT4 = INT4
    E2M1 = E2M1

    @property
    def is_packed(self) -> bool:
        """Whether they are codes of 4 bits, two a byte."""
        return self.value in CODE_VALUES


def shared_kind(*weights: Weight | None) -> MatrixKind:
    """That of all matrices that exist: numbers where one is, and e4m3, whose tiles suit all codes, where formats
    differ."""
    formats = {
        weight.format if isinstance(weight, QuantizedWeight) else None for weight in weights if weight is not None
    }
    if None in formats or not formats:
        return MatrixKind.NUMBERS
    return MatrixKind(formats.pop()) if len(formats) == 1 else MatrixKind.E4M3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs that a block sums: the `part` of `length` inputs (None: the only one), in steps of `size`."""

    length: int
    size: int
    part: Array | None = None

    def first(self, index: Any, size: int, unit: int = 1) -> Any:
        """The first input of that step in whole units, such as bytes or groups, of which a part has whole ones. A
        quotient is made only where a step is shorter than a unit: Triton does not know what a quotient is a multiple
        of, and loads one byte at a time from there."""
        own = index * (size // unit) if size % unit == 0 else lax.div(jnp.asarray(index * size), unit)
        if self.part is None:
            return own
        assert self.length % unit == 0, (self.length, unit)
        return self.part * (self.length // unit) + own

    def step(self, index: Any, size: int, unit: int = 1) -> tuple[Array, Array | None]:
        """The units of that step, of which it has whole ones, and which of them exist; None if all do."""
        offset = jnp.arange(size // unit)
        deep = None if self.length % size == 0 else index * (size // unit) + offset < self.length // unit
        return self.first(index, size, unit) + offset, deep


def load_rows(
    x: Any, rows: Array, depth: Array, row_mask: Array | None, deep: Array | None, *, is_coded: bool
) -> Float[Array, "T I"] | Float[Array, "I T"]:
    """Those of `row_mask` [T, 1], and inputs `depth`, of which `deep` [I] exist. With codes they are transposed as they
    are loaded: Triton pipelines no load that it transposes."""
    values = x.values if isinstance(x, ScaledRows) else x
    if is_coded:
        mask = combine_masks(None if row_mask is None else row_mask.T, None if deep is None else deep[:, None])
        return load_or_zero(values.at[rows[None, :], depth[:, None]], mask)
    mask = combine_masks(row_mask, None if deep is None else deep[None, :])
    return load_or_zero(values.at[rows[:, None], depth[None, :]], mask)


def load_block(
    weights: Any, matrix: Array, depth: Array, columns: Array, deep: Array | None, real: Array | None, dtype: Any
) -> Float[Array, "I C"] | Float[Array, "C I"]:
    """A block of one matrix of the stack for rows of `dtype`: inputs `depth`, of which `deep` [I] exist, and
    `columns`, of which `real` [1, C] exist. Codes are transposed, in `dtype`, which holds them exactly."""
    if not isinstance(weights, QuantizedWeight):
        at = weights.at[matrix, depth[:, None], columns[None, :]]
        return load_or_zero(at, combine_masks(None if deep is None else deep[:, None], real))
    mask = combine_masks(None if deep is None else deep[None, :], None if real is None else real.T)
    return decode(load_codes(weights, matrix, depth, columns, mask), mask, dtype)


def load_codes(
    weights: QuantizedWeight, matrix: Array, depth: Array, columns: Array, mask: Array | None
) -> Float[Array, "C I"]:
    """Codes of inputs `depth` and `columns`; those outside the mask [C, I] are not defined."""
    codes: Any = weights.codes
    at = codes.at[matrix, columns[:, None], depth[None, :]]
    return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask)


def decode(codes: Float[Array, "C I"], mask: Array | None, dtype: Any) -> Float[Array, "C I"]:
    """The values of codes, and zeros outside the mask; after the conversion, because Triton has no constants of every
    type of codes."""
    return codes.astype(dtype) if mask is None else jnp.where(mask, codes.astype(dtype), jnp.zeros((), dtype))


def block_product(rows: Array, block: Array, scales: Array | None) -> Float[Array, "T C"] | Float[Array, "C T"]:
    """Rows [T, I] times the block [I, C]; or the block [C, I] of codes times rows [I, T] and `scales` [C, 1]."""
    return _dot(rows, block) if scales is None else codes_product(rows, block) * scales


def codes_product(rows: Float[Array, "I T"], block: Float[Array, "C I"]) -> Float[Array, "C T"]:
    """The values of codes times the rows."""
    precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    return jnp.dot(block, rows, precision=precision, preferred_element_type=jnp.float32)


def end_sums(total: Array, x: Any, weights: Any, rows: Array, row_mask: Array | None) -> Float[Array, "T C"]:
    """The sums by row, of rows as they were before they were scaled. `row_mask` [T, 1]."""
    if not isinstance(weights, QuantizedWeight):
        return total
    if not isinstance(x, ScaledRows) or is_in_parts(x):
        return total.T
    return total.T * load_or_zero(x.inverse.at[0, rows[:, None]], row_mask)


def is_in_parts(x: Any) -> bool:
    """Whether rows have parts with powers of their own."""
    return isinstance(x, ScaledRows) and x.inverse.shape[0] > 1


def load_inverse(x: Any, rows: Array, row_mask: Array | None, first: Any) -> list[Float[Array, "1 T"]]:
    """What the sums over inputs from `first` on, all in one part, are multiplied by; nothing where a row has one
    power."""
    if not is_in_parts(x):
        return []
    at = x.inverse.at[lax.div(jnp.asarray(first), x.part), rows[None, :]]
    return [load_or_zero(at, None if row_mask is None else row_mask.T)]


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
