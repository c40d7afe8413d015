"""One safetensors file: its header, and tensors read with plain reads.

Tensors are read, not mapped: pages of a mapped file count as resident memory of the process until the system
reclaims them, so a checkpoint would count twice. The format (https://github.com/huggingface/safetensors#format): 8
bytes of length, a JSON header, data. safetensors' own reader decides whether a file is complete."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from routed_experts.core.errors import CheckpointError

_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
        **{
            dtype_name: np.dtype(name)
            for dtype_name, name in {"F16": "float16", "F32": "float32", "F64": "float64", "BOOL": "bool"}.items()
        },
        **{
            f"{kind}{bits}": np.dtype(f"{name}{bits}")
            for kind, name in {"I": "int", "U": "uint"}.items()
            for bits in (8, 16, 32, 64)
        },
    }
)
WEIGHT_DTYPES = frozenset({"bfloat16", "float16", "float32"})
_SAMPLE_BYTES = 64  # of the values of a tensor
_BLOCK_BYTES = 16 << 20  # read at once where only a part of each row is expected


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Shape, dtype and place of one tensor. `dtype` is NumPy's name where we read it as a weight, else safetensors'
    word."""

    shape: tuple[int, ...]
    dtype: str
    dtype_name: str
    first_byte: int  # byte of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file whose header has been read; no handle stays open."""

    path: Path
    tensors: Mapping[str, StoredTensor]

    @staticmethod
    def open(path: Path) -> "TensorFile":
        """Read the header. CheckpointError where the file is damaged or cut short; FileNotFoundError is the
        caller's."""
        try:
            with safe_open(path, framework="np") as judged:
                names = set(judged.keys())
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(size))
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is damaged or cut short ({error}); expected safetensors; copy it again"
            ) from error
        tensors = {
            name: StoredTensor(
                shape=tuple(entry["shape"]),
                dtype=_named(entry["dtype"]),
                dtype_name=entry["dtype"],
                first_byte=8 + size + entry["data_offsets"][0],
                num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
            if name in names
        }
        return TensorFile(path, tensors)

    def read(self, name: str, box: tuple[slice, ...] = ()) -> np.ndarray:
        """Copy one tensor, or the part of it that `box` names (no steps), to the host. CheckpointError where it cannot
        be read."""
        tensor = self.tensors[name]
        dtype = _DTYPES.get(tensor.dtype_name)
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: {name} is {tensor.dtype_name}; expected one of {', '.join(sorted(_DTYPES))}; convert it"
            )
        sides = (
            [side.indices(size)[:2] for side, size in zip(box, tensor.shape, strict=True)]
            if box
            else [(0, n) for n in tensor.shape]
        )
        out = np.empty(tuple(stop - start for start, stop in sides), dtype)
        try:
            with self.path.open("rb", buffering=0) as file:
                _read_box(file, tensor.first_byte, tensor.shape, sides, out)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read ({error}); copy the checkpoint again") from error
        return out

    def samples(self) -> dict[str, bytes]:
        """By name, the bytes in the middle of every tensor. CheckpointError where they cannot be read."""
        contents: dict[str, bytes] = {}
        try:
            with self.path.open("rb", buffering=0) as file:
                for name, tensor in self.tensors.items():
                    size = min(tensor.num_bytes, _SAMPLE_BYTES)
                    file.seek(tensor.first_byte + (tensor.num_bytes - size) // 2)
                    contents[name] = file.read(size)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error}); copy the checkpoint again") from error
        return contents


def _named(dtype_name: str) -> str:
    name = _DTYPES[dtype_name].name if dtype_name in _DTYPES else dtype_name
    return name if name in WEIGHT_DTYPES else dtype_name


def _read_box(
    file: FileIO, first_byte: int, shape: tuple[int, ...], sides: list[tuple[int, int]], out: np.ndarray
) -> None:
    """Fill `out` with the box. Leading axes of size one are an offset; complete rows are one
    read, others are read in blocks of rows and sliced."""
    if out.size == 0:
        return
    axis, offset = 0, 0
    while axis < len(shape) - 1 and sides[axis][1] - sides[axis][0] == 1:
        offset += sides[axis][0] * math.prod(shape[axis + 1 :])
        axis += 1
    if axis == len(shape):  # a scalar
        return _fill(file, first_byte, out)
    (start, stop), row = sides[axis], math.prod(shape[axis + 1 :])
    offset_bytes = first_byte + (offset + start * row) * out.itemsize
    if all(side == (0, size) for side, size in zip(sides[axis + 1 :], shape[axis + 1 :], strict=True)):
        return _fill(file, offset_bytes, out)
    expected = out.reshape(stop - start, *out.shape[axis + 1 :])
    cut = tuple(slice(*side) for side in sides[axis + 1 :])
    rows = max(1, _BLOCK_BYTES // (row * out.itemsize))
    for first in range(0, len(expected), rows):
        block = np.empty((min(rows, len(expected) - first), *shape[axis + 1 :]), out.dtype)
        _fill(file, offset_bytes + first * row * out.itemsize, block)
        expected[first : first + rows] = block[(slice(None), *cut)]


def _fill(file: FileIO, offset_bytes: int, array: np.ndarray) -> None:
    """Read the bytes of an array; OSError where the file ends before them."""
    left = array.reshape(-1).view(np.uint8).data
    file.seek(offset_bytes)
    while left:
        count = file.readinto(left)
        if not count:
            raise OSError(f"the file ends {len(left)} bytes early")
        left = left[count:]
