"""ReqToTokenPool: the pages that each running request reads, as one table.

Invariants: slot 0 is the padding row, never handed out, all zeros; a free slot's row is all zeros; the pages of a row
come first, without a hole and without a repeat, then zeros (0 is the padding page). Engine thread only. Dims: R request
slots, W pages of the longest request, B requests of a step, P pages."""

from collections import Counter

import numpy as np
from jaxtyping import Int, Int32

from routed_experts.core.integrity import Violation

PADDING_SLOT = 0


class ReqToTokenPool:
    """The page table and a stack of free request slots; the slot freed last is handed out first."""

    def __init__(self, num_slots: int, max_pages: int) -> None:
        """Make `num_slots` rows, the padding row among them, so `num_slots - 1` requests can run."""
        assert num_slots >= 2, f"num_slots={num_slots}: expected at least 2, the padding row and one to hand out"
        assert max_pages >= 1, f"max_pages={max_pages}: expected at least 1"
        self.pages: Int32[np.ndarray, "R W"] = np.zeros((num_slots, max_pages), dtype=np.int32)
        self._free_slots = list(range(num_slots - 1, PADDING_SLOT, -1))
        self._used = np.zeros(num_slots, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        """Request slots that can be handed out now."""
        return len(self._free_slots)

    @property
    def num_total(self) -> int:
        """Request slots that can ever be handed out: all but the padding row."""
        return self.pages.shape[0] - 1

    def allocate(self) -> int | None:
        """Take a slot with an empty row; None when all are used."""
        if not self._free_slots:
            return None
        slot = self._free_slots.pop()
        self._used[slot] = True
        return slot

    def free(self, slot: int) -> None:
        """Clear the row and free its slot; the pages stay with their owner."""
        self._assert_used(slot)
        self.pages[slot] = 0
        self._used[slot] = False
        self._free_slots.append(slot)

    def set_pages(self, slot: int, start: int, pages: Int32[np.ndarray, " P"]) -> None:
        """Write `pages` at columns start, start + 1, ... of the row; zeros shorten a row from its end."""
        self._assert_used(slot)
        end = start + pages.size
        width = self.pages.shape[1]
        assert 0 <= start <= width - pages.size, f"slot {slot}: columns {start}..{end} of a row of {width} pages"
        assert start == 0 or pages.size == 0 or self.pages[slot, start - 1] != 0, (
            f"slot {slot}: pages at {start} would leave a hole"
        )
        self.pages[slot, start:end] = pages

    def rows(self, slots: Int[np.ndarray, " B"]) -> Int32[np.ndarray, "B W"]:
        """Copy the rows of `slots`; slot 0 gives a row of padding."""
        return self.pages.take(slots, axis=0)

    def check_integrity(self) -> list[Violation]:
        """Compare the free slots with the used bits, and check every row."""
        violations: list[Violation] = []
        free, used = self._free_slots, np.flatnonzero(self._used).tolist()
        twice = sorted(slot for slot, count in Counter(free).items() if count > 1)
        if twice:
            violations.append(
                Violation(name="slot_free_list_duplicate", detail=f"slots {twice} are on the free list more than once")
            )
        if not all(PADDING_SLOT < slot <= self.num_total for slot in free):
            violations.append(
                Violation(name="slot_free_list_range", detail=f"free slots {free} are not all in 1..{self.num_total}")
            )
        overlap = sorted(set(free) & set(used))
        if overlap:
            violations.append(Violation(name="slot_free_and_used", detail=f"slots {overlap} are both free and used"))
        if len(free) + len(used) != self.num_total:
            counts = f"{len(free)} free + {len(used)} used != {self.num_total} total"
            violations.append(Violation(name="slot_total", detail=counts))
        for slot in np.flatnonzero(~self._used & self.pages.any(axis=1)).tolist():
            name = "slot_padding_row" if slot == PADDING_SLOT else "slot_free_row"
            count = int(np.count_nonzero(self.pages[slot]))
            violations.append(Violation(name=name, detail=f"row {slot} is not in use but holds {count} pages"))
        for slot in used:
            violations.extend(_check_row(slot, self.pages[slot]))
        return violations

    def _assert_used(self, slot: int) -> None:
        assert PADDING_SLOT < slot <= self.num_total, f"slot {slot}: expected 1..{self.num_total}"
        assert self._used[slot], f"slot {slot} is free; {self.num_free} of {self.num_total} are free"


def _check_row(slot: int, row: Int32[np.ndarray, " W"]) -> list[Violation]:
    violations: list[Violation] = []
    pages = row[row != 0]
    if row[pages.size :].any():
        hole = int(np.flatnonzero(row == 0)[0])
        violations.append(
            Violation(name="slot_row_hole", detail=f"row {slot} holds {pages.size} pages but column {hole} is empty")
        )
    if (row < 0).any():
        violations.append(Violation(name="slot_row_range", detail=f"row {slot} holds page {int(row.min())}"))
    num_distinct = np.unique(pages).size
    if num_distinct != pages.size:
        violations.append(
            Violation(name="slot_row_repeat", detail=f"row {slot} holds {pages.size} pages, {num_distinct} distinct")
        )
    return violations
