"""Virtual tensors: computed from a checkpoint's tensors when they are read. Every other row of a tensor, a tensor with
its last axes swapped, or numbers packed in 4 bits. They have names, shapes and dtypes like all others.

MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 numbers of 4 bits (sign, 2 bits of exponent, 1 of mantissa), two a
byte, the lower half first; each block is multiplied by 2^(scale - 127). Dims: E experts, D inputs, O outputs, B
blocks of a row."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from routed_experts.models.loading.checkpoint import Checkpoint

_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
FP4_VALUES = np.concatenate([_FP4, -_FP4])

Header = tuple[tuple[int, ...], str]


class VirtualTensor(Protocol):
    """A virtual tensor."""

    @property
    def needs(self) -> tuple[str, ...]: ...

    def header(self, headers: Mapping[str, Header]) -> Header: ...

    def read(self, checkpoint: Checkpoint, box: tuple[slice, ...]) -> np.ndarray: ...


def no_virtual_tensors(headers: Mapping[str, Header]) -> Mapping[str, VirtualTensor]:
    """Of a family whose files hold what its table names."""
    return {}


@dataclass(frozen=True, slots=True)
class Strided:
    """Entries start, start + 2, ... of the last axis."""

    name: str
    start: int

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.name,)

    def header(self, headers: Mapping[str, Header]) -> Header:
        shape, dtype = headers[self.name]
        return (*shape[:-1], shape[-1] // 2), dtype

    def read(self, checkpoint: Checkpoint, box: tuple[slice, ...]) -> np.ndarray:
        last = slice(2 * box[-1].start, 2 * box[-1].stop)
        return checkpoint.read(self.name, (*box[:-1], last))[..., self.start :: 2]


@dataclass(frozen=True, slots=True)
class Swapped:
    """[E, D, O] from [E, O, D]."""

    name: str

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.name,)

    def header(self, headers: Mapping[str, Header]) -> Header:
        (experts, outputs, inputs), dtype = headers[self.name]
        return (experts, inputs, outputs), dtype

    def read(self, checkpoint: Checkpoint, box: tuple[slice, ...]) -> np.ndarray:
        return np.swapaxes(checkpoint.read(self.name, (box[0], box[2], box[1])), 1, 2)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """[E, D, O] from blocks [E, O, B, 16] and scales [E, O, B]; with `start`, every other output from there on.
    bfloat16 holds it exactly."""

    blocks: str
    scales: str
    start: int | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        return self.blocks, self.scales

    def header(self, headers: Mapping[str, Header]) -> Header:
        experts, outputs, blocks, half = headers[self.blocks][0]
        return (experts, blocks * half * 2, outputs if self.start is None else outputs // 2), "bfloat16"

    def read(self, checkpoint: Checkpoint, box: tuple[slice, ...]) -> np.ndarray:
        full = slice(None)
        blocks = checkpoint.read(self.blocks, (box[0], full, full, full))
        scales = checkpoint.read(self.scales, (box[0], full, full))
        if self.start is not None:
            blocks, scales = blocks[:, self.start :: 2], scales[:, self.start :: 2]
        return np.swapaxes(dequantize_mxfp4(blocks[:, box[2]], scales[:, box[2]]), 1, 2)[:, box[1]].astype(
            ml_dtypes.bfloat16
        )


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

    def close(self) -> None:
        self._source.close()
