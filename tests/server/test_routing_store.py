"""The store of rows: bytes and seconds bound it, live requests are untouched, and no reader gets short rows."""

import numpy as np
import pytest

from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.server.errors import ApiError
from routed_experts.server.routing_store import RoutingStore, StoredRows


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def stored_rows(rows=10, owner=""):
    ids = np.arange(rows * 2, dtype=np.uint8).reshape(rows, 1, 2)
    record = RoutedExperts(
        ids=ids,
        start=0,
        num_tokens=rows + 1,
        num_prompt_tokens=1,
        layer_ids=(0,),
        num_hidden_layers=1,
        num_experts=256,
        version_spans=((0, rows, 0),),
    )
    return StoredRows(record=record, token_ids=np.zeros(rows + 1, np.int32), owner=owner)


def new_store(*, max_bytes, clock, call_later=lambda seconds, call: None):
    return RoutingStore(max_bytes=max_bytes, ttl_s=10, clock=clock, call_later=call_later)


def code(call):
    with pytest.raises(ApiError) as caught:
        call()
    return caught.value.code


def test_rows_live_for_their_seconds():
    clock = Clock()
    store = new_store(max_bytes=10_000, clock=clock)
    entry = store.reserve("a", owner="", choices=range(2))
    assert code(lambda: store.get("a", 0, owner="")) == "routing_not_ready"
    store.fill(entry, 0, stored_rows())
    clock.now = 100  # not ended: it does not age
    assert store.get("a", 0, owner="").record.num_rows == 10
    assert code(lambda: store.get("a", 1, owner="")) == "routing_not_ready"
    store.fill(entry, 1, stored_rows())
    clock.now = 109.9
    assert store.nbytes == 2 * stored_rows().nbytes and store.get("a", 1, owner="")
    clock.now = 110
    assert code(lambda: store.get("a", 0, owner="")) == "routing_not_found"
    assert store.nbytes == 0


def test_the_oldest_finished_make_room_and_live_ones_stay():
    store = new_store(max_bytes=3 * stored_rows().nbytes, clock=Clock())
    entry = store.reserve("live", owner="", choices=range(2))
    store.fill(entry, 0, stored_rows())
    for name in ("one", "two", "three"):
        entry = store.reserve(name, owner="", choices=range(1))
        store.fill(entry, 0, stored_rows())
        assert store.nbytes <= 3 * stored_rows().nbytes
    assert code(lambda: store.get("one", 0, owner="")) == "routing_not_found"
    assert store.get("two", 0, owner="") and store.get("three", 0, owner="") and store.get("live", 0, owner="")


def test_rows_that_cannot_fit_are_not_stored():
    store = new_store(max_bytes=stored_rows().nbytes, clock=Clock())
    entry = store.reserve("big", owner="", choices=range(1))
    store.fill(entry, 0, stored_rows(rows=100))
    assert code(lambda: store.get("big", 0, owner="")) == "routing_not_found"
    assert store.nbytes == 0


def test_a_request_without_an_answer_leaves_nothing():
    store = new_store(max_bytes=10_000, clock=Clock())
    entry = store.reserve("gone", owner="", choices=range(2))
    store.fill(entry, 0, stored_rows())
    store.release(entry)
    assert store.nbytes == 0
    store.fill(entry, 1, stored_rows())
    assert store.nbytes == 0 and code(lambda: store.get("gone", 0, owner="")) == "routing_not_found"
    entry = store.reserve("done", owner="", choices=range(1))
    store.fill(entry, 0, stored_rows())
    store.release(entry)
    assert store.get("done", 0, owner="")


def test_an_owner_is_the_key_of_the_request():
    store = new_store(max_bytes=10_000, clock=Clock())
    entry = store.reserve("a", owner="me", choices=range(1))
    store.fill(entry, 0, stored_rows(owner="me"))
    assert code(lambda: store.get("a", 0, owner="you")) == "routing_of_another_key"
    assert code(lambda: store.delete("a", owner="")) == "routing_of_another_key"
    store.delete("a", owner="me")
    assert store.nbytes == 0


def test_an_id_that_is_used_again_belongs_to_the_newer_call():
    store = new_store(max_bytes=10_000, clock=Clock())
    old = store.reserve("a", owner="", choices=range(2))
    store.fill(old, 0, stored_rows())
    new = store.reserve("a", owner="", choices=range(2))
    store.fill(old, 1, stored_rows(rows=99))
    store.release(old)
    assert store.nbytes == 0 and code(lambda: store.get("a", 1, owner="")) == "routing_not_ready"
    store.fill(new, 0, stored_rows(rows=7))
    store.release(old)
    assert store.get("a", 0, owner="").record.num_rows == 7


def test_rows_expire_without_a_request_for_them():
    clock, timers = Clock(), []
    store = new_store(max_bytes=10_000, clock=clock, call_later=lambda seconds, call: timers.append((seconds, call)))
    store.fill(store.reserve("a", owner="", choices=[0]), 0, stored_rows())
    clock.now = 4
    store.fill(store.reserve("b", owner="", choices=[0]), 0, stored_rows())
    live = store.reserve("live", owner="", choices=[0, 1])
    store.fill(live, 0, stored_rows())
    ((seconds, call),) = timers
    assert seconds == 10, "one timer for all"
    clock.now = 10
    call()
    assert store.nbytes == 2 * stored_rows().nbytes and timers[1][0] == 4
    clock.now = 14
    timers[1][1]()
    assert store.nbytes == stored_rows().nbytes and len(timers) == 2, "what has not ended waits for its end"


def test_only_expected_choices_are_stored_and_end_the_request():
    clock = Clock()
    store = new_store(max_bytes=10_000, clock=clock)
    store.fill(store.reserve("a", owner="", choices=[1]), 1, stored_rows())
    assert store.get("a", 1, owner="") and code(lambda: store.get("a", 0, owner="")) == "routing_not_found"
    clock.now = 10
    assert code(lambda: store.get("a", 1, owner="")) == "routing_not_found"
