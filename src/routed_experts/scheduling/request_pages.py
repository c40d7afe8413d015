"""RequestPages: the pages of each request and their owners.

A request's row of the page table has first `num_shared` pages, which the prefix cache owns and the request has locked,
then its own pages. Pages come from the free list, or from the cache by eviction.

Keys of a page depend on the pages before it. Where two requests computed the same tokens, their pages differ by
rounding alone, so that later pages of one may follow earlier pages of the other in the cache; unless what a pass
computes depends on other requests (`one_pass_prefixes`)."""

from collections.abc import Hashable, Iterable

import numpy as np
from jaxtyping import Int, Int32

from routed_experts.core.integrity import Violation
from routed_experts.memory.page_allocator import PageAllocator
from routed_experts.memory.prefix_cache import PrefixCache, PrefixNode
from routed_experts.memory.req_to_token_pool import ReqToTokenPool
from routed_experts.scheduling.schedule_batch import Req


class RequestPages:
    """The page table, the free list and the prefix cache together."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_request_slots: int,
        table_width: int,
        use_prefix_cache: bool,
        one_pass_prefixes: bool = False,
    ) -> None:
        """`one_pass_prefixes`: a page is cached only behind the pages that its keys were computed with."""
        self.page_size, self.use_prefix_cache = page_size, use_prefix_cache
        self._one_pass_prefixes = one_pass_prefixes
        self.allocator = PageAllocator(num_pages, page_size)
        self.cache = PrefixCache(page_size)
        self.table = ReqToTokenPool(num_request_slots, table_width)
        self._changed: list[Int32[np.ndarray, " P"]] = []

    @property
    def num_available(self) -> int:
        """Pages that can be handed out now, by eviction if necessary."""
        return self.allocator.num_free + self.cache.num_evictable

    def num_cached(self, req: Req, namespace: Hashable) -> int:
        """How many tokens `admit` would take from the prefix cache. Nothing is marked as used."""
        limit = _matchable_tokens(req) if self.use_prefix_cache else 0
        return self.cache.match_length(req.tokens[:limit], namespace)

    def admit(self, req: Req, namespace: Hashable, *, spare: int) -> bool:
        """Assign a waiting request a slot, its cached prefix, and pages for all its known tokens. Returns False if
        there are not enough, or if fewer than `spare` pages would be left."""
        if self.table.num_free == 0:
            return False
        limit = _matchable_tokens(req) if self.use_prefix_cache else 0
        match = self.cache.match(req.tokens[:limit], namespace)
        self.cache.lock(match.node)
        needed = pages_for(req.num_known, self.page_size) - match.pages.size
        if needed + spare > self.num_available:
            self._free(self.cache.unlock(match.node))
            return False
        slot = self.table.allocate()
        assert slot is not None
        req.slot, req.node = slot, match.node
        req.num_shared = req.num_pages = int(match.pages.size)
        req.num_dispatched = req.num_committed = req.num_shared * self.page_size
        self.table.set_pages(slot, 0, match.pages)
        grown = self.grow(req, req.num_known)
        assert grown, (req.rid, needed, self.num_available)
        return True

    def grow(self, req: Req, num_tokens: int) -> bool:
        """Ensure pages for the first `num_tokens` tokens of a running request; False if there are not enough."""
        if num_tokens <= req.num_pages * self.page_size:
            return True
        needed = pages_for(num_tokens, self.page_size) - req.num_pages
        if needed > self.num_available:
            return False
        if needed > self.allocator.num_free:
            self._free(self.cache.evict(needed - self.allocator.num_free))
        pages = self.allocator.allocate(needed)
        assert pages is not None, (needed, self.allocator.num_free)
        self.table.set_pages(req.slot, req.num_pages, pages)
        req.num_pages += needed
        self._changed.append(pages)
        return True

    def cache_prefix(self, req: Req, namespace: Hashable) -> None:
        """Insert the full pages of a running request's committed tokens into the prefix cache, unless the cache has
        those tokens under other pages: the request then keeps the pages of its own pass."""
        full = req.num_committed // self.page_size
        if (
            not self.use_prefix_cache
            or full <= req.num_shared
            or req.node is None
            or not self.cache.is_attached(req.node)
        ):
            return
        matched = self.cache.match(req.tokens[: full * self.page_size], namespace)
        if matched.pages.size > req.num_shared:
            return
        inserted = self.cache.insert(req.tokens[: full * self.page_size], self._pages(req, full), namespace)
        assert inserted.duplicates.size == 0, (req.rid, inserted.duplicates)
        self.cache.lock(inserted.node)
        self._free(self.cache.unlock(req.node))
        req.node, req.num_shared = inserted.node, full

    def release(self, req: Req, namespace: Hashable, *, cache: bool) -> None:
        """Release the slot and the pages of a request; with `cache`, its full pages go to the prefix cache."""
        assert req.node is not None, req.rid
        to_free, full = self._pages(req)[req.num_shared :], req.num_committed // self.page_size
        if cache and self._may_insert(req, full, namespace):
            inserted = self.cache.insert(req.tokens[: full * self.page_size], self._pages(req, full), namespace)
            to_free = np.concatenate([inserted.duplicates, self._pages(req)[max(full, req.num_shared) :]])
        self._free(to_free)
        self._free(self.cache.unlock(req.node))
        self.table.free(req.slot)
        req.slot, req.num_pages, req.num_shared, req.node = 0, 0, 0, None

    def kv_slots(self, req: Req, start: int, end: int) -> Int[np.ndarray, " R"]:
        """Return the KV slots of tokens [start, end) of a running request."""
        positions = np.arange(start, end)
        return self.table.pages[req.slot, positions // self.page_size] * self.page_size + positions % self.page_size

    def flush(self) -> int:
        """Drop all cached prefixes; returns the number of pages freed now. Running requests keep their pages."""
        pages = self.cache.flush()
        self._free(pages)
        return int(pages.size)

    def drain_changed_pages(self) -> Int32[np.ndarray, " P"]:
        """Return the pages handed out or freed since the last call: rows recorded for their slots are stale."""
        pages = np.concatenate(self._changed) if self._changed else np.zeros(0, np.int32)
        self._changed.clear()
        return pages

    def owned_slots(self, running: Iterable[Req]) -> Int[np.ndarray, " O"]:
        """The KV slots of all pages that a request or the cache holds."""
        pages = np.concatenate([self.cache.owned_pages(), *(self._pages(req) for req in running)]).astype(np.int64)
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def check_integrity(self, running: Iterable[Req]) -> list[Violation]:
        """Check the live state: every page has one owner, every lock of the prefix cache a holder and every slot of
        the page table is free or used."""
        holders = list(running)
        owners = {f"request {req.rid}": self._pages(req)[req.num_shared :] for req in holders}
        refs: dict[PrefixNode, int] = {}
        for req in holders:
            assert req.node is not None, req.rid
            refs[req.node] = refs.get(req.node, 0) + 1
        violations = self.allocator.check_integrity({**owners, "prefix cache": self.cache.owned_pages()})
        return [*violations, *self.cache.check_integrity(refs), *self.table.check_integrity()]

    def _may_insert(self, req: Req, full: int, namespace: Hashable) -> bool:
        """Whether the first `full` pages of a request that ends may go to the cache."""
        if not self.use_prefix_cache or req.node is None or not self.cache.is_attached(req.node):
            return False
        if not self._one_pass_prefixes:
            return True
        known = self.cache.match_length(req.tokens[: full * self.page_size], namespace) // self.page_size
        return known <= req.num_shared

    def _pages(self, req: Req, count: int | None = None) -> Int32[np.ndarray, " P"]:
        return self.table.pages[req.slot, : req.num_pages if count is None else count].copy()

    def _free(self, pages: Int32[np.ndarray, " P"]) -> None:
        if pages.size:
            self.allocator.free(pages)
            self._changed.append(pages)


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def _matchable_tokens(req: Req) -> int:
    """Tokens that may come from the cache: not the last, which must be fed to sample; none whose logprobs or counts are
    needed."""
    if req.source.sampling.is_penalized:
        return 0
    limit = req.num_known - 1
    if req.wants_prompt_logprobs and not req.is_prefilled:
        limit = min(limit, max(req.source.logprob_start_len - 1, 0))
    return limit
