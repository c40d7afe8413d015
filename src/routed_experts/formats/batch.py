"""Shared parts of the framework layouts of whole batches. Host NumPy.

A layout without a mark for "no row" refuses a token that lacks one, and names the sample. The last token of each
sequence has none after a rollout and needs none. Dims: B samples, S positions, M MoE layers, K experts per token."""

from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Int, Int32, UInt

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import RoutingFormatError
from routed_experts.formats.layout import known_rows, refuse


class Batch(Protocol):
    """Rows of a batch, such as `replay.RoutedBatch`: anything that np.asarray reads."""

    @property
    def ids(self) -> Any:
        """[B, S, M, K]; ids of rows that are not valid mean nothing."""
        ...

    @property
    def valid(self) -> Any:
        """[B, S]: the positions whose row is known."""
        ...

    @property
    def pad(self) -> Any:
        """[B, S]: the positions that hold no token."""
        ...


class BatchRows(NamedTuple):
    """The fields of a `replay.RoutedBatch` in their order, on the host: `RoutedBatch(*rows)`."""

    ids: UInt[np.ndarray, "B S M K"]
    valid: Bool[np.ndarray, "B S"]
    pad: Bool[np.ndarray, "B S"]


def rows_or_fill(batch: Batch, spec: CaptureSpec, layout: str, *, fill: int) -> Int32[np.ndarray, "B S M K"]:
    """The ids of known rows, `fill` elsewhere; raise RoutingFormatError where ids are not those of the model."""
    ids, valid = np.asarray(batch.ids), np.asarray(batch.valid)
    if ids.ndim != 4 or ids.shape[2:] != (spec.num_moe_layers, spec.top_k) or valid.shape != ids.shape[:2]:
        received = f"ids are {list(ids.shape)}, valid {list(valid.shape)}"
        refuse(layout, received, f"[B, S, {spec.num_moe_layers}, {spec.top_k}] and [B, S]")
    return np.where(valid[..., None, None], ids.astype(np.int32), fill)


def require_all_but_last(batch: Batch, layout: str) -> None:
    """Raise for a token without a row, but for the last of each sample."""
    valid, tokens = np.asarray(batch.valid), ~np.asarray(batch.pad)
    positions = np.arange(tokens.shape[1])
    last = np.max(np.where(tokens, positions, -1), axis=1)
    unknown = tokens & ~valid & (positions != last[:, None])
    if unknown.any():
        sample, position = np.argwhere(unknown)[0]
        raise RoutingFormatError(
            f"{layout}: sample {sample}, position {position}: the row of this token is not known, and {layout} has no "
            "mark for that; replay it with forward(..., routed=), or drop the sample"
        )


def to_batch_rows(
    rows: Int[np.ndarray, "B S columns K"], pad: Bool[np.ndarray, "B S"], spec: CaptureSpec, layout: str
) -> BatchRows:
    """Rows of all hidden layers, or of the MoE layers alone; a row that no router can have chosen is not valid."""
    columns = (spec.num_hidden_layers, spec.num_moe_layers)
    if rows.ndim != 4 or rows.shape[:2] != pad.shape or rows.shape[2] not in columns or rows.shape[3] != spec.top_k:
        received = f"rows are {list(rows.shape)}, padding {list(pad.shape)}"
        refuse(layout, received, f"[B, S, {columns[0]} or {columns[1]}, {spec.top_k}] and [B, S]")
    moe = rows if rows.shape[2] == spec.num_moe_layers else rows[:, :, spec.layer_ids]
    valid = known_rows(moe, spec) & ~pad
    ids = np.where(valid[..., None, None], moe, 0).astype(spec.dtype)
    return BatchRows(ids, valid, pad)
