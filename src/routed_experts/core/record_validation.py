"""Laws of raw rows: which ids are experts, which rows are known, which weights made them. Knows nothing of records or
payloads.

Dims: R rows, M MoE layers, K experts per token."""

import base64
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Int

from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.routed_experts_metadata import RoutedExpertsMetadata, VersionSpans


def version_spans_of(start: int, versions: Int[np.ndarray, " R"]) -> VersionSpans:
    """Join neighbouring rows of one weight version into (lo, hi, version), absolute token indices."""
    if versions.size == 0:
        return ()
    cuts = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist(), versions.size]
    return tuple((start + a, start + b, int(versions[a])) for a, b in pairwise(cuts))


def check_version_spans(spans: VersionSpans, start: int, end: int) -> None:
    """Raise RoutingFormatError unless the spans cover tokens [start, end), ascending and disjoint."""
    covered = start
    for low, high, version in spans:
        if low != covered or high <= low:
            raise RoutingFormatError(
                f"version span {(low, high, version)} begins at {low}; wanted a run of tokens from {covered} on"
            )
        covered = high
    if covered != end:
        raise RoutingFormatError(f"version spans {spans} end at {covered}; wanted them to end at {end}, with the rows")


def valid_rows_of(sidecar: RoutedExpertsMetadata) -> Bool[np.ndarray, " R"] | None:
    """Unpack the bits of `valid`; None when every row is known."""
    if sidecar.valid is None:
        return None
    num_rows = sidecar.shape[0]
    try:
        bits = base64.b64decode(sidecar.valid, validate=True)
    except ValueError as cause:
        raise RoutingFormatError(
            f"routed_experts_info.valid is {sidecar.valid!r}: {cause}; wanted base64 of {num_rows} bits"
        ) from cause
    if len(bits) != (num_rows + 7) // 8:
        raise RoutingFormatError(
            f"routed_experts_info.valid holds {len(bits)} bytes; wanted {(num_rows + 7) // 8} for {num_rows} rows"
        )
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=num_rows, bitorder="little").astype(np.bool_)


def check_id_range(
    ids: Int[np.ndarray, "R M K"],
    *,
    start: int,
    layer_ids: tuple[int, ...],
    num_experts: int,
    known: Bool[np.ndarray, " R"],
) -> None:
    """Raise RoutingFormatError naming the first token, layer and slot of a known row whose id is no expert."""
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < num_experts):
        return
    outside = ((ids < 0) | (ids >= num_experts)) & known[:, None, None]
    if outside.any():
        row, column, slot = np.argwhere(outside)[0]
        raise RoutingFormatError(
            f"token {start + row}, layer {layer_ids[column]}, slot {slot}: id {ids[row, column, slot]}; wanted 0 to {num_experts - 1}"
        )
