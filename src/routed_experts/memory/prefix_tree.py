"""Radix tree over whole pages of token ids: find, split, add, remove, walk, check.

    root -- [5 9 | 2 2] -- [7 1]          page_size 2: every edge holds whole pages; siblings differ in their first page
                       `- [7 8 | 0 3]      (the namespace is part of it, so no page is shared between namespaces)

Invariants: token ids are compared, a hash only picks the bucket; a page occurs once; refs of a node >= the sum of
the refs of its children; a node is never older than what hangs below it. Time is a counter. Dims: S tokens of a
sequence, P pages."""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from routed_experts.core.integrity import Violation

NO_PAGES = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False, kw_only=True)
class PrefixNode:
    """One edge of the tree and its subtree. A handle for lock and unlock; only the cache changes it."""

    key: tuple[Hashable, int]  # (namespace, hash of the first page): its bucket in the parent
    tokens: Int32[np.ndarray, " S"]
    pages: Int32[np.ndarray, " P"]
    parent: "PrefixNode | None" = field(repr=False)  # None: a root, or a node that is gone
    serial: int  # unique in its tree, breaks ties of age
    last_access: int
    refs: int = 0
    queued: bool = False  # has its one entry in the eviction queue
    children: "dict[tuple[Hashable, int], list[PrefixNode]]" = field(default_factory=dict, repr=False)

    @property
    def is_evictable(self) -> bool:
        """Whether it is an unlocked leaf."""
        return self.refs == 0 and not self.children and self.parent is not None

    def __str__(self) -> str:
        return f"node {self.serial} ({self.pages.size} pages, {self.refs} refs, {self.key[0]!r})"


class PrefixTree:
    """One root and the clock of its tree."""

    def __init__(self, page_size: int, hash_page: Callable[[bytes], int]) -> None:
        self.page_size = page_size
        self._hash_page = hash_page
        self._clock = itertools.count(1)
        self.root = PrefixNode(key=(None, 0), tokens=NO_PAGES, pages=NO_PAGES, parent=None, serial=0, last_access=0)

    def descend(
        self, token_ids: Int32[np.ndarray, " S"], namespace: Hashable
    ) -> tuple[PrefixNode, Int32[np.ndarray, " P"]]:
        """Follow the tokens as far as whole pages go and mark the path as just used. A node they end inside is split,
        so the returned node ends where the returned pages do."""
        assert token_ids.dtype == np.int32, f"token ids are {token_ids.dtype}: expected int32"
        now = next(self._clock)
        node, pages = self.root, [NO_PAGES]
        node.last_access = now
        rest = token_ids[: token_ids.size // self.page_size * self.page_size]
        while rest.size:
            child, count = self._next_child(node, rest, namespace)
            if child is None:
                break
            node = child if count == child.pages.size else self._split(child, count)
            node.last_access = now
            pages.append(node.pages)
            rest = rest[count * self.page_size :]
        return node, np.concatenate(pages)

    def match_length(self, token_ids: Int32[np.ndarray, " S"], namespace: Hashable) -> int:
        """How many tokens `descend` would follow. The tree stays as it is."""
        node, rest = self.root, token_ids[: token_ids.size // self.page_size * self.page_size]
        while rest.size:
            child, count = self._next_child(node, rest, namespace)
            if child is None:
                break
            node, rest = child, rest[count * self.page_size :]
            if count < child.pages.size:
                break
        return token_ids.size // self.page_size * self.page_size - rest.size

    def _next_child(
        self, node: PrefixNode, rest: Int32[np.ndarray, " S"], namespace: Hashable
    ) -> tuple[PrefixNode | None, int]:
        """The child that begins as `rest` does, and how many whole pages they share; None and 0 without one."""
        bucket = node.children.get(self._key(namespace, rest), [])
        counted = ((child, _num_common_pages(child.tokens, rest, self.page_size)) for child in bucket)
        return next((pair for pair in counted if pair[1]), (None, 0))

    def add(
        self, parent: PrefixNode, tokens: Int32[np.ndarray, " S"], pages: Int32[np.ndarray, " P"], namespace: Hashable
    ) -> PrefixNode:
        """Add a leaf under the node where `descend` of its sequence just ended; it is as recent as its parent."""
        leaf = PrefixNode(
            key=self._key(namespace, tokens),
            tokens=tokens.copy(),
            pages=pages.copy(),
            parent=parent,
            serial=next(self._clock),
            last_access=parent.last_access,
        )
        parent.children.setdefault(leaf.key, []).append(leaf)
        return leaf

    def check_node(self, node: PrefixNode) -> list[Violation]:
        """Check alignment, parent, siblings, refs and age of one node."""
        violations: list[Violation] = []
        is_root = node.parent is None
        if node.tokens.size != node.pages.size * self.page_size or is_root != (node.pages.size == 0):
            detail = f"{node} holds {node.tokens.size} tokens, page_size {self.page_size}, root: {is_root}"
            violations.append(Violation(name="prefix_alignment", detail=detail))
        children = [child for bucket in node.children.values() for child in bucket]
        for key, bucket in node.children.items():
            for child in bucket:
                stray = not is_root and key[0] != node.key[0]
                if child.parent is not node or child.key != key or self._key(key[0], child.tokens) != key or stray:
                    violations.append(
                        Violation(
                            name="prefix_place", detail=f"{child} of parent {child.parent} is below {node} under {key}"
                        )
                    )
        firsts = Counter((child.key[0], child.tokens[: self.page_size].tobytes()) for child in children)
        shared = sum(count for count in firsts.values() if count > 1)
        if shared:
            violations.append(
                Violation(
                    name="prefix_siblings",
                    detail=f"{shared} of {len(children)} children of {node} share their first page",
                )
            )
        child_refs = sum(child.refs for child in children)
        if node.refs < child_refs or any(child.refs < 0 for child in children):
            detail = f"{node} has children with {[child.refs for child in children]} refs"
            violations.append(Violation(name="prefix_refs", detail=detail))
        newest = max((child.last_access for child in children), default=0)
        if newest > node.last_access:
            violations.append(
                Violation(name="prefix_age", detail=f"{node} was used at {node.last_access}, a child of it at {newest}")
            )
        return violations

    def _key(self, namespace: Hashable, tokens: Int32[np.ndarray, " S"]) -> tuple[Hashable, int]:
        return namespace, self._hash_page(tokens[: self.page_size].tobytes())

    def _split(self, node: PrefixNode, num_pages: int) -> PrefixNode:
        """Move the first pages of a node to a new one above it. The old node stays the handle of its holders: its
        path is the same."""
        cut = num_pages * self.page_size
        assert node.parent is not None, f"split of {node}, a root"
        upper = PrefixNode(
            key=node.key,
            tokens=node.tokens[:cut].copy(),
            pages=node.pages[:num_pages].copy(),
            parent=node.parent,
            serial=next(self._clock),
            last_access=node.last_access,
            refs=node.refs,
        )
        bucket = node.parent.children[node.key]
        bucket[bucket.index(node)] = upper
        node.tokens, node.pages = node.tokens[cut:].copy(), node.pages[num_pages:].copy()
        node.key, node.parent = self._key(node.key[0], node.tokens), upper
        upper.children[node.key] = [node]
        return upper


def remove(node: PrefixNode) -> None:
    """Detach a node from its parent."""
    assert node.parent is not None, f"removal of {node}, a root"
    bucket = node.parent.children[node.key]
    bucket.remove(node)
    if not bucket:
        del node.parent.children[node.key]
    node.parent = None


def find_root(node: PrefixNode) -> PrefixNode:
    """Return the root above a node; a removed node is its own root."""
    while node.parent is not None:
        node = node.parent
    return node


def nodes_below(roots: Iterable[PrefixNode]) -> list[PrefixNode]:
    """Return all nodes, roots included. A node reached twice is listed twice, its subtree once."""
    nodes: list[PrefixNode] = []
    visited: set[PrefixNode] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        nodes.append(node)
        if node not in visited:
            visited.add(node)
            stack.extend(child for bucket in node.children.values() for child in bucket)
    return nodes


def concatenate_pages(nodes: Iterable[PrefixNode]) -> Int32[np.ndarray, " P"]:
    """Concatenate the pages of the nodes."""
    return np.concatenate([NO_PAGES, *(node.pages for node in nodes)])


def check_pages(nodes: list[PrefixNode]) -> list[Violation]:
    """Check that each page is reached once, and the padding page never."""
    pages, counts = np.unique(concatenate_pages(nodes), return_counts=True)
    violations: list[Violation] = []
    twice = pages[counts > 1].tolist()
    if twice:
        violations.append(
            Violation(name="prefix_page_twice", detail=f"{len(twice)} pages are reached more than once: {twice[:8]}")
        )
    if pages.size and pages[0] <= 0:
        violations.append(
            Violation(name="prefix_padding_page", detail=f"page {pages[0]} is cached: expected pages above 0")
        )
    return violations


def check_refs(nodes: list[PrefixNode], locks: Mapping[PrefixNode, int]) -> list[Violation]:
    """Check that the refs of every node are the locks held on it and below it."""
    expected: Counter[PrefixNode] = Counter()
    for handle, count in locks.items():
        node: PrefixNode | None = handle
        while node is not None:
            expected[node] += count
            node = node.parent
    reached = set(nodes)
    violations = [
        Violation(name="prefix_expected_refs", detail=f"{node}: its holders have {expected[node]} locks")
        for node in reached
        if node.refs != expected[node]
    ]
    gone = [str(node) for node, count in expected.items() if count and node not in reached]
    if gone:
        violations.append(
            Violation(name="prefix_lost_lock", detail=f"{len(gone)} locked nodes are in no tree: {gone[:8]}")
        )
    return violations


def _num_common_pages(left: Int32[np.ndarray, " S"], right: Int32[np.ndarray, " S"], page_size: int) -> int:
    length = min(left.size, right.size)
    differs = left[:length] != right[:length]
    return (int(differs.argmax()) if differs.any() else length) // page_size
