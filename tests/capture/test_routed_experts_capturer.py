"""The capturer: a page's rows from its step to its record, through retraction and reuse, on poisoned stores."""

import contextvars
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.capture import RoutedExpertsCapturer, get_global_experts_capturer, set_global_experts_capturer
from routed_experts.capture.device_cache import create_device_cache
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import CaptureDisabledError, CaptureUnsupportedError, RoutingIncompleteError

SPEC = CaptureSpec(num_hidden_layers=3, layer_ids=(1, 2), num_experts=8, top_k=2, router="9f3a")
PAGE_SIZE = 4


def build_capturer(num_slots=32):
    return RoutedExpertsCapturer.create(SPEC, num_slots=num_slots, page_size=PAGE_SIZE, enable=True)


def token_row(token, salt=0):
    """Distinct experts that identify the token."""
    return np.array([token % 8, (token + 1 + salt) % 8, (token + 2) % 8, (token + 3 + salt) % 8], np.uint8)


def token_rows(tokens, salt=0):
    return np.stack([token_row(token, salt) for token in tokens])


def fed(capturer, slots, tokens, version=0, salt=0):
    capturer.host_cache.overwrite_invalid_rows()
    capturer.on_forward_end(np.array(slots, np.int32), token_rows(tokens, salt), version)


SLOTS = np.array([9, 8, 20, 21, 22, 4], np.int32)  # of tokens 0 to 5


def test_a_record_holds_the_rows_of_its_tokens_by_the_row_law():
    capturer = build_capturer()
    fed(capturer, SLOTS, range(6))
    for start in range(7):
        record = capturer.collect(SLOTS[start:], start=start, num_tokens=7, num_prompt_tokens=3)
        record.validate()
        assert (record.start, record.num_rows, record.valid, record.router) == (start, 6 - start, None, "9f3a")
        assert np.array_equal(record.ids.reshape(-1, 4), token_rows(range(6))[start:])
        assert (record.layer_ids, record.num_hidden_layers, record.num_experts) == ((1, 2), 3, 8)
    assert capturer.collect(SLOTS[3:3], start=3, num_tokens=3, num_prompt_tokens=3).num_rows == 0


def test_the_last_token_has_a_row_only_when_it_was_fed():
    capturer = build_capturer()
    fed(capturer, SLOTS, range(6))
    assert capturer.collect(SLOTS, start=0, num_tokens=6, num_prompt_tokens=6, include_last=True).num_rows == 6
    assert capturer.collect(SLOTS, start=0, num_tokens=6, num_prompt_tokens=3).num_rows == 5
    with pytest.raises(RoutingIncompleteError, match="token 6 "):
        capturer.collect(SLOTS, start=0, num_tokens=7, num_prompt_tokens=3, include_last=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_come_with_their_rows_where_they_are_asked_for(dtype):
    """Through a record from a start, and through retraction: saved rows keep the weights of the pass that made them."""
    spec = dataclasses.replace(SPEC, weights_dtype=dtype)
    capturer = RoutedExpertsCapturer.create(spec, num_slots=32, page_size=PAGE_SIZE, enable=True)
    given = np.random.default_rng(0).random((8, 4)).astype(dtype)

    def feed(slots, tokens, weights):
        words = token_rows(tokens).view(np.int32), np.ascontiguousarray(weights).view(np.int32)
        capturer.host_cache.overwrite_invalid_rows()
        capturer.on_forward_end(np.array(slots, np.int32), np.hstack(words), 0)

    feed(SLOTS, range(6), given[:6])
    sizes = {"num_tokens": 7, "num_prompt_tokens": 3}
    whole = capturer.collect(SLOTS, start=0, weights=True, **sizes)
    assert whole.weights.dtype == given.dtype and np.array_equal(whole.weights.reshape(-1, 4), given[:6])
    assert capturer.collect(SLOTS, start=0, **sizes).weights is None
    part = capturer.collect(SLOTS[2:], start=2, weights=True, **sizes)
    assert part == whole[2:]
    saved = capturer.save(SLOTS)
    capturer.on_pages_allocated(np.unique(SLOTS // PAGE_SIZE))
    other = np.arange(12, 20, dtype=np.int32)
    feed(other, range(8), given[::-1])  # the second pass of all tokens, and two more: rows that were saved come first
    record = capturer.collect(other, start=0, num_tokens=9, num_prompt_tokens=3, saved=saved, weights=True)
    assert np.array_equal(record.weights.reshape(-1, 4), np.concatenate([given[:6], given[1::-1]]))
    blocks, stored = 2 * 4 * 4, spec.stored_bytes
    assert (capturer.device_bytes(10), stored) == (10 * (blocks + stored), 4 + 4 * given.itemsize)


def test_a_missing_row_is_an_error_that_names_its_token():
    capturer = build_capturer()
    fed(capturer, SLOTS[:2], range(2))
    fed(capturer, SLOTS[3:], range(3, 6))
    with pytest.raises(RoutingIncompleteError, match="token 2 is not known; expected all 5 rows from token 1 on"):
        capturer.collect(SLOTS[1:], start=1, num_tokens=7, num_prompt_tokens=3)
    capturer.host_cache.clear(SLOTS[4:5])
    with pytest.raises(RoutingIncompleteError, match="token 2 is not known, nor that of 1 more; expected all 5 rows"):
        capturer.collect(SLOTS[1:], start=1, num_tokens=7, num_prompt_tokens=3)
    assert capturer.collect(SLOTS[5:], start=5, num_tokens=7, num_prompt_tokens=3).num_rows == 1


def test_poison_is_never_returned_when_a_page_is_handed_out_again():
    capturer = build_capturer()
    fed(capturer, range(4, 8), range(4))
    capturer.on_pages_allocated(np.array([1]))
    capturer.host_cache.overwrite_invalid_rows()
    ids, valid, _ = capturer.get_routed_experts(np.arange(4, 8))
    assert not valid.any()
    assert (ids == 0xFF).all()
    with pytest.raises(RoutingIncompleteError, match="token 0 "):
        capturer.collect(np.arange(4, 8), start=0, num_tokens=5, num_prompt_tokens=4)
    fed(capturer, range(4, 8), range(10, 14))
    record = capturer.collect(np.arange(4, 8), start=10, num_tokens=15, num_prompt_tokens=12)
    assert np.array_equal(record.ids.reshape(-1, 4), token_rows(range(10, 14)))


def test_saved_rows_outrank_those_of_the_new_pages():
    capturer = build_capturer()
    fed(capturer, SLOTS[:4], range(4), version=1)
    saved = capturer.save(SLOTS[:4])
    capturer.on_pages_allocated(np.arange(8))
    fed(capturer, np.arange(12, 18), range(6), version=2, salt=2)
    record = capturer.collect(np.arange(12, 18), start=0, num_tokens=7, num_prompt_tokens=3, saved=saved)
    assert np.array_equal(
        record.ids.reshape(-1, 4), np.concatenate([token_rows(range(4)), token_rows(range(4, 6), salt=2)])
    )
    assert record.version_spans == ((0, 4, 1), (4, 6, 2))
    later = capturer.collect(np.arange(15, 18), start=3, num_tokens=7, num_prompt_tokens=3, saved=saved)
    assert later == record[3:]
    past = capturer.collect(np.arange(17, 18), start=5, num_tokens=7, num_prompt_tokens=3, saved=saved)
    assert past == record[5:]
    assert past.version_spans == ((5, 6, 2),)


def test_rows_saved_twice_stay_those_of_the_first_pass():
    capturer = build_capturer()
    fed(capturer, SLOTS[:3], range(3), version=1)
    first = capturer.save(SLOTS[:3])
    fed(capturer, np.arange(12, 17), range(5), version=2, salt=2)
    second = capturer.save(np.arange(12, 17), first)
    capturer.on_pages_allocated(np.arange(8))
    record = capturer.collect(
        np.arange(0), start=0, num_tokens=6, num_prompt_tokens=3, saved=second
    )  # aborted while it waited: no pages
    assert np.array_equal(
        record.ids.reshape(-1, 4), np.concatenate([token_rows(range(3)), token_rows(range(3, 5), salt=2)])
    )
    assert record.version_spans == ((0, 3, 1), (3, 5, 2))
    assert capturer.save(np.arange(12, 13), second).valid.size == 5  # retracted again before it came so far


def test_a_row_that_was_not_known_when_saved_comes_from_the_new_pages():
    capturer = build_capturer()
    fed(capturer, [9, 20], [0, 2], version=1)
    saved = capturer.save(SLOTS[:3])
    assert saved.valid.tolist() == [True, False, True]
    fed(capturer, np.arange(12, 15), range(3), version=2, salt=2)
    record = capturer.collect(np.arange(12, 15), start=0, num_tokens=4, num_prompt_tokens=3, saved=saved)
    assert np.array_equal(record.ids.reshape(-1, 4), np.stack([token_row(0), token_row(1, 2), token_row(2)]))
    assert record.version_spans == ((0, 1, 1), (1, 2, 2), (2, 3, 1))


def test_version_spans_join_equal_neighbours():
    capturer = build_capturer()
    for version, tokens in ((3, [0, 1]), (3, [2]), (4, [3]), (3, [4, 5])):
        fed(capturer, SLOTS[tokens], tokens, version=version)
    record = capturer.collect(SLOTS[1:], start=1, num_tokens=7, num_prompt_tokens=3)
    assert record.version_spans == ((1, 3, 3), (3, 4, 4), (4, 6, 3))


def test_collecting_does_not_tie_the_record_to_the_store():
    capturer = build_capturer()
    fed(capturer, SLOTS, range(6))
    record = capturer.collect(SLOTS, start=0, num_tokens=7, num_prompt_tokens=3)
    fed(capturer, SLOTS, range(6), salt=2)
    assert np.array_equal(record.ids.reshape(-1, 4), token_rows(range(6)))


def test_a_jitted_step_and_the_store_agree():
    capturer = build_capturer()
    ids = np.stack([token_rows(range(6))[:, :2], token_rows(range(6))[:, 2:]]).astype(np.int32)

    @jax.jit
    def step(ids):
        cache = create_device_cache(SPEC, 8)
        for layer, own in enumerate(jnp.pad(ids, ((0, 0), (0, 2), (0, 0)))):
            cache = cache.capture_fwd_routed_experts(layer, own)
        return cache.rows()

    capturer.on_forward_end(SLOTS, np.asarray(step(ids))[:6], 0)
    assert np.array_equal(
        capturer.collect(SLOTS, start=0, num_tokens=7, num_prompt_tokens=3).ids.reshape(-1, 4), token_rows(range(6))
    )


def test_off_drops_reported_counts_and_refuses_requests_for_them():
    off = RoutedExpertsCapturer.create(None, num_slots=32, page_size=PAGE_SIZE, enable=False)
    off.on_pages_allocated(np.array([1]))
    off.on_forward_end(SLOTS, token_rows(range(6)), 0)
    assert (off.enabled, off.host_bytes(), off.device_bytes(64), off.check_integrity(SLOTS)) == (False, 0, 0, [])
    for read in (
        lambda: off.get_routed_experts(SLOTS),
        lambda: off.save(SLOTS),
        lambda: off.collect(SLOTS, start=0, num_tokens=7, num_prompt_tokens=3),
    ):
        with pytest.raises(CaptureDisabledError, match="enable_return_routed_experts=True"):
            read()


def test_a_dense_model_cannot_be_captured():
    with pytest.raises(CaptureUnsupportedError, match="no MoE layer"):
        RoutedExpertsCapturer.create(None, num_slots=32, page_size=PAGE_SIZE, enable=True)


def test_bytes_are_those_of_the_arrays():
    capturer = build_capturer()
    cache = create_device_cache(SPEC, 16)
    assert capturer.device_bytes(16) == cache.ids.nbytes + cache.rows().nbytes
    assert capturer.host_bytes() == 32 * (4 + 4)


def test_rows_outside_held_pages_are_detected():
    capturer = build_capturer()
    fed(capturer, SLOTS, range(6))
    assert capturer.check_integrity(SLOTS) == []
    (violation,) = capturer.check_integrity(SLOTS[:-1])
    assert violation.name == "row_without_page"
    assert "1 of 6" in violation.detail


def test_the_global_capturer_is_off_until_it_is_set():
    def script():
        assert not get_global_experts_capturer().enabled
        capturer = build_capturer()
        set_global_experts_capturer(capturer)
        assert get_global_experts_capturer() is capturer

    contextvars.copy_context().run(script)
    assert not get_global_experts_capturer().enabled  # and closes with its context
