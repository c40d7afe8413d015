"""Wire forms of one record, both ways: a base64 payload, or nested lists, and its metadata.

Invariants: every form carries the same ids, so one sha256 serves all; decoding never unpickles and never trusts a
length that it has not compared. Integers are little-endian. Dims: R rows, L hidden layers, M MoE layers, columns of a
payload: L or M, K experts per token."""

import dataclasses
import io
import math
import tokenize
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, cast

import numpy as np
import pybase64
from jaxtyping import Int, Int32, UInt

from routed_experts.core.capture_spec import expert_id_dtype
from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.io_struct import RoutingOptions
from routed_experts.core.record_validation import check_id_range
from routed_experts.core.routed_experts import CombineWeights, RoutedExperts
from routed_experts.formats import packed
from routed_experts.formats.base64_text import decode_base64
from routed_experts.formats.layout import check_ids, scatter_to_all_layers
from routed_experts.formats.metadata import (
    PayloadLayers,
    RoutedExpertsMetadata,
    from_stored_weights,
    to_metadata,
    to_record,
    to_stored_weights,
)

PAYLOAD_KEY = "routed_experts"
INFO_KEY = "routed_experts_info"
WEIGHTS_KEY = "routed_experts_weights"
START_KEY = "routed_experts_start_len"
PROMPT_KEY = "prompt_routed_experts"
REF_KEY = "routed_experts_ref"
NPY_MAGIC = b"\x93NUMPY"
# What NumPy raises for damaged files: its header is the text of a Python literal.
NPY_ERRORS = (
    *(ValueError, TypeError, KeyError, EOFError, OverflowError, MemoryError, RecursionError),
    *(SyntaxError, tokenize.TokenError),
)
EncodedFormat = Literal["int32", "npy", "packed"]
_ENCODED: Mapping[str, EncodedFormat] = MappingProxyType({"int32": "int32", "npy": "npy", "packed": "packed"})


def encode_routed_experts(
    record: RoutedExperts, *, payload_format: EncodedFormat, layers: PayloadLayers, aborted: bool = False
) -> dict[str, object]:
    """Return the fields of meta_info or a choice: `routed_experts`, its metadata, and the weights if the record has
    them: base64 of an npy array [R, M, K] of float32, or of uint16, which are the bits of bfloat16.

    An aborted request that generated nothing has the payload None and no rows; any other record of 0 rows is not
    None."""
    has_no_rows = aborted and record.num_tokens == record.num_prompt_tokens
    if has_no_rows:
        record = record[record.start : record.start]
    payload: object
    if payload_format == "int32":
        payload = pybase64.b64encode_as_string(_columns(record, layers=layers, fill=-1, dtype=np.dtype("<i4")).data)
    else:
        ids = _columns(record, layers=layers, fill=0, dtype=record.ids.dtype)
        payload = (
            packed.encode(ids, start=record.start)
            if payload_format == "packed"
            else pybase64.b64encode_as_string(npy_bytes(ids))
        )
    metadata = to_metadata(record, payload_format=payload_format, layers=layers)
    fields: dict[str, object] = {PAYLOAD_KEY: None if has_no_rows else payload, INFO_KEY: metadata.to_json()}
    if record.weights is not None:
        stored = npy_bytes(to_stored_weights(record.weights))
        fields[WEIGHTS_KEY] = None if has_no_rows else pybase64.b64encode_as_string(stored)
    return fields


def encode_meta_info(
    record: RoutedExperts, *, payload_format: EncodedFormat, layers: PayloadLayers, aborted: bool = False
) -> dict[str, object]:
    """Return the keys of encode_routed_experts plus the echo of `start` that readers of meta_info look for."""
    return {
        START_KEY: int(record.start),
        **encode_routed_experts(record, payload_format=payload_format, layers=layers, aborted=aborted),
    }


def encode_as_lists(record: RoutedExperts, *, layers: PayloadLayers, aborted: bool = False) -> dict[str, object]:
    """Return `prompt_routed_experts`, `routed_experts` (the generated rows), the metadata of both together and the
    weights, if any, as nested lists: numbers as JSON has them. An aborted request that generated nothing has None for
    its rows."""
    has_no_rows = aborted and record.num_tokens == record.num_prompt_tokens
    if has_no_rows:
        record = record[record.start : record.start]
    rows = _columns(record, layers=layers, fill=-1, dtype=np.dtype(np.int32))
    metadata = to_metadata(record, payload_format="list", layers=layers)
    fields: dict[str, object] = {
        PROMPT_KEY: None if has_no_rows else rows[: metadata.prompt_rows].tolist(),
        PAYLOAD_KEY: None if has_no_rows else rows[metadata.prompt_rows :].tolist(),
        INFO_KEY: metadata.to_json(),
    }
    if record.weights is not None:
        fields[WEIGHTS_KEY] = None if has_no_rows else record.weights.astype(np.float32).tolist()
    return fields


def encode_rows(record: RoutedExperts, options: RoutingOptions, *, aborted: bool = False) -> dict[str, object]:
    """Return the fields of encode_routed_experts or encode_as_lists, as a request chose. The metadata of streamed rows
    describes a part and has no hash of the whole. For format ref there is `encode_ref`."""
    layers = "moe" if options.layers == "moe" else "all"
    if options.format == "list":
        fields = encode_as_lists(record, layers=layers, aborted=aborted)
    else:
        payload_format = _ENCODED.get(options.format, "int32")
        fields = encode_routed_experts(record, payload_format=payload_format, layers=layers, aborted=aborted)
    if options.stream:
        fields[INFO_KEY] = {**cast("dict[str, object]", fields[INFO_KEY]), "sha256": None}
    return fields


def encode_ref(record: RoutedExperts, *, url: str) -> dict[str, object]:
    """Return `routed_experts_ref` and the metadata of what is kept there: the canonical ids, and weights if the record
    has them."""
    return {REF_KEY: url, INFO_KEY: to_metadata(record, payload_format="ref").to_json()}


def decode_routed_experts(
    payload: object, info: object, *, weights: object = None, prompt_payload: object = None
) -> RoutedExperts:
    """Read a payload by its metadata: ids [rows, layers, K], and `weights` of the same shape where it names some.
    `prompt_payload` holds the prompt's rows of the list form. Raises RoutingFormatError where they do not agree."""
    metadata = RoutedExpertsMetadata.from_json(info)
    if metadata.format == "int32":
        array = _raw_int32(payload, metadata.shape)
    elif metadata.format == "npy":
        array = read_npy(decode_base64(payload), dtype=metadata.dtype, shape=metadata.shape)
    elif metadata.format == "packed":
        array = _packed_rows(payload, metadata)
    elif metadata.format == "list":
        array = _rows_from_lists(payload, prompt_payload, metadata)
    else:
        raise RoutingFormatError(
            f"the payload has the format {metadata.format!r}; expected int32, npy, packed or list: a ref is fetched "
            "from its URL"
        )
    return to_record(_canonical_ids(array, metadata), metadata, weights=_decoded_weights(weights, metadata))


def record_from_npy(encoded: bytes, info: object) -> RoutedExperts:
    """Read the raw .npy body of a ref by the metadata of its header. It holds ids alone: the safetensors body
    (`decode_record`) has the combine weights, too."""
    metadata = dataclasses.replace(RoutedExpertsMetadata.from_json(info), weights=None)
    return to_record(read_npy(encoded, dtype=metadata.dtype, shape=metadata.shape), metadata)


def npy_bytes(array: np.ndarray) -> bytes:
    """Return a .npy of version 1.0, little-endian, C-order."""
    encoded = io.BytesIO()
    little_endian = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    np.lib.format.write_array(encoded, little_endian, version=(1, 0), allow_pickle=False)
    return encoded.getvalue()


def read_npy(encoded: bytes, *, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Read a .npy that must hold exactly `dtype` and `shape`; the result is a read-only view of the bytes."""
    stream = io.BytesIO(encoded)
    try:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise RoutingFormatError(f".npy of version {version}; expected (1, 0)")
        stored_shape, fortran_order, stored_dtype = np.lib.format.read_array_header_1_0(stream)
    except NPY_ERRORS as cause:
        raise RoutingFormatError(
            f"{len(encoded)} bytes are no .npy: {cause}; expected version 1.0 of {dtype}{list(shape)}"
        ) from cause
    expected_dtype = np.dtype(dtype).newbyteorder("<")
    if (stored_shape, stored_dtype, fortran_order) != (shape, expected_dtype, False):
        order = ", Fortran order" if fortran_order else ""
        raise RoutingFormatError(
            f".npy holds {stored_dtype}{list(stored_shape)}{order}; expected C-order {expected_dtype}{list(shape)}"
        )
    num_bytes, expected_bytes = len(encoded) - stream.tell(), math.prod(shape) * expected_dtype.itemsize
    if num_bytes != expected_bytes:
        raise RoutingFormatError(
            f".npy holds {num_bytes} bytes after its header; expected {expected_bytes} for {dtype}{list(shape)}"
        )
    return np.frombuffer(encoded, expected_dtype, offset=stream.tell()).reshape(shape)


def _columns(
    record: RoutedExperts, *, layers: PayloadLayers, fill: int, dtype: np.dtype[np.integer]
) -> Int[np.ndarray, "R columns K"]:
    if layers == "all":
        return scatter_to_all_layers(record, dtype, fill=fill)
    check_ids(record)
    return record.ids.astype(dtype, copy=False)


def _raw_int32(payload: object, shape: tuple[int, int, int]) -> Int32[np.ndarray, "R columns K"]:
    encoded, num_expected = decode_base64(payload), math.prod(shape)
    if len(encoded) != 4 * num_expected:
        raise RoutingFormatError(
            f"int32 payload holds {len(encoded)} bytes; expected {4 * num_expected} for the shape {list(shape)}"
        )
    return np.frombuffer(encoded, np.dtype("<i4")).reshape(shape)


def _packed_rows(payload: object, metadata: RoutedExpertsMetadata) -> Int[np.ndarray, "R columns K"]:
    """Read a packed payload, which must say what its metadata says."""
    array = packed.decode(payload)
    start = packed.start_of(cast("Mapping[str, object]", payload))
    if (array.shape, array.dtype.name) != (metadata.shape, metadata.dtype) or start not in (None, metadata.start):
        raise RoutingFormatError(
            f"packed rows are {array.dtype.name}{list(array.shape)} from token {start} on; expected "
            f"{metadata.dtype}{list(metadata.shape)} from {metadata.start} on"
        )
    return array


def _to_array(name: str, nested: object, kind: type[np.generic]) -> np.ndarray:
    """Turn nested JSON numbers into an array of a dtype of this kind."""
    if not isinstance(nested, list):
        raise RoutingFormatError(f"{name} is a {type(nested).__name__}; expected a nested list")
    try:
        array = np.array(cast("list[object]", nested))
    except (ValueError, OverflowError) as cause:
        raise RoutingFormatError(f"{name} is no array: {cause}; expected nested lists of equal lengths") from cause
    if array.size and not np.issubdtype(array.dtype, kind):
        raise RoutingFormatError(f"{name} holds {array.dtype}; expected {kind.__name__} numbers")
    return array


def _rows_from_lists(
    generated: object, prompt: object, metadata: RoutedExpertsMetadata
) -> Int[np.ndarray, "R columns K"]:
    num_rows, num_columns, num_slots = metadata.shape
    pieces: list[np.ndarray] = []
    for name, nested, expected_rows in (
        ("prompt_routed_experts", [] if prompt is None else prompt, metadata.prompt_rows),
        ("routed_experts", generated, num_rows - metadata.prompt_rows),
    ):
        piece, expected_shape = _to_array(name, nested, np.integer), (expected_rows, num_columns, num_slots)
        if piece.shape != expected_shape and (piece.size or expected_rows):
            advice = (
                ""
                if piece.size
                else "; the prompt's rows are next to the choices: read the whole response with record_from_response"
            )
            raise RoutingFormatError(
                f"{name} has the shape {list(piece.shape)}; expected {list(expected_shape)}{advice}"
            )
        pieces.append(piece.astype(np.int64).reshape(expected_shape))
    return np.concatenate(pieces)


def _decoded_weights(weights: object, metadata: RoutedExpertsMetadata) -> CombineWeights | None:
    if metadata.weights is None:
        return None
    shape = (metadata.shape[0], len(metadata.moe_layer_ids), metadata.top_k)
    dtype = np.dtype(metadata.weights)
    if metadata.format != "list":
        stored = "uint16" if metadata.weights == "bfloat16" else "float32"
        array = read_npy(decode_base64(weights), dtype=stored, shape=shape)
        return from_stored_weights(array, metadata.weights)
    listed = _to_array(WEIGHTS_KEY, weights, np.number)
    if listed.shape != shape and (listed.size or math.prod(shape)):  # `[]` has no other dims
        raise RoutingFormatError(f"{WEIGHTS_KEY} has the shape {list(listed.shape)}; expected {list(shape)}")
    with np.errstate(over="ignore"):
        array = listed.astype(dtype)
    overflows = np.isinf(array) & ~np.isinf(listed)
    if overflows.any():
        value = listed[overflows].flat[0]
        raise RoutingFormatError(
            f"{WEIGHTS_KEY} holds {value:g}, which {dtype} does not hold; give the weights that were recorded"
        )
    return array.reshape(shape)


def _canonical_ids(array: Int[np.ndarray, "R columns K"], metadata: RoutedExpertsMetadata) -> UInt[np.ndarray, "R M K"]:
    """Drop the dense columns, which must hold their fill, and narrow ids that were found to be experts."""
    layer_ids = metadata.moe_layer_ids
    if metadata.layers == "all":
        if any(layer >= metadata.num_hidden_layers for layer in layer_ids):
            raise RoutingFormatError(
                f"moe_layer_ids {layer_ids}; expected indices below num_hidden_layers {metadata.num_hidden_layers}"
            )
        dense = np.delete(array, layer_ids, axis=1)
        if metadata.dense_fill is None or (dense != metadata.dense_fill).any():
            raise RoutingFormatError(
                f"a dense layer's column holds {np.unique(dense)[:4].tolist()}; expected {metadata.dense_fill} alone"
            )
        array = array[:, layer_ids]
    valid = metadata.unpack_valid()
    known = np.ones(metadata.shape[0], np.bool_) if valid is None else valid
    check_id_range(array, start=metadata.start, layer_ids=layer_ids, num_experts=metadata.num_experts, known=known)
    return np.ascontiguousarray(array, dtype=expert_id_dtype(metadata.num_experts))
