"""The packed payload of prime-rl and SkyRL: an object with base64 of raw ids, their shape, first token and dtype.

Invariants: the payload says how it is read without other metadata; `data` is the first key, because prime-rl's client
cuts it out of the bytes of a response before it decodes the JSON; dense layers are 0, for the readers refuse negative
ids. Dims: R rows, L hidden layers, M MoE layers, columns: L or M, K experts per token."""

import math
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import pybase64
from jaxtyping import Int

from routed_experts.core.capture_spec import MAX_HIDDEN_LAYERS, MAX_NUM_EXPERTS
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import RoutingFormatError
from routed_experts.formats.base64_text import decode_base64

_DTYPES = ("uint8", "uint16", "int16", "int32")  # uint16: prime-rl; int16, int32: SkyRL
NARROWED = ("uint8", "int16", "int32")  # what `narrow` chooses from


def encode(ids: Int[np.ndarray, "R columns K"], *, start: int) -> dict[str, object]:
    """Encode ids of one of the four dtypes as `{data, shape, start, dtype}`. `start`: the token of row 0."""
    assert ids.dtype.name in _DTYPES, ids.dtype
    little_endian = np.ascontiguousarray(ids, dtype=ids.dtype.newbyteorder("<"))
    return {
        "data": pybase64.b64encode_as_string(little_endian.data),
        "shape": list(ids.shape),
        "start": int(start),
        "dtype": ids.dtype.name,
    }


def decode(payload: object) -> Int[np.ndarray, "R columns K"]:
    """Read the ids, in the dtype of the payload; read-only. Raises RoutingFormatError for anything else."""
    if not isinstance(payload, Mapping):
        raise RoutingFormatError(f"packed rows are a {type(payload).__name__}; expected {{data, shape, dtype}}")
    fields = cast("Mapping[str, object]", payload)
    dtype, shape = fields.get("dtype"), fields.get("shape")
    if dtype not in _DTYPES:
        raise RoutingFormatError(
            f"packed rows have the dtype {short_repr(dtype)}; expected one of {', '.join(_DTYPES)}"
        )
    sizes: Sequence[object] = shape if isinstance(shape, list | tuple) else ()
    if len(sizes) != 3 or not all(type(size) is int and size >= 0 for size in sizes):
        raise RoutingFormatError(f"packed rows have the shape {short_repr(shape)}; expected [rows, layers, top_k]")
    num_layers, top_k = cast("Sequence[int]", sizes)[1:]
    for name, size, high in (("layers", num_layers, MAX_HIDDEN_LAYERS), ("top_k", top_k, MAX_NUM_EXPERTS)):
        if not 1 <= size <= high:  # a row without ids would bound no number of rows
            raise RoutingFormatError(f"packed rows have {short_repr(size)} {name}; expected 1 to {high}")
    encoded, expected = decode_base64(fields.get("data")), np.dtype(str(dtype)).newbyteorder("<")
    num_bytes = math.prod(cast("Sequence[int]", sizes)) * expected.itemsize
    if len(encoded) != num_bytes:
        raise RoutingFormatError(
            f"packed rows hold {len(encoded)} bytes; expected {short_repr(num_bytes)} for {dtype} of that shape"
        )
    return np.frombuffer(encoded, expected).reshape(cast("Sequence[int]", sizes))


def start_of(payload: Mapping[str, object]) -> object:
    """The token of row 0, None where a payload of SkyRL does not say it."""
    return payload.get("start")


def narrow(ids: Int[np.ndarray, "R columns K"]) -> Int[np.ndarray, "R columns K"]:
    """The ids in the dtype that SkyRL's reader takes: the first of uint8, int16 and int32 that holds the largest id of
    this array, whatever the number of experts is."""
    largest = int(ids.max(initial=0))
    kind = next(kind for kind in NARROWED if largest <= np.iinfo(kind).max)
    return ids.astype(kind, copy=False)
