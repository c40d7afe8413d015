"""Damage to the prefix cache is reported by name and with its numbers: one spoiled field, one violation to find."""

from collections.abc import Callable

import numpy as np
import pytest

from routed_experts.memory.prefix_cache import PrefixCache
from routed_experts.memory.prefix_tree import PrefixNode


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def names(cache: PrefixCache, held: dict[PrefixNode, int] | None = None) -> dict[str, str]:
    return {violation.name: violation.detail for violation in cache.check_integrity(held)}


def forked() -> PrefixCache:
    """page_size 2: pages 1 2 hold 5 5 6 6, then 3 holds 7 7 and 4 holds 8 8."""
    cache = PrefixCache(2)
    cache.insert(ids(5, 5, 6, 6, 7, 7), ids(1, 2, 3), "a")
    cache.insert(ids(5, 5, 6, 6, 8, 8), ids(1, 2, 4), "a")
    return cache


def spoil_tokens(leaf: PrefixNode, parent: PrefixNode) -> None:
    leaf.tokens = leaf.tokens[:-1]


def spoil_key(leaf: PrefixNode, parent: PrefixNode) -> None:
    leaf.tokens = leaf.tokens + 1


def spoil_parent(leaf: PrefixNode, parent: PrefixNode) -> None:
    leaf.parent = leaf


def spoil_siblings(leaf: PrefixNode, parent: PrefixNode) -> None:
    twin = PrefixNode(key=leaf.key, tokens=leaf.tokens, pages=ids(77), parent=parent, serial=99, last_access=0)
    parent.children[leaf.key].append(twin)


def spoil_page(leaf: PrefixNode, parent: PrefixNode) -> None:
    leaf.pages = ids(1)


def spoil_padding(leaf: PrefixNode, parent: PrefixNode) -> None:
    leaf.pages = ids(0)


def spoil_reach(leaf: PrefixNode, parent: PrefixNode) -> None:
    parent.children[leaf.key].append(leaf)


def spoil_refs(leaf: PrefixNode, parent: PrefixNode) -> None:
    leaf.refs += 1


def spoil_age(leaf: PrefixNode, parent: PrefixNode) -> None:
    leaf.last_access = 1000


@pytest.mark.parametrize(
    ("spoil", "name", "number"),
    [
        (spoil_tokens, "prefix_alignment", "holds 1 tokens, page_size 2"),
        (spoil_key, "prefix_place", "1 pages"),
        (spoil_parent, "prefix_place", "1 pages"),
        (spoil_siblings, "prefix_siblings", "2 of 3 children"),
        (spoil_page, "prefix_page_twice", "[1]"),
        (spoil_padding, "prefix_padding_page", "page 0"),
        (spoil_reach, "prefix_page_twice", "[3]"),
        (spoil_refs, "prefix_refs", "[1, 0] refs"),
        (spoil_age, "prefix_age", "1000"),
    ],
)
def test_damaged_tree_is_reported(spoil: Callable[[PrefixNode, PrefixNode], None], name: str, number: str) -> None:
    cache = forked()
    leaf = cache.match(ids(5, 5, 6, 6, 7, 7), "a").node
    assert leaf.parent is not None
    assert not names(cache, {})
    spoil(leaf, leaf.parent)
    assert number in names(cache)[name]


def test_damaged_counts_and_queue_are_reported() -> None:
    cache = forked()
    cache.num_evictable += 1
    assert names(cache) == {"prefix_counts": "(cached, evictable, detached) says (4, 5, 0), the walk finds (4, 4, 0)"}
    cache.num_evictable -= 1
    cache._queue.clear()
    assert "2 unlocked leaves" in names(cache)["prefix_eviction_queue"]


def test_locks_that_differ_from_their_holders_are_reported() -> None:
    cache = forked()
    leaf = cache.match(ids(5, 5, 6, 6, 7, 7), "a").node
    cache.lock(leaf)
    assert not names(cache, {leaf: 1})
    assert "its holders have 2 locks" in names(cache, {leaf: 2})["prefix_expected_refs"]
    assert "its holders have 0 locks" in names(cache, {})["prefix_expected_refs"]
    other = PrefixCache(2).match(ids(), "a").node
    assert "1 locked nodes are in no tree" in names(cache, {leaf: 1, other: 1})["prefix_lost_lock"]


def test_detached_node_without_a_holder_is_reported() -> None:
    cache = forked()
    leaf = cache.match(ids(5, 5, 6, 6, 7, 7), "a").node
    cache.lock(leaf)
    cache.flush()
    leaf.refs = 0
    assert "1 flushed nodes" in names(cache)["prefix_detached_unheld"]
