"""Facts of the page table: slot 0 is padding, free rows are empty, rows have no hole, and damage is reported with its
numbers."""

import numpy as np
import pytest

from routed_experts.memory.req_to_token_pool import ReqToTokenPool


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


def pool_of_two() -> ReqToTokenPool:
    """Slots 1 and 2 of 4 in use, three and no pages."""
    pool = ReqToTokenPool(5, 4)
    assert (pool.allocate(), pool.allocate()) == (1, 2)
    pool.set_pages(1, 0, ids(7, 8, 9))
    return pool


def names(pool: ReqToTokenPool) -> dict[str, str]:
    return {violation.name: violation.detail for violation in pool.check_integrity()}


def test_slot_zero_is_never_handed_out_and_reads_as_padding() -> None:
    pool = ReqToTokenPool(4, 3)
    assert [pool.allocate() for _ in range(4)] == [1, 2, 3, None]
    assert (pool.num_free, pool.num_total) == (0, 3)
    pool.set_pages(2, 0, ids(5, 6))
    rows = pool.rows(ids(2, 0))
    assert rows.tolist() == [[5, 6, 0], [0, 0, 0]]
    assert rows.dtype == np.int32
    rows[:] = 9
    assert pool.rows(ids(2)).tolist() == [[5, 6, 0]]


def test_freed_slot_is_empty_and_comes_first() -> None:
    pool = pool_of_two()
    pool.free(1)
    assert not pool.check_integrity()
    assert pool.allocate() == 1
    assert not pool.pages[1].any()


def test_pages_are_appended_and_cut_from_the_end() -> None:
    pool = pool_of_two()
    pool.set_pages(1, 3, ids(4))
    assert pool.pages[1].tolist() == [7, 8, 9, 4]
    pool.set_pages(1, 1, ids(0, 0, 0))
    assert pool.pages[1].tolist() == [7, 0, 0, 0]
    assert not pool.check_integrity()


def test_wrong_calls_assert_with_numbers() -> None:
    pool = pool_of_two()
    with pytest.raises(AssertionError, match=r"slot 3 is free; 2 of 4"):
        pool.free(3)
    with pytest.raises(AssertionError, match=r"slot 0: expected 1..4"):
        pool.set_pages(0, 0, ids(1))
    with pytest.raises(AssertionError, match=r"slot 1: columns 3..5 of a row of 4"):
        pool.set_pages(1, 3, ids(1, 2))
    with pytest.raises(AssertionError, match=r"slot 2: pages at 1 would leave a hole"):
        pool.set_pages(2, 1, ids(1))
    pool.free(2)
    with pytest.raises(AssertionError, match=r"slot 2 is free"):
        pool.free(2)


@pytest.mark.parametrize(
    ("slot", "row", "name"),
    [
        (0, [3, 0, 0, 0], "slot_padding_row"),
        (4, [3, 0, 0, 0], "slot_free_row"),
        (1, [7, 0, 9, 0], "slot_row_hole"),
        (1, [7, 8, 7, 0], "slot_row_repeat"),
        (1, [7, -1, 0, 0], "slot_row_range"),
    ],
)
def test_damaged_row_is_reported(slot: int, row: list[int], name: str) -> None:
    pool = pool_of_two()
    assert not names(pool)
    pool.pages[slot] = row
    assert list(names(pool)) == [name]
    assert f"row {slot} " in names(pool)[name]


def test_damaged_free_list_is_reported() -> None:
    pool = pool_of_two()
    pool._free_slots.append(3)
    assert names(pool) == {
        "slot_free_list_duplicate": "slots [3] are on the free list more than once",
        "slot_total": "3 free + 2 used != 4 total",
    }
    pool._free_slots[-1] = 2
    assert "slots [2]" in names(pool)["slot_free_and_used"]
    pool._free_slots[-1] = 0
    assert "not all in 1..4" in names(pool)["slot_free_list_range"]
