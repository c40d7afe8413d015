"""A box of a quantised matrix as codes and scales: what is read from a file, stacked, and multiplied on a device.

    number[o, i] = float32(value(code[o, i]) - zero[o, g]) * float32(scale[o, g])      g: the group of input i

`dequantize` computes the numbers with NumPy; `numbers` is traced into the program that writes them to an array. Values
of codes are whole numbers of few bits or small floats, exact in float32, so both round once, to nearest even, and give
the same bits wherever no product is subnormal: XLA flushes these to zero on some devices. `is_normal` says whether a
part has none; a part that may is computed with NumPy.

Codes stay bytes until they are multiplied. e4m3 and e2m1 are decoded by integer operations, for which XLA has vector
code on all devices. Dims: E experts, O outputs, I inputs, B bytes of a row, G groups that the box meets."""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from routed_experts.layers.quantized import CODE_VALUES, E2M1, E4M3, INT4, inputs_of_byte

INT8 = "int8"  # a byte each, -128 to 127; beside the formats of layers/quantized.py
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_TABLES: Mapping[str, Float[np.ndarray, " codes"]] = MappingProxyType(
    {E4M3: E4M3_VALUES} | {form: np.array(values, np.float32) for form, values in CODE_VALUES.items()}
)
_FLOAT_BITS: Mapping[str, tuple[int, int]] = MappingProxyType({E4M3: (4, 3), E2M1: (2, 1)})  # exponent, mantissa
_SIZES: Mapping[str, tuple[float, float]] = MappingProxyType(  # the least above zero and the largest, less zero points
    {E4M3: (2.0**-9, 448.0), E2M1: (0.5, 6.0), INT4: (1.0, 15.0), INT8: (1.0, 255.0)}
)
_LEAST, _LARGEST = 2.0**-126, float(np.finfo(np.float32).max)  # normal numbers of float32
_SLAB = 1 << 18  # numbers


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "zero_points", "column_groups"],
    meta_fields=["format", "first", "inputs_last"],
)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedPart:
    """The box. Arrays are on the host, or traced. Codes of 4 bits are two a byte, the lower half first; the box begins
    at input `first` of the first byte. Each output has its own row of scales, and `column_groups` are the columns of
    them, one for each input. `inputs_last`: as in files; otherwise the last two axes of all arrays are swapped."""

    codes: Shaped[Any, "*E O B"]  # uint8, or int8 of INT8
    scales: Float[Any, "*E O G"]  # float32
    zero_points: Int[Any, "*E O G"] | None
    column_groups: Int[Any, " I"]
    format: str
    first: int = 0
    inputs_last: bool = True

    @property
    def is_normal(self) -> bool:
        """Whether every product is zero or a normal number of float32, whatever the codes. On the host."""
        least, largest = _SIZES[self.format]
        smallest = np.where(self.scales > 0, self.scales, np.float32(1)).min()
        return bool(smallest * least >= _LEAST and float(self.scales.max()) * largest <= _LARGEST)

    def swapped(self) -> "QuantizedPart":
        """The same box with its last two axes swapped: views of arrays on the host."""
        codes, scales, zeros = (
            None if array is None else array.swapaxes(-1, -2) for array in (self.codes, self.scales, self.zero_points)
        )
        return dataclasses.replace(
            self, codes=codes, scales=scales, zero_points=zeros, inputs_last=not self.inputs_last
        )

    def dequantize(self) -> Float[np.ndarray, "*E O I"]:
        """The numbers, float32, on the host; computed in slabs of outputs that stay in the cache."""
        if not self.inputs_last:
            return self.swapped().dequantize().swapaxes(-1, -2)
        numbers = np.empty((*self.codes.shape[:-1], len(self.column_groups)), np.float32)
        outputs = self.codes.shape[-2]
        depth = max(1, _SLAB * outputs // max(1, numbers.size))
        for start in range(0, outputs, depth):
            rows = slice(start, min(start + depth, outputs))
            self._fill(numbers[..., rows, :], rows)
        return numbers

    def numbers(self) -> Float[Array, "*E O I"] | Float[Array, "*E I O"]:
        """The numbers, float32, in a traced program."""
        axis = -1 if self.inputs_last else -2
        numbers = self._values(axis)
        if self.zero_points is not None:
            numbers = numbers - _by_input(self.zero_points, self.column_groups, axis).astype(jnp.float32)
        return numbers * _by_input(self.scales, self.column_groups, axis)

    def _fill(self, numbers: Float[np.ndarray, "*E R I"], rows: slice) -> None:
        """Write the numbers of some outputs."""
        codes = self.codes[..., rows, :]
        if self.format == INT8:
            numbers[...] = codes
        elif self.format == E4M3:
            np.take(E4M3_VALUES, codes, out=numbers, mode="clip")
        else:
            halves = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
            halves = halves[..., self.first : self.first + numbers.shape[-1]]
            np.take(_TABLES[self.format], halves, out=numbers, mode="clip")
        if self.zero_points is not None:
            numbers -= self._expanded(self.zero_points[..., rows, :])
        numbers *= self._expanded(self.scales[..., rows, :])

    def _expanded(self, grid: Shaped[np.ndarray, "*E R G"]) -> Shaped[np.ndarray, "*E R i"]:
        """The entry of each input; a single one is left to broadcast."""
        return np.take(grid, self.column_groups, axis=-1) if grid.shape[-1] > 1 else grid

    def _values(self, axis: int) -> Float[Array, "..."]:
        """What the codes are, along the axis of inputs."""
        if self.format == INT8:
            return self.codes.astype(jnp.float32)
        codes = self.codes.astype(jnp.uint32)
        if inputs_of_byte(self.format) == 2:
            codes = jnp.repeat(codes, 2, axis=axis)
            halves = lax.broadcasted_iota(jnp.uint32, codes.shape, codes.ndim + axis) & 1
            codes = (codes >> (4 * halves)) & 15
            count = self.column_groups.shape[-1]
            codes = lax.slice_in_dim(codes, self.first, self.first + count, axis=axis)
        if self.format == INT4:
            return codes.astype(jnp.float32) - 8.0
        return _float_values(codes, *_FLOAT_BITS[self.format])


def _by_input(grid: Shaped[Array, "..."], groups: Int[Array, " I"], axis: int) -> Shaped[Array, "..."]:
    """The grid's entry of each input; a single one is left to broadcast."""
    return grid if grid.shape[axis] == 1 else jnp.take(grid, groups, axis=axis, mode="clip")


def _float_values(codes: Shaped[Array, "..."], exponent_bits: int, mantissa_bits: int) -> Float[Array, "..."]:
    """Values of codes of a sign, an exponent and a mantissa, uint32, without infinities. By integers, exactly: bits of
    normal ones are moved into those of float32, subnormal ones are whole numbers times a power of two."""
    bias, sign_bit = (1 << (exponent_bits - 1)) - 1, exponent_bits + mantissa_bits
    size = codes & ((1 << sign_bit) - 1)
    normal = lax.bitcast_convert_type((size << (23 - mantissa_bits)) + jnp.uint32((127 - bias) << 23), jnp.float32)
    small = size.astype(jnp.float32) * jnp.float32(2.0 ** (1 - bias - mantissa_bits))
    value = jnp.where(size < (1 << mantissa_bits), small, normal)
    sign = (codes >> sign_bit) << 31
    return lax.bitcast_convert_type(lax.bitcast_convert_type(value, jnp.uint32) | sign, jnp.float32)
