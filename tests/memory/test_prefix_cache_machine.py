"""Allocator and prefix cache driven at random as a scheduler would, against a dict of token tuples that knows no tree.

The oracle: cached maps (namespace, all tokens up to the end of a page) to [page, time of last use]; it is closed under
prefixes. A page is a leaf if no cached key extends its key. Locks are the prefixes of whole requests. After every step
both structures check themselves, every lock and every page has its owner, and the counts are those of the dict."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from routed_experts.memory.page_allocator import PageAllocator
from routed_experts.memory.prefix_cache import PrefixCache
from routed_experts.memory.prefix_tree import PrefixNode

NUM_PAGES = 14
Key = tuple[str, tuple[int, ...]]


@dataclass
class Holder:
    """A running request: `locked` prefix pages are the tree's, the rest of `pages` its own."""

    node: PrefixNode
    tokens: list[int]
    namespace: str
    pages: list[int]
    locked: int
    generation: int  # number of flushes before its lock


@dataclass
class Cached:
    page: int
    used_at: int


def array(values: list[int] | tuple[int, ...]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class PrefixCacheMachine(RuleBasedStateMachine):
    @initialize(page_size=st.integers(1, 3), equal_hashes=st.booleans())
    def build(self, page_size: int, equal_hashes: bool) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(NUM_PAGES, page_size)
        self.cache = PrefixCache(page_size, hash_page=(lambda page: 0) if equal_hashes else hash)
        self.cached: dict[Key, Cached] = {}
        self.holders: list[Holder] = []
        self.generation = 0
        self.now = 0

    # The oracle

    def keys(self, namespace: str, tokens: list[int]) -> list[Key]:
        """One key a whole page."""
        return [(namespace, tuple(tokens[:end])) for end in range(self.page_size, len(tokens) + 1, self.page_size)]

    def locked_keys(self) -> set[Key]:
        live = [holder for holder in self.holders if holder.generation == self.generation]
        return {key for holder in live for key in self.keys(holder.namespace, holder.tokens)[: holder.locked]}

    def touch(self, keys: list[Key]) -> list[int]:
        """Pages of the longest cached prefix, marked as just used."""
        self.now += 1
        pages: list[int] = []
        for key in keys:
            if key not in self.cached:
                break
            self.cached[key].used_at = self.now
            pages.append(self.cached[key].page)
        return pages

    def evict_one(self) -> int | None:
        locked = self.locked_keys()
        parents = {(namespace, tokens[: -self.page_size]) for namespace, tokens in self.cached}
        leaves = [key for key in self.cached if key not in locked and key not in parents]
        if not leaves:
            return None
        return self.cached.pop(min(leaves, key=lambda key: self.cached[key].used_at)).page

    def flushed_pages_held(self) -> Counter[int]:
        old = [holder for holder in self.holders if holder.generation != self.generation]
        return Counter(page for holder in old for page in holder.pages[: holder.locked])

    # What a scheduler does

    def evict_and_free(self, count: int) -> None:
        expected = [page for page in (self.evict_one() for _ in range(count)) if page is not None]
        pages = self.cache.evict(count)
        assert pages.tolist() == expected
        self.allocator.free(pages)

    def take(self, count: int) -> list[int] | None:
        if count > self.allocator.num_free:
            self.evict_and_free(count - self.allocator.num_free)
        pages = self.allocator.allocate(count)
        return None if pages is None else pages.tolist()

    def unlock(self, holder: Holder) -> None:
        """The holder has left `self.holders`: pages are freed only if flushed and held by no other request."""
        still_held = self.flushed_pages_held()
        flushed = holder.pages[: holder.locked] if holder.generation != self.generation else []
        pages = self.cache.unlock(holder.node)
        assert sorted(pages.tolist()) == sorted(page for page in flushed if not still_held[page])
        self.allocator.free(pages)

    def insert(self, holder: Holder) -> PrefixNode:
        """Insert all whole pages of the holder and free its duplicates; its pages are the tree's from now on."""
        keys = self.keys(holder.namespace, holder.tokens)
        known = self.touch(keys)
        result = self.cache.insert(
            array(holder.tokens[: len(keys) * self.page_size]), array(holder.pages), holder.namespace
        )
        assert result.duplicates.tolist() == [
            own_page for own_page, tree in zip(holder.pages, known, strict=False) if own_page != tree
        ]
        for key, page in zip(keys[len(known) :], holder.pages[len(known) :], strict=True):
            self.cached[key] = Cached(page, self.now)
        holder.pages = [self.cached[key].page for key in keys]
        assert result.pages.tolist() == holder.pages
        self.allocator.free(result.duplicates)
        return result.node

    @rule(namespace=st.sampled_from("ab"), tokens=st.lists(st.integers(0, 1), max_size=12))
    def admit(self, namespace: str, tokens: list[int]) -> None:
        keys = self.keys(namespace, tokens)
        match = self.cache.match(array(tokens), namespace)
        assert match.pages.tolist() == self.touch(keys)
        self.cache.lock(match.node)
        holder = Holder(match.node, tokens, namespace, match.pages.tolist(), match.pages.size, self.generation)
        self.holders.append(holder)
        own = self.take(len(keys) - holder.locked)
        if own is None:
            self.holders.remove(holder)
            self.unlock(holder)
        else:
            holder.pages += own

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 99), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, pick: int, tokens: list[int]) -> None:
        holder = self.holders[pick % len(self.holders)]
        own = self.take(len(self.keys(holder.namespace, holder.tokens + tokens)) - len(holder.pages))
        if own is not None:
            holder.pages += own
            holder.tokens = holder.tokens + tokens

    @precondition(lambda self: any(holder.generation == self.generation for holder in self.holders))
    @rule(pick=st.integers(0, 99))
    def cache_unfinished(self, pick: int) -> None:
        live = [holder for holder in self.holders if holder.generation == self.generation]
        holder = live[pick % len(live)]
        node = self.insert(holder)
        self.cache.lock(node)
        assert self.cache.unlock(holder.node).size == 0
        holder.node, holder.locked = node, len(holder.pages)

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 99), abort=st.booleans())
    def finish(self, pick: int, abort: bool) -> None:
        holder = self.holders.pop(pick % len(self.holders))
        attached = self.cache.is_attached(holder.node)
        assert attached == (holder.generation == self.generation)
        if attached and not abort:
            self.insert(holder)
        else:
            self.allocator.free(array(holder.pages[holder.locked :]))
        self.unlock(holder)

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 99))
    def fork(self, pick: int) -> None:
        """A second request on the same lock, also on a flushed one."""
        parent = self.holders[pick % len(self.holders)]
        self.cache.lock(parent.node)
        tokens = parent.tokens[: parent.locked * self.page_size]
        pages = parent.pages[: parent.locked]
        self.holders.append(Holder(parent.node, tokens, parent.namespace, pages, parent.locked, parent.generation))

    @rule(namespace=st.sampled_from("ab"), tokens=st.lists(st.integers(0, 1), max_size=12))
    def probe(self, namespace: str, tokens: list[int]) -> None:
        assert self.cache.match(array(tokens), namespace).pages.tolist() == self.touch(self.keys(namespace, tokens))

    @rule(namespace=st.sampled_from("ab"), tokens=st.lists(st.integers(0, 1), max_size=12))
    def measure(self, namespace: str, tokens: list[int]) -> None:
        """The length of a match, which touches nothing: `now` stands still."""
        keys, actual = self.keys(namespace, tokens), 0
        while actual < len(keys) and keys[actual] in self.cached:
            actual += 1
        assert self.cache.match_length(array(tokens), namespace) == actual * self.page_size

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        self.evict_and_free(count)

    @precondition(lambda self: self.cached)
    @rule(draw=st.integers(0, 3))
    def flush(self, draw: int) -> None:
        if draw:  # an empty tree is dull: one draw in four flushes
            return
        locked = self.locked_keys()
        pages = self.cache.flush()
        assert sorted(pages.tolist()) == sorted(entry.page for key, entry in self.cached.items() if key not in locked)
        self.allocator.free(pages)
        self.cached.clear()
        self.generation += 1

    @invariant()
    def all_is_well(self) -> None:
        locks = Counter(holder.node for holder in self.holders)
        assert self.cache.check_integrity(locks) == []
        owners = {f"request {index}": array(holder.pages[holder.locked :]) for index, holder in enumerate(self.holders)}
        assert self.allocator.check_integrity({"cache": self.cache.owned_pages(), **owners}) == []
        locked = self.locked_keys()
        assert self.cache.num_cached == len(self.cached)
        assert self.cache.num_evictable == sum(key not in locked for key in self.cached)
        assert self.cache.num_detached == len(self.flushed_pages_held())

    def teardown(self) -> None:
        """At idle free + cached == total, and a flush leaves nothing."""
        while self.holders:
            self.finish(0, abort=True)
        assert self.cache.check_integrity({}) == []
        assert self.allocator.num_free + self.cache.num_cached == self.allocator.num_total
        self.allocator.free(self.cache.flush())
        assert self.allocator.num_free == self.allocator.num_total


class TestPrefixCacheMachine(PrefixCacheMachine.TestCase):
    settings = settings(max_examples=75, stateful_step_count=60, deadline=None)


@pytest.mark.thorough
class TestPrefixCacheMachineLonger(PrefixCacheMachine.TestCase):
    settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
