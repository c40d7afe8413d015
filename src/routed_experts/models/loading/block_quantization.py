"""Plain matrices as virtual tensors of codes and of scales: blocks of 128 x 128, quantised when they are read.

The law is that of `quantize_blocks` (layers/quantized.py), on the host and part by part: a box reads the whole blocks
that it meets. Blocks of each of the `segments` of a tensor's outputs begin anew. Dims: E experts, O outputs, I inputs,
J groups of inputs, P spans of outputs."""

import dataclasses
import math
from collections.abc import Mapping

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int, Shaped

from routed_experts.layers.quantized import BLOCK, LARGEST_E4M3, LEAST_PEAK, block_of_outputs
from routed_experts.models.loading.checkpoint import Checkpoint
from routed_experts.models.loading.virtual_tensors import Header

Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BlockCodes:
    """The codes of a matrix [..., O, I]."""

    name: str
    segments: tuple[int, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.name,)

    def header(self, headers: Mapping[str, Header]) -> Header:
        return headers[self.name][0], "float8_e4m3fn"

    def read(self, checkpoint: Checkpoint, box: Box) -> Shaped[np.ndarray, "*E o i"]:
        rows, columns = box[-2:]
        blocks = _Blocks.read(checkpoint, self.name, self.segments, box)
        inner = slice(rows.start - blocks.first_row, rows.stop - blocks.first_row)
        across = slice(columns.start - blocks.first_column, columns.stop - blocks.first_column)
        scales = np.take(blocks.scales, blocks.row_blocks[inner], axis=-2)
        scales = np.take(scales, blocks.column_blocks[across], axis=-1)
        return (blocks.numbers[..., inner, across] / scales).astype(ml_dtypes.float8_e4m3fn)


@dataclasses.dataclass(frozen=True, slots=True)
class BlockScales:
    """Its scales [..., P, J], of groups of inputs and of spans of outputs; a span divides all segments."""

    name: str
    segments: tuple[int, ...]
    group: int
    span: int = 1

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.name,)

    def header(self, headers: Mapping[str, Header]) -> Header:
        *lead, outputs, inputs = headers[self.name][0]
        return (*lead, outputs // self.span, math.ceil(inputs / self.group)), "float32"

    def read(self, checkpoint: Checkpoint, box: Box) -> Float[np.ndarray, "*E p j"]:
        rows, groups = slice(box[-2].start * self.span, box[-2].stop * self.span), box[-1]
        inputs = checkpoint.names()[self.name][0][-1]
        columns = slice(groups.start * self.group, min(groups.stop * self.group, inputs))
        blocks = _Blocks.read(checkpoint, self.name, self.segments, (*box[:-2], rows, columns))
        inner = slice(rows.start - blocks.first_row, rows.stop - blocks.first_row)
        of_groups = np.arange(columns.start, columns.stop, self.group) // BLOCK - blocks.first_column // BLOCK
        of_spans = blocks.row_blocks[inner][:: self.span]
        return np.take(np.take(blocks.scales, of_spans, axis=-2), of_groups, axis=-1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """The whole blocks that a box meets: their numbers, float32, and their scales; the block of each row and column."""

    numbers: Float[np.ndarray, "*E o i"]
    scales: Float[np.ndarray, "*E r c"]
    first_row: int
    first_column: int
    row_blocks: Int[np.ndarray, " o"]
    column_blocks: Int[np.ndarray, " i"]

    @staticmethod
    def read(checkpoint: Checkpoint, name: str, segments: tuple[int, ...], box: Box) -> "_Blocks":
        """Read them."""
        (*_, inputs), (rows, columns) = checkpoint.names()[name][0], box[-2:]
        of_rows = block_of_outputs(segments)
        low, high = np.searchsorted(of_rows, (of_rows[rows.start], of_rows[rows.stop - 1] + 1)).tolist()
        left = columns.start // BLOCK * BLOCK
        right = min(inputs, math.ceil(columns.stop / BLOCK) * BLOCK)
        numbers = checkpoint.read(name, (*box[:-2], slice(low, high), slice(left, right))).astype(np.float32)
        row_blocks = of_rows[low:high] - of_rows[low]
        starts = np.searchsorted(row_blocks, np.arange(row_blocks[-1] + 1))
        peaks = np.maximum.reduceat(np.abs(numbers), starts, axis=-2)
        peaks = np.maximum.reduceat(peaks, np.arange(0, right - left, BLOCK), axis=-1)
        return _Blocks(
            numbers=numbers,
            scales=np.where(peaks >= LEAST_PEAK, peaks / np.float32(LARGEST_E4M3), np.float32(1)),
            first_row=low,
            first_column=left,
            row_blocks=row_blocks,
            column_blocks=np.arange(right - left) // BLOCK,
        )
