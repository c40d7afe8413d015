"""Virtual tensors: computed from a checkpoint's tensors when they are read. Every other row of a tensor, a tensor with
its last axes swapped, or numbers packed in 4 bits. They have names, shapes and dtypes like all others.

MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 numbers of 4 bits (sign, 2 bits of exponent, 1 of mantissa), two a
byte, the lower half first; each block is multiplied by 2^(scale - 127). Dims: E experts, D inputs, O outputs, B
blocks of a row, J groups of inputs."""

import abc
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped, UInt8

from routed_experts.core.errors import CheckpointError, WeightsMismatchError
from routed_experts.layers.quantized import CODE_DTYPES, CODE_VALUES, E2M1, E2M1_MAX_SCALE, pack_runs
from routed_experts.models.base.weight_source import StoredEntries
from routed_experts.models.loading.checkpoint import Checkpoint
from routed_experts.models.loading.quantized_part import QuantizedPart

FP4_VALUES = np.array(CODE_VALUES[E2M1], np.float32)
_BLOCK_INPUTS, _BLOCK_BYTES = 32, 16
_BLOCK_DTYPES, _EXPONENT_DTYPES = ("U8", "I8"), ("U8", "F8_E8M0")  # either holds the same bytes
_NAN_EXPONENT = 255

Header = tuple[tuple[int, ...], str]


class VirtualTensor(Protocol):
    """A tensor that no file holds: it is computed from stored tensors when it is read."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the stored tensors that it is computed from."""
        ...

    def header(self, headers: Mapping[str, Header]) -> Header:
        """Shape and dtype, from those of the stored tensors."""
        ...

    def read(self, checkpoint: Checkpoint, box: tuple[slice, ...]) -> np.ndarray:
        """Compute a new array of the part that `box` names: a slice with start and stop for each axis. Raises
        CheckpointError where a stored tensor cannot be read or holds what cannot be computed with."""
        ...


class DequantizableTensor(VirtualTensor):
    """A virtual tensor whose numbers a device can compute, from codes and scales."""

    @abc.abstractmethod
    def read_part(self, checkpoint: Checkpoint, box: tuple[slice, ...]) -> QuantizedPart | None:
        """These for a box; None where its source has none."""


class CodedTensor(DequantizableTensor):
    """A virtual tensor [..., O, I] whose numbers are codes times scales, and which may be shown as these instead. As a
    string it is its form in words."""

    @property
    @abc.abstractmethod
    def code_format(self) -> str | None:
        """The format of its codes, one of CODE_DTYPES; None where they cannot stay as they are."""

    @property
    @abc.abstractmethod
    def group(self) -> int:
        """Neighbouring inputs that share a scale; 0 for all of them."""

    @property
    @abc.abstractmethod
    def span(self) -> int:
        """Neighbouring outputs that share their scales; the number of outputs where all do."""

    @property
    @abc.abstractmethod
    def has_bf16_scales(self) -> bool:
        """Whether bfloat16 holds the scales: they are stored in it, or as exponents."""

    @abc.abstractmethod
    def as_codes(self) -> VirtualTensor:
        """The codes [..., O, I], or [..., O, I / 2] where a byte has two."""

    @abc.abstractmethod
    def as_scales(self, group: int, span: int) -> VirtualTensor:
        """The scales [..., P, J], of groups and spans that divide its own."""


@dataclass(frozen=True, slots=True)
class PackedRuns:
    """Codes of 4 bits [..., O, I / 2] with the inputs of a byte `run` apart, from those of neighbouring inputs."""

    codes: VirtualTensor
    run: int

    @property
    def needs(self) -> tuple[str, ...]:
        return self.codes.needs

    def header(self, headers: Mapping[str, Header]) -> Header:
        return self.codes.header(headers)

    def read(self, checkpoint: Checkpoint, box: tuple[slice, ...]) -> Shaped[np.ndarray, "... O bytes"]:
        """The box, from the pairs of runs that it meets, which have the same bytes in both forms."""
        *lead, columns = box
        first, last = columns.start // self.run * self.run, math.ceil(columns.stop / self.run) * self.run
        stored = self.codes.read(checkpoint, (*lead, slice(first, last)))
        return pack_runs(stored, self.run)[..., columns.start - first : columns.stop - first]


@dataclass(frozen=True, slots=True)
class ExactScales:
    """Scales that are kept in a shorter dtype than the file's, which holds them all. `text`: what they are, for the
    error."""

    scales: VirtualTensor
    text: str
    dtype: np.dtype

    @property
    def needs(self) -> tuple[str, ...]:
        return self.scales.needs

    def header(self, headers: Mapping[str, Header]) -> Header:
        return self.scales.header(headers)

    def read(self, checkpoint: Checkpoint, box: tuple[slice, ...]) -> Float[np.ndarray, "... P J"]:
        """The box. Raises WeightsMismatchError for a scale that the dtype would round."""
        scales = self.scales.read(checkpoint, box)
        rounded = scales.astype(self.dtype).astype(scales.dtype) != scales
        if rounded.any():
            raise WeightsMismatchError(
                f"{checkpoint.path}: {self.text} hold {scales[rounded].flat[0]}, and {self.dtype.name}, in which they "
                "are served, does not; build an engine of its own for this checkpoint",
                param="model_path",
            )
        return scales


def no_virtual_tensors(checkpoint: Checkpoint) -> Mapping[str, VirtualTensor]:
    """Return no tensor: for a family whose files hold what its table names."""
    return {}


@dataclass(frozen=True, slots=True)
class StoredView(DequantizableTensor):
    """Entries of a tensor, in its dtype. A device computes them where the tensor has codes and its axes are swapped at
    most."""

    entries: StoredEntries

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.entries.name,)

    def header(self, headers: Mapping[str, Header]) -> Header:
        shape, dtype = headers[self.entries.name]
        return self.entries.shape(shape), dtype

    def read(self, checkpoint: Checkpoint, box: tuple[slice, ...]) -> np.ndarray:
        return self.entries.view(checkpoint.read(self.entries.name, self.entries.stored_box(box)))

    def read_part(self, checkpoint: Checkpoint, box: tuple[slice, ...]) -> QuantizedPart | None:
        if self.entries.step != 1:
            return None
        part = checkpoint.read_part(self.entries.name, self.entries.stored_box(box))
        return part.swapped() if part is not None and self.entries.swapped else part


def with_axes_swapped(name: str) -> StoredView:
    """[E, D, O] from [E, O, D]."""
    return StoredView(StoredEntries(name=name, swapped=True))


@dataclass(frozen=True, slots=True)
class Mxfp4(CodedTensor):
    """[E, O, D] from blocks [E, O, B, 16] and scales [E, O, B]; with `start`, every other output from there on.
    bfloat16 holds it exactly. Reads of scales raise CheckpointError for one that is NaN."""

    blocks: str
    scales: str
    start: int | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        return self.blocks, self.scales

    def check(self, headers: Mapping[str, Header], path: Path) -> None:
        """Raise CheckpointError for blocks that are no MXFP4, and for scales that are missing or do not fit them."""
        shape, dtype = headers[self.blocks]
        if len(shape) != 4 or shape[-1] != _BLOCK_BYTES or dtype not in _BLOCK_DTYPES:
            fits = f"[experts, outputs, blocks, {_BLOCK_BYTES}] of {' or '.join(_BLOCK_DTYPES)}"
            raise _error(path, self.blocks, f"is {list(shape)} of {dtype}", fits)
        if self.start is not None and shape[1] % 2:
            raise _error(path, self.blocks, f"is {list(shape)}", "an even number of outputs: gate and up in turn")
        fits = f"{list(shape[:-1])} of {' or '.join(_EXPONENT_DTYPES)}"
        if self.scales not in headers:
            raise _error(path, self.blocks, f"has no {self.scales} beside it", fits)
        shape_of_scales, dtype = headers[self.scales]
        if shape_of_scales != shape[:-1] or dtype not in _EXPONENT_DTYPES:
            raise _error(path, self.scales, f"is {list(shape_of_scales)} of {dtype}", fits)

    def header(self, headers: Mapping[str, Header]) -> Header:
        experts, outputs, blocks, half = headers[self.blocks][0]
        return (experts, outputs if self.start is None else outputs // 2, blocks * half * 2), "bfloat16"

    def read(self, checkpoint: Checkpoint, box: tuple[slice, ...]) -> np.ndarray:
        inner, first = _blocks_of(box[2], _BLOCK_INPUTS)
        blocks, scales = (read(checkpoint, box[0], box[1], inner) for read in (self.read_blocks, self.read_scales))
        numbers = dequantize_mxfp4(blocks, scales)
        return numbers[:, :, box[2].start - first : box[2].stop - first].astype(ml_dtypes.bfloat16)

    def read_part(self, checkpoint: Checkpoint, box: tuple[slice, ...]) -> QuantizedPart:
        columns, inputs = box[2], np.arange(box[2].start, box[2].stop, dtype=np.int32)
        code_bytes = slice(columns.start // 2, math.ceil(columns.stop / 2))
        groups, _ = _blocks_of(columns, _BLOCK_INPUTS)
        return QuantizedPart(
            codes=self.as_codes().read(checkpoint, (box[0], box[1], code_bytes)),
            scales=_powers(self.read_scales(checkpoint, box[0], box[1], groups)),
            zero_points=None,
            column_groups=inputs // _BLOCK_INPUTS - groups.start,
            format=E2M1,
            first=columns.start % 2,
        )

    @property
    def code_format(self) -> str:
        return E2M1

    @property
    def group(self) -> int:
        return _BLOCK_INPUTS

    @property
    def span(self) -> int:
        return 1

    @property
    def has_bf16_scales(self) -> bool:
        return True

    def as_codes(self) -> "Mxfp4Codes":
        return Mxfp4Codes(self)

    def as_scales(self, group: int, span: int) -> "Mxfp4Scales":
        assert span == 1, span
        return Mxfp4Scales(self, group)

    def read_blocks(
        self, checkpoint: Checkpoint, experts: slice, outputs: slice, blocks: slice
    ) -> UInt8[np.ndarray, "E O B 16"]:
        """Blocks of some of its outputs."""
        box = (experts, self._stored(outputs), blocks, slice(0, _BLOCK_BYTES))
        return self._rows(checkpoint.read(self.blocks, box).view(np.uint8))

    def read_scales(
        self, checkpoint: Checkpoint, experts: slice, outputs: slice, blocks: slice
    ) -> UInt8[np.ndarray, "E O B"]:
        """Their exponents. Raises CheckpointError for one that is NaN."""
        stored = checkpoint.read(self.scales, (experts, self._stored(outputs), blocks))
        exponents = self._rows(stored.view(np.uint8))
        if (exponents == _NAN_EXPONENT).any():
            fault, fits = f"holds {_NAN_EXPONENT}, which is NaN", f"exponents 0 to {_NAN_EXPONENT - 1}"
            raise _error(checkpoint.path, self.scales, fault, fits)
        return exponents

    def _stored(self, outputs: slice) -> slice:
        return outputs if self.start is None else slice(2 * outputs.start, 2 * outputs.stop)

    def _rows(self, stored: np.ndarray) -> np.ndarray:
        return stored if self.start is None else stored[:, self.start :: 2]

    def __str__(self) -> str:
        return f"mxfp4 (groups of {_BLOCK_INPUTS})"


@dataclass(frozen=True, slots=True)
class Mxfp4Codes:
    """The codes [E, O, D / 2], as they are stored."""

    tensor: Mxfp4

    @property
    def needs(self) -> tuple[str, ...]:
        return self.tensor.needs

    def header(self, headers: Mapping[str, Header]) -> Header:
        (experts, outputs, inputs), _ = self.tensor.header(headers)
        return (experts, outputs, inputs // 2), CODE_DTYPES[E2M1].name

    def read(self, checkpoint: Checkpoint, box: tuple[slice, ...]) -> UInt8[np.ndarray, "E O bytes"]:
        inner, first = _blocks_of(box[2], _BLOCK_BYTES)
        blocks = self.tensor.read_blocks(checkpoint, box[0], box[1], inner)
        return blocks.reshape(*blocks.shape[:2], -1)[:, :, box[2].start - first : box[2].stop - first]


@dataclass(frozen=True, slots=True)
class Mxfp4Scales:
    """The scales [E, O, J], float32: one for each output and `group` inputs, which divide a block."""

    tensor: Mxfp4
    group: int

    @property
    def needs(self) -> tuple[str, ...]:
        return self.tensor.needs

    def header(self, headers: Mapping[str, Header]) -> Header:
        (experts, outputs, inputs), _ = self.tensor.header(headers)
        return (experts, outputs, inputs // self.group), "float32"

    def read(self, checkpoint: Checkpoint, box: tuple[slice, ...]) -> Float[np.ndarray, "E O J"]:
        """The box. Raises CheckpointError for a scale that is NaN, or that no kernel takes."""
        count = _BLOCK_INPUTS // self.group  # of a block
        inner, first = _blocks_of(box[2], count)
        exponents = self.tensor.read_scales(checkpoint, box[0], box[1], inner)
        most = round(math.log2(E2M1_MAX_SCALE))
        large = exponents[exponents > 127 + most]
        if large.size:
            text = f"{checkpoint.path}: {self.tensor.scales} holds {large[0]}, a scale of 2^{int(large[0]) - 127}"
            raise CheckpointError(
                f"{text}; expected scales of at most 2^{most}; serve plain weights (quantization='none')"
            )
        scales = np.repeat(_powers(exponents), count, axis=-1)
        return scales[:, :, box[2].start - first : box[2].stop - first]


def _powers(exponents: UInt8[np.ndarray, "E O B"]) -> Float[np.ndarray, "E O B"]:
    """Scales, float32, of exponents 0 to 254."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)


def _error(path: Path, name: str, fault: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{path}: {name} {fault}; expected {expected}; copy the checkpoint again")


def _blocks_of(side: slice, size: int) -> tuple[slice, int]:
    """The blocks that a range meets, `size` entries each, and the first entry of those."""
    blocks = slice(side.start // size, math.ceil(side.stop / size))
    return blocks, blocks.start * size


def dequantize_mxfp4(
    blocks: UInt8[np.ndarray, "E O B 16"], scales: UInt8[np.ndarray, "E O B"]
) -> Float[np.ndarray, "E O D"]:
    """The numbers of packed rows, float32."""
    numbers = np.empty((*blocks.shape[:-1], 2 * blocks.shape[-1]), np.float32)
    numbers[..., 0::2], numbers[..., 1::2] = FP4_VALUES[blocks & 15], FP4_VALUES[blocks >> 4]
    numbers = np.ldexp(numbers, scales.astype(np.int32)[..., None] - 127)
    return numbers.reshape(*blocks.shape[:2], -1)


class VirtualCheckpoint(Checkpoint):
    """A checkpoint with virtual tensors in place of their source tensors, which may be virtual too. Tensors of
    `hidden` are not shown."""

    def __init__(
        self, source: Checkpoint, tensors: Mapping[str, VirtualTensor], *, hidden: Collection[str] = ()
    ) -> None:
        self.path = source.path
        self._source, self._virtual = source, dict(tensors)
        self._dequantizable = {
            name: tensor for name, tensor in tensors.items() if isinstance(tensor, DequantizableTensor)
        }
        stored = source.names()
        used = {name for tensor in self._virtual.values() for name in tensor.needs}.union(hidden)
        self._shown = {name: header for name, header in stored.items() if name not in used}
        self._shown |= {name: tensor.header(stored) for name, tensor in self._virtual.items()}

    @property
    def num_bytes(self) -> int:
        return self._source.num_bytes

    def names(self) -> dict[str, Header]:
        """Shape and dtype of every tensor, virtual ones among them."""
        return dict(self._shown)

    def read(self, name: str, box: tuple[slice, ...] = ()) -> np.ndarray:
        """Copy one tensor, or the part of it that `box` names, to the host."""
        if name not in self._virtual:
            return self._source.read(name, box)
        shape = self._shown[name][0]
        array = self._virtual[name].read(self._source, box or tuple(slice(0, size) for size in shape))
        assert (
            math.prod(array.shape) == math.prod(side.stop - side.start for side in box) if box else array.shape == shape
        ), (name, box)
        return array

    def read_part(self, name: str, box: tuple[slice, ...]) -> QuantizedPart | None:
        """The codes and scales of the part, of a virtual tensor that has them."""
        if name not in self._virtual:
            return self._source.read_part(name, box)
        return self._dequantizable[name].read_part(self._source, box) if name in self._dequantizable else None

    def close(self) -> None:
        self._source.close()
