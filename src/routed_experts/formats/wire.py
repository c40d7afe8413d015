"""Wire forms of one record: a base64 payload and its sidecar, both ways. Knows nothing of JAX, HTTP or where a payload
stands.

Invariants: every form carries the same ids, so the sidecar's sha256 is one for all; decoding never unpickles and never
trusts a length it has not compared. Integers are little-endian.
Dims: R rows, L hidden layers, M MoE layers, columns of a payload: L or M, K experts per token."""

import io
import math
from typing import Literal, cast

import numpy as np
import pybase64
from jaxtyping import Float32, Int, Int32, UInt

from routed_experts.core.capture_spec import expert_id_dtype
from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.record_validation import check_id_range, valid_rows_of
from routed_experts.core.routed_experts import RoutedExperts, record_of, to_metadata
from routed_experts.core.routed_experts_metadata import PayloadLayers, RoutedExpertsMetadata

PAYLOAD_KEY = "routed_experts"
INFO_KEY = "routed_experts_info"
WEIGHTS_KEY = "routed_experts_weights"
START_KEY = "routed_experts_start_len"
PROMPT_KEY = "prompt_routed_experts"
REF_KEY = "routed_experts_ref"


def encode_routed_experts(
    record: RoutedExperts, *, payload_format: Literal["int32", "npy"], layers: PayloadLayers, aborted: bool = False
) -> dict[str, object]:
    """Return `routed_experts`, its sidecar, and the weights if the record has them, as stand in meta_info or a choice.

    An aborted request that generated nothing has the payload None and no rows; any other record of 0 rows is not
    None."""
    nothing = aborted and record.num_tokens == record.num_prompt_tokens
    if nothing:
        record = record[record.start : record.start]
    if payload_format == "int32":
        payload = pybase64.b64encode_as_string(
            scatter_to_all_layers(record, layers=layers, fill=-1, dtype=np.dtype("<i4")).data
        )
    else:
        payload = pybase64.b64encode_as_string(
            npy_bytes(scatter_to_all_layers(record, layers=layers, fill=0, dtype=record.ids.dtype))
        )
    sidecar = to_metadata(record, payload_format=payload_format, layers=layers)
    fields: dict[str, object] = {PAYLOAD_KEY: None if nothing else payload, INFO_KEY: sidecar.to_json()}
    if record.weights is not None:
        fields[WEIGHTS_KEY] = None if nothing else pybase64.b64encode_as_string(npy_bytes(record.weights))
    return fields


def encode_meta_info(
    record: RoutedExperts, *, payload_format: Literal["int32", "npy"], layers: PayloadLayers, aborted: bool = False
) -> dict[str, object]:
    """Return the keys of encode_routed_experts plus the echo of `start` that readers of meta_info look for."""
    return {
        START_KEY: record.start,
        **encode_routed_experts(record, payload_format=payload_format, layers=layers, aborted=aborted),
    }


def encode_as_lists(record: RoutedExperts, *, layers: PayloadLayers, aborted: bool = False) -> dict[str, object]:
    """Return `prompt_routed_experts`, `routed_experts` (the generated rows), the sidecar of both together and the
    weights, if any, as nested lists: numbers as JSON has them. An aborted request that generated nothing has None for
    its rows."""
    nothing = aborted and record.num_tokens == record.num_prompt_tokens
    if nothing:
        record = record[record.start : record.start]
    rows = scatter_to_all_layers(record, layers=layers, fill=-1, dtype=np.dtype(np.int32))
    sidecar = to_metadata(record, payload_format="list", layers=layers)
    fields: dict[str, object] = {
        PROMPT_KEY: None if nothing else rows[: sidecar.prompt_rows].tolist(),
        PAYLOAD_KEY: None if nothing else rows[sidecar.prompt_rows :].tolist(),
        INFO_KEY: sidecar.to_json(),
    }
    if record.weights is not None:
        fields[WEIGHTS_KEY] = None if nothing else record.weights.tolist()
    return fields


def drop_checksum(fields: dict[str, object]) -> dict[str, object]:
    """The fields of an increment: its sidecar is of a piece, and has no hash of the whole."""
    return {**fields, INFO_KEY: {**cast("dict[str, object]", fields[INFO_KEY]), "sha256": None}}


def encode_ref(record: RoutedExperts, *, url: str) -> dict[str, object]:
    """Return `routed_experts_ref` and the sidecar of what is kept there: the canonical ids."""
    return {REF_KEY: url, INFO_KEY: to_metadata(record, payload_format="ref").to_json()}


def decode_routed_experts(
    payload: object, info: object, *, weights: object = None, prompt_payload: object = None
) -> RoutedExperts:
    """Read a payload by its sidecar; `prompt_payload` holds the prompt's rows of a list, which stand apart from the
    choice's."""
    sidecar = RoutedExpertsMetadata.from_json(info)
    if sidecar.format == "int32":
        array = _raw_int32(payload, sidecar.shape)
    elif sidecar.format == "npy":
        array = read_npy(decode_base64(payload), dtype=sidecar.dtype, shape=sidecar.shape)
    elif sidecar.format == "list":
        array = _listed_rows(payload, prompt_payload, sidecar)
    else:
        raise RoutingFormatError(
            f"a payload came with format {sidecar.format!r}; wanted int32, npy or list: a ref is fetched from its URL"
        )
    return record_of(_canonical_ids(array, sidecar), sidecar, weights=_decoded_weights(weights, sidecar))


def record_from_npy(encoded: bytes, info: object) -> RoutedExperts:
    """Read the raw .npy body of a ref by the sidecar of its header."""
    sidecar = RoutedExpertsMetadata.from_json(info)
    return record_of(read_npy(encoded, dtype=sidecar.dtype, shape=sidecar.shape), sidecar)


def scatter_to_all_layers(
    record: RoutedExperts, *, layers: PayloadLayers, fill: int, dtype: np.dtype[np.integer]
) -> Int[np.ndarray, "R columns K"]:
    """Return the ids as `dtype`, with a column of `fill` for every dense layer when layers is "all"."""
    if layers == "moe":
        return record.ids.astype(dtype, copy=False)
    spread = np.full((record.num_rows, record.num_hidden_layers, record.top_k), fill, dtype)
    spread[:, record.layer_ids] = record.ids
    return spread


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
            raise RoutingFormatError(f".npy of version {version}; wanted (1, 0)")
        came_shape, fortran_order, came_dtype = np.lib.format.read_array_header_1_0(stream)
    except ValueError as cause:
        raise RoutingFormatError(
            f"{len(encoded)} bytes are no .npy: {cause}; wanted version 1.0 of {dtype}{list(shape)}"
        ) from cause
    wanted_dtype = np.dtype(dtype).newbyteorder("<")
    if (came_shape, came_dtype, fortran_order) != (shape, wanted_dtype, False):
        order = ", Fortran order" if fortran_order else ""
        raise RoutingFormatError(
            f".npy holds {came_dtype}{list(came_shape)}{order}; wanted C-order {wanted_dtype}{list(shape)}"
        )
    num_bytes, wanted_bytes = len(encoded) - stream.tell(), math.prod(shape) * wanted_dtype.itemsize
    if num_bytes != wanted_bytes:
        raise RoutingFormatError(
            f".npy holds {num_bytes} bytes after its header; wanted {wanted_bytes} for {dtype}{list(shape)}"
        )
    return np.frombuffer(encoded, wanted_dtype, offset=stream.tell()).reshape(shape)


def decode_base64(payload: object) -> bytes:
    """Decode padded base64 without line breaks; anything else is a RoutingFormatError."""
    if not isinstance(payload, str | bytes):
        raise RoutingFormatError(f"payload is a {type(payload).__name__}; wanted base64 text")
    try:
        return pybase64.b64decode(payload, validate=True)
    except ValueError as cause:
        raise RoutingFormatError(
            f"payload of {len(payload)} characters is no base64: {cause}; wanted RFC 4648 §4, padded"
        ) from cause


def _raw_int32(payload: object, shape: tuple[int, int, int]) -> Int32[np.ndarray, "R columns K"]:
    encoded, num_wanted = decode_base64(payload), math.prod(shape)
    if len(encoded) != 4 * num_wanted:
        raise RoutingFormatError(
            f"int32 payload holds {len(encoded)} bytes; wanted {4 * num_wanted} for the shape {list(shape)}"
        )
    return np.frombuffer(encoded, np.dtype("<i4")).reshape(shape)


def _listed(name: str, nested: object, wanted: type[np.generic]) -> np.ndarray:
    """Turn nested JSON numbers into an array of a dtype below `wanted`."""
    if not isinstance(nested, list):
        raise RoutingFormatError(f"{name} is a {type(nested).__name__}; wanted a nested list")
    try:
        array = np.array(cast("list[object]", nested))
    except (ValueError, OverflowError) as cause:
        raise RoutingFormatError(f"{name} is no array: {cause}; wanted nested lists of equal lengths") from cause
    if array.size and not np.issubdtype(array.dtype, wanted):
        raise RoutingFormatError(f"{name} holds {array.dtype}; wanted {wanted.__name__} numbers")
    return array


def _listed_rows(generated: object, prompt: object, sidecar: RoutedExpertsMetadata) -> Int[np.ndarray, "R columns K"]:
    num_rows, num_columns, num_slots = sidecar.shape
    pieces: list[np.ndarray] = []
    for name, nested, wanted_rows in (
        ("prompt_routed_experts", [] if prompt is None else prompt, sidecar.prompt_rows),
        ("routed_experts", generated, num_rows - sidecar.prompt_rows),
    ):
        piece, wanted_shape = _listed(name, nested, np.integer), (wanted_rows, num_columns, num_slots)
        if piece.shape != wanted_shape and (piece.size or wanted_rows):
            advice = (
                ""
                if piece.size
                else "; the prompt's rows stand beside the choices: read the whole response with record_from_response"
            )
            raise RoutingFormatError(f"{name} has the shape {list(piece.shape)}; wanted {list(wanted_shape)}{advice}")
        pieces.append(piece.astype(np.int64).reshape(wanted_shape))
    return np.concatenate(pieces)


def _decoded_weights(weights: object, sidecar: RoutedExpertsMetadata) -> Float32[np.ndarray, "R M K"] | None:
    if sidecar.weights is None:
        return None
    shape = (sidecar.shape[0], len(sidecar.moe_layer_ids), sidecar.top_k)
    if sidecar.format != "list":
        return read_npy(decode_base64(weights), dtype="float32", shape=shape)
    listed = _listed(WEIGHTS_KEY, weights, np.number).astype(np.float32)
    if listed.size != math.prod(shape):
        raise RoutingFormatError(f"{WEIGHTS_KEY} has the shape {list(listed.shape)}; wanted {list(shape)}")
    return listed.reshape(shape)


def _canonical_ids(array: Int[np.ndarray, "R columns K"], sidecar: RoutedExpertsMetadata) -> UInt[np.ndarray, "R M K"]:
    """Drop the dense columns, which must hold their fill, and narrow ids that were found to be experts."""
    layer_ids = sidecar.moe_layer_ids
    if sidecar.layers == "all":
        if any(layer >= sidecar.num_hidden_layers for layer in layer_ids):
            raise RoutingFormatError(
                f"moe_layer_ids {layer_ids}; wanted indices below num_hidden_layers {sidecar.num_hidden_layers}"
            )
        dense = np.delete(array, layer_ids, axis=1)
        if sidecar.dense_fill is None or (dense != sidecar.dense_fill).any():
            raise RoutingFormatError(
                f"a dense layer's column holds {np.unique(dense)[:4].tolist()}; wanted {sidecar.dense_fill} alone"
            )
        array = array[:, layer_ids]
    valid = valid_rows_of(sidecar)
    known = np.ones(sidecar.shape[0], np.bool_) if valid is None else valid
    check_id_range(array, start=sidecar.start, layer_ids=layer_ids, num_experts=sidecar.num_experts, known=known)
    return np.ascontiguousarray(array, dtype=expert_id_dtype(sidecar.num_experts))
