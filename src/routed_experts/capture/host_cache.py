"""Host store of routed experts, one row a KV slot. Knows nothing of JAX, requests or who owns a page.

A row has the life of its slot: written by the pass that wrote the slot's keys and values, shared as they are shared, and
forgotten when the page is handed out again. What stands in a row that is not valid is never to be returned. Validity is kept in the
slot's weight version, below 0 where there is no row: filing a step is two writes. What steps bring is written down in their order and
filed some steps at a time, at the latest when somebody reads: between two steps the store and the code that files are cold in cache,
and filing one step then costs as much as filing ten; experts are counted there too (`expert_counts.py`). Token-major: one token's row is
one contiguous run of M*K bytes. Engine thread only.
Dims: Z slots, P pages, R rows, M MoE layers, K experts per token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Int32, UInt

from routed_experts.capture.expert_counts import AskGenerated, ExpertCounts
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.integrity import Violation
from routed_experts.core.routing_stats import RoutingStats

_NUM_SHOWN = 8
_NO_ROW = -1  # a weight version that no weights have
_MOST_NOTES = 24  # that wait to be filed: at a batch of 8 about 16 steps, and the pages that changed between them
_MOST_ROWS = 512
_FEW_OF = 4


# What waits to be filed: slots, rows, version, which of them live, and who tells which are of generated tokens; or pages to be
# forgotten, and their size. Plain tuples: making one is all that a step waits for.
_Step = tuple[Int[np.ndarray, " R"], Any, int, Bool[np.ndarray, " R"] | None, AskGenerated | None]
_Forgotten = tuple[Int[np.ndarray, " P"], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRows:
    """Rows that a retracted request takes along, of its positions [0, R0). Where valid, they outrank what its new pages hold."""

    ids: UInt[np.ndarray, "R0 M K"]
    valid: Bool[np.ndarray, " R0"]
    versions: Int32[np.ndarray, " R0"]


class _RoutedExpertsHostCache:  # pyright: ignore[reportUnusedClass]  # used in this room
    """Rows and their weight versions by KV slot."""

    def __init__(self, num_slots: int, spec: CaptureSpec) -> None:
        assert num_slots >= 1, f"num_slots={num_slots}: wanted at least 1"
        self._spec = spec
        self._store: UInt[np.ndarray, "Z M*K"] = np.zeros((num_slots, spec.num_moe_layers * spec.top_k), spec.dtype)
        self._versions: Int32[np.ndarray, " Z"] = np.full(num_slots, _NO_ROW, np.int32)
        self._counts = ExpertCounts(spec)
        self._notes: list[_Step | _Forgotten] = []
        self._noted_rows = 0

    @property
    def nbytes(self) -> int:
        """Host memory of the store, in bytes."""
        return self._store.nbytes + self._versions.nbytes

    def put(
        self, slots: Int[np.ndarray, " R"], rows: Any, version: int, live: Bool[np.ndarray, " R"] | None = None,
        generated: AskGenerated | None = None,
    ) -> None:  # fmt: skip
        """Take the rows of one step under the slots of its real tokens. `version`: of the weights that ran. `rows`: anything that
        np.asarray reads as [N, M*K] of the spec's dtype, real tokens first; `live` says which of them to keep, None keeps all.
        `generated` is asked, when the rows are filed, which are of generated tokens; None counts all as prompts. The arrays are
        the store's from now on; what is wrong with them is found when they are filed."""
        self._noted_rows += slots.size
        self._note((slots, rows, version, live, generated))

    def clear(self, slots: Int[np.ndarray, " R"]) -> None:
        """Forget the rows of these slots."""
        self.clear_pages(slots, 1)

    def clear_pages(self, pages: Int[np.ndarray, " P"], page_size: int) -> None:
        """Forget the rows of these pages; page p holds slots [p * page_size, (p + 1) * page_size)."""
        assert self._versions.size % page_size == 0, f"{self._versions.size} slots are no whole number of pages of {page_size}"
        self._note((pages, page_size))

    def file(self) -> None:
        """Write down in the store what steps brought, in their order; every reader does so first. Steps between two forgettings are
        written at once: of two rows of one slot, the later stays."""
        notes, self._notes, self._noted_rows = self._notes, [], 0
        try:
            self._file(notes)
        except BaseException:  # what was to be forgotten may stand there still: no row is known any more
            self._versions[:] = _NO_ROW
            raise

    def _file(self, notes: Sequence[_Step | _Forgotten]) -> None:
        together: list[_Step] = []
        for note in notes:
            if len(note) == 2:
                self._write(together)
                together = []
                pages, page_size = note
                self._versions.reshape(-1, page_size)[pages] = _NO_ROW
            elif together and together[0][2] != note[2]:
                self._write(together)
                together = [note]
            else:
                together.append(note)
        self._write(together)

    def routing_stats(self, *, reset: bool, wait: bool) -> RoutingStats:
        """Counts of the rows that were filed since the last reset; `reset` begins anew afterwards. Without `wait`, of those that were
        filed and counted some steps ago."""
        if not wait and not reset:
            return self._counts.latest()
        self.file()
        stats = self._counts.stats()
        if reset:
            self._counts.reset()
        return stats

    def _write(self, steps: list[_Step]) -> None:
        if not steps:
            return
        version, read = steps[0][2], [_read(step, self._store) for step in steps]
        assert version > _NO_ROW, version
        slots, ids = (read[0][0], read[0][1]) if len(read) == 1 else (np.concatenate([one[part] for one in read]) for part in (0, 1))
        assert slots.size == 0 or slots.min() >= 0, f"slot {slots.min()}: wanted 0 to {self._versions.size - 1}"
        self._store[slots] = ids
        self._versions[slots] = version
        for _, rows, generated in read:
            self._counts.note(rows, generated)

    def _note(self, note: _Step | _Forgotten) -> None:
        self._notes.append(note)
        if len(self._notes) >= _MOST_NOTES or self._noted_rows >= _MOST_ROWS:
            self.file()

    def gather(self, slots: Int[np.ndarray, " R"]) -> tuple[UInt[np.ndarray, "R M K"], Bool[np.ndarray, " R"], Int32[np.ndarray, " R"]]:
        """Copy out ids, valid bits and versions; ids of a row that is not valid mean nothing."""
        assert slots.size == 0 or slots.min() >= 0, f"slot {slots.min()}: wanted 0 to {self._versions.size - 1}"
        self.file()
        ids = self._store.take(slots, axis=0).reshape(slots.size, self._spec.num_moe_layers, self._spec.top_k)
        versions = self._versions[slots]
        return ids, versions > _NO_ROW, versions

    def poison(self) -> None:
        """Fill every row that is not valid with the largest value of its dtype, so that a test sees it come back."""
        self.file()
        self._store[self._versions == _NO_ROW] = np.iinfo(self._store.dtype).max

    def check_integrity(self, owned_slots: Int[np.ndarray, " owned"]) -> list[Violation]:
        """Check that no row is valid outside `owned_slots`, the slots of all pages that someone holds."""
        self.file()
        valid = self._versions > _NO_ROW
        orphaned = valid.copy()
        orphaned[owned_slots] = False
        num_orphaned = int(np.count_nonzero(orphaned))
        if num_orphaned == 0:
            return []
        shown = np.flatnonzero(orphaned)[:_NUM_SHOWN].tolist()
        detail = f"{num_orphaned} of {np.count_nonzero(valid)} valid rows are in slots whose page nobody owns, the first {shown}"
        return [Violation(name="row_without_page", detail=detail)]


def _read(
    step: _Step, store: UInt[np.ndarray, "Z M*K"]
) -> tuple[Int[np.ndarray, " R"], UInt[np.ndarray, "R M*K"], Bool[np.ndarray, " R"]]:
    """Slots and rows of the step that are kept, and which of them are of generated tokens."""
    slots, rows, _, live, generated = step
    ids: UInt[np.ndarray, "N M*K"] = np.asarray(rows)
    assert ids.dtype == store.dtype, (ids.dtype, store.dtype)
    assert ids.shape[0] >= slots.size and ids.shape[1:] == store.shape[1:], (ids.shape, slots.shape, store.shape)
    told = np.zeros(slots.size, np.bool_) if generated is None else generated()
    few = ids.shape[0] > _FEW_OF * slots.size  # a view would keep all the padding until it is counted
    ids = ids[: slots.size].copy() if few else ids[: slots.size]
    return (slots, ids, told) if live is None else (slots[live], ids[live], told[live])
