"""The sidecar `routed_experts_info`: what a payload of routed experts means. Knows nothing of arrays or base64.

Invariants: to_json has exactly the keys of schema routed_experts/1 (plus `valid` when rows are missing);
from_json(to_json(s)) == s; whatever from_json accepts is consistent in itself (shape, layers, rows of the prompt).
Dims: R rows, L hidden layers, M MoE layers, K experts per token, E experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from routed_experts.core.capture_spec import MAX_NUM_EXPERTS
from routed_experts.core.errors import RoutingFormatError

SCHEMA = "routed_experts/1"
ORDER = "score_desc"
ID_SPACE = "logical"

PayloadFormat = Literal["int32", "npy", "list", "ref"]
PayloadLayers = Literal["all", "moe"]
VersionSpans = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExpertsMetadata:
    """One sidecar; fields are its keys. `valid` is base64 of packed bits (little-endian), present when missing_rows >
    0."""

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
    exact: bool
    placement: dict[str, object] | None
    version_spans: VersionSpans
    missing_rows: int
    weights: Literal["float32"] | None
    router: str | None
    sha256: str | None
    valid: str | None = None

    def __post_init__(self) -> None:
        num_rows, num_columns, num_slots = self.shape
        wanted_columns = self.num_hidden_layers if self.layers == "all" else len(self.moe_layer_ids)
        if (num_columns, num_slots) != (wanted_columns, self.top_k):
            raise RoutingFormatError(
                f"shape is {list(self.shape)}; wanted [R, {wanted_columns}, {self.top_k}] for layers {self.layers!r}"
            )
        if not 1 <= self.num_experts <= MAX_NUM_EXPERTS:
            raise RoutingFormatError(f"num_experts is {self.num_experts}; wanted 1 to {MAX_NUM_EXPERTS}")
        wanted_prompt_rows = prompt_rows(self.start, num_rows, self.num_prompt_tokens)
        if self.prompt_rows != wanted_prompt_rows:
            raise RoutingFormatError(
                f"prompt_rows is {self.prompt_rows}; wanted {wanted_prompt_rows} by start and num_prompt_tokens"
            )
        if (self.valid is None) != (self.missing_rows == 0):
            raise RoutingFormatError(
                f"missing_rows is {self.missing_rows}, valid {self.valid!r}; wanted valid when rows are missing only"
            )

    def to_json(self) -> dict[str, object]:
        """Return the JSON object, in the order of the wire description."""
        sidecar: dict[str, object] = {
            "schema": SCHEMA,
            "format": self.format,
            "layers": self.layers,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "start": self.start,
            "num_tokens": self.num_tokens,
            "num_prompt_tokens": self.num_prompt_tokens,
            "prompt_rows": self.prompt_rows,
            "include_last": self.include_last,
            "num_hidden_layers": self.num_hidden_layers,
            "moe_layer_ids": list(self.moe_layer_ids),
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "dense_fill": self.dense_fill,
            "order": ORDER,
            "ids": ID_SPACE,
            "exact": self.exact,
            "placement": self.placement,
            "version_spans": [list(span) for span in self.version_spans],
            "missing_rows": self.missing_rows,
            "weights": self.weights,
            "router": self.router,
            "sha256": self.sha256,
        }
        if self.valid is not None:
            sidecar["valid"] = self.valid
        return sidecar

    @staticmethod
    def from_json(sidecar: object) -> "RoutedExpertsMetadata":
        """Read a JSON object; raises RoutingFormatError naming the first key that is missing, mistyped or
        inconsistent."""
        if not isinstance(sidecar, Mapping):
            raise RoutingFormatError(f"routed_experts_info is a {type(sidecar).__name__}; wanted a JSON object")
        read = cast("Mapping[str, object]", sidecar)
        for key, constant in (("schema", SCHEMA), ("order", ORDER), ("ids", ID_SPACE)):
            if read.get(key) != constant:
                raise RoutingFormatError(f"routed_experts_info.{key} is {read.get(key)!r}; wanted {constant!r}")
        payload_format = _text(read, "format", get_args(PayloadFormat))
        payload_layers = _text(read, "layers", get_args(PayloadLayers))
        shape = _ints(read, "shape", read.get("shape"))
        if len(shape) != 3:
            raise RoutingFormatError(f"routed_experts_info.shape has {len(shape)} dims; wanted 3: rows, layers, top_k")
        placement = _given(read, "placement")
        if placement is not None and not isinstance(placement, dict):
            raise RoutingFormatError(f"routed_experts_info.placement is {placement!r}; wanted an object or null")
        return RoutedExpertsMetadata(
            format=cast("PayloadFormat", payload_format),
            layers=cast("PayloadLayers", payload_layers),
            dtype=_text(read, "dtype", ("int32", "int16", "uint8", "uint16")),
            shape=(shape[0], shape[1], shape[2]),
            start=_int(read, "start"),
            num_tokens=_int(read, "num_tokens"),
            num_prompt_tokens=_int(read, "num_prompt_tokens"),
            prompt_rows=_int(read, "prompt_rows"),
            include_last=_bool(read, "include_last"),
            num_hidden_layers=_int(read, "num_hidden_layers"),
            moe_layer_ids=_ints(read, "moe_layer_ids", read.get("moe_layer_ids")),
            num_experts=_int(read, "num_experts"),
            top_k=_int(read, "top_k"),
            dense_fill=None if _given(read, "dense_fill") is None else _int(read, "dense_fill", low=-1),
            exact=_bool(read, "exact"),
            placement=cast("dict[str, object] | None", placement),
            version_spans=_spans(read),
            missing_rows=_int(read, "missing_rows"),
            weights="float32" if _optional_text(read, "weights", ("float32",)) else None,
            router=_optional_text(read, "router"),
            sha256=_optional_text(read, "sha256"),
            valid=_optional_text(read, "valid") if "valid" in read else None,
        )


def prompt_rows(start: int, num_rows: int, num_prompt_tokens: int) -> int:
    """Count the rows of [start, start + num_rows) that belong to the prompt."""
    return min(max(num_prompt_tokens - start, 0), num_rows)


def _given(sidecar: Mapping[str, object], key: str) -> object:
    if key not in sidecar:
        raise RoutingFormatError(f"routed_experts_info has no key {key!r}; wanted every key of schema {SCHEMA}")
    return sidecar[key]


def _int(sidecar: Mapping[str, object], key: str, low: int = 0) -> int:
    value = _given(sidecar, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise RoutingFormatError(f"routed_experts_info.{key} is {value!r}; wanted an integer of at least {low}")
    return value


def _bool(sidecar: Mapping[str, object], key: str) -> bool:
    value = _given(sidecar, key)
    if not isinstance(value, bool):
        raise RoutingFormatError(f"routed_experts_info.{key} is {value!r}; wanted true or false")
    return value


def _text(sidecar: Mapping[str, object], key: str, wanted: tuple[str, ...]) -> str:
    value = _given(sidecar, key)
    if not isinstance(value, str) or value not in wanted:
        raise RoutingFormatError(f"routed_experts_info.{key} is {value!r}; wanted one of {', '.join(wanted)}")
    return value


def _optional_text(sidecar: Mapping[str, object], key: str, wanted: tuple[str, ...] = ()) -> str | None:
    value = _given(sidecar, key)
    if value is not None and (not isinstance(value, str) or (wanted and value not in wanted)):
        raise RoutingFormatError(
            f"routed_experts_info.{key} is {value!r}; wanted {' or '.join(wanted) or 'text'} or null"
        )
    return value


def _ints(sidecar: Mapping[str, object], key: str, value: object) -> tuple[int, ...]:
    _given(sidecar, key)
    if not isinstance(value, list | tuple):
        raise RoutingFormatError(f"routed_experts_info.{key} is {value!r}; wanted a list of integers")
    items = cast("list[object]", value)
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
        raise RoutingFormatError(f"routed_experts_info.{key} is {value!r}; wanted integers of at least 0")
    return tuple(cast("list[int]", items))


def _spans(sidecar: Mapping[str, object]) -> VersionSpans:
    spans = _given(sidecar, "version_spans")
    if not isinstance(spans, list | tuple):
        raise RoutingFormatError(f"routed_experts_info.version_spans is {spans!r}; wanted a list of [lo, hi, version]")
    triples = [_ints(sidecar, "version_spans", span) for span in cast("list[object]", spans)]
    for triple in triples:
        if len(triple) != 3:
            raise RoutingFormatError(
                f"routed_experts_info.version_spans holds {list(triple)}; wanted [lo, hi, version]"
            )
    return tuple((triple[0], triple[1], triple[2]) for triple in triples)
