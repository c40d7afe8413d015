"""The store of kept rows: bytes and seconds bound it, live requests are untouched, and nobody gets short rows."""

import numpy as np
import pytest

from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.server.errors import ApiError
from routed_experts.server.routing_store import KeptRows, RoutingStore


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def kept(rows=10, owner=""):
    ids = np.arange(rows * 2, dtype=np.uint8).reshape(rows, 1, 2)
    record = RoutedExperts(
        ids=ids, start=0, num_tokens=rows + 1, num_prompt_tokens=1, layer_ids=(0,), num_hidden_layers=1, num_experts=256,
        version_spans=((0, rows, 0),),
    )  # fmt: skip
    return KeptRows(record=record, token_ids=np.zeros(rows + 1, np.int32), owner=owner)


def code(call):
    with pytest.raises(ApiError) as told:
        call()
    return told.value.code


def test_rows_live_for_their_seconds():
    clock = Clock()
    store = RoutingStore(max_bytes=10_000, ttl_s=10, clock=clock)
    store.expect("a", owner="", num_choices=2)
    assert code(lambda: store.get("a", 0, owner="")) == "routing_not_ready"
    store.put("a", 0, kept())
    clock.now = 100  # not ended: it does not age
    assert store.get("a", 0, owner="").record.num_rows == 10
    assert code(lambda: store.get("a", 1, owner="")) == "routing_not_ready"
    store.put("a", 1, kept())
    clock.now = 109.9
    assert store.nbytes == 2 * kept().nbytes and store.get("a", 1, owner="")
    clock.now = 110
    assert code(lambda: store.get("a", 0, owner="")) == "routing_not_found"
    assert store.nbytes == 0


def test_the_oldest_finished_make_room_and_live_ones_stay():
    store = RoutingStore(max_bytes=3 * kept().nbytes, ttl_s=10, clock=Clock())
    store.expect("live", owner="", num_choices=2)
    store.put("live", 0, kept())
    for name in ("one", "two", "three"):
        store.expect(name, owner="", num_choices=1)
        store.put(name, 0, kept())
        assert store.nbytes <= 3 * kept().nbytes
    assert code(lambda: store.get("one", 0, owner="")) == "routing_not_found"
    assert store.get("two", 0, owner="") and store.get("three", 0, owner="") and store.get("live", 0, owner="")


def test_rows_that_cannot_fit_are_not_kept():
    store = RoutingStore(max_bytes=kept().nbytes, ttl_s=10, clock=Clock())
    store.expect("big", owner="", num_choices=1)
    store.put("big", 0, kept(rows=100))
    assert code(lambda: store.get("big", 0, owner="")) == "routing_not_found"
    assert store.nbytes == 0


def test_a_request_without_an_answer_leaves_nothing():
    store = RoutingStore(max_bytes=10_000, ttl_s=10, clock=Clock())
    store.expect("gone", owner="", num_choices=2)
    store.put("gone", 0, kept())
    store.forget("gone")
    assert store.nbytes == 0
    store.put("gone", 1, kept())
    assert store.nbytes == 0 and code(lambda: store.get("gone", 0, owner="")) == "routing_not_found"
    store.expect("done", owner="", num_choices=1)
    store.put("done", 0, kept())
    store.forget("done")
    assert store.get("done", 0, owner="")


def test_an_owner_is_the_key_that_asked():
    store = RoutingStore(max_bytes=10_000, ttl_s=10, clock=Clock())
    store.expect("a", owner="me", num_choices=1)
    store.put("a", 0, kept(owner="me"))
    assert code(lambda: store.get("a", 0, owner="you")) == "routing_of_another_key"
    assert code(lambda: store.delete("a", owner="")) == "routing_of_another_key"
    store.delete("a", owner="me")
    assert store.nbytes == 0
