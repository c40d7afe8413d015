"""Validity of raw rows: which ids are experts, which rows repeat one, which tokens the weight versions cover.

Dims: R rows, M MoE layers, K experts per token."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Int, UInt

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.integers import is_integer

VersionSpans = tuple[tuple[int, int, int], ...]  # (lo, hi, count of the weights' update) of tokens [lo, hi), absolute
VersionLabels = tuple[tuple[int, str], ...]  # (count, label) of updates of the weights

# Ids compared at a time: they fit a core's own cache, with the room that the comparison needs.
_BLOCK_IDS = 1 << 17
_LANES = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}  # K booleans of a row as one number


def to_version_spans(start: int, versions: Int[np.ndarray, " R"]) -> VersionSpans:
    """Join neighbouring rows of one weight version; row i is token start + i."""
    if versions.size == 0:
        return ()
    cuts = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist(), versions.size]
    return tuple((start + a, start + b, int(versions[a])) for a, b in pairwise(cuts))


def cut_version_spans(spans: VersionSpans, start: int, end: int) -> VersionSpans:
    """The parts of the spans in tokens [start, end). What is no span stays, for `check_version_spans`."""
    if not all(_is_span(span) for span in spans):
        return spans
    return tuple((max(low, start), min(high, end), v) for low, high, v in spans if max(low, start) < min(high, end))


def check_version_spans(spans: VersionSpans, start: int, end: int) -> None:
    """Raise RoutingFormatError unless the spans cover tokens [start, end), ascending and disjoint."""
    if not isinstance(spans, Sequence) or not all(_is_span(span) for span in spans):
        raise RoutingFormatError(
            f"version_spans={short_repr(spans)}; expected triples (lo, hi, count) of integers; give () for no rows"
        )
    covered = start
    for low, high, version in spans:
        if low != covered or high <= low:
            raise RoutingFormatError(
                f"version span {(low, high, version)} begins at {low}; expected a run of tokens from {covered} on"
            )
        covered = high
    if covered != end:
        raise RoutingFormatError(f"version spans {spans} end at {covered}; expected {end}, where the rows end")


def _is_span(span: object) -> bool:
    return isinstance(span, tuple | list) and len(span) == 3 and all(map(is_integer, span))


def check_id_range(
    ids: Int[np.ndarray, "R M K"],
    *,
    start: int,
    layer_ids: tuple[int, ...],
    num_experts: int,
    known: Bool[np.ndarray, " R"],
) -> None:
    """Raise RoutingFormatError naming the first token, hidden layer and slot of a known row whose id is no expert."""
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < num_experts):
        return
    outside = ((ids < 0) | (ids >= num_experts)) & known[:, None, None]
    if outside.any():
        row, column, slot = np.argwhere(outside)[0]
        raise RoutingFormatError(
            f"token {start + row}, hidden layer {layer_ids[column]}, slot {slot}: id {ids[row, column, slot]}; "
            f"expected 0 to {num_experts - 1}; give logical ids of this model"
        )


def repeated_rows(ids: UInt[np.ndarray, "R M K"]) -> Bool[np.ndarray, "R M"]:
    """Return which rows of which layers name an expert twice."""
    rows, layers, top_k = ids.shape
    repeated = np.zeros(rows * layers, np.bool_)
    flat = np.ascontiguousarray(ids).reshape(-1, top_k)
    if top_k not in _LANES:
        for first in range(top_k):
            for second in range(first + 1, top_k):
                repeated |= flat[:, first] == flat[:, second]
        return repeated.reshape(rows, layers)
    step = _BLOCK_IDS // top_k
    for low in range(0, flat.shape[0], step):
        block = flat[low : low + step]
        repeated[low : low + step] = _repeated_in_lanes(block.reshape(-1), top_k)
    return repeated.reshape(rows, layers)


def _repeated_in_lanes(ids: UInt[np.ndarray, " RK"], top_k: int) -> Bool[np.ndarray, " R"]:
    """Compare all ids with those d positions on and mask what crosses a row: K - 1 passes over neighbours, no
    gather."""
    lane, equal = _LANES[top_k], np.zeros(ids.size, np.bool_)
    repeated = np.zeros(ids.size // top_k, lane)
    inside = np.zeros(top_k, np.bool_)
    for distance in range(1, top_k):
        np.equal(ids[distance:], ids[:-distance], out=equal[:-distance])
        inside[:] = np.arange(top_k) < top_k - distance
        repeated |= equal.view(lane) & inside.view(lane)[0]
    return repeated != 0
