"""verl: int16 [R, L, K], a column for each hidden layer, dense layers 0; of a padded batch [B, S, L, K].

Dims: B samples, S positions, R rows, L hidden layers, M MoE layers, K experts per token."""

from typing import Literal

import numpy as np
from jaxtyping import Bool, Int, Int16

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.batch import Batch, BatchRows, require_all_but_last, rows_or_fill, to_batch_rows
from routed_experts.formats.layout import (
    SequenceInfo,
    check_fits,
    require_complete,
    scatter_to_all_layers,
    to_int_array,
    to_mask,
    to_record,
)


def encode(record: RoutedExperts) -> Int16[np.ndarray, "R L K"]:
    """Encode as `routed_experts` of a sample, writable. Raises RoutingFormatError for rows that are not known and for
    E > 32,768."""
    require_complete(record, "verl")
    return scatter_to_all_layers(record, np.int16, fill=0)


def decode(array: Int[np.ndarray, "R columns K"], info: SequenceInfo) -> RoutedExperts:
    """Decode [S-1 or S, L or M, K]; a row of zeros is not known."""
    return to_record(array, info, layout="verl", columns="either")


def encode_batch(
    batch: Batch, spec: CaptureSpec, *, columns: Literal["all", "moe"] = "all"
) -> Int16[np.ndarray, "B S columns K"]:
    """Encode as `routed_experts` of a batch laid out by align(layout="pad_both", prompt_width=...). Padding, dense
    layers and each last token are 0; another token without a row raises RoutingFormatError."""
    if columns not in ("all", "moe"):
        raise RoutingFormatError(f"columns={columns!r} is unknown; choose all (a column a hidden layer) or moe")
    require_all_but_last(batch, "verl")
    ids = rows_or_fill(batch, spec, "verl", fill=0).astype(check_fits(spec.num_experts, np.int16))
    if columns == "moe":
        return ids
    rows = np.zeros((*ids.shape[:2], spec.num_hidden_layers, spec.top_k), np.int16)
    rows[:, :, spec.layer_ids] = ids
    return rows


def decode_batch(
    array: Int[np.ndarray, "B S columns K"],
    attention_mask: Bool[np.ndarray, "B S"] | Int[np.ndarray, "B S"],
    spec: CaptureSpec,
) -> BatchRows:
    """Decode a batch; rows of zeros, and positions outside the mask, are not valid."""
    return to_batch_rows(to_int_array(array, "verl"), ~to_mask(attention_mask, "verl"), spec, "verl")
