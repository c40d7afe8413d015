"""Which pages a request holds: admission, growth, sharing, release."""

import numpy as np
import pytest

from routed_experts.scheduling.request_pages import RequestPages, pages_for
from routed_experts.scheduling.schedule_batch import Req, ReqState
from support.numpy_device import source

PAGE = 4


def make_pages(num_pages=8, *, cache=True, **named):
    return RequestPages(
        num_pages=num_pages + 1, page_size=PAGE, num_request_slots=4, table_width=8, use_prefix_cache=cache, **named
    )


def admitted(pages, prompt, *, space=None, spare=0, **named):
    """A running request whose prompt has been fed and read back."""
    req = Req(source(prompt, max_tokens=8, **named))
    assert pages.admit(req, space, spare=spare)
    req.state, req.num_dispatched = ReqState.RUNNING, req.num_known
    req.num_committed = req.num_dispatched
    req.is_prefilled = True
    return req


def test_pages_for_rounds_up():
    assert [pages_for(tokens, 4) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_admission_leaves_the_spare_pages_alone_and_nothing_behind():
    pages = make_pages(num_pages=3)
    req = Req(source(range(8)))
    assert not pages.admit(req, None, spare=2)
    assert pages.num_available == 3 and pages.table.num_free == 3 and pages.check_integrity([]) == []
    assert pages.admit(req, None, spare=1)
    assert pages.num_available == 1 and pages.check_integrity([req]) == []


def test_admission_needs_a_request_slot():
    pages = make_pages()
    reqs = [admitted(pages, [index], rid=str(index)) for index in range(3)]
    assert not pages.admit(Req(source([9])), None, spare=0)
    assert pages.check_integrity(reqs) == []


def test_growth_evicts_the_cache_before_it_gives_up():
    pages = make_pages(num_pages=4)
    first = admitted(pages, range(8))
    pages.release(first, None, cache=True)
    assert pages.allocator.num_free == 2 and pages.num_available == 4
    second = admitted(pages, range(50, 58))
    assert pages.grow(second, 16) and pages.num_available == 0
    assert not pages.grow(second, 17)
    assert second.num_pages == 4 and pages.check_integrity([second]) == []


def test_a_shared_prompt_is_found_while_its_first_owner_still_runs():
    pages = make_pages()
    first = admitted(pages, range(10))
    pages.cache_prefix(first, None)
    assert first.num_shared == 2
    second = admitted(pages, range(10), rid="s")
    assert second.num_shared == 2 and np.array_equal(pages.kv_slots(first, 0, 8), pages.kv_slots(second, 0, 8))
    assert not np.array_equal(pages.kv_slots(first, 8, 10), pages.kv_slots(second, 8, 10))
    assert pages.check_integrity([first, second]) == []
    pages.release(first, None, cache=True)
    assert pages.check_integrity([second]) == []


def test_two_that_computed_one_prompt_keep_their_own_pages():
    pages = make_pages()
    first, second = admitted(pages, range(8)), admitted(pages, range(8), rid="s")
    own = pages.kv_slots(second, 0, 8)
    pages.cache_prefix(first, None)
    pages.cache_prefix(second, None)
    assert second.num_shared == 0 and np.array_equal(pages.kv_slots(second, 0, 8), own)
    pages.release(second, None, cache=True)
    pages.release(first, None, cache=True)
    assert pages.num_available == 8 and pages.allocator.num_free == 6 and pages.check_integrity([]) == []


@pytest.mark.parametrize("one_pass", [False, True])
def test_a_page_follows_pages_of_another_pass_unless_these_are_told_apart(one_pass):
    pages = make_pages(one_pass_prefixes=one_pass)
    short, long = admitted(pages, range(4)), admitted(pages, range(12), rid="s")
    pages.release(short, None, cache=True)
    pages.release(long, None, cache=True)
    later = Req(source(range(16), rid="t"))
    assert pages.num_cached(later, None) == (PAGE if one_pass else 3 * PAGE)
    assert pages.num_available == 8 and pages.check_integrity([]) == []
    longer = admitted(pages, range(12), rid="u")  # computed behind the cached page, so cached behind it
    pages.release(longer, None, cache=True)
    assert pages.num_cached(later, None) == 3 * PAGE and pages.check_integrity([]) == []


def test_released_pages_without_keep_are_free():
    pages = make_pages()
    req = admitted(pages, range(10))
    pages.release(req, None, cache=False)
    assert (pages.allocator.num_free, req.num_pages, req.slot, req.node) == (8, 0, 0, None)


def test_a_flush_frees_the_idle_and_running_requests_go_on():
    pages = make_pages()
    idle, runs = admitted(pages, range(8)), admitted(pages, range(20, 30), rid="s")
    pages.release(idle, None, cache=True)
    pages.cache_prefix(runs, None)
    assert pages.flush() == 2
    assert pages.check_integrity([runs]) == []
    later = admitted(pages, range(20, 30), rid="t")
    assert later.num_shared == 0, "a flushed prefix is matched"
    for req in (runs, later):
        pages.release(req, None, cache=True)
    assert pages.num_available == 8 and pages.check_integrity([]) == []


def test_every_page_that_changes_hands_is_reported_once():
    pages = make_pages()
    req = admitted(pages, range(10))
    handed_out = pages.drain_changed_pages()
    assert sorted(handed_out) == sorted(pages.table.pages[req.slot, :3])
    assert pages.drain_changed_pages().size == 0
    pages.release(req, None, cache=True)
    assert pages.drain_changed_pages().tolist() == [handed_out[2]]  # two full pages stay in the cache
    pages.flush()
    assert sorted(pages.drain_changed_pages()) == sorted(handed_out[:2])


def test_owned_slots_are_those_of_requests_and_cache():
    pages = make_pages()
    first, second = admitted(pages, range(8)), admitted(pages, range(30, 33), rid="s")
    pages.release(first, None, cache=True)
    owned = pages.owned_slots([second])
    assert np.unique(owned).size == owned.size == 3 * PAGE
    assert set(pages.kv_slots(second, 0, 3)) <= set(owned.tolist())


def test_without_a_cache_nothing_is_retained():
    pages = make_pages(cache=False)
    req = admitted(pages, range(10))
    pages.cache_prefix(req, None)
    assert req.num_shared == 0
    pages.release(req, None, cache=True)
    assert pages.allocator.num_free == 8
