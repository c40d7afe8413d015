"""Host store of routed experts, one row for each KV slot.

A row has the life of its slot: written by the pass that wrote the slot's keys and values, shared as they are shared,
and invalid when the page is handed out again. An invalid row is never returned. The slot's weight version holds
validity too (below 0: no row), so that filing is two writes. Rows of steps are buffered and filed many steps at a
time, at the latest when the cache is read: between two steps the store and the filing code are cold in cache. All
buffered steps are written at once: of two rows of one slot the later wins, and a row from before its page was last
invalidated is dropped. Experts are counted here too (`expert_counts.py`). Token-major: a token's row is one contiguous
run of M*K bytes. Combine weights, where they are recorded, have a store of their own, which is written with the ids and
valid where they are. Engine thread only.
Dims: Z slots, P pages, R rows, N rows and padding, M MoE layers, K experts per token, W words of a packed row, V words
of its weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Int, Int32, UInt

from routed_experts.capture.expert_counts import ExpertCounts
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.integrity import Violation
from routed_experts.core.model_worker_batch import ALL_GENERATED, TokenOrigins
from routed_experts.core.routed_experts import CombineWeights
from routed_experts.core.routing_stats import RoutingStats

_NUM_SHOWN = 8
_NO_ROW = -1  # a weight version that no weights have
_INT32 = np.dtype(np.int32)
_MAX_BUFFERED_STEPS = 128
_MAX_BUFFERED_ROWS = 4096  # padding included; beside them waits one step of any size, so that its tokens do not

# A buffered step: slots, rows, version, which of them are live, origins of its tokens. A plain tuple: building it is
# all that a step waits for.
_Step = tuple[Int[np.ndarray, " R"], Any, int, Bool[np.ndarray, " R"] | None, TokenOrigins | None]
# Pages that were invalidated when so many steps were buffered.
_Invalidated = tuple[Int[np.ndarray, " P"], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRows:
    """Rows of positions [0, R0) that a retracted request keeps. Where valid, they take precedence over the rows of its
    new pages."""

    ids: UInt[np.ndarray, "R0 M K"]
    valid: Bool[np.ndarray, " R0"]
    versions: Int32[np.ndarray, " R0"]
    weights: CombineWeights | None = None


class _RoutedExpertsHostCache:
    """Rows and their weight versions by KV slot."""

    def __init__(self, num_slots: int, spec: CaptureSpec, *, page_size: int = 1) -> None:
        assert num_slots >= 1 and num_slots % page_size == 0, (
            f"{num_slots} slots are no multiple of page_size {page_size}"
        )
        self._spec, self._page_size = spec, page_size
        self._store: UInt[np.ndarray, "Z M*K"] = np.zeros((num_slots, spec.row_ids), spec.dtype)
        self._rows = _as_items(self._store)
        self._weights: Int32[np.ndarray, "Z V"] | None = None
        if spec.weights_dtype is not None:
            self._weights = np.zeros((num_slots, spec.row_words - spec.id_words), np.int32)
        self._versions: Int32[np.ndarray, " Z"] = np.full(num_slots, _NO_ROW, np.int32)
        self._first_after: Int32[np.ndarray, " P"] = np.zeros(num_slots // page_size, np.int32)  # 0 except while filing
        self._counts = ExpertCounts(spec)
        self._steps: list[_Step] = []
        self._invalidated: list[_Invalidated] = []
        self._buffered_rows = 0

    @property
    def nbytes(self) -> int:
        """Host memory of the store, in bytes."""
        weights = 0 if self._weights is None else self._weights.nbytes
        return self._store.nbytes + self._versions.nbytes + weights

    def append(
        self,
        slots: Int[np.ndarray, " R"],
        rows: Any,
        version: int,
        live: Bool[np.ndarray, " R"] | None = None,
        origins: TokenOrigins | None = None,
    ) -> None:
        """Buffer the rows of one step under the slots of its real tokens; those of the steps before are filed when they
        are many. `version`: of the weights that ran.
        `rows`: anything that np.asarray reads as [N, M*K] of the spec's dtype, or as an int32 table whose last W
        columns are packed rows (CaptureSpec.row_words), real tokens first; `live`: rows to file, None files all.
        `origins` separates generated tokens from prompts; None counts all as prompts. The store owns the arrays from
        now on and checks them when it files them. Those of a device stay there until `settle`."""
        if self._buffered_rows >= _MAX_BUFFERED_ROWS or len(self._steps) >= _MAX_BUFFERED_STEPS:
            self.flush()
        self._steps.append((slots, rows, version, live, origins))
        self._buffered_rows += len(rows)  # padding is buffered too

    def settle(self) -> None:
        """Wait for the newest step's rows, where they are still on their way from the device, and let go of it."""
        if self._steps:
            slots, rows, version, live, origins = self._steps[-1]
            self._steps[-1] = slots, np.asarray(rows), version, live, origins

    def clear(self, slots: Int[np.ndarray, " R"]) -> None:
        """Invalidate the rows of these slots."""
        self.flush()
        self._versions[slots] = _NO_ROW

    def clear_pages(self, pages: Int[np.ndarray, " P"]) -> None:
        """Invalidate the rows of these pages; page p holds slots [p * page_size, (p + 1) * page_size)."""
        self._invalidated.append((pages, len(self._steps)))
        if len(self._invalidated) >= 2 * _MAX_BUFFERED_STEPS:
            self.flush()

    def flush(self) -> None:
        """File all buffered rows; every reader does so first."""
        steps, self._steps, self._buffered_rows = self._steps, [], 0
        invalidated, self._invalidated = self._invalidated, []
        try:
            if invalidated:
                self._invalidate(invalidated)
            if steps:
                self._write(steps)
            for pages, _ in invalidated:
                self._first_after[pages] = 0
        except BaseException:  # stale rows may be left: no row is valid any more
            self._versions[:], self._first_after[:] = _NO_ROW, 0
            raise

    def _invalidate(self, invalidated: Sequence[_Invalidated]) -> None:
        """Invalidate pages, and note for each the first step that came later; the last call for a page applies."""
        pages = np.concatenate([pages for pages, _ in invalidated])
        self._versions.reshape(-1, self._page_size)[pages] = _NO_ROW
        self._first_after[pages] = np.repeat(
            [after for _, after in invalidated], [pages.size for pages, _ in invalidated]
        )

    def _write(self, steps: Sequence[_Step]) -> None:
        counts = [step[0].size for step in steps]
        slots = np.concatenate([step[0] for step in steps])
        assert slots.size == 0 or slots.min() >= 0, f"slot {slots.min()}: expected 0 to {self._versions.size - 1}"
        ids, weights = _concatenate_rows(steps, counts, self._spec)
        assert len(ids) == slots.size, f"{len(ids)} rows for {slots.size} tokens"
        assert ids.max(initial=0) < self._spec.num_experts, (
            f"expert {ids.max()} of {self._spec.num_experts}"
        )  # what was not written, too
        live, generated = _live_and_generated(steps, counts)
        versions = np.repeat(np.array([step[2] for step in steps], np.int32), counts)
        assert versions.min(initial=0) > _NO_ROW, versions.min()
        if live is not None:
            slots, ids, generated, versions = slots[live], ids[live], generated[live], versions[live]
            weights = None if weights is None else weights[live]
        self._counts.enqueue(ids, generated)
        rows = _as_items(ids)
        if self._first_after.any():
            order = np.repeat(np.arange(len(steps), dtype=np.int32), counts)
            stay = (order if live is None else order[live]) >= self._first_after[slots // self._page_size]
            if not stay.all():
                slots, rows, versions = slots[stay], rows[stay], versions[stay]
                weights = None if weights is None else weights[stay]
        self._rows[slots] = rows
        if self._weights is not None and weights is not None:
            _as_items(self._weights)[slots] = _as_items(weights)
        self._versions[slots] = versions

    def routing_stats(self, *, reset: bool, wait: bool) -> RoutingStats:
        """Return counts of the rows filed since the last reset; `reset` sets them to zero afterwards. Without
        `wait`, counts may lag some steps behind."""
        if not wait and not reset:
            return self._counts.snapshot()
        self.flush()
        stats = self._counts.stats()
        if reset:
            self._counts.reset()
        return stats

    def gather(
        self, slots: Int[np.ndarray, " R"]
    ) -> tuple[UInt[np.ndarray, "R M K"], Bool[np.ndarray, " R"], Int32[np.ndarray, " R"]]:
        """Copy out ids, valid bits and versions; ids of an invalid row mean nothing."""
        assert slots.size == 0 or slots.min() >= 0, f"slot {slots.min()}: expected 0 to {self._versions.size - 1}"
        self.flush()
        ids = self._store.take(slots, axis=0).reshape(slots.size, self._spec.num_moe_layers, self._spec.top_k)
        versions = self._versions[slots]
        return ids, versions > _NO_ROW, versions

    def gather_weights(self, slots: Int[np.ndarray, " R"]) -> CombineWeights:
        """Copy out the combine weights of these slots, in the dtype of the spec; those of an invalid row mean
        nothing."""
        assert self._weights is not None, "combine weights are not recorded"
        self.flush()
        return _unpack_weights(self._weights.take(slots, axis=0), self._spec)

    def overwrite_invalid_rows(self) -> None:
        """Fill every invalid row with the largest value of its dtype, so that a test detects its return."""
        self.flush()
        self._store[self._versions == _NO_ROW] = np.iinfo(self._store.dtype).max
        if self._weights is not None:
            self._weights[self._versions == _NO_ROW] = -1  # NaN in both dtypes

    def check_integrity(self, owned_slots: Int[np.ndarray, " owned"]) -> list[Violation]:
        """Check that no row is valid outside `owned_slots`, the slots of all pages that are held."""
        self.flush()
        valid = self._versions > _NO_ROW
        orphaned = valid.copy()
        orphaned[owned_slots] = False
        num_orphaned = int(np.count_nonzero(orphaned))
        if num_orphaned == 0:
            return []
        first = np.flatnonzero(orphaned)[:_NUM_SHOWN].tolist()
        num_valid = np.count_nonzero(valid)
        detail = f"{num_orphaned} of {num_valid} valid rows are in slots of pages without an owner, the first {first}"
        return [Violation(name="row_without_page", detail=detail)]


RoutedExpertsHostCache = _RoutedExpertsHostCache  # the name for other modules; SGLang's has the underscore


def unpack_rows(
    rows: UInt[np.ndarray, "R M*K"] | Int32[np.ndarray, "R W"], spec: CaptureSpec
) -> tuple[UInt[np.ndarray, "R M K"], CombineWeights | None]:
    """Ids and combine weights of the rows of a step: narrow ids, or with weights packed words."""
    shape = (len(rows), spec.num_moe_layers, spec.top_k)
    if spec.weights_dtype is None:
        return rows.reshape(shape), None
    words, weights = _split_words(rows, spec)
    return np.ascontiguousarray(words.view(spec.dtype)[:, : spec.row_ids]).reshape(shape), _unpack_weights(
        weights, spec
    )


def empty_weights(spec: CaptureSpec) -> CombineWeights:
    """The combine weights of no rows, in the dtype of the spec."""
    return _unpack_weights(np.zeros((0, spec.row_words - spec.id_words), np.int32), spec)


def _split_words(
    words: Int32[np.ndarray, "R W"], spec: CaptureSpec
) -> tuple[Int32[np.ndarray, "R I"], Int32[np.ndarray, "R V"]]:
    """Words of ids, and of weights."""
    return np.ascontiguousarray(words[:, : spec.id_words]), np.ascontiguousarray(words[:, spec.id_words :])


def _unpack_weights(words: Int32[np.ndarray, "R V"], spec: CaptureSpec) -> CombineWeights:
    dtype = np.dtype(ml_dtypes.bfloat16 if spec.weights_dtype == "bfloat16" else np.float32)
    weights = np.ascontiguousarray(words.view(dtype)[:, : spec.row_ids])
    return weights.reshape(len(words), spec.num_moe_layers, spec.top_k)


def _as_items(ids: UInt[np.ndarray, "R M*K"]) -> np.ndarray:
    """View each row as one item: NumPy scatters such items faster than rows of single ids."""
    return ids.view(f"V{ids.shape[1] * ids.itemsize}")[:, 0]


def _concatenate_rows(
    steps: Sequence[_Step], counts: Sequence[int], spec: CaptureSpec
) -> tuple[UInt[np.ndarray, "R M*K"], Int32[np.ndarray, "R V"] | None]:
    """Concatenate the rows of the steps' real tokens, and the words of their weights."""
    tables = [np.asarray(step[1]) for step in steps]
    if spec.weights_dtype is None and not any(table.dtype == _INT32 for table in tables):
        if len(counts) == 1 and len(tables[0]) == counts[0]:  # a prompt that fills its step is not copied
            return np.ascontiguousarray(_check_ids(tables[0], spec)), None
        return np.ascontiguousarray(
            np.concatenate([_check_ids(table, spec)[:count] for table, count in zip(tables, counts, strict=True)])
        ), None
    assert spec.weights_dtype is None or all(table.dtype == _INT32 for table in tables), "rows without their weights"
    parts = zip(tables, counts, strict=True)
    tables = [
        table if table.dtype == _INT32 else _pack(_check_ids(table, spec)[:count], spec) for table, count in parts
    ]
    if [len(table) for table in tables] != counts or len(
        {table.shape[1] for table in tables}
    ) > 1:  # padding, or some have more columns
        tables = [table[:count, -spec.row_words :] for table, count in zip(tables, counts, strict=True)]
    words = np.ascontiguousarray(np.concatenate(tables)[:, -spec.row_words :])
    assert words.shape[1] == spec.row_words, (words.shape, spec.row_words)
    if spec.weights_dtype is None:
        return words.view(spec.dtype)[:, : spec.row_ids], None
    ids, weights = _split_words(words, spec)
    return ids.view(spec.dtype)[:, : spec.row_ids], weights


def _check_ids(ids: Int[np.ndarray, "N any"], spec: CaptureSpec) -> UInt[np.ndarray, "N M*K"]:
    assert ids.dtype == spec.dtype and ids.shape[1:] == (spec.row_ids,), (
        ids.dtype,
        ids.shape,
        spec.dtype,
        spec.row_ids,
    )
    return ids


def _pack(ids: UInt[np.ndarray, "R M*K"], spec: CaptureSpec) -> Int32[np.ndarray, "R W"]:
    words: Int32[np.ndarray, "R W"] = np.zeros((len(ids), spec.row_words), np.int32)
    words.view(spec.dtype)[:, : spec.row_ids] = ids
    return words


def _live_and_generated(
    steps: Sequence[_Step], counts: Sequence[int]
) -> tuple[Bool[np.ndarray, " R"] | None, Bool[np.ndarray, " R"]]:
    """Return which rows of these steps to file, None for all, and which are of generated tokens."""
    generated = np.ones(sum(counts), np.bool_)
    live = np.ones(sum(counts), np.bool_) if any(step[3] is not None for step in steps) else None
    for (_, _, _, step_live, origins), size, end in zip(steps, counts, accumulate(counts), strict=True):
        if step_live is not None and live is not None:
            live[end - size : end] = step_live
        if origins is not ALL_GENERATED:
            generated[end - size : end] = origins is not None and origins.generated(size)
    return live, generated
