"""The host store against a dictionary, under any order of writes and forgetting."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from routed_experts.capture import host_cache
from routed_experts.capture.host_cache import _RoutedExpertsHostCache
from routed_experts.core.capture_spec import CaptureSpec

NUM_SLOTS, PAGE_SIZE = 12, 4
SPEC = CaptureSpec(num_hidden_layers=3, layer_ids=(0, 2), num_experts=300, top_k=2)
SLOTS = st.lists(st.integers(0, NUM_SLOTS - 1), unique=True, max_size=NUM_SLOTS)


def packed(rows, num_experts):
    """Rows packed in a loop: ids as little-endian bytes, padded with zeros to a whole word."""
    size = 1 if num_experts <= 256 else 2
    of_rows = [b"".join(int(expert).to_bytes(size, "little") for expert in row) for row in rows]
    words = [
        [int.from_bytes(row[at : at + 4].ljust(4, b"\0"), "little", signed=True) for at in range(0, len(row), 4)]
        for row in of_rows
    ]
    return np.array(words, np.int32).reshape(len(rows), -1) if words else np.zeros((0, 2), np.int32)


class HostCacheMachine(RuleBasedStateMachine):
    """The model is a dict from slot to (row, version); poison falls between any two operations."""

    def __init__(self):
        super().__init__()
        self.cache = _RoutedExpertsHostCache(NUM_SLOTS, SPEC, page_size=PAGE_SIZE)
        self.known = {}

    @rule(slots=SLOTS, version=st.integers(0, 3), seed=st.integers(0, 999))
    def put(self, slots, version, seed):
        rows = np.random.default_rng(seed).integers(0, 300, (len(slots), 4)).astype(np.uint16)
        self.cache.append(np.array(slots, np.int32), rows, version)
        self.known |= {slot: (row.tolist(), version) for slot, row in zip(slots, rows, strict=True)}

    @rule(slots=SLOTS, padding=st.integers(0, 3), columns=st.none() | st.integers(0, 7), data=st.data())
    def put_some(self, slots, padding, columns, data):
        """A padded step of which some requests have ended; with `columns`, packed behind so many others."""
        live = np.array(data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots))), bool)
        rows = np.random.default_rng(len(slots)).integers(0, 300, (len(slots) + padding, 4)).astype(np.uint16)
        brought = (
            rows if columns is None else np.hstack([np.full((len(rows), columns), -7, np.int32), packed(rows, 300)])
        )
        self.cache.append(np.array(slots, np.int32), brought, 5, live)
        self.known |= {
            slot: (row.tolist(), 5)
            for slot, row, is_live in zip(slots, rows[: len(slots)], live, strict=True)
            if is_live
        }

    @rule(slots=SLOTS)
    def clear(self, slots):
        self.cache.clear(np.array(slots, np.int32))
        self.known = {slot: row for slot, row in self.known.items() if slot not in slots}

    @rule(pages=st.lists(st.integers(0, NUM_SLOTS // PAGE_SIZE - 1), unique=True))
    def clear_pages(self, pages):
        self.cache.clear_pages(np.array(pages, np.int32))
        self.known = {slot: row for slot, row in self.known.items() if slot // PAGE_SIZE not in pages}

    @rule()
    def poison(self):
        self.cache.overwrite_invalid_rows()
        ids, valid, _ = self.cache.gather(np.arange(NUM_SLOTS))
        assert (ids[~valid] == 0xFFFF).all()

    @rule(owned=SLOTS)
    def check(self, owned):
        violations = self.cache.check_integrity(np.array(owned, np.int32))
        orphaned = sorted(set(self.known) - set(owned))
        assert [violation.name for violation in violations] == ["row_without_page"] * bool(orphaned)
        assert not orphaned or violations[0].detail.startswith(f"{len(orphaned)} of {len(self.known)} ")

    @rule()
    def read(self):
        self.agrees()

    def teardown(self):
        self.agrees()

    def agrees(self):
        slots = np.arange(NUM_SLOTS)[::-1]
        ids, valid, versions = self.cache.gather(slots)
        assert (ids.shape, ids.dtype, versions.dtype) == ((NUM_SLOTS, 2, 2), np.uint16, np.int32)
        got = {int(s): (ids[i].reshape(-1).tolist(), int(versions[i])) for i, s in enumerate(slots) if valid[i]}
        assert got == self.known


class WeightsMachine(RuleBasedStateMachine):
    """The model is a dict from slot to the weights of its row; ids of 300 experts are filed with them."""

    spec = replace(SPEC, weights_dtype="float32")

    def __init__(self):
        super().__init__()
        self.cache = _RoutedExpertsHostCache(NUM_SLOTS, self.spec, page_size=PAGE_SIZE)
        self.known = {}

    @rule(slots=SLOTS, padding=st.integers(0, 3), columns=st.integers(0, 7), data=st.data())
    def put(self, slots, padding, columns, data):
        """A padded step of which some requests have ended, packed behind some other columns."""
        live = np.array(data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots))), bool)
        rng = np.random.default_rng(data.draw(st.integers(0, 999)))
        ids = rng.integers(0, 300, (len(slots) + padding, 4)).astype(np.uint16)
        weights = rng.standard_normal(ids.shape).astype(self.dtype)
        filled = weights.view(np.int32)  # an even number of weights fills its words
        table = np.hstack([np.full((len(ids), columns), -7, np.int32), packed(ids, 300), filled])
        self.cache.append(np.array(slots, np.int32), table, 1, live)
        self.known |= {
            slot: (row.tolist(), own.tolist())
            for slot, row, own, is_live in zip(slots, ids, weights, live, strict=False)
            if is_live
        }

    @rule(pages=st.lists(st.integers(0, NUM_SLOTS // PAGE_SIZE - 1), unique=True))
    def clear_pages(self, pages):
        self.cache.clear_pages(np.array(pages, np.int32))
        self.known = {slot: row for slot, row in self.known.items() if slot // PAGE_SIZE not in pages}

    @rule()
    def poison(self):
        self.cache.overwrite_invalid_rows()
        _, valid, _ = self.cache.gather(np.arange(NUM_SLOTS))
        assert np.isnan(self.cache.gather_weights(np.arange(NUM_SLOTS)).astype(np.float32)[~valid]).all()

    @rule()
    def read(self):
        slots = np.arange(NUM_SLOTS)[::-1]
        ids, valid, _ = self.cache.gather(slots)
        weights = self.cache.gather_weights(slots)
        assert (weights.shape, weights.dtype) == ((NUM_SLOTS, 2, 2), self.dtype)
        got = {
            int(slot): (ids[index].reshape(-1).tolist(), weights[index].reshape(-1).tolist())
            for index, slot in enumerate(slots)
            if valid[index]
        }
        assert got == self.known

    @property
    def dtype(self):
        return np.dtype(self.spec.weights_dtype)

    def teardown(self):
        self.read()


class HalfWeightsMachine(WeightsMachine):
    """The same in bfloat16."""

    spec = replace(SPEC, weights_dtype="bfloat16")


for machine in (WeightsMachine, HalfWeightsMachine):
    machine.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
test_the_store_of_weights_agrees_with_a_dictionary = WeightsMachine.TestCase
test_the_store_of_half_weights_agrees_with_a_dictionary = HalfWeightsMachine.TestCase


HostCacheMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_the_store_agrees_with_a_dictionary = HostCacheMachine.TestCase


def test_what_was_gathered_is_a_copy():
    cache = _RoutedExpertsHostCache(NUM_SLOTS, SPEC)
    slots = np.array([3, 4])
    cache.append(slots, np.full((2, 4), 256, np.uint16), 0)
    ids, _, _ = cache.gather(slots)
    cache.append(slots, np.zeros((2, 4), np.uint16), 1)
    assert (ids == 256).all()


@pytest.mark.parametrize(("slots", "error"), [([-1], AssertionError), ([NUM_SLOTS], IndexError)])
def test_a_slot_outside_the_store_is_refused(slots, error):
    cache = _RoutedExpertsHostCache(NUM_SLOTS, SPEC)
    cache.append(np.array(slots), np.zeros((1, 4), np.uint16), 0)
    with pytest.raises(error):
        cache.flush()
    with pytest.raises(error):
        cache.gather(np.array(slots))


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((2, 3), np.uint16),
        np.zeros((1, 4), np.uint16),
        np.zeros((2, 4), np.int64),
        np.zeros((2, 4), np.uint8),
        np.zeros((2, 4), np.float32),
        np.zeros((2, 1), np.int32),
    ],
)
def test_rows_of_another_shape_or_dtype_are_refused(rows):
    cache = _RoutedExpertsHostCache(NUM_SLOTS, SPEC)
    cache.append(np.array([1, 2]), rows, 0)
    with pytest.raises(AssertionError):
        cache.flush()


@pytest.mark.parametrize("num_experts", [32, 256, 300])
@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_rows_may_come_as_ids_and_packed_behind_other_columns_in_turn(num_experts, top_k):
    spec = CaptureSpec(num_hidden_layers=3, layer_ids=(0, 1, 2), num_experts=num_experts, top_k=top_k)
    cache, noise = _RoutedExpertsHostCache(NUM_SLOTS, spec), np.random.default_rng(0)
    expected = noise.integers(0, num_experts, (10, 3 * top_k))
    for step, columns in enumerate((None, 2, 2, 0, 7)):  # what pads a step may be anything
        rows = np.pad(expected[2 * step : 2 * step + 2], ((0, step), (0, 0)), constant_values=7).astype(spec.dtype)
        if columns is not None:
            rows = np.hstack([noise.integers(-9, 9, (len(rows), columns)).astype(np.int32), packed(rows, num_experts)])
            assert rows.shape[1] == columns + spec.row_words
        cache.append(np.arange(2 * step, 2 * step + 2), rows, step)
    ids, valid, versions = cache.gather(np.arange(10))
    assert np.array_equal(ids.reshape(10, -1), expected) and ids.dtype == spec.dtype
    assert valid.all() and versions.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
def test_a_step_that_lacks_rows_is_detected_beside_a_padded_one(dtype):
    cache = _RoutedExpertsHostCache(NUM_SLOTS, SPEC)
    cache.append(np.arange(4), np.zeros((6, 4), dtype), 0)
    cache.append(np.arange(4, 8), np.zeros((2, 4), dtype), 0)
    with pytest.raises(AssertionError):
        cache.flush()


def test_the_size_is_one_byte_an_id_a_slot_and_four_for_its_version():
    spec = CaptureSpec(num_hidden_layers=48, layer_ids=tuple(range(48)), num_experts=128, top_k=8)
    assert _RoutedExpertsHostCache(64, spec).nbytes == 64 * (384 + 4)


@pytest.mark.parametrize(("dtype", "size"), [(None, 0), ("float32", 4), ("bfloat16", 2)])
def test_weights_take_bytes_of_their_own(dtype, size):
    spec = CaptureSpec(num_hidden_layers=48, layer_ids=tuple(range(48)), num_experts=128, top_k=8, weights_dtype=dtype)
    assert _RoutedExpertsHostCache(64, spec).nbytes == 64 * (384 + 4 + 384 * size)
    assert (spec.row_bytes, spec.weight_bytes, spec.stored_bytes) == (384, 384 * size, 384 * (1 + size))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_experts", "layers", "top_k"), [(8, 1, 1), (300, 3, 1), (300, 5, 3)])
def test_an_odd_number_of_ids_fills_its_last_word_with_zeros(dtype, num_experts, layers, top_k):
    spec = CaptureSpec(
        num_hidden_layers=layers,
        layer_ids=tuple(range(layers)),
        num_experts=num_experts,
        top_k=top_k,
        weights_dtype=dtype,
    )
    rng, cache = np.random.default_rng(7), _RoutedExpertsHostCache(NUM_SLOTS, spec)
    ids = rng.integers(0, num_experts, (4, layers * top_k)).astype(spec.dtype)
    weights = rng.standard_normal(ids.shape).astype(dtype)
    even = np.pad(weights, ((0, 0), (0, weights.shape[1] % 2 if dtype == "bfloat16" else 0)))
    table = np.hstack([packed(ids, num_experts), even.view(np.int32)])
    assert table.shape[1] == spec.row_words
    cache.append(np.arange(4), table, 0)
    assert np.array_equal(cache.gather(np.arange(4))[0].reshape(ids.shape), ids)
    assert np.array_equal(cache.gather_weights(np.arange(4)).reshape(ids.shape), weights)


def test_rows_without_weights_are_refused_where_these_are_recorded():
    cache = _RoutedExpertsHostCache(NUM_SLOTS, replace(SPEC, weights_dtype="float32"))
    cache.append(np.arange(2), np.zeros((2, 4), np.uint16), 0)
    with pytest.raises(AssertionError, match="rows without their weights"):
        cache.flush()


def test_what_waits_to_be_filed_is_bounded():
    cache = _RoutedExpertsHostCache(NUM_SLOTS, SPEC, page_size=PAGE_SIZE)
    for step in range(1000):
        cache.append(np.array([step % NUM_SLOTS]), np.full((1, 4), step % 300, np.uint16), step)
        cache.clear_pages(np.array([(step + 5) % NUM_SLOTS // PAGE_SIZE]))
        assert len(cache._steps) <= host_cache._MAX_BUFFERED_STEPS
    for step in range(1000, 1040):  # what pads a step waits as well
        cache.append(np.array([step % NUM_SLOTS]), np.zeros((100, 4), np.uint16), step)
        assert sum(len(rows) for _, rows, *_ in cache._steps[:-1]) < host_cache._MAX_BUFFERED_ROWS
    for step in (2000, 2001):
        cache.append(np.arange(5000) % NUM_SLOTS, np.zeros((5000, 4), np.uint16), step)
    assert len(cache._steps) == 1, "a large step is filed when the next one comes"
    for _ in range(1000):
        cache.clear_pages(np.array([1]))
        assert len(cache._invalidated) < 2 * host_cache._MAX_BUFFERED_STEPS


class OnDevice:
    """Rows whose copy to the host has to be waited for."""

    def __init__(self, rows):
        self.rows, self.num_copies = rows, 0

    def __len__(self):
        return len(self.rows)

    def __array__(self, dtype=None, copy=None):
        self.num_copies += 1
        return self.rows


def test_rows_stay_on_the_device_until_they_are_taken_off_it():
    cache = _RoutedExpertsHostCache(NUM_SLOTS, SPEC, page_size=PAGE_SIZE)
    cache.settle()  # nothing is buffered
    steps = [OnDevice(np.full((1, 4), step, np.uint16)) for step in range(3)]
    for step, rows in enumerate(steps):
        cache.append(np.array([step]), rows, step)
        assert rows.num_copies == 0, "a step waits for no copy"
        cache.settle()
        cache.settle()
        assert [own.num_copies for own in steps] == [1] * (step + 1) + [0] * (2 - step)
    ids, valid, _ = cache.gather(np.arange(3))
    assert valid.all()
    np.testing.assert_array_equal(ids.reshape(3, -1), np.arange(3)[:, None].repeat(4, axis=1))
    assert [own.num_copies for own in steps] == [1, 1, 1]


def test_after_a_filing_that_failed_no_row_is_known():
    cache = _RoutedExpertsHostCache(NUM_SLOTS, SPEC, page_size=PAGE_SIZE)
    cache.append(np.arange(4), np.zeros((4, 4), np.uint16), 0)
    cache.flush()
    cache.append(np.arange(4), np.zeros((4, 3), np.uint16), 0)
    cache.clear_pages(np.array([0]))
    with pytest.raises(AssertionError):
        cache.flush()
    assert not cache.gather(np.arange(NUM_SLOTS))[1].any(), "page 0 was to be forgotten"


def test_rows_may_lie_in_any_order_of_axes():
    cache, rows = _RoutedExpertsHostCache(NUM_SLOTS, SPEC), np.arange(16, dtype=np.uint16).reshape(4, 4)
    cache.append(np.arange(4), np.asfortranarray(rows), 0)
    assert np.array_equal(cache.gather(np.arange(4))[0].reshape(4, 4), rows)


@pytest.mark.parametrize("rows", [np.full((2, 4), 300, np.uint16), np.full((2, 2), -1, np.int32)])
def test_ids_of_no_expert_are_refused_before_a_record_leaves(rows):
    cache = _RoutedExpertsHostCache(NUM_SLOTS, SPEC)
    cache.append(np.arange(2), rows, 0)
    with pytest.raises(AssertionError, match="of 300"):
        cache.gather(np.arange(2))


def test_the_padding_of_a_step_is_freed_before_its_rows_are_counted():
    cache = _RoutedExpertsHostCache(NUM_SLOTS, SPEC)
    cache.append(np.arange(2), np.zeros((64, 4), np.uint16), 0)
    cache.flush()
    cache.append(np.arange(2), np.zeros((64, 9), np.int32), 0)
    cache.flush()
    owned = [(rows if rows.base is None else rows.base, rows.shape) for rows, _ in cache._counts._pending]
    assert [(base.nbytes, shape) for base, shape in owned] == [(2 * SPEC.row_bytes, (2, 4))] * 2
