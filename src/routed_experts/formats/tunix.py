"""Tunix: int16 [S, M, K], a row for each token, -1 where there is none; of a padded batch [B, S, M, K].

Dims: B samples, S tokens or positions, M MoE layers, K experts per token."""

import numpy as np
from jaxtyping import Bool, Int, Int16

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.batch import Batch, BatchRows, require_all_but_last, rows_or_fill, to_batch_rows
from routed_experts.formats.layout import (
    TO_LIVE_ROUTER,
    Missing,
    SequenceInfo,
    check_fits,
    check_missing,
    pad_to_tokens,
    require_whole,
    to_int_array,
    to_mask,
    to_record,
)


def encode(record: RoutedExperts, *, missing: Missing = "error") -> Int16[np.ndarray, "S M K"]:
    """Encode as `TokenSegment.routed_experts`, the last token of a rollout -1. Rows that are not known raise
    RoutingFormatError, or are -1 with missing="gate": only where the model leaves such a token to its own router
    (MaxText takes -1 for no expert output)."""
    check_missing(record, "tunix", missing)
    require_whole(record, "tunix", cut=missing, fix=TO_LIVE_ROUTER)
    return pad_to_tokens(record, np.int16)


def decode(array: Int[np.ndarray, "S M K"], info: SequenceInfo) -> RoutedExperts:
    """Decode a row for each token; one of -1 is not known."""
    return to_record(array, info, layout="tunix", columns="moe")


def encode_batch(batch: Batch, spec: CaptureSpec) -> Int16[np.ndarray, "B S M K"]:
    """Encode as `routed_experts` of a batch laid out by align(layout="pad_both"). A sample without rows raises
    RoutingFormatError: Tunix would drop the rows of all samples."""
    empty = np.flatnonzero(~np.asarray(batch.valid).any(axis=1))
    if empty.size:
        raise RoutingFormatError(
            f"tunix: sample {empty[0]}: no row is known, and Tunix would drop the rows of all samples; leave the "
            "sample out"
        )
    require_all_but_last(batch, "tunix")
    return rows_or_fill(batch, spec, "tunix", fill=-1).astype(check_fits(spec.num_experts, np.int16))


def decode_batch(array: Int[np.ndarray, "B S M K"], pad: Bool[np.ndarray, "B S"], spec: CaptureSpec) -> BatchRows:
    """Decode a batch; rows of -1 are not valid."""
    return to_batch_rows(to_int_array(array, "tunix"), to_mask(pad, "tunix"), spec, "tunix")
