"""Quantised matrices as virtual tensors: any box of one is computed from the codes and scales that the box needs.

    number[o, i] = float32(code[o, i] - zero[o // R, g]) * float32(scale[o // R, g])      g = i // C, or a map's g[i]

One multiplication in float32, rounded to nearest even. The loader rounds once more, to the dtype that is served, so a
header says float32. Blocks of R x C count from 0 and the last one of an axis is cut short: a box may begin and end
anywhere. `read_part` reads codes and scales, which a device multiplies (quantized_part.py); `read` does it on the host.

Dims: O outputs, I inputs, R and C of a block, J x G the grid of scales, W words of a row, P spans of outputs. Leading
axes are experts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int, Shaped

from routed_experts.core.errors import CheckpointError
from routed_experts.layers.quantized import CODE_DTYPES, E4M3, INT4, has_nan
from routed_experts.models.base.quantization_config import Codes, StorageFormat
from routed_experts.models.loading.checkpoint import Checkpoint
from routed_experts.models.loading.quantized_part import INT8, QuantizedPart
from routed_experts.models.loading.virtual_tensors import CodedTensor, Header

_WORD_BITS = 32

Box = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix(CodedTensor):
    """A matrix [O, I], or [E, O, I], of float32 from its stored tensors. `shape` is checked against the headers by
    quantized_checkpoint.py. `unused`: tensors of the module that a product of quantised activations would need."""

    name: str
    shape: tuple[int, ...]
    storage: StorageFormat
    codes: str
    scales: str
    zero_points: str | None = None
    has_packed_zeros: bool = False  # in words, along the rows of the grid
    group_map: str | None = None
    scale_dtype: str = "float32"  # in the file
    unused: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(self.storage)

    @property
    def needs(self) -> tuple[str, ...]:
        named = (self.codes, self.scales, self.zero_points, self.group_map, *self.unused)
        return tuple(name for name in named if name is not None)

    @property
    def block(self) -> tuple[int, int]:
        """R and C, 1 at least."""
        rows, columns = self.shape[-2:]
        return self.storage.rows or max(rows, 1), self.storage.columns or max(columns, 1)

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the scales."""
        sides = zip(self.shape[-2:], self.block, strict=True)
        return (*self.shape[:-2], *(math.ceil(size / side) for size, side in sides))

    def header(self, headers: Mapping[str, Header]) -> Header:
        return self.shape, "float32"

    def read(self, checkpoint: Checkpoint, box: Box) -> Float[np.ndarray, "*E o i"]:
        """The box, float32. Raises as `read_part` does, and CheckpointError for e4m3 products beyond float32."""
        part = self.read_part(checkpoint, box)
        with np.errstate(over="ignore"):
            numbers = part.dequantize()
        if part.format == E4M3 and not part.is_normal and not np.isfinite(numbers).all():
            raise self.error(checkpoint, self.codes, "holds a product beyond float32", "finite numbers")
        return numbers

    def read_part(self, checkpoint: Checkpoint, box: Box) -> QuantizedPart:
        """The codes and scales of the box. Raises CheckpointError for scales that are negative or not finite, NaN
        codes, and maps or zero points out of range."""
        lead, (rows, columns) = box[:-2], box[-2:]
        row_side, column_side = self.block
        grid_rows = _grid_side(rows, row_side)
        row_groups = np.arange(rows.start, rows.stop) // row_side - grid_rows.start
        grid_columns = _grid_side(columns, column_side)
        column_groups = np.arange(columns.start, columns.stop) // column_side - grid_columns.start
        if self.group_map is not None:
            column_groups, grid_columns = self._mapped(checkpoint, columns), slice(0, self.grid[-1])
        grid_box = (*lead, grid_rows, grid_columns)
        codes, first = self._codes(checkpoint, box)
        zeros = None if self.zero_points is None else self._zeros(checkpoint, grid_box)
        return QuantizedPart(
            codes=codes,
            scales=np.take(self._scales(checkpoint, grid_box), row_groups, axis=-2),
            zero_points=None if zeros is None else np.take(zeros, row_groups, axis=-2),
            column_groups=column_groups.astype(np.int32),
            format=self._part_format,
            first=first,
        )

    @property
    def _part_format(self) -> str:
        if self.storage.codes is Codes.E4M3:
            return E4M3
        return INT4 if self.storage.codes is Codes.PACKED and self.storage.bits == 4 else INT8

    @property
    def code_format(self) -> str | None:
        """The format of its codes, where each number is its code times a scale of its output and of neighbouring
        inputs; None where it is not, and for integers that a whole row scales, whose last byte may be half full."""
        if self.zero_points is not None or self.group_map is not None:
            return None
        if self.storage.codes is Codes.PACKED:
            return INT4 if self.storage.bits == 4 and self.storage.columns else None
        return E4M3 if self.storage.codes is Codes.E4M3 else None

    @property
    def group(self) -> int:
        """Neighbouring inputs that share a scale; 0 for all of them."""
        return self.block[1] if self.grid[-1] > 1 else 0

    @property
    def span(self) -> int:
        """Neighbouring outputs that share their scales."""
        return self.block[0]

    @property
    def has_bf16_scales(self) -> bool:
        return self.scale_dtype == "bfloat16"

    def as_codes(self) -> "StoredCodes":
        return StoredCodes(self)

    def as_scales(self, group: int, span: int) -> "GroupScales":
        return GroupScales(self, group, span)

    def scales_of(self, checkpoint: Checkpoint, box: Box, *, steps: tuple[int, int]) -> Float[np.ndarray, "*E p j"]:
        """The scales of the numbers of the box in every so many rows and columns, from its first ones on."""
        rows, columns = box[-2:]
        row_side, column_side = self.block
        grid_rows, grid_columns = _grid_side(rows, row_side), _grid_side(columns, column_side)
        scales = self._scales(checkpoint, (*box[:-2], grid_rows, grid_columns))
        row_groups = np.arange(rows.start, rows.stop, steps[0]) // row_side - grid_rows.start
        column_groups = np.arange(columns.start, columns.stop, steps[1]) // column_side - grid_columns.start
        return np.take(np.take(scales, row_groups, axis=-2), column_groups, axis=-1)

    def _codes(self, checkpoint: Checkpoint, box: Box) -> tuple[Shaped[np.ndarray, "*E o b"], int]:
        """The bytes of the box, and the inputs of the first byte that are before it."""
        if self.storage.codes is Codes.INT8:
            return checkpoint.read(self.codes, box), 0
        if self.storage.codes is Codes.E4M3:
            return self.e4m3_codes(checkpoint, box).view(np.uint8), 0
        rows, columns = box
        count = _WORD_BITS // self.storage.bits
        words = slice(columns.start // count, math.ceil(columns.stop / count))
        stored = np.ascontiguousarray(checkpoint.read(self.codes, (rows, words)))
        if self.storage.bits == 8:
            first = columns.start - words.start * count
            return unpack_words(stored, 8)[:, first : first + columns.stop - columns.start], 0
        first, last = columns.start // 2, math.ceil(columns.stop / 2)
        first_of_words = words.start * count // 2
        code_bytes = stored.astype("<i4", copy=False).view(np.uint8)
        return code_bytes[:, first - first_of_words : last - first_of_words], columns.start % 2

    def e4m3_codes(self, checkpoint: Checkpoint, box: Box) -> Shaped[np.ndarray, "*E o i"]:
        """The codes of the box. Raises CheckpointError for a NaN code."""
        codes = checkpoint.read(self.codes, box)
        if has_nan(codes):
            raise self.error(checkpoint, self.codes, "holds a NaN code", "finite numbers")
        return codes

    def _scales(self, checkpoint: Checkpoint, box: Box) -> Float[np.ndarray, "*E j g"]:
        scales = scale_values(self._of_grid(checkpoint, self.scales, box))
        if not np.isfinite(scales).all() or np.signbit(scales).any():
            wrong = scales[~np.isfinite(scales) | np.signbit(scales)]
            raise self.error(checkpoint, self.scales, f"holds {wrong.flat[0]}", "finite scales that are not negative")
        return scales

    def _of_grid(self, checkpoint: Checkpoint, name: str, box: Box) -> Shaped[np.ndarray, "*E j g"]:
        """The box of a tensor of the grid; a single entry may be stored as [] or [1]."""
        if math.prod(self.grid) == 1:
            return checkpoint.read(name).reshape(self.grid)
        return checkpoint.read(name, box)

    def _zeros(self, checkpoint: Checkpoint, box: Box) -> Int[np.ndarray, "j g"]:
        """Zero points of the box of the grid: integers as they are, or packed in words along the grid's rows."""
        assert self.zero_points is not None
        if not self.has_packed_zeros:
            zeros = self._of_grid(checkpoint, self.zero_points, box).astype(np.int16)
            bound = 1 << (self.storage.bits - 1)
            if ((zeros < -bound) | (zeros >= bound)).any():
                wrong = zeros[(zeros < -bound) | (zeros >= bound)].flat[0]
                raise self.error(checkpoint, self.zero_points, f"holds {wrong}", f"{-bound} to {bound - 1}")
            return zeros
        rows, columns = box
        count = _WORD_BITS // self.storage.bits
        first, last = rows.start // count, math.ceil(rows.stop / count)
        words = checkpoint.read(self.zero_points, (slice(first, last), columns))
        low = rows.start - first * count
        zeros = unpack_words(np.ascontiguousarray(words.T), self.storage.bits).T
        return zeros[low : low + rows.stop - rows.start].astype(np.int16)

    def _mapped(self, checkpoint: Checkpoint, columns: slice) -> Int[np.ndarray, " i"]:
        assert self.group_map is not None
        groups = checkpoint.read(self.group_map, (columns,)).astype(np.int64)
        if ((groups < 0) | (groups >= self.grid[-1])).any():
            wrong = groups[(groups < 0) | (groups >= self.grid[-1])][0]
            raise self.error(checkpoint, self.group_map, f"holds {wrong}", f"groups 0 to {self.grid[-1] - 1}")
        return groups

    def error(self, checkpoint: Checkpoint, name: str, fault: str, expected: str) -> CheckpointError:
        """Build the error of one of its tensors."""
        return CheckpointError(f"{checkpoint.path}: {name} {fault}; expected {expected}; copy the checkpoint again")


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """The codes of a matrix of e4m3 or of 4 bits, as they are stored: the bytes of the words have two each, the lower
    half first."""

    matrix: QuantizedMatrix

    @property
    def needs(self) -> tuple[str, ...]:
        return self.matrix.needs

    def header(self, headers: Mapping[str, Header]) -> Header:
        form, (*lead, inputs) = self.matrix.code_format, self.matrix.shape
        assert form is not None, self.matrix
        return (*lead, inputs // 2 if form == INT4 else inputs), CODE_DTYPES[form].name

    def read(self, checkpoint: Checkpoint, box: Box) -> Shaped[np.ndarray, "*E o i"]:
        """The box. Raises CheckpointError for a NaN code."""
        if self.matrix.code_format == INT4:
            columns, count = box[-1], _WORD_BITS // 8
            words = slice(columns.start // count, math.ceil(columns.stop / count))
            stored = np.ascontiguousarray(checkpoint.read(self.matrix.codes, (*box[:-1], words)))
            first = columns.start - words.start * count
            return stored.astype("<i4", copy=False).view(np.int8)[..., first : first + columns.stop - columns.start]
        return self.matrix.e4m3_codes(checkpoint, box)


@dataclass(frozen=True, slots=True)
class GroupScales:
    """The scales of a matrix, [..., P, J]: one for each `span` outputs and `group` inputs, which no block cuts."""

    matrix: QuantizedMatrix
    group: int
    span: int

    @property
    def needs(self) -> tuple[str, ...]:
        return self.matrix.needs

    def header(self, headers: Mapping[str, Header]) -> Header:
        *lead, outputs, inputs = self.matrix.shape
        return (*lead, outputs // self.span, math.ceil(inputs / self.group)), "float32"

    def read(self, checkpoint: Checkpoint, box: Box) -> Float[np.ndarray, "*E p j"]:
        """The box. Raises as `QuantizedMatrix.read` does for scales."""
        spans, groups = box[-2:]
        rows = slice(spans.start * self.span, spans.stop * self.span)
        columns = slice(groups.start * self.group, min(groups.stop * self.group, self.matrix.shape[-1]))
        return self.matrix.scales_of(checkpoint, (*box[:-2], rows, columns), steps=(self.span, self.group))


def scale_values(scales: Shaped[np.ndarray, "*E j g"]) -> Float[np.ndarray, "*E j g"]:
    """Scales in float32, exactly. Bytes are exponents plus 127 (ue8m0); 255 is NaN."""
    if scales.dtype == np.uint8:
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    return scales.astype(np.float32)


def unpack_words(words: Int[np.ndarray, "o w"], bits: int) -> Int[np.ndarray, "o n"]:
    """Signed integers (int8) of words that hold them as number + 2^(bits - 1), the lowest bits first."""
    stored = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 4:
        numbers = np.empty((len(stored), 2 * stored.shape[1]), np.uint8)
        numbers[:, 0::2], numbers[:, 1::2] = stored & 15, stored >> 4
    else:
        assert bits == 8, bits
        numbers = stored
    return (numbers ^ 128).view(np.int8) if bits == 8 else numbers.view(np.int8) - np.int8(8)


def _grid_side(side: slice, size: int) -> slice:
    """The blocks that a range meets."""
    return slice(side.start // size, math.ceil(side.stop / size))
