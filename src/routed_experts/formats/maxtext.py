"""MaxText: int32 [S, M, K], a row for each token, -1 for no expert output; of a padded batch [B, S, M, K].

`native` are the ids of a live recording forward (`forward(..., return_routed=True).ids`), which replace rows
that are not known. Dims: B samples, S tokens or positions, M MoE layers, K experts per token."""

import numpy as np
from jaxtyping import Bool, Int, Int32

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.batch import Batch, BatchRows, require_all_but_last, rows_or_fill, to_batch_rows
from routed_experts.formats.layout import (
    SequenceInfo,
    pad_to_tokens,
    refuse,
    require_complete,
    require_whole,
    to_int_array,
    to_mask,
    to_record,
)


def encode(record: RoutedExperts, *, native: Int[np.ndarray, "S M K"] | None = None) -> Int32[np.ndarray, "S M K"]:
    """Encode as one sample of `forced_routed_experts`. Without `native`, the last token of a rollout is -1 and a row
    that is not known raises RoutingFormatError."""
    if native is None:
        require_complete(record, "maxtext")
    require_whole(record, "maxtext", cut="error" if native is None else "gate")
    rows = pad_to_tokens(record, np.int32)
    if native is None:
        return rows
    return _with_native(rows, native, rows[:, 0, 0] < 0, record.num_experts)


def decode(array: Int[np.ndarray, "S M K"], info: SequenceInfo) -> RoutedExperts:
    """Decode a row for each token; one of -1 is not known."""
    return to_record(array, info, layout="maxtext", columns="moe")


def encode_batch(
    batch: Batch, spec: CaptureSpec, *, native: Int[np.ndarray, "B S M K"] | None = None
) -> Int32[np.ndarray, "B S M K"]:
    """Encode as `forced_routed_experts` of a batch. Padding is -1; so is each last token without `native`, and another
    token without a row then raises RoutingFormatError."""
    if native is None:
        require_all_but_last(batch, "maxtext")
    rows = rows_or_fill(batch, spec, "maxtext", fill=-1)
    if native is None:
        return rows
    return _with_native(rows, native, ~(np.asarray(batch.valid) | np.asarray(batch.pad)), spec.num_experts)


def decode_batch(array: Int[np.ndarray, "B S M K"], pad: Bool[np.ndarray, "B S"], spec: CaptureSpec) -> BatchRows:
    """Decode a batch; rows of -1 are not valid."""
    return to_batch_rows(to_int_array(array, "maxtext"), to_mask(pad, "maxtext"), spec, "maxtext")


def _with_native(
    rows: Int32[np.ndarray, "... M K"],
    native: Int[np.ndarray, "... M K"],
    unknown: Bool[np.ndarray, "..."],
    num_experts: int,
) -> Int32[np.ndarray, "... M K"]:
    """The rows, those that are not known from the live forward. Raises RoutingFormatError for `native` of another shape
    or dtype, and for an id of it that would be taken and is no expert."""
    live = to_int_array(native, "maxtext native")
    if live.shape != rows.shape:
        refuse("maxtext", f"native is {list(live.shape)}", f"{list(rows.shape)}, a row a token")
    outside = ((live < 0) | (live >= num_experts)) & unknown[..., None, None]
    if outside.any():
        at = np.argwhere(outside)[0].tolist()
        refuse("maxtext", f"native{at} is {live[tuple(at)]}", f"0 to {num_experts - 1}: ids of a live forward")
    return np.where(unknown[..., None, None], live.astype(np.int32), rows)
