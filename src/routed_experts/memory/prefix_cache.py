"""Cached prefixes: a radix tree of pages with reference counts, LRU eviction and flush.

Ownership: the tree owns the pages of its nodes. A lock keeps a node and its path to the root: their pages are not
evicted. A handle (node) or the pages of a match are valid until the next `evict` or `flush` unless locked: match,
then lock. Flush starts a new tree. Locked nodes stay, detached, for their holders: never matched, never inserted
into again; the `unlock` that releases the last lock over their pages returns them, exactly once. A holder whose node
is detached (see `is_attached`) does not insert: it frees its own pages and unlocks. Invariants: those of
prefix_tree.py; only pages with refs == 0 are evicted; every unlocked leaf is in the eviction queue. Engine thread
only. Dims: S tokens of a sequence, P pages."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from jaxtyping import Int32

from routed_experts.core.integrity import Violation
from routed_experts.memory.prefix_tree import (
    NO_PAGES,
    PrefixNode,
    PrefixTree,
    check_pages,
    check_refs,
    concatenate_pages,
    find_root,
    nodes_below,
    remove,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """The longest cached page-aligned prefix; `node` ends exactly where `pages` does."""

    pages: Int32[np.ndarray, " P"]
    node: PrefixNode


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertResult:
    """`node` covers all tokens, `pages` are the tree's for them; `duplicates` were the caller's and still are."""

    node: PrefixNode
    pages: Int32[np.ndarray, " P"]
    duplicates: Int32[np.ndarray, " P"]


class PrefixCache:
    """One tree to match, and flushed trees that wait for their holders."""

    def __init__(self, page_size: int, *, hash_page: Callable[[bytes], int] = hash) -> None:
        assert page_size >= 1, f"page_size={page_size}: expected at least 1 token"
        self.page_size = page_size
        self.num_cached = 0  # pages of the tree, locked or not; the three counts are read-only
        self.num_evictable = 0  # pages of the tree that no lock covers
        self.num_detached = 0  # flushed pages that wait for their last unlock
        self._hash_page = hash_page
        self._tree = PrefixTree(page_size, hash_page)
        self._detached: set[PrefixNode] = set()  # roots of flushed trees; each has refs > 0
        self._queue: list[tuple[int, int, PrefixNode]] = []  # heap of (age when queued, serial, node), one entry a node

    def match(self, token_ids: Int32[np.ndarray, " S"], namespace: Hashable) -> PrefixMatch:
        """Find the longest cached prefix of whole pages and mark it as just used; without one, the root and no
        pages."""
        node, pages = self._tree.descend(token_ids, namespace)
        return PrefixMatch(pages=pages, node=node)

    def match_length(self, token_ids: Int32[np.ndarray, " S"], namespace: Hashable) -> int:
        """How many tokens `match` would find. Nothing is marked as used, and no node is split."""
        return self._tree.match_length(token_ids, namespace)

    def lock(self, node: PrefixNode) -> None:
        """Keep the node and its path until as many unlocks. A detached node can be locked while another lock covers
        it."""
        top = find_root(node)
        assert top is self._tree.root or top in self._detached, (
            f"lock of {node}, which was evicted or flushed; match again"
        )
        step: PrefixNode | None = node
        while step is not None:
            if step.refs == 0:
                self.num_evictable -= step.pages.size
            step.refs += 1
            step = step.parent

    def unlock(self, node: PrefixNode) -> Int32[np.ndarray, " P"]:
        """Release one lock. Returns the flushed pages that have no holder any more, for the caller to free."""
        assert node.refs > 0, f"unlock of {node}, which has no lock"
        attached = self.is_attached(node)
        freed: list[PrefixNode] = []
        step: PrefixNode | None = node
        while step is not None:
            parent = step.parent
            step.refs -= 1
            if step.refs == 0 and attached:
                self.num_evictable += step.pages.size
                self._enqueue(step)
            elif step.refs == 0 and parent is None:
                self._detached.remove(step)
            elif step.refs == 0:
                freed.append(step)
                remove(step)
            step = parent
        pages = concatenate_pages(freed)
        self.num_detached -= pages.size
        return pages

    def insert(
        self, token_ids: Int32[np.ndarray, " S"], pages: Int32[np.ndarray, " P"], namespace: Hashable
    ) -> InsertResult:
        """Add a sequence of whole pages. The tree takes the pages of new tokens; where it has the tokens under another
        page, the caller's page is returned in `duplicates`. A caller whose lock is detached must not insert."""
        size = self.page_size
        assert token_ids.size == pages.size * size, (
            f"insert of {token_ids.size} tokens in {pages.size} pages of {size}: not page-aligned"
        )
        assert pages.size == 0 or pages.min() > 0, (
            f"insert of page {pages.min()}: expected pages above 0, the padding page"
        )
        if self._detached:
            flushed = np.intersect1d(pages, concatenate_pages(nodes_below(self._detached)))
            assert flushed.size == 0, (
                f"insert of flushed pages {flushed[:8]}: if not is_attached(node), free your own pages and unlock"
            )
        node, known = self._tree.descend(token_ids, namespace)
        covered, tail = pages[: known.size], pages[known.size :]
        if tail.size:
            node = self._tree.add(node, token_ids[known.size * size :], tail, namespace)
            self.num_cached += tail.size
            self.num_evictable += tail.size
            self._enqueue(node)
        return InsertResult(node=node, pages=np.concatenate([known, tail]), duplicates=covered[covered != known])

    def evict(self, num_pages: int) -> Int32[np.ndarray, " P"]:
        """Drop the `num_pages` least recently used unlocked pages, leaves first and each from its tail; fewer if there
        are fewer. Returns them in that order, for the caller to free."""
        assert num_pages >= 0, f"evict({num_pages}): expected 0 or more pages"
        freed, remaining = [NO_PAGES], num_pages
        while remaining > 0 and self._queue:
            queued_at, _, leaf = heappop(self._queue)
            leaf.queued = False
            if queued_at != leaf.last_access:  # used since it was queued: queue it again
                self._enqueue(leaf)
            elif leaf.is_evictable:
                keep = max(leaf.pages.size - remaining, 0)
                freed.append(leaf.pages[keep:][::-1])
                remaining -= leaf.pages.size - keep
                self._trim(leaf, keep)
        self.num_cached -= num_pages - remaining
        self.num_evictable -= num_pages - remaining
        return np.concatenate(freed)

    def flush(self) -> Int32[np.ndarray, " P"]:
        """Drop the tree. Returns the pages that no lock covers, for the caller to free; the rest is detached."""
        root = self._tree.root
        idle = [node for node in nodes_below([root]) if node.refs == 0 and node is not root]
        for node in idle:
            remove(node)
        if root.refs:
            self._detached.add(root)
        self.num_detached += self.num_cached - self.num_evictable
        self.num_cached = self.num_evictable = 0
        self._queue.clear()
        self._tree = PrefixTree(self.page_size, self._hash_page)
        return concatenate_pages(idle)

    def is_attached(self, node: PrefixNode) -> bool:
        """Whether the node is still part of the tree that is matched: not flushed, not evicted."""
        return find_root(node) is self._tree.root

    def owned_pages(self) -> Int32[np.ndarray, " P"]:
        """All pages the cache owns, detached ones too."""
        return concatenate_pages(nodes_below([self._tree.root, *self._detached]))

    def check_integrity(self, expected_refs: Mapping[PrefixNode, int] | None = None) -> list[Violation]:
        """Check all trees. `expected_refs`: locks held on each handle, over all holders, compared with every count."""
        attached, detached = nodes_below([self._tree.root]), nodes_below(self._detached)
        nodes = attached + detached
        violations = [violation for node in nodes for violation in self._tree.check_node(node)]
        violations += check_pages(nodes)
        if expected_refs is not None:
            violations += check_refs(nodes, expected_refs)
        counts = (self.num_cached, self.num_evictable, self.num_detached)
        idle = [node for node in attached if node.refs == 0]
        walked = (concatenate_pages(attached).size, concatenate_pages(idle).size, concatenate_pages(detached).size)
        if counts != walked:
            violations.append(
                Violation(
                    name="prefix_counts", detail=f"(cached, evictable, detached) says {counts}, the walk finds {walked}"
                )
            )
        queued = {node for _, _, node in self._queue}
        lost = [str(node) for node in idle if node.is_evictable and node not in queued]
        if lost:
            violations.append(
                Violation(
                    name="prefix_eviction_queue", detail=f"{len(lost)} unlocked leaves are not queued: {lost[:8]}"
                )
            )
        unheld = [str(node) for node in detached if node.refs <= 0]
        if unheld:
            violations.append(
                Violation(
                    name="prefix_detached_unheld",
                    detail=f"{len(unheld)} flushed nodes have no holder: {unheld[:8]}",
                )
            )
        return violations

    def _trim(self, leaf: PrefixNode, num_pages: int) -> None:
        """Shorten a leaf; one without pages is removed, and its parent may become a leaf."""
        parent = leaf.parent
        if num_pages:
            leaf.pages, leaf.tokens = leaf.pages[:num_pages].copy(), leaf.tokens[: num_pages * self.page_size].copy()
            self._enqueue(leaf)
        elif parent is not None:
            remove(leaf)
            self._enqueue(parent)

    def _enqueue(self, node: PrefixNode) -> None:
        """Queue an unlocked leaf for eviction once; a later use of it is noticed when its entry is popped."""
        if node.is_evictable and not node.queued:
            node.queued = True
            heappush(self._queue, (node.last_access, node.serial, node))
