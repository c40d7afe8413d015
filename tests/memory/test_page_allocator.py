"""Facts of the page allocator: no page twice, LIFO, free + used == total, and damage is reported with its numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routed_experts.memory.page_allocator import PageAllocator


def take(allocator: PageAllocator, count: int) -> np.ndarray:
    pages = allocator.allocate(count)
    assert pages is not None
    return pages


def names(allocator: PageAllocator, **owners: np.ndarray) -> dict[str, str]:
    return {violation.name: violation.detail for violation in allocator.check_integrity(owners or None)}


def test_padding_page_is_never_handed_out() -> None:
    allocator = PageAllocator(9, 16)
    assert (allocator.num_free, allocator.num_total) == (8, 8)
    pages = take(allocator, 8)
    assert pages.dtype == np.int32
    assert sorted(pages.tolist()) == list(range(1, 9))


def test_too_many_pages_take_nothing() -> None:
    allocator = PageAllocator(5, 1)
    assert allocator.allocate(5) is None
    assert allocator.num_free == 4
    assert take(allocator, 0).size == 0


def test_pages_freed_last_come_first_in_their_order() -> None:
    allocator = PageAllocator(10, 1)
    first, second = take(allocator, 3), take(allocator, 4)
    allocator.free(first)
    allocator.free(second[::-1])
    assert take(allocator, 7).tolist() == [*second[::-1].tolist(), *first.tolist()]


def test_double_free_asserts_with_the_page() -> None:
    allocator = PageAllocator(6, 1)
    pages = take(allocator, 3)
    allocator.free(pages[1:2])
    with pytest.raises(AssertionError, match=r"pages \[2\], which are free already; 3 of 5"):
        allocator.free(pages)
    assert allocator.num_free == 3
    assert not allocator.check_integrity()


@pytest.mark.parametrize(
    ("pages", "message"), [([0], "1..5"), ([6], "1..5"), ([-1], "1..5"), ([1, 2, 1], r"\[1\] more than once")]
)
def test_wrong_free_asserts_and_changes_nothing(pages: list[int], message: str) -> None:
    allocator = PageAllocator(6, 1)
    take(allocator, 3)
    with pytest.raises(AssertionError, match=message):
        allocator.free(np.array(pages, dtype=np.int32))
    assert allocator.num_free == 2
    assert not allocator.check_integrity()


@given(st.lists(st.integers(-6, 6), max_size=40))
def test_any_order_of_allocate_and_free_equals_a_python_stack(steps: list[int]) -> None:
    allocator, stack, owned = PageAllocator(12, 1), list(range(11, 0, -1)), list[int]()
    for step in steps:
        if step >= 0:
            pages = allocator.allocate(step)
            assert (pages is None) == (step > len(stack))
            expected = [stack.pop() for _ in range(step)] if pages is not None else []
            assert pages is None or pages.tolist() == expected
            owned += expected
        else:
            freed, owned = owned[:-step], owned[-step:]
            allocator.free(np.array(freed, dtype=np.int32))
            stack += freed[::-1]
        assert not allocator.check_integrity({"test": np.array(owned, dtype=np.int32)})
        assert allocator.num_free == len(stack)


def test_owners_are_compared_with_the_used_pages() -> None:
    allocator = PageAllocator(9, 1)
    pages = take(allocator, 4)
    assert not names(allocator, cache=pages[:2], request=pages[2:])
    assert names(allocator, cache=pages[:3], request=pages[2:]) == {
        "page_two_owners": "page 3 is owned 2 times: ['cache', 'request']"
    }
    assert names(allocator, cache=pages[:3]) == {"page_leaked": "1 pages are handed out but have no owner: [4]"}
    assert "[0, 9]" in names(allocator, cache=pages, request=np.array([0, 9], dtype=np.int32))["page_owned_range"]
    foreign = np.array([7], dtype=np.int32)
    assert names(allocator, cache=pages, request=foreign) == {
        "page_owned_not_used": "1 pages have an owner but are not handed out: [7]"
    }


def test_damaged_free_list_is_reported() -> None:
    allocator = PageAllocator(9, 1)
    take(allocator, 4)
    allocator._stack[0] = allocator._stack[1]
    assert "[7]" in names(allocator)["page_free_list_duplicate"]
    allocator._stack[0] = 0
    assert "[0]" in names(allocator)["page_free_list_range"]
    allocator._stack[0] = 1
    assert "[1]" in names(allocator)["page_free_and_used"]


def test_damaged_used_bits_are_reported() -> None:
    allocator = PageAllocator(9, 1)
    take(allocator, 4)
    allocator._used[2] = False
    assert names(allocator) == {"page_total": "4 free + 3 used != 8 total"}
    allocator._used[2] = allocator._used[0] = True
    assert set(names(allocator)) == {"page_padding_used", "page_total"}
