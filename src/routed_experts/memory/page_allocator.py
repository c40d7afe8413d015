"""Free pages of the KV pool.

Invariants: page 0 is the padding page and is never handed out; every other page is either free or used, never both;
free + used == total. Reuse is LIFO: the pages freed last come first, in the order in which `free` received them; a
fresh allocator hands out 1, 2, 3, ... Engine thread only. Dims: P pages."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Int, Int32

from routed_experts.core.integrity import Violation

PADDING_PAGE = 0
_NUM_SHOWN = 8


class PageAllocator:
    """A stack of free page ids and one used bit a page."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages >= 2, f"num_pages={num_pages}: expected at least 2, the padding page and one to hand out"
        assert page_size >= 1, f"page_size={page_size}: expected at least 1 token"
        self.num_pages = num_pages
        self.page_size = page_size
        self._stack = np.arange(num_pages - 1, PADDING_PAGE, -1, dtype=np.int32)  # top of the stack at [_num_free - 1]
        self._num_free = num_pages - 1
        self._used = np.zeros(num_pages, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        """Pages that can be handed out now."""
        return self._num_free

    @property
    def num_total(self) -> int:
        """Pages that can ever be handed out: all but the padding page."""
        return self.num_pages - 1

    def allocate(self, count: int) -> Int32[np.ndarray, " P"] | None:
        """Take `count` pages, which the caller then owns; None when fewer are free."""
        assert count >= 0, f"allocate({count}): expected 0 or more pages"
        if count > self._num_free:
            return None
        bottom = self._num_free - count
        pages = self._stack[bottom : self._num_free][::-1].copy()
        self._num_free = bottom
        self._used[pages] = True
        return pages

    def free(self, pages: Int32[np.ndarray, " P"]) -> None:
        """Return pages; all of them must be used, and each listed once."""
        if pages.size == 0:
            return
        outside = self._outside(pages)
        assert outside.size == 0, f"free of pages {_list_pages(outside)}: expected ids in 1..{self.num_total}"
        idle = pages[~self._used[pages]]
        assert idle.size == 0, (
            f"free of pages {_list_pages(idle)}, which are free already; {self._num_free} of {self.num_total} are free"
        )
        ascending = np.sort(pages)
        twice = ascending[1:][ascending[1:] == ascending[:-1]]
        assert twice.size == 0, f"free of {pages.size} pages names {_list_pages(twice)} more than once"
        self._used[pages] = False
        self._stack[self._num_free : self._num_free + pages.size] = pages[::-1]
        self._num_free += pages.size

    def check_integrity(self, owners: Mapping[str, Int32[np.ndarray, " P"]] | None = None) -> list[Violation]:
        """Compare the free list with the used bits and, given `owners` (name -> pages owned, shared pages under the
        sharer only), with every owner: one owner a page, no leak, no owner of a free page."""
        free = self._stack[: self._num_free]
        empty = np.empty(0, dtype=np.int32)
        owned = np.concatenate([empty, *(owners or {}).values()])
        num_free, num_owned = self._count(free), self._count(owned)  # [num_pages] each
        violations: list[Violation] = []

        def expect_none(name: str, pages: Int[np.ndarray, " P"], what: str) -> None:
            if pages.size:
                violations.append(Violation(name=name, detail=f"{pages.size} {what}: {_list_pages(pages)}"))

        expect_none(
            "page_free_list_range",
            self._outside(free),
            f"pages of the free list are padding or outside 1..{self.num_total}",
        )
        expect_none(
            "page_free_list_duplicate", np.flatnonzero(num_free > 1), "pages are on the free list more than once"
        )
        expect_none("page_free_and_used", np.flatnonzero((num_free > 0) & self._used), "pages are both free and used")
        expect_none("page_padding_used", np.flatnonzero(self._used[: PADDING_PAGE + 1]), "padding page is handed out")
        num_used = int(np.count_nonzero(self._used))
        if self._num_free + num_used != self.num_total:
            counts = f"{self._num_free} free + {num_used} used != {self.num_total} total"
            violations.append(Violation(name="page_total", detail=counts))
        if owners is not None:
            for page in np.flatnonzero(num_owned > 1)[:_NUM_SHOWN].tolist():
                names = [name for name, pages in owners.items() for _ in range(int(np.count_nonzero(pages == page)))]
                violations.append(
                    Violation(name="page_two_owners", detail=f"page {page} is owned {len(names)} times: {names}")
                )
            expect_none(
                "page_owned_range", self._outside(owned), f"owned pages are padding or outside 1..{self.num_total}"
            )
            expect_none(
                "page_owned_not_used",
                np.flatnonzero((num_owned > 0) & ~self._used),
                "pages have an owner but are not handed out",
            )
            expect_none(
                "page_leaked", np.flatnonzero((num_owned == 0) & self._used), "pages are handed out but have no owner"
            )
        return violations

    def _outside(self, pages: Int32[np.ndarray, " P"]) -> Int32[np.ndarray, " P"]:
        return pages[(pages <= PADDING_PAGE) | (pages >= self.num_pages)]

    def _count(self, pages: Int32[np.ndarray, " P"]) -> Int[np.ndarray, " P"]:
        """Count how often each page id of the pool occurs."""
        return np.bincount(pages[(pages > PADDING_PAGE) & (pages < self.num_pages)], minlength=self.num_pages)


def _list_pages(pages: Int[np.ndarray, " P"]) -> str:
    tail = ", ..." if pages.size > _NUM_SHOWN else ""
    return f"[{', '.join(map(str, pages[:_NUM_SHOWN].tolist()))}{tail}]"
