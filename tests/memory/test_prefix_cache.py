"""Facts of the prefix cache, one each; the state machine beside this file looks for what they forget."""

from collections.abc import Callable

import numpy as np
import pytest

from routed_experts.memory.prefix_cache import PrefixCache
from routed_experts.memory.prefix_tree import PrefixNode


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def names(cache: PrefixCache, held: dict[PrefixNode, int] | None = None) -> dict[str, str]:
    return {violation.name: violation.detail for violation in cache.check_integrity(held)}


def matched(cache: PrefixCache, *tokens: int, namespace: object = "a") -> list[int]:
    return cache.match(ids(*tokens), namespace).pages.tolist()


def forked() -> PrefixCache:
    """page_size 2: pages 1 2 hold 5 5 6 6, then 3 holds 7 7 and 4 holds 8 8."""
    cache = PrefixCache(2)
    cache.insert(ids(5, 5, 6, 6, 7, 7), ids(1, 2, 3), "a")
    cache.insert(ids(5, 5, 6, 6, 8, 8), ids(1, 2, 4), "a")
    return cache


def test_longest_prefix_of_whole_pages_is_matched() -> None:
    cache = forked()
    assert matched(cache, 5, 5, 6, 6, 7, 7, 9) == [1, 2, 3]
    assert matched(cache, 5, 5, 6, 6, 8, 9) == [1, 2]
    assert matched(cache, 5, 5, 6) == [1]
    assert matched(cache, 5) == []
    assert matched(cache) == []
    assert not names(cache)


def test_namespaces_share_no_page() -> None:
    cache = forked()
    assert matched(cache, 5, 5, namespace="b") == []
    cache.insert(ids(5, 5), ids(9), "b")
    assert matched(cache, 5, 5, 6, 6, namespace="b") == [9]
    assert matched(cache, 5, 5, 6, 6) == [1, 2]
    assert matched(cache, 5, 5, namespace=("a", 1)) == []


def test_known_tokens_keep_their_page_and_the_callers_is_returned() -> None:
    cache = forked()
    result = cache.insert(ids(5, 5, 6, 6, 9, 9), ids(1, 7, 8), "a")
    assert result.duplicates.tolist() == [7]
    assert result.pages.tolist() == [1, 2, 8]
    assert cache.match(ids(5, 5, 6, 6, 9, 9), "a").node is result.node
    again = cache.insert(ids(5, 5, 6, 6), ids(1, 2), "a")
    assert again.duplicates.size == 0
    assert cache.match(ids(5, 5, 6, 6), "a").node is again.node
    assert sorted(cache.owned_pages().tolist()) == [1, 2, 3, 4, 8]
    assert not names(cache)


def test_siblings_share_no_first_page_but_may_share_tokens() -> None:
    cache = PrefixCache(2)
    cache.insert(ids(5, 1), ids(1), "a")
    cache.insert(ids(5, 2), ids(2), "a")
    assert (matched(cache, 5, 1), matched(cache, 5, 2), matched(cache, 5, 3)) == ([1], [2], [])
    assert not names(cache)


@pytest.mark.parametrize("hash_page", [lambda page: 0, lambda page: page[0]])
def test_equal_hashes_still_compare_token_ids(hash_page: Callable[[bytes], int]) -> None:
    cache = PrefixCache(2, hash_page=hash_page)
    for page, tokens in enumerate([(1, 2), (1, 3), (257, 2), (2, 1)], start=1):
        cache.insert(ids(*tokens, 9, 9), ids(page, page + 10), "a")
    assert [matched(cache, *tokens, 9, 9) for tokens in [(1, 2), (1, 3), (257, 2), (2, 1)]] == [
        [1, 11],
        [2, 12],
        [3, 13],
        [4, 14],
    ]
    assert matched(cache, 257, 3) == []
    assert not names(cache)


def test_equal_hashes_of_namespaces_still_compare_namespaces() -> None:
    cache = PrefixCache(1)
    assert hash(-1) == hash(-2)
    cache.insert(ids(5), ids(1), -1)
    assert matched(cache, 5, namespace=-2) == []


def test_least_recently_used_goes_first() -> None:
    cache = PrefixCache(1)
    for page in (1, 2, 3):
        cache.insert(ids(page * 10), ids(page), "a")
    matched(cache, 10)
    assert cache.evict(1).tolist() == [2]
    assert cache.evict(5).tolist() == [3, 1]
    assert (cache.num_cached, cache.num_evictable) == (0, 0)
    assert not names(cache)


def test_a_leaf_is_trimmed_from_its_tail_and_no_further_than_asked() -> None:
    cache = PrefixCache(2)
    cache.insert(ids(1, 1, 2, 2, 3, 3), ids(1, 2, 3), "a")
    assert cache.evict(2).tolist() == [3, 2]
    assert matched(cache, 1, 1, 2, 2, 3, 3) == [1]
    assert cache.evict(0).size == 0
    assert not names(cache)


def test_a_parent_outlives_its_children() -> None:
    cache = forked()
    assert cache.evict(3).tolist() == [3, 4, 2]
    assert matched(cache, 5, 5, 6, 6) == [1]


def test_locked_pages_and_their_path_are_never_evicted() -> None:
    cache = forked()
    node = cache.match(ids(5, 5, 6, 6, 7, 7), "a").node
    cache.lock(node)
    assert (cache.num_cached, cache.num_evictable) == (4, 1)
    assert cache.evict(9).tolist() == [4]
    assert matched(cache, 5, 5, 6, 6, 7, 7) == [1, 2, 3]
    assert cache.unlock(node).size == 0
    assert sorted(cache.evict(9).tolist()) == [1, 2, 3]


def test_a_handle_keeps_its_whole_path_when_its_node_is_split() -> None:
    cache = PrefixCache(1)
    node = cache.insert(ids(1, 2, 3, 4), ids(1, 2, 3, 4), "a").node
    cache.lock(node)
    upper = cache.match(ids(1, 2), "a").node
    assert upper is not node
    assert cache.evict(9).size == 0
    assert not names(cache, {node: 1})
    cache.lock(upper)
    cache.unlock(node)
    assert cache.evict(9).tolist() == [4, 3]
    assert not names(cache, {upper: 1})


def test_flush_frees_the_unlocked_and_matches_nothing() -> None:
    cache = forked()
    node = cache.match(ids(5, 5, 6, 6), "a").node
    cache.lock(node)
    assert sorted(cache.flush().tolist()) == [3, 4]
    assert matched(cache, 5, 5, 6, 6) == []
    assert not cache.is_attached(node)
    assert (cache.num_cached, cache.num_evictable, cache.num_detached) == (0, 0, 2)
    assert sorted(cache.owned_pages().tolist()) == [1, 2]
    assert cache.evict(9).size == 0
    assert sorted(cache.unlock(node).tolist()) == [1, 2]
    assert cache.num_detached == 0
    with pytest.raises(AssertionError, match="which has no lock"):
        cache.unlock(node)
    assert not names(cache, {})


def test_flushed_pages_are_freed_once_with_the_last_of_several_locks() -> None:
    cache = forked()
    left, right = (cache.match(ids(5, 5, 6, 6, tail, tail), "a").node for tail in (7, 8))
    for node in (left, right, right):
        cache.lock(node)
    assert cache.flush().size == 0
    assert cache.flush().size == 0
    assert cache.unlock(right).size == 0
    assert cache.unlock(left).tolist() == [3]
    cache.lock(right)
    assert cache.unlock(right).size == 0
    assert not names(cache, {right: 1})
    assert sorted(cache.unlock(right).tolist()) == [1, 2, 4]
    assert cache.flush().size == 0


def test_flushed_pages_can_not_be_inserted_again() -> None:
    cache = forked()
    node = cache.match(ids(5, 5, 6, 6), "a").node
    cache.lock(node)
    cache.flush()
    with pytest.raises(AssertionError, match=r"flushed pages \[1 2\]: if not is_attached"):
        cache.insert(ids(5, 5, 6, 6, 9, 9), ids(1, 2, 6), "a")
    cache.insert(ids(5, 5, 6, 6), ids(7, 8), "a")
    assert matched(cache, 5, 5, 6, 6) == [7, 8]
    assert not names(cache, {node: 1})


def test_a_lock_without_pages_is_detached_too() -> None:
    cache = PrefixCache(1)
    node = cache.match(ids(1), "a").node
    cache.lock(node)
    assert cache.is_attached(node)
    cache.flush()
    assert not cache.is_attached(node)
    assert cache.unlock(node).size == 0
    assert not names(cache, {})


def test_wrong_calls_assert_with_numbers() -> None:
    cache = forked()
    leaf = cache.match(ids(5, 5, 6, 6, 7, 7), "a").node
    with pytest.raises(AssertionError, match="3 tokens in 1 pages of 2"):
        cache.insert(ids(1, 2, 3), ids(1), "a")
    with pytest.raises(AssertionError, match="insert of page 0"):
        cache.insert(ids(1, 2), ids(0), "a")
    with pytest.raises(AssertionError, match="int64"):
        cache.match(np.array([1, 2], dtype=np.int64), "a")
    with pytest.raises(AssertionError, match="which has no lock"):
        cache.unlock(leaf)
    cache.evict(9)
    with pytest.raises(AssertionError, match="evicted or flushed; match again"):
        cache.lock(leaf)


def test_the_tree_keeps_no_view_of_the_callers_arrays() -> None:
    cache = PrefixCache(1)
    tokens, pages = ids(1, 2), ids(1, 2)
    cache.insert(tokens, pages, "a")
    tokens[:] = pages[:] = 9
    cache.match(ids(1, 2), "a").pages[:] = 9
    assert matched(cache, 1, 2) == [1, 2]


def test_many_touches_leave_one_queue_entry_a_node() -> None:
    cache = forked()
    for _ in range(50):
        matched(cache, 5, 5, 6, 6, 7, 7)
        cache.evict(0)
    assert len(cache._queue) <= 3
