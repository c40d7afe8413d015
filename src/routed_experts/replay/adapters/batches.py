"""Adapters of whole batches: a RoutedBatch as verl's, Tunix's and MaxText's tensors, both ways. Host NumPy.

A target that has no word for a token without rows refuses it, and names the sample. The last token of each sequence has
none after a rollout and needs none. Dims: B samples, S places, L hidden layers, M MoE layers, K experts per token."""

from typing import Literal

import numpy as np
from jaxtyping import Bool, Int, Int16, Int32

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import RoutingAlignmentError
from routed_experts.replay.adapters.foreign import known_rows, narrow
from routed_experts.replay.batch import RoutedBatch


def batch_to_verl(
    routed: RoutedBatch, spec: CaptureSpec, *, columns: Literal["all", "moe"] = "all"
) -> Int16[np.ndarray, "B S columns K"]:
    """`routed_experts` of a verl batch: lay it out by align(layout="pad_both", prompt_width=...). Padding, dense layers
    and each last token are 0; any other token without a row is refused."""
    if columns not in ("all", "moe"):
        raise RoutingAlignmentError(f"columns={columns!r} is unknown; choose all (a column a hidden layer) or moe")
    _all_but_last(routed, "verl")
    valid = np.asarray(routed.valid)
    ids = np.where(valid[..., None, None], np.asarray(routed.ids), 0).astype(narrow(spec.num_experts, np.int16))
    if columns == "moe":
        return ids
    spread = np.zeros((*ids.shape[:2], spec.num_hidden_layers, spec.top_k), np.int16)
    spread[:, :, spec.layer_ids] = ids
    return spread


def batch_from_verl(
    rows: Int[np.ndarray, "B S columns K"],
    attention_mask: Bool[np.ndarray, "B S"] | Int[np.ndarray, "B S"],
    spec: CaptureSpec,
) -> RoutedBatch:
    """Read a verl batch; rows of zeros, and tokens that are masked, are not valid."""
    return _batch_of(np.asarray(rows), np.asarray(attention_mask) == 0, spec, "verl")


def batch_to_maxtext(
    routed: RoutedBatch, *, native: Int[np.ndarray, "B S M K"] | None = None
) -> Int32[np.ndarray, "B S M K"]:
    """`forced_routed_experts` of a batch. Padding and each last token are -1; another token without a row takes the ids
    of `native`, a live recording forward (R2), or is refused: -1 would be no expert output at all."""
    if native is None:
        return _with_last_unknown(routed, "maxtext")
    if np.shape(native) != np.shape(routed.ids):
        raise RoutingAlignmentError(
            f"maxtext: native is {list(np.shape(native))}, ids {list(np.shape(routed.ids))}; wanted one shape"
        )
    known = np.asarray(routed.valid) | np.asarray(routed.pad)
    return np.where(known[..., None, None], _rows(routed), np.asarray(native, np.int32))


def batch_from_maxtext(
    rows: Int[np.ndarray, "B S M K"], pad: Bool[np.ndarray, "B S"], spec: CaptureSpec
) -> RoutedBatch:
    """Read `forced_routed_experts`; rows of -1 are not valid."""
    return _batch_of(np.asarray(rows), np.asarray(pad, np.bool_), spec, "maxtext")


def batch_to_tunix(routed: RoutedBatch, spec: CaptureSpec) -> Int16[np.ndarray, "B S M K"]:
    """`routed_experts` of a Tunix batch (pad_both). One sample without rows would drop the replay of all: it is
    refused."""
    empty = np.flatnonzero(~np.asarray(routed.valid).any(axis=1))
    if empty.size:
        text = f"tunix, sample {empty[0]}: no row is known, and Tunix would drop the rows of all samples; leave the sample out"
        raise RoutingAlignmentError(text)
    return _with_last_unknown(routed, "tunix").astype(narrow(spec.num_experts, np.int16))


def batch_from_tunix(rows: Int[np.ndarray, "B S M K"], pad: Bool[np.ndarray, "B S"], spec: CaptureSpec) -> RoutedBatch:
    """Read a Tunix batch; rows of -1 are not valid."""
    return _batch_of(np.asarray(rows), np.asarray(pad, np.bool_), spec, "tunix")


def _rows(routed: RoutedBatch) -> Int32[np.ndarray, "B S M K"]:
    """The ids of valid rows; -1 in all others."""
    return np.where(np.asarray(routed.valid)[..., None, None], np.asarray(routed.ids).astype(np.int32), -1)


def _with_last_unknown(routed: RoutedBatch, target: str) -> Int32[np.ndarray, "B S M K"]:
    """The same, where no token but the last of each sample lacks its row."""
    _all_but_last(routed, target)
    return _rows(routed)


def _all_but_last(routed: RoutedBatch, target: str) -> None:
    """Refuse tokens without a row, but for the last of each sample."""
    valid, pad = np.asarray(routed.valid), np.asarray(routed.pad)
    tokens = ~pad
    places = np.arange(pad.shape[1])
    last = np.max(np.where(tokens, places, -1), axis=1)
    unknown = tokens & ~valid & (places != last[:, None])
    if unknown.any():
        sample, place = np.argwhere(unknown)[0]
        raise RoutingAlignmentError(
            f"{target}, sample {sample}, place {place}: the row of this token is not known, and {target} has no word for that; "
            "replay it with forward(..., routed=), or drop the sample"
        )


def _batch_of(
    rows: Int[np.ndarray, "B S columns K"], pad: Bool[np.ndarray, "B S"], spec: CaptureSpec, target: str
) -> RoutedBatch:
    columns = (spec.num_hidden_layers, spec.num_moe_layers)
    if rows.ndim != 4 or rows.shape[:2] != pad.shape or rows.shape[2] not in columns or rows.shape[3] != spec.top_k:
        came = f"rows are {list(rows.shape)}, padding {list(pad.shape)}"
        raise RoutingAlignmentError(
            f"{target}: {came}; wanted [B, S, {columns[0]} or {columns[1]}, {spec.top_k}] and [B, S]"
        )
    moe = rows if rows.shape[2] == spec.num_moe_layers else rows[:, :, spec.layer_ids]
    valid = known_rows(moe, spec) & ~pad
    ids = np.where(valid[..., None, None], moe, 0).astype(spec.dtype)
    return RoutedBatch(ids, valid, pad)  # pyright: ignore[reportArgumentType]  # NumPy until it is put on devices
