"""The device cache against a NumPy loop: under jit, in a scan, twice in a row, and never by side effect."""

import re
import struct
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.capture.device_cache import (
    _count_by_comparing,
    _count_by_scattering,
    _RoutedExpertsDeviceCache,
    create_device_cache,
)
from routed_experts.core.capture_spec import CaptureSpec

pytestmark = pytest.mark.usefixtures("fast_compilation")

NUM_TOKENS = 6


def build_spec(num_experts=8, num_layers=5, top_k=3):
    return CaptureSpec(
        num_hidden_layers=num_layers, layer_ids=tuple(range(num_layers)), num_experts=num_experts, top_k=top_k
    )


def random_ids(spec, seed=0, num_tokens=NUM_TOKENS):
    shape = (spec.num_moe_layers, num_tokens, spec.top_k)
    return np.random.default_rng(seed).integers(0, spec.num_experts, shape).astype(np.int32)


def rows_by_loop(ids):
    num_layers, num_tokens, top_k = ids.shape
    rows = np.zeros((num_tokens, num_layers * top_k), np.int64)
    for layer in range(num_layers):
        for token in range(num_tokens):
            for slot in range(top_k):
                rows[token, layer * top_k + slot] = ids[layer, token, slot]
    return rows


def scanned(spec):
    @jax.jit
    def step(ids):
        def layer(cache, scanned_in):
            index, layer_ids = scanned_in
            return cache.capture_fwd_routed_experts(index, layer_ids), None

        cache = _RoutedExpertsDeviceCache.create(ids.shape[1], spec)
        return jax.lax.scan(layer, cache, (jnp.arange(spec.num_moe_layers), ids))[0].rows()

    return step


@pytest.mark.parametrize("num_experts", [8, 256, 257, 65_535])
def test_a_scanned_step_returns_the_rows_of_a_numpy_loop(num_experts):
    spec = build_spec(num_experts)
    ids = random_ids(spec)
    ids[0, 0, 0] = num_experts - 1
    rows = scanned(spec)(ids)
    assert rows.dtype == spec.dtype
    assert np.array_equal(np.asarray(rows), rows_by_loop(ids))


@pytest.mark.parametrize("num_experts", [8, 256, 257, 512])
@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
def test_packed_words_are_the_same_rows_to_the_byte(num_experts, top_k):
    spec = CaptureSpec(num_hidden_layers=5, layer_ids=(0, 2, 4), num_experts=num_experts, top_k=top_k)
    ids = np.random.default_rng(top_k).integers(0, num_experts, (spec.row_ids, 7)).astype(np.int32)
    ids[-1, -1], ids[0, 0] = num_experts - 1, -1  # -1: not written
    cache = replace(_RoutedExpertsDeviceCache.create(7, spec), ids=jnp.asarray(ids))
    words = np.asarray(jax.jit(lambda cache: cache.packed_rows())(cache))
    assert words.dtype == np.int32 and words.shape == (spec.row_words, 7)
    for row, packed in zip(np.asarray(cache.rows()), words.T, strict=True):
        assert packed.tobytes() == row.tobytes().ljust(4 * spec.row_words, b"\0")


def weighted(dtype, **sizes):
    return replace(build_spec(**sizes), weights_dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_experts", "num_layers", "top_k"), [(8, 5, 3), (257, 2, 4), (256, 1, 1)])
def test_weights_are_packed_behind_the_ids_to_the_byte(dtype, num_experts, num_layers, top_k):
    """Against struct: bfloat16 is the upper half of a float32, rounded to nearest, ties to even."""
    spec = weighted(dtype, num_experts=num_experts, num_layers=num_layers, top_k=top_k)
    rng, ids = np.random.default_rng(3), random_ids(spec)
    values = rng.standard_normal((num_layers, NUM_TOKENS, top_k)).astype(np.float32)

    @jax.jit
    def step(ids, values):
        cache = _RoutedExpertsDeviceCache.create(NUM_TOKENS, spec)
        for layer in range(num_layers):
            cache = cache.capture_fwd_routed_experts(jnp.int32(layer), ids[layer], weights=values[layer])
        return cache.rows(), cache.packed_rows()

    rows, words = step(ids, values)
    assert rows.shape == (NUM_TOKENS, spec.row_words) and np.array_equal(rows.T, words)
    narrow = rows_by_loop(ids).astype(spec.dtype)
    for token, row in enumerate(np.asarray(rows)):
        expected = narrow[token].tobytes().ljust(4 * spec.id_words, b"\0")
        floats = values[:, token].reshape(-1).tolist()
        if dtype == "float32":
            expected += struct.pack(f"<{len(floats)}f", *floats)
        else:
            expected += b"".join(rounded_half(value) for value in floats)
        assert row.tobytes() == expected.ljust(4 * spec.row_words, b"\0")


def rounded_half(value):
    """The two bytes of a bfloat16."""
    [bits] = struct.unpack("<I", struct.pack("<f", value))
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to_bytes(2, "little")


def test_weights_of_every_layer_are_beside_its_ids():
    spec, rng = weighted("float32"), np.random.default_rng(4)
    ids, values = random_ids(spec), rng.random((5, NUM_TOKENS, 3)).astype(np.float32)
    cache = _RoutedExpertsDeviceCache.create(NUM_TOKENS, spec)
    for layer in range(5):
        cache = cache.capture_fwd_routed_experts(layer, jnp.asarray(ids[layer]), weights=jnp.asarray(values[layer]))
    assert np.array_equal(np.asarray(cache.weights).reshape(5, 3, NUM_TOKENS), values.swapaxes(1, 2))


def test_a_layer_without_its_weights_is_refused_where_they_are_recorded():
    empty = _RoutedExpertsDeviceCache.create(NUM_TOKENS, weighted("float32"))
    with pytest.raises(AssertionError, match="needs those of every layer"):
        empty.capture_fwd_routed_experts(0, jnp.zeros((NUM_TOKENS, 3), jnp.int32))


def test_unrolled_layers_in_any_order_give_the_same_rows():
    spec = build_spec()
    ids = random_ids(spec)

    @jax.jit
    def unrolled(ids):
        cache = _RoutedExpertsDeviceCache.create(NUM_TOKENS, spec)
        for layer in reversed(range(spec.num_moe_layers)):
            cache = cache.capture_fwd_routed_experts(layer, ids[layer])
        return cache.rows()

    assert np.array_equal(unrolled(ids), rows_by_loop(ids))


def test_the_second_step_records_its_own_ids_and_compiles_nothing():
    spec = build_spec()
    step = scanned(spec)
    first, second = random_ids(spec, seed=1), random_ids(spec, seed=2)
    rows = step(first)
    assert np.array_equal(step(second), rows_by_loop(second))
    assert np.array_equal(rows, rows_by_loop(first))
    assert step._cache_size() == 1


def test_no_tracer_leaks():
    spec = build_spec()
    with jax.checking_leaks():
        assert np.array_equal(scanned(spec)(random_ids(spec)), rows_by_loop(random_ids(spec)))


def test_a_write_is_a_new_value():
    spec = build_spec()
    empty = _RoutedExpertsDeviceCache.create(NUM_TOKENS, spec)
    ids = random_ids(spec)[0]
    written = empty.capture_fwd_routed_experts(1, jnp.asarray(ids))
    assert (np.asarray(empty.ids) == -1).all()
    assert np.array_equal(written.rows()[:, 3:6], ids)


def test_a_layer_that_was_not_written_is_no_expert():
    rows = _RoutedExpertsDeviceCache.create(NUM_TOKENS, build_spec(8)).rows()
    assert (np.asarray(rows) == 0xFF).all()
    assert (np.asarray(_RoutedExpertsDeviceCache.create(NUM_TOKENS, build_spec(257)).rows()) == 0xFFFF).all()


def test_the_carry_of_a_scan_is_written_in_place():
    spec = build_spec(num_experts=128, num_layers=48, top_k=8)
    compiled = scanned(spec).lower(jax.ShapeDtypeStruct((48, 256, 8), jnp.int32)).compile()
    block_bytes = 48 * 256 * 8 * 4
    assert not re.findall(r"= s32\[384,256\]\S* copy\(", compiled.as_text())
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * block_bytes


def test_ids_of_another_shape_or_layer_are_refused():
    cache = _RoutedExpertsDeviceCache.create(NUM_TOKENS, build_spec())
    with pytest.raises(AssertionError, match="shared experts"):
        cache.capture_fwd_routed_experts(0, jnp.zeros((NUM_TOKENS, 4), jnp.int32))
    with pytest.raises(AssertionError, match="expected 0 to 4"):
        cache.capture_fwd_routed_experts(5, jnp.zeros((NUM_TOKENS, 3), jnp.int32))


def test_ids_of_another_integer_type_are_cast_explicitly():
    spec = build_spec()
    ids = jnp.ones((NUM_TOKENS, 3), jnp.uint8)
    cache = _RoutedExpertsDeviceCache.create(NUM_TOKENS, spec).capture_fwd_routed_experts(jnp.uint8(0), ids)
    assert cache.ids.dtype == jnp.int32


def test_off_is_an_empty_pytree():
    assert jax.tree.leaves(create_device_cache(None, NUM_TOKENS)) == []
    assert len(jax.tree.leaves(create_device_cache(build_spec(), NUM_TOKENS))) == 1


@pytest.mark.parametrize("how", [_count_by_scattering, _count_by_comparing])
def test_counts_grow_by_the_bincount_of_what_ran(how):
    """By phase, layer and expert; slots of padding, and those that are empty, are none."""
    rng, shape = np.random.default_rng(0), (2, 3, 5)
    keys = rng.integers(-1, 10, (3, 4, 17)).astype(np.int32)
    before = rng.integers(0, 9, shape).astype(np.int32)
    expected = before.copy()
    for layer in range(3):
        expected[:, layer] += np.bincount(keys[layer][keys[layer] >= 0], minlength=10).reshape(2, 5)
    np.testing.assert_array_equal(jax.jit(how)(before, keys), expected)


def test_a_step_counts_its_valid_slots():
    spec = CaptureSpec(num_hidden_layers=2, layer_ids=(0, 1), num_experts=5, top_k=2)
    ids = np.array([[0, 1, 2], [1, 2, -1], [4, 4, 4], [3, 0, 0]], np.int32)  # [M * K, N]
    cache = _RoutedExpertsDeviceCache(ids=jnp.asarray(ids), spec=spec)
    valid, generated = jnp.array([True, True, False]), jnp.array([False, True, True])
    counts = np.asarray(cache.count_experts(jnp.zeros((2, 2, 5), jnp.int32), valid, generated))
    expected = np.zeros((2, 2, 5), int)
    for phase, layer, expert in (
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 4),
        (0, 1, 3),
        (1, 0, 1),
        (1, 0, 2),
        (1, 1, 4),
        (1, 1, 0),
    ):
        expected[phase, layer, expert] += 1
    np.testing.assert_array_equal(counts, expected)
