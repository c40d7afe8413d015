"""Products with codes and scales inside of a TPU kernel: codes are fetched as bytes and become bfloat16 in VMEM.

The vector unit unpacks bytes of some formats to bfloat16; codes are moved into one of these by integer operations on
words of four. A chunk of CHUNK inputs is multiplied at a time; the product of each group, float32, is multiplied by its
scales before it is added. Of groups that share a chunk, each has its own copy of the rows, in which the other groups'
inputs are 0: fewer inputs than CHUNK would take the matrix unit as long. Where all scales are powers of two, as those
of MXFP4 are, values of e2m1 times their scales are exact in bfloat16: with many rows, a chunk is then one product.

Codes of 4 bits are read in whole tiles of bytes. What a tile holds beyond the matrix is not defined, but is finite
whatever it is, and is multiplied by 0. Dims: T rows, I inputs, O outputs, J groups, C inputs of a chunk, L rows of
their codes, B outputs of a block."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt8

from routed_experts.core.errors import ConfigError
from routed_experts.layers.quantized import CODE_DTYPES, E2M1, E4M3, INT4, QuantizedWeight, Weight, inputs_of_byte

CHUNK = 128  # inputs of the matrix unit of a v5e; a v6e's takes 256
LANES = 128
STACKED_ROWS = 256  # most rows of one product of groups that share a chunk
FEW_SUMS = CHUNK // 2  # of rows and groups of a chunk; more cost more to scale than the chunk's numbers
SUMS_AT_ONCE = 256 << 10  # most numbers of one product's result, where it has more columns than lanes
CODE_ROWS = 32  # rows of a tile of bytes; a cut of codes begins on one
SCALE_ROWS = 8  # rows of a tile of float32
GROUPS = (128, 64, 32, 16)
FORMATS = (E4M3, INT4, E2M1)
# Of the four bytes of a word
_MAGNITUDE_BITS, _SIGN_BITS, _ONES = 0x7F7F7F7F, 0x80808080 - (1 << 32), 0x01010101
_E2M1_BITS = 0x8E8E8E8E - (1 << 32)  # in the places of e5m2: the sign, two bits of the exponent, one behind the point
_HIGHEST_OF_HALVES = 0x88888888 - (1 << 32)
_FRACTION_SIZE, _EXPONENT_OF_ONE = 23, 127  # of float32
MOST_EXPONENT = 100  # of scales that are multiplied with values of e2m1, in units of 2^14 at first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatrixBlock:
    """What a kernel holds of a matrix: numbers, or the codes of some inputs and the scales of all of them, in a format
    that the dtype of the codes tells. `group` 0: numbers. `num_outputs`: where the block ends beyond the matrix, the
    outputs from the block's first to the matrix's last."""

    values: Any  # [1 I O]; of codes of 4 bits [1 rows O], whole tiles
    scales: Any = None  # [1 J O], float32, J a multiple of SCALE_ROWS
    group: int = 0
    num_outputs: Any = None

    def product(self, x: Float[Array, "T I"], first_group: Any = 0) -> Float[Array, "T O"]:
        """Rows times the block's first I inputs, float32; `first_group` is that of the first input."""
        if not self.group:
            return jnp.dot(x, self.values[0], preferred_element_type=jnp.float32)
        num_rows, inputs = x.shape
        padded = _round_up(inputs, self._tile_inputs)
        shapes = pltpu.VMEM((num_rows, padded), x.dtype), pltpu.VMEM((num_rows, self.values.shape[2]), jnp.float32)
        return pl.run_scoped(lambda rows, total: self._scaled_sum(x, first_group, rows, total), *shapes)

    @property
    def _tile_inputs(self) -> int:
        """Inputs that are read at once, at least: codes of 4 bits only in whole tiles."""
        inputs = inputs_of_byte(_format_of(self.values.dtype))
        return 1 if inputs == 1 else inputs * CODE_ROWS

    def has_powers_of_two(self, first_group: Any, num_groups: int) -> Bool[Array, ""]:
        """Whether the scales of these groups are powers of two that neither overflow nor become subnormal in
        products with values of e2m1."""
        num_rows, outputs = self.scales.shape[1:]
        last_group, num_outputs = first_group + num_groups, outputs if self.num_outputs is None else self.num_outputs

        def check(index: Any, faults: Float[Array, "8 O"]) -> Float[Array, "8 O"]:
            start = pl.multiple_of(index * SCALE_ROWS, SCALE_ROWS)
            bits = pltpu.bitcast(self.scales[0, pl.ds(start, SCALE_ROWS)], jnp.int32)
            groups = start + lax.broadcasted_iota(jnp.int32, bits.shape, 0)
            is_own = (groups >= first_group) & (groups < last_group)
            is_own &= lax.broadcasted_iota(jnp.int32, bits.shape, 1) < num_outputs
            exponents = ((bits >> _FRACTION_SIZE) & 0xFF) - _EXPONENT_OF_ONE
            is_power = (bits & ((1 << _FRACTION_SIZE) - 1) == 0) & (jnp.abs(exponents) <= MOST_EXPONENT)
            return jnp.where(is_own & ~is_power, 1.0, faults)

        faults = lax.fori_loop(0, num_rows // SCALE_ROWS, check, jnp.zeros((SCALE_ROWS, outputs), jnp.float32))
        return jnp.max(faults) == 0.0

    def _scaled_sum(self, x: Float[Array, "T I"], first_group: Any, rows: Any, total: Any) -> Float[Array, "T O"]:
        """The product, through references: a loop indexes no value."""
        num_rows, inputs = x.shape
        total[...] = jnp.zeros_like(total)
        if rows.shape != x.shape:
            rows[...] = jnp.zeros_like(rows)
        rows[:, :inputs] = x

        def add(product: Callable[..., Float[Array, "T B"]]) -> None:
            self._add_chunks(product, inputs, first_group, rows, total)

        if _format_of(self.values.dtype) == E2M1 and num_rows * pl.cdiv(CHUNK, self.group) > FEW_SUMS:
            is_exact = self.has_powers_of_two(first_group, pl.cdiv(inputs, self.group))
            pl.when(is_exact)(lambda: add(self._scaled_product))
            pl.when(jnp.logical_not(is_exact))(lambda: add(self._product_by_groups))
        else:
            add(self._product_by_groups)
        return total[...]

    def _add_chunks(
        self, product: Callable[..., Float[Array, "T B"]], inputs: int, first_group: Any, rows: Any, total: Any
    ) -> None:
        """Add the products of blocks of outputs and chunks of inputs to the total."""
        num_rows, outputs = total.shape
        of_byte, tile = inputs_of_byte(_format_of(self.values.dtype)), self._tile_inputs
        stacked = num_rows * self._groups_at_once(num_rows, min(inputs, CHUNK))

        def add_block(first_output: Any, num_outputs: int) -> None:
            block = pl.ds(first_output, num_outputs)

            def add_chunk(start: Any, length: int) -> None:
                fetched = _round_up(length, tile)
                own, codes = rows[:, pl.ds(start, fetched)], pl.ds(_row_of_codes(start, of_byte), fetched // of_byte)
                group, groups = first_group + start // self.group, pl.cdiv(length, self.group)
                total[:, block] += product(own, self.values[0, codes, block], group, groups, block)

            _for_each_part(inputs, CHUNK, add_chunk)

        _for_each_part(outputs, max(LANES, SUMS_AT_ONCE // stacked // LANES * LANES), add_block)

    def _product_by_groups(
        self, x: Float[Array, "T C"], codes: Shaped[Array, "L B"], first_group: Any, num_groups: int, outputs: Any
    ) -> Float[Array, "T B"]:
        """Rows times the codes of one or more groups, each sum times its scales."""
        num_rows, inputs = x.shape
        (values, unit), at_once = _values_of(codes, x.dtype), self._groups_at_once(num_rows, inputs)
        group_of_input = lax.broadcasted_iota(jnp.int32, x.shape, 1) // self.group
        total = jnp.zeros((num_rows, codes.shape[1]), jnp.float32)
        for start in range(0, num_groups, at_once):
            groups = range(start, min(start + at_once, num_groups))
            own = [x if num_groups == 1 else jnp.where(group_of_input == group, x, 0) for group in groups]
            sums = jnp.dot(jnp.concatenate(own, axis=0), values, preferred_element_type=jnp.float32)
            for index, group in enumerate(groups):
                scales = self._scales(first_group + group, outputs) * unit
                total += sums[index * num_rows : (index + 1) * num_rows] * scales
        return total

    def _scaled_product(
        self, x: Float[Array, "T C"], codes: Shaped[Array, "L B"], first_group: Any, num_groups: int, outputs: Any
    ) -> Float[Array, "T B"]:
        """Rows times the numbers of one or more groups, where the dtype of the rows holds these."""
        values, unit = _values_of(codes, jnp.float32)
        ends = [*(self.group * group for group in range(1, num_groups)), x.shape[1]]  # beyond the groups rows are 0
        parts = zip([0, *ends[:-1]], ends, strict=True)
        numbers = [
            values[start:end] * (self._scales(first_group + group, outputs) * unit)
            for group, (start, end) in enumerate(parts)
        ]
        return jnp.dot(x, jnp.concatenate(numbers, axis=0).astype(x.dtype), preferred_element_type=jnp.float32)

    def _scales(self, group: Any, outputs: Any) -> Float[Array, "1 B"]:
        return self.scales[0, pl.ds(group, 1), outputs]

    def _groups_at_once(self, num_rows: int, inputs: int) -> int:
        """Groups of a chunk whose rows are stacked in one product."""
        return max(1, min(pl.cdiv(inputs, self.group), STACKED_ROWS // num_rows))


def _values_of(codes: Shaped[Array, "L B"], dtype: Any) -> tuple[Float[Array, "C B"], float]:
    """The values of codes in a unit, in the order of inputs: (values / unit, unit)."""
    decode = {E4M3: _e4m3_values, INT4: _int4_values, E2M1: _e2m1_values}[_format_of(codes.dtype)]
    return decode(codes, dtype)


def _e4m3_values(codes: Float[Array, "C B"], dtype: Any) -> tuple[Float[Array, "C B"], float]:
    """The vector unit unpacks float8_e4m3b11fnuz, which is float8_e4m3fn / 16 but for -0, which is its NaN, and for
    NaN, which is its 30 or -30. A cast corrects numbers, by seven operations a register of them; here bytes are
    corrected, four a word. For 128 by 1,536 codes, one group, and 16 rows a v5e runs 262 instructions instead of 417,
    and reads them in the time of 360."""
    if codes.shape[0] % CODE_ROWS:
        return codes.astype(dtype), 1.0
    words = pltpu.bitcast(codes, jnp.int32)
    magnitudes = words & _MAGNITUDE_BITS
    keeps_sign = (magnitudes + _MAGNITUDE_BITS) | _MAGNITUDE_BITS  # of a byte whose magnitude is not 0
    is_nan = (magnitudes + _ONES) & _SIGN_BITS
    words = (words & (keeps_sign ^ is_nan)) + lax.shift_right_logical(is_nan, 7)  # 0x7F + 1 is the other NaN, 0x80
    return pltpu.bitcast(words, jnp.float8_e4m3b11fnuz).astype(dtype), 16.0


def _int4_values(codes: Int[Array, "L B"], dtype: Any) -> tuple[Float[Array, "C B"], float]:
    """Codes are whole numbers plus 8: with the highest bit inverted, 4 bits of two's complement. The eight halves of a
    word are eight neighbouring rows of 4 bits. For 128 by 1,536 codes in groups of 32 and 16 rows a v5e runs 306
    instructions and a v6e 222; a v5e reads codes and scales in the time of 225."""
    words = pltpu.bitcast(codes, jnp.int32) ^ _HIGHEST_OF_HALVES
    return pltpu.bitcast(words, jnp.int4).astype(dtype), 1.0


def _e2m1_values(codes: UInt8[Array, "L B"], dtype: Any) -> tuple[Float[Array, "C B"], float]:
    """In the places of float8_e5m2 the bits of a code are its value / 2^14, subnormal ones and -0 too. The sign of a
    half, extended to a byte, is above the bits of its magnitude, which a shift moves by one place. For 128 by 1,536
    codes in groups of 32 and 16 rows a v5e runs 281 instructions and a v6e 255; with 64 rows a v5e runs 421 and 33 that
    examine scales where these are powers of two, else 749."""
    halves = pltpu.bitcast(codes, jnp.int4).astype(jnp.int8)
    words = (pltpu.bitcast(halves, jnp.int32) << 1) & _E2M1_BITS
    return pltpu.bitcast(words, jnp.float8_e5m2).astype(dtype), 2.0**14


def _format_of(dtype: Any) -> str:
    """The format of codes of a dtype."""
    return next(format for format in FORMATS if CODE_DTYPES[format] == dtype)


def _row_of_codes(start: Any, of_byte: int) -> Any:
    """The row of the codes of a chunk's first input."""
    if of_byte == 1:
        return start
    if isinstance(start, int):
        return start // of_byte
    return pl.multiple_of(lax.div(start, of_byte), CHUNK // of_byte)


def _round_up(count: int, unit: int) -> int:
    return pl.cdiv(count, unit) * unit


def _for_each_part(length: int, step: int, run: Callable[[Any, int], None]) -> None:
    """Run with the start and the length of each part of a dimension: a loop over whole parts, then the rest."""
    whole = length // step
    if whole:
        lax.fori_loop(0, whole, lambda index, _: run(pl.multiple_of(index * step, step), step), None)
    if length % step:
        run(whole * step, length % step)


def weight_arrays(weight: Weight) -> list[Array]:
    """What a kernel is given of a stack of matrices: numbers, or codes and scales.

    Raises ConfigError for codes that no TPU kernel reads."""
    if not isinstance(weight, QuantizedWeight):
        return [weight]
    dtype, forms = weight.codes.dtype, ", ".join(f"{form} ({CODE_DTYPES[form]})" for form in FORMATS)
    is_read = weight.format in FORMATS and dtype == CODE_DTYPES[weight.format]
    if not is_read or weight.outputs_first or weight.group not in GROUPS or weight.span != 1:
        order = "outputs first" if weight.outputs_first else "inputs first"
        raise ConfigError(
            f"codes {weight.format} ({dtype}), {order}, in groups of {weight.group} inputs and spans of {weight.span} "
            f"outputs came to a TPU kernel, which reads {forms}, inputs first, in groups of "
            f"{', '.join(map(str, GROUPS))} and with a scale for each output; dequantise them when they are loaded"
        )
    num_groups = -(-weight.shape[1] // weight.group)
    assert weight.scales.shape == (weight.shape[0], num_groups, weight.shape[2]), (weight.scales.shape, weight.shape)
    assert weight.scales.dtype == jnp.float32, weight.scales.dtype
    return [weight.codes, weight.scales]


def group_of(weight: Weight) -> int:
    """Inputs that share a scale; 0 for numbers."""
    return weight.group if isinstance(weight, QuantizedWeight) else 0


def inputs_of_row(weight: Weight) -> int:
    """Inputs that a row of the numbers or codes holds."""
    return inputs_of_byte(weight.format) if isinstance(weight, QuantizedWeight) else 1


def rows_of_inputs(weight: Weight, inputs: int) -> int:
    """Rows that a kernel fetches of the numbers or codes of some inputs: of codes of 4 bits, whole tiles."""
    of_row = inputs_of_row(weight)
    return inputs if of_row == 1 else _round_up(pl.cdiv(inputs, of_row), CODE_ROWS)


def fetched_rows(weight: Weight) -> list[int]:
    """Rows that a kernel fetches of each of `weight_arrays`: all inputs, and the groups in whole tiles."""
    inputs, group = weight.shape[1], group_of(weight)
    rows = rows_of_inputs(weight, inputs)
    return [rows, _round_up(pl.cdiv(inputs, group), SCALE_ROWS)] if group else [rows]


def column_bytes(weight: Weight) -> int:
    """Bytes of one output of one matrix, with its scales."""
    arrays = weight_arrays(weight)
    return sum(rows * array.dtype.itemsize for rows, array in zip(fetched_rows(weight), arrays, strict=True))
