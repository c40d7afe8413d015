"""What all adapters share: a record as a plain array of integers, and a plain array as a record. Host NumPy; names no
framework.

Outward nothing is invented: a row that is not known is refused unless the target has a word for it. Inward a row that
no router can have given (an id outside 0..E-1, or one twice) is marked as not known: zeros never pass for expert 0
(with K = 1 nothing tells them apart, and a mask must). Dims: S tokens of a sequence, R rows, L hidden layers, M MoE
layers, K experts per token, E experts."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Int

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import RoutingAlignmentError
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.replay.check import repeated_rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What an array of ids does not say of itself: its model's routing (`config.capture_spec`), the sequence's length
    and prompt, the token of row 0, and the weights that routed it."""

    spec: CaptureSpec
    num_tokens: int
    num_prompt_tokens: int
    start: int = 0
    version: int = 0


def record_of_rows(
    rows: Int[np.ndarray, "R columns K"], origin: Origin, *, target: str, lost: bool = True
) -> RoutedExperts:
    """A record of R = S - 1 - start or S - start rows, with a column for each hidden layer (dense ones are dropped,
    whatever they hold) or for each MoE layer. With `lost` false, a row that cannot be is an error instead of not
    known."""
    spec = origin.spec
    if rows.ndim != 3 or rows.dtype.kind not in "iu" or rows.shape[2] != spec.top_k:
        raise RoutingAlignmentError(
            f"{target}: rows are {rows.dtype}{list(rows.shape)}; wanted integers [rows, layers, {spec.top_k}]"
        )
    if rows.shape[1] not in (spec.num_hidden_layers, spec.num_moe_layers):
        raise RoutingAlignmentError(
            f"{target}: rows have {rows.shape[1]} columns; wanted {spec.num_hidden_layers}, one a hidden layer, or {spec.num_moe_layers}, "
            "one a MoE layer"
        )
    most = origin.num_tokens - origin.start
    if rows.shape[0] not in (most - 1, most):
        raise RoutingAlignmentError(
            f"{target}: {rows.shape[0]} rows from token {origin.start} on of a sequence of {origin.num_tokens}; wanted {most - 1} or {most}"
        )
    moe = rows if rows.shape[1] == spec.num_moe_layers else rows[:, spec.layer_ids]
    known = known_rows(moe, spec)
    if not lost and not known.all():
        row = int(np.flatnonzero(~known)[0])
        text = f"{target}, row {origin.start + row}: ids {moe[row].tolist()} are no choice of {spec.top_k} experts"
        raise RoutingAlignmentError(f"{text}; give rows that were recorded")
    ids = np.where(known[:, None, None], moe, 0).astype(spec.dtype)
    num_rows = ids.shape[0]
    return RoutedExperts(
        ids=np.ascontiguousarray(ids),
        start=origin.start,
        num_tokens=origin.num_tokens,
        num_prompt_tokens=origin.num_prompt_tokens,
        layer_ids=spec.layer_ids,
        num_hidden_layers=spec.num_hidden_layers,
        num_experts=spec.num_experts,
        version_spans=((origin.start, origin.start + num_rows, origin.version),) if num_rows else (),
        valid=None if known.all() else known,
        router=spec.router,
    )


def known_rows(moe: Int[np.ndarray, "... M K"], spec: CaptureSpec) -> Bool[np.ndarray, "..."]:
    """Which rows a router can have given, in all layers."""
    flat = moe.reshape(-1, *moe.shape[-2:])
    inside = np.all((flat >= 0) & (flat < spec.num_experts), axis=(1, 2))
    ids = np.where(inside[:, None, None], flat, 0).astype(spec.dtype)
    return (inside & ~repeated_rows(ids).any(axis=1)).reshape(moe.shape[:-2])


def require_complete(record: RoutedExperts, target: str) -> RoutedExperts:
    """The record; refused where a row is not known."""
    if record.valid is not None and not record.valid.all():
        row = record.start + int(np.flatnonzero(~record.valid)[0])
        raise RoutingAlignmentError(
            f"{target}, row {row}: the row is not known, and {target} has no word for that; replay such samples with "
            "forward(..., routed=), or drop them"
        )
    return record


def require_start_zero(record: RoutedExperts, target: str) -> RoutedExperts:
    """The record; refused where it does not begin with the first token."""
    if record.start != 0:
        raise RoutingAlignmentError(
            f"{target}: rows begin at token {record.start}; wanted 0: merge the turns first (merge_turns)"
        )
    return record


def drop_last(record: RoutedExperts) -> RoutedExperts:
    """The S - 1 rows that a rollout has, of a record that may have one for the last token too."""
    return record[: record.num_tokens - 1]


def spread(record: RoutedExperts, dtype: type[np.signedinteger] | np.dtype, *, dense: int) -> Int[np.ndarray, "R L K"]:
    """A new array with a column for every hidden layer, `dense` in those without experts; refuses a dtype that cannot
    hold the ids."""
    rows = np.full((record.num_rows, record.num_hidden_layers, record.top_k), dense, narrow(record.num_experts, dtype))
    rows[:, record.layer_ids] = record.ids
    return rows


def by_token(record: RoutedExperts, dtype: type[np.signedinteger], *, missing: int) -> Int[np.ndarray, "S M K"]:
    """A new array with a row for every token; `missing` where there is no known row."""
    rows = np.full((record.num_tokens, *record.ids.shape[1:]), missing, narrow(record.num_experts, dtype))
    part = rows[record.start : record.start + record.num_rows]
    known = np.ones(record.num_rows, np.bool_) if record.valid is None else record.valid
    part[known] = record.ids[known]
    return rows


def narrow(num_experts: int, dtype: type[np.signedinteger] | np.dtype) -> np.dtype:
    """The dtype, if it holds all ids."""
    most = int(np.iinfo(dtype).max)
    if num_experts - 1 > most:
        raise RoutingAlignmentError(
            f"{num_experts} experts do not fit {np.dtype(dtype)}, whose largest id is {most}; use the record"
        )
    return np.dtype(dtype)
