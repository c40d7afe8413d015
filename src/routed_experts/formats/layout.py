"""Shared parts of the framework layouts: a record as a plain integer array, and a plain array as a record.

Encoding invents nothing: a row that is not known raises, unless the layout has a mark for it and the caller allows it.
Decoding marks a row that no router can have chosen (an id outside 0..E-1, or an expert twice) as not known: zeros never
pass for expert 0 (with K = 1 zeros are ambiguous). A last token whose row is not known is left out, as a rollout
has it. Dims: S tokens of a sequence, R rows, L hidden layers, M MoE layers, K experts per token, E experts."""

import dataclasses
from typing import Any, Literal, NoReturn

import numpy as np
from jaxtyping import Bool, Int

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.integers import is_integer
from routed_experts.core.record_validation import (
    VersionLabels,
    VersionSpans,
    check_id_range,
    cut_version_spans,
    repeated_rows,
)
from routed_experts.core.routed_experts import RoutedExperts

Missing = Literal["error", "gate"]
Columns = Literal["all", "moe", "either"]  # hidden layers, MoE layers
TO_LIVE_ROUTER = 'pass missing="gate" to leave it to the live router'
_NO_MARK = "{layout} has no mark for that; replay such samples with forward(..., routed=), or drop them"
_MAX_TOKENS = 1 << 26  # of a sequence that is laid out with a row a token; above any context


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInfo:
    """The facts that an array of ids does not carry: its model's routing (`config.capture_spec`), the length of the
    sequence and of its prompt, the token of row 0, and the weight version of all rows, or the versions' spans;
    versions are counts of updates, of which some have labels."""

    spec: CaptureSpec
    num_tokens: int
    num_prompt_tokens: int
    start: int = 0
    version: int | VersionSpans = 0
    version_labels: VersionLabels = ()

    def __post_init__(self) -> None:
        if not isinstance(self.spec, CaptureSpec):
            raise RoutingFormatError(f"spec is {short_repr(self.spec)}; expected a CaptureSpec: config.capture_spec")
        for name, count in (
            ("num_tokens", self.num_tokens),
            ("num_prompt_tokens", self.num_prompt_tokens),
            ("start", self.start),
        ):
            if not is_integer(count) or count < 0:
                raise RoutingFormatError(f"{name}={short_repr(count)}; expected an integer of at least 0")
        if not is_integer(self.version) and not isinstance(self.version, tuple):
            raise RoutingFormatError(
                f"version={short_repr(self.version)}; expected a count of updates, or spans (lo, hi, count); a label "
                "goes to version_labels"
            )


def refuse(layout: str, received: str, expected: str) -> NoReturn:
    """Raise RoutingFormatError naming the layout, the received and the expected shape."""
    raise RoutingFormatError(f"{layout}: {received}; expected {expected}")


# --- record to array


def check_record(record: RoutedExperts, layout: str) -> None:
    """Raise RoutingFormatError for what is no record."""
    if not isinstance(record, RoutedExperts):
        raise RoutingFormatError(
            f"{layout}: the record is {short_repr(record)}; expected RoutedExperts, as record_from_meta_info returns it"
        )


def check_num_tokens(record: RoutedExperts, layout: str) -> None:
    """Raise RoutingFormatError for a sequence that is too long for a row a token."""
    if record.num_tokens > _MAX_TOKENS:
        received = f"num_tokens={record.num_tokens} of a record with {record.num_rows} rows"
        refuse(layout, received, f"at most {_MAX_TOKENS}: correct the metadata")


def check_missing(record: RoutedExperts, layout: str, missing: Missing) -> None:
    """Raise for rows that are not known, unless `missing` is "gate": the layout's mark then leaves them to the live
    router."""
    if missing not in ("error", "gate"):
        raise RoutingFormatError(f"missing={missing!r} is unknown; choose error or gate")
    if missing == "error":
        require_complete(record, layout, fix=TO_LIVE_ROUTER)


def require_complete(record: RoutedExperts, layout: str, *, fix: str | None = None) -> None:
    """Raise for what is no record, and where a row is not known."""
    check_record(record, layout)
    if record.valid is not None and not record.valid.all():
        token = record.start + int(np.flatnonzero(~record.valid)[0])
        fix = fix or _NO_MARK.format(layout=layout)
        raise RoutingFormatError(f"{layout}: the row of token {token} is not known; {fix}")


def require_whole(record: RoutedExperts, layout: str, *, cut: Missing = "error", fix: str | None = None) -> None:
    """Raise for what is no record, and unless the rows begin with the first token and, with cut="error", reach the last
    but one: a token without a row there is as one whose row is not known."""
    check_record(record, layout)
    if record.start != 0:
        raise RoutingFormatError(
            f"{layout}: rows begin at token {record.start}; expected 0: merge the turns first (merge_turns)"
        )
    check_num_tokens(record, layout)
    if cut == "error" and record.num_rows < record.num_tokens - 1:
        fix = fix or _NO_MARK.format(layout=layout)
        raise RoutingFormatError(
            f"{layout}: the row of token {record.num_rows} is not known, for the rows end before it; expected rows of "
            f"tokens 0 to {record.num_tokens - 2}: give the record as it was before it was cut; {fix}"
        )


def check_fits(num_experts: int, dtype: type[np.signedinteger] | np.dtype) -> np.dtype:
    """Return the dtype; raise unless it holds all ids."""
    largest = int(np.iinfo(dtype).max)
    if num_experts - 1 > largest:
        raise RoutingFormatError(
            f"{num_experts} experts do not fit {np.dtype(dtype)}, whose largest id is {largest}; use the record"
        )
    return np.dtype(dtype)


def check_ids(record: RoutedExperts) -> None:
    """Raise RoutingFormatError for what is no record, and for an id of a known row that is no expert."""
    check_record(record, "routed_experts")
    check_id_range(
        record.ids,
        start=record.start,
        layer_ids=record.layer_ids,
        num_experts=record.num_experts,
        known=record.known,
    )


def scatter_to_all_layers(
    record: RoutedExperts, dtype: type[np.signedinteger] | np.dtype, *, fill: int
) -> Int[np.ndarray, "R L K"]:
    """A new array with a column for every hidden layer, `fill` in the dense ones. Raises for an id that is no
    expert."""
    check_ids(record)
    shape = (record.num_rows, record.num_hidden_layers, record.top_k)
    rows = new_rows(shape, fill, check_fits(record.num_experts, dtype))
    rows[:, record.layer_ids] = record.ids
    return rows


def pad_to_tokens(record: RoutedExperts, dtype: type[np.signedinteger]) -> Int[np.ndarray, "S M K"]:
    """A new array with a row for every token, -1 where there is no known row. Raises for an id that is no expert."""
    check_ids(record)
    check_num_tokens(record, "routed_experts")
    shape, id_dtype = (record.num_tokens, *record.ids.shape[1:]), check_fits(record.num_experts, dtype)
    rows = new_rows(shape, -1, id_dtype)
    known = record.known
    rows[record.start : record.start + record.num_rows][known] = record.ids[known]
    return rows


def new_rows(shape: tuple[int, ...], fill: int, dtype: np.dtype) -> Int[np.ndarray, "R columns K"]:
    """A new array of one value; raises RoutingFormatError where the allocation fails."""
    try:
        return np.full(shape, fill, dtype)
    except MemoryError as error:
        text = f"an array {list(shape)} of {dtype} does not fit the memory"
        raise RoutingFormatError(f"{text}; convert the record where there is more") from error


# --- array to record


def to_int_array(payload: Any, layout: str, row: tuple[int, ...] = ()) -> Int[np.ndarray, "..."]:
    """An array of integers from an array or nested lists; no rows as `[]` have the shape of `row`."""
    try:
        array = np.asarray(payload)
    except ValueError as cause:
        raise RoutingFormatError(f"{layout}: the payload is no array ({cause})") from cause
    if array.size and array.dtype.kind not in "iu":
        refuse(layout, f"rows are {array.dtype}{list(array.shape)}", "integers")
    return np.zeros((0, *row), np.int64) if array.shape == (0,) and row else array


def to_mask(payload: Any, layout: str) -> Bool[np.ndarray, "..."]:
    """An array of booleans from an array or nested lists."""
    try:
        return np.asarray(payload, np.bool_)
    except (ValueError, TypeError) as cause:
        raise RoutingFormatError(f"{layout}: the mask is no array ({cause})") from cause


def to_record(
    payload: Any, info: SequenceInfo, *, layout: str, columns: Columns, strict: bool = False
) -> RoutedExperts:
    """A record of S - 1 - start or S - start rows. `columns`: the layers that the array has; dense ones are dropped,
    regardless of their values. With `strict`, a row that is no choice of K experts raises. Version spans are cut to
    the rows."""
    spec = info.spec
    width = spec.num_moe_layers if columns == "moe" else spec.num_hidden_layers
    rows = to_int_array(payload, layout, (width, spec.top_k))
    widths = {"all": (spec.num_hidden_layers,), "moe": (spec.num_moe_layers,)}.get(
        columns, (spec.num_hidden_layers, spec.num_moe_layers)
    )
    if rows.ndim != 3 or rows.shape[1] not in widths or rows.shape[2] != spec.top_k:
        layers = " or ".join(map(str, dict.fromkeys(widths)))
        refuse(layout, f"rows are {rows.dtype}{list(rows.shape)}", f"integers [rows, {layers} layers, {spec.top_k}]")
    max_rows = info.num_tokens - info.start
    if rows.shape[0] not in (max_rows - 1, max_rows):
        text = f"{rows.shape[0]} rows from token {info.start} on of a sequence of {info.num_tokens}"
        refuse(layout, text, f"{max_rows - 1} or {max_rows}")
    moe = rows[:, spec.layer_ids] if rows.shape[1] == spec.num_hidden_layers else rows
    known = known_rows(moe, spec)
    if moe.shape[0] == max_rows > 0 and not known[-1]:
        moe, known = moe[:-1], known[:-1]
    if strict and not known.all():
        row = int(np.flatnonzero(~known)[0])
        refuse(
            layout,
            f"the ids {moe[row].tolist()} of token {info.start + row} are no choice of {spec.top_k} experts",
            "rows that were recorded",
        )
    ids = np.where(known[:, None, None], moe, 0).astype(spec.dtype)
    spans = info.version
    if not isinstance(spans, tuple):
        spans = ((info.start, info.start + ids.shape[0], int(spans)),) if ids.shape[0] else ()
    spans = cut_version_spans(spans, info.start, info.start + ids.shape[0])
    return RoutedExperts.from_spec(
        spec,
        ids=np.ascontiguousarray(ids),
        start=info.start,
        num_tokens=info.num_tokens,
        num_prompt_tokens=info.num_prompt_tokens,
        version_spans=spans,
        valid=None if known.all() else known,
        version_labels=info.version_labels,
    )


def known_rows(moe: Int[np.ndarray, "... M K"], spec: CaptureSpec) -> Bool[np.ndarray, "..."]:
    """Which rows a router can have chosen, in all layers."""
    flat = moe.reshape(-1, *moe.shape[-2:])
    inside = np.all((flat >= 0) & (flat < spec.num_experts), axis=(1, 2))
    ids = np.where(inside[:, None, None], flat, 0).astype(spec.dtype)
    return (inside & ~repeated_rows(ids).any(axis=1)).reshape(moe.shape[:-2])
