"""`routed_experts_info`: the metadata that says what a payload of routed experts means, and its record.

Invariants: to_json has exactly the keys of schema routed_experts/1 (plus `valid` when rows are missing, and
`version_labels` when labels are known);
from_json(to_json(m)) == m; what from_json accepts is consistent in itself (shape, layers, dtype, rows of the prompt and
of the last token). Sizes are bounded before an array is made: a row has at least one id and at most MAX_HIDDEN_LAYERS
layers, so a payload that has the size of `shape` bounds R, and an array of R rows has at most MAX_HIDDEN_LAYERS times
as many ids. num_tokens bounds an array of all tokens (`pad_to_tokens`): RoutingFormatError where memory does not hold
it. Dims: R rows, L hidden layers, M MoE layers, K experts per token, E experts."""

import base64
import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NoReturn, cast, get_args

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float32, UInt, UInt16

from routed_experts.core.capture_spec import (
    MAX_HIDDEN_LAYERS,
    MAX_NUM_EXPERTS,
    WEIGHTS_DTYPES,
    WeightsDType,
    expert_id_dtype,
)
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.record_validation import VersionSpans, check_id_range
from routed_experts.core.routed_experts import CombineWeights, RoutedExperts
from routed_experts.core.weight_version import MAX_LABEL_CHARS
from routed_experts.formats.packed import NARROWED

SCHEMA = "routed_experts/1"
ORDER = "score_desc"
ID_SPACE = "logical"
_MAX_COUNT = 2**31 - 1  # of tokens and rows
_MAX_VERSION = 2**63 - 1  # the count of an update of the weights, an int64 where versions are an array
_MAX_VERSION_DIGITS = len(str(_MAX_VERSION))  # checked first: Python reads no integer of more than 4,300 digits

PayloadFormat = Literal["int32", "npy", "packed", "list", "ref"]
PayloadLayers = Literal["all", "moe"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExpertsMetadata:
    """The metadata of one payload; fields are the keys of the JSON object, in their order. `valid` is base64 of packed
    bits (little-endian), present when missing_rows > 0. `version_labels`: of the counts in `version_spans`, by
    count, present when any is known."""

    schema: str = SCHEMA
    format: PayloadFormat
    layers: PayloadLayers
    dtype: str
    shape: tuple[int, int, int]
    start: int
    num_tokens: int
    num_prompt_tokens: int
    prompt_rows: int
    include_last: bool
    num_hidden_layers: int
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    dense_fill: int | None
    order: str = ORDER
    ids: str = ID_SPACE
    exact: bool
    placement: dict[str, object] | None
    version_spans: VersionSpans
    missing_rows: int
    weights: WeightsDType | None
    router: str | None
    sha256: str | None
    valid: str | None = None
    version_labels: Mapping[int, str] = dataclasses.field(default_factory=dict[int, str])

    def __post_init__(self) -> None:
        num_rows, num_columns, num_slots = self.shape
        self._check_sizes()
        expected_columns = self.num_hidden_layers if self.layers == "all" else len(self.moe_layer_ids)
        if (num_columns, num_slots) != (expected_columns, self.top_k):
            raise RoutingFormatError(
                f"shape is {list(self.shape)}; expected [R, {expected_columns}, {self.top_k}] for layers "
                f"{self.layers!r}"
            )
        expected_prompt_rows = prompt_rows(self.start, num_rows, self.num_prompt_tokens)
        if self.prompt_rows != expected_prompt_rows:
            raise RoutingFormatError(
                f"prompt_rows is {self.prompt_rows}; expected {expected_prompt_rows} by start and num_prompt_tokens"
            )
        has_last = _has_last(self.start, num_rows, self.num_tokens)
        if self.include_last != has_last:
            raise RoutingFormatError(
                f"include_last is {self.include_last}; expected {has_last} for {num_rows} rows from token {self.start} "
                f"on of {self.num_tokens} tokens"
            )
        dtype = payload_dtype(self.format, self.num_experts)
        if self.dtype != dtype and not (self.format == "packed" and self.dtype in NARROWED):
            raise RoutingFormatError(
                f"dtype is {self.dtype!r}; expected {dtype!r} for the format {self.format!r} and {self.num_experts} "
                "experts"
            )
        if (self.valid is None) != (self.missing_rows == 0):
            raise RoutingFormatError(
                f"missing_rows is {self.missing_rows}, valid {short_repr(self.valid)}; expected valid when rows are "
                "missing only"
            )

    def _check_sizes(self) -> None:
        """Raise RoutingFormatError for a size that no model has: it would claim memory that no payload carries."""
        for name, size, high in (
            ("num_experts", self.num_experts, MAX_NUM_EXPERTS),
            ("top_k", self.top_k, self.num_experts),
            ("num_hidden_layers", self.num_hidden_layers, MAX_HIDDEN_LAYERS),
        ):
            if not 1 <= size <= high:
                raise RoutingFormatError(f"{name} is {short_repr(size)}; expected 1 to {high}")
        num_moe_layers = len(self.moe_layer_ids)
        if not 1 <= num_moe_layers <= self.num_hidden_layers:
            raise RoutingFormatError(
                f"moe_layer_ids has {num_moe_layers} layers; expected 1 to {self.num_hidden_layers}, num_hidden_layers"
            )

    def to_json(self) -> dict[str, object]:
        """Return the JSON object, in the order of the wire description."""
        fields = {field.name: _to_json(getattr(self, field.name)) for field in dataclasses.fields(self)}
        fields["version_labels"] = {str(count): label for count, label in self.version_labels.items()}
        for name in ("valid", "version_labels"):
            if not fields[name]:
                del fields[name]
        return fields

    def unpack_valid(self) -> Bool[np.ndarray, " R"] | None:
        """Unpack the bits of `valid`; None when every row is known."""
        if self.valid is None:
            return None
        num_rows = self.shape[0]
        try:
            bits = base64.b64decode(self.valid, validate=True)
        except ValueError as cause:
            raise RoutingFormatError(
                f"routed_experts_info.valid is {short_repr(self.valid)}: {cause}; expected base64 of {num_rows} bits"
            ) from cause
        if len(bits) != (num_rows + 7) // 8:
            raise RoutingFormatError(
                f"routed_experts_info.valid holds {len(bits)} bytes; expected {(num_rows + 7) // 8} for {num_rows} rows"
            )
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=num_rows, bitorder="little").astype(np.bool_)

    @staticmethod
    def from_json(metadata: object) -> "RoutedExpertsMetadata":
        """Read a JSON object; raises RoutingFormatError naming the first key that is missing, mistyped or
        inconsistent."""
        if not isinstance(metadata, Mapping):
            raise RoutingFormatError(f"routed_experts_info is a {type(metadata).__name__}; expected a JSON object")
        read = cast("Mapping[str, object]", metadata)
        for key, constant in (("schema", SCHEMA), ("order", ORDER), ("ids", ID_SPACE)):
            if read.get(key) != constant:
                _refuse(key, read.get(key), repr(constant))
        fields: dict[str, Any] = {}
        for key, parse in _PARSERS.items():
            if key in read:
                fields[key] = parse(key, read[key])
            elif key not in ("valid", "version_labels"):
                text = f"routed_experts_info has no key {key!r}; expected every key of schema {SCHEMA}"
                raise RoutingFormatError(text)
        return RoutedExpertsMetadata(**fields)


def to_record(
    ids: UInt[np.ndarray, "R M K"],
    metadata: RoutedExpertsMetadata,
    *,
    weights: CombineWeights | None = None,
    valid: Bool[np.ndarray, " R"] | None = None,
) -> RoutedExperts:
    """Join canonical ids with their metadata; raises RoutingFormatError where the two disagree.

    `valid` None takes the bits of the metadata; where both are there, they must be the same."""
    if ids.shape != (expected_shape := (metadata.shape[0], len(metadata.moe_layer_ids), metadata.top_k)):
        raise RoutingFormatError(
            f"ids have the shape {list(ids.shape)}; expected {list(expected_shape)}, as routed_experts_info says"
        )
    bits = metadata.unpack_valid()
    if valid is not None and bits is not None and not np.array_equal(valid, bits):
        raise RoutingFormatError(
            "valid marks other rows as missing than the bits of routed_experts_info.valid; expected the same rows: "
            "leave one of them out"
        )
    valid = bits if valid is None else valid
    num_missing = 0 if valid is None else int(valid.size - np.count_nonzero(valid))
    if num_missing != metadata.missing_rows or (valid is not None and valid.shape != ids.shape[:1]):
        raise RoutingFormatError(
            f"{num_missing} of {ids.shape[0]} rows are marked missing; expected {metadata.missing_rows}, as "
            "routed_experts_info says"
        )
    if (None if weights is None else weights.dtype.name) != metadata.weights:
        received = "no weights" if weights is None else f"weights of {weights.dtype.name}"
        raise RoutingFormatError(
            f"the payload has {received}; expected {metadata.weights!r}, as routed_experts_info says"
        )
    record = RoutedExperts(
        ids=ids,
        start=metadata.start,
        num_tokens=metadata.num_tokens,
        num_prompt_tokens=metadata.num_prompt_tokens,
        layer_ids=metadata.moe_layer_ids,
        num_hidden_layers=metadata.num_hidden_layers,
        num_experts=metadata.num_experts,
        version_spans=metadata.version_spans,
        valid=valid,
        weights=weights,
        router=metadata.router,
        version_labels=tuple(metadata.version_labels.items()),
        exact=metadata.exact,
        placement=metadata.placement,
    )
    check_id_range(
        ids, start=record.start, layer_ids=record.layer_ids, num_experts=record.num_experts, known=record.known
    )
    if metadata.sha256 is not None and metadata.sha256 != ids_sha256(record):
        raise RoutingFormatError(
            f"ids have sha256 {ids_sha256(record)}; expected {metadata.sha256}: the payload was changed on its way, or "
            "the prompt's rows are those of another choice"
        )
    return record


def to_metadata(
    record: RoutedExperts, *, payload_format: PayloadFormat, layers: PayloadLayers = "moe"
) -> RoutedExpertsMetadata:
    """Describe a payload of this record; the last token counts as included when it has a row."""
    num_columns = record.num_hidden_layers if layers == "all" else len(record.layer_ids)
    num_missing = 0 if record.valid is None else record.num_rows - int(np.count_nonzero(record.valid))
    packed = None if record.valid is None else np.packbits(record.valid, bitorder="little").tobytes()
    return RoutedExpertsMetadata(
        format=payload_format,
        layers=layers,
        dtype=payload_dtype(payload_format, record.num_experts),
        shape=(record.num_rows, int(num_columns), int(record.top_k)),
        start=int(record.start),
        num_tokens=int(record.num_tokens),
        num_prompt_tokens=int(record.num_prompt_tokens),
        prompt_rows=prompt_rows(int(record.start), record.num_rows, int(record.num_prompt_tokens)),
        include_last=_has_last(record.start, record.num_rows, record.num_tokens),
        num_hidden_layers=int(record.num_hidden_layers),
        moe_layer_ids=tuple(map(int, record.layer_ids)),
        num_experts=int(record.num_experts),
        top_k=int(record.top_k),
        dense_fill=None if layers == "moe" else 0 if payload_format in ("npy", "packed") else -1,
        exact=record.exact,
        placement=record.placement,
        version_spans=tuple((int(low), int(high), int(count)) for low, high, count in record.version_spans),
        missing_rows=num_missing,
        weights=_weights_dtype(record),
        router=record.router,
        sha256=ids_sha256(record),
        valid=base64.b64encode(packed).decode() if packed is not None and num_missing else None,
        version_labels=record.labels,
    )


def to_stored_weights(weights: CombineWeights) -> Float32[np.ndarray, "R M K"] | UInt16[np.ndarray, "R M K"]:
    """Weights as files and payloads hold them: float32, or the bits of bfloat16, which NumPy's formats have no name
    for."""
    return weights if weights.dtype == np.float32 else weights.view(np.uint16)


def from_stored_weights(array: np.ndarray, dtype: WeightsDType | None) -> np.ndarray:
    """Weights of the dtype that the metadata names; an array that holds none is returned as it is."""
    if dtype == "bfloat16" and array.dtype == np.uint16:
        return array.view(ml_dtypes.bfloat16)
    return array


def _weights_dtype(record: RoutedExperts) -> WeightsDType | None:
    if record.weights is None:
        return None
    return "float32" if record.weights.dtype == np.float32 else "bfloat16"


def ids_sha256(record: RoutedExperts) -> str:
    """Hash the canonical ids, little-endian: equal for every wire form of one record. Combine weights are not in it."""
    return hashlib.sha256(record.ids.astype(record.ids.dtype.newbyteorder("<"), copy=False).data).hexdigest()


def payload_dtype(payload_format: PayloadFormat, num_experts: int) -> str:
    """The dtype of the ids of a payload."""
    return {"int32": "int32", "list": "int16"}.get(payload_format, expert_id_dtype(num_experts).name)


def prompt_rows(start: int, num_rows: int, num_prompt_tokens: int) -> int:
    """Count the rows of [start, start + num_rows) that belong to the prompt."""
    return min(max(num_prompt_tokens - start, 0), num_rows)


def _has_last(start: int, num_rows: int, num_tokens: int) -> bool:
    """Whether the last token has a row."""
    return num_rows > 0 and bool(start + num_rows == num_tokens)


def _to_json(value: object) -> object:
    """A field as JSON has it: tuples, nested ones too, are lists."""
    return [_to_json(item) for item in cast("tuple[object, ...]", value)] if isinstance(value, tuple) else value


def _refuse(key: str, value: object, expected: str) -> NoReturn:
    raise RoutingFormatError(f"routed_experts_info.{key} is {short_repr(value)}; expected {expected}")


def _int(key: str, value: object, *, low: int = 0, high: int = _MAX_COUNT) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        _refuse(key, value, f"an integer of {low} to {high}")
    return value


def _dense_fill(key: str, value: object) -> int | None:
    return None if value is None else _int(key, value, low=-1, high=0)


def _bool(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        _refuse(key, value, "true or false")
    return value


def _placement(key: str, value: object) -> object:
    if value is not None and not isinstance(value, dict):
        _refuse(key, value, "an object or null")
    return value


def _one_of(*allowed: str) -> "_Parser":
    def parse(key: str, value: object) -> object:
        if not isinstance(value, str) or value not in allowed:
            _refuse(key, value, f"one of {', '.join(allowed)}")
        return value

    return parse


def _optional_text(*allowed: str) -> "_Parser":
    def parse(key: str, value: object) -> object:
        if value is not None and (not isinstance(value, str) or (allowed and value not in allowed)):
            _refuse(key, value, f"{' or '.join(allowed) or 'text'} or null")
        return value

    return parse


def _ints(key: str, value: object, *, high: int = _MAX_COUNT) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        _refuse(key, value, "a list of integers")
    items = cast("list[object]", value)
    return tuple(_int(key, item, high=high) for item in items)


def _shape(key: str, value: object) -> tuple[int, ...]:
    shape = _ints(key, value)
    if len(shape) != 3:
        raise RoutingFormatError(f"routed_experts_info.{key} has {len(shape)} dims; expected 3: rows, layers, top_k")
    return shape


def _spans(key: str, value: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list | tuple):
        _refuse(key, value, "a list of [lo, hi, version]")
    triples = tuple(_ints(key, span, high=_MAX_VERSION) for span in cast("list[object]", value))
    for triple in triples:
        if len(triple) != 3:
            raise RoutingFormatError(f"routed_experts_info.{key} holds {list(triple)}; expected [lo, hi, version]")
    return triples


def _labels(key: str, value: object) -> dict[int, str]:
    if not isinstance(value, Mapping):
        _refuse(key, value, "an object of labels by count")
    labels: dict[int, str] = {}
    for count, label in cast("Mapping[object, object]", value).items():
        number = _version(count)
        if number is None or not isinstance(label, str) or len(label) > MAX_LABEL_CHARS:
            pair = f"{short_repr(count)}: {short_repr(label)}"
            expected = f'"count": text of at most {MAX_LABEL_CHARS} characters, for a count of 0 to {_MAX_VERSION}'
            raise RoutingFormatError(f"routed_experts_info.{key} holds {pair}; expected {expected}")
        labels[number] = label
    return labels


def _version(text: object) -> int | None:
    """The count of an update from its decimal digits; None for anything else."""
    is_number = isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) <= _MAX_VERSION_DIGITS
    number = int(cast("str", text)) if is_number else _MAX_VERSION + 1
    return number if number <= _MAX_VERSION else None


_Parser = Callable[[str, object], object]  # key and its value in the JSON object; raises RoutingFormatError
_PARSERS: Mapping[str, _Parser] = MappingProxyType(  # of every field but schema, order and ids, which are constants
    {
        "format": _one_of(*get_args(PayloadFormat)),
        "layers": _one_of(*get_args(PayloadLayers)),
        "dtype": _one_of("int32", "int16", "uint8", "uint16"),
        "shape": _shape,
        **dict.fromkeys(("start", "num_tokens", "num_prompt_tokens", "prompt_rows"), _int),
        "include_last": _bool,
        "num_hidden_layers": _int,
        "moe_layer_ids": _ints,
        **dict.fromkeys(("num_experts", "top_k"), _int),
        "dense_fill": _dense_fill,
        "exact": _bool,
        "placement": _placement,
        "version_spans": _spans,
        "missing_rows": _int,
        "weights": _optional_text(*WEIGHTS_DTYPES),
        **dict.fromkeys(("router", "sha256", "valid"), _optional_text()),
        "version_labels": _labels,
    }
)
