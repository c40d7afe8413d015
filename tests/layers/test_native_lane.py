"""Errands of a lane against float64 loops: inside a program of the CPU, and through the GPU's handlers over a stand-in
for its driver (fake_driver.cpp), whose stream runs behind whoever enqueues. What runs between begin and end runs while
the host works."""

import ctypes
import functools
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.expert_slots import ExpertTable, run_slots
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.layers.native import toolchain
from routed_experts.layers.native.host_expert_queue import HostExpertQueue

TOKENS, TOP_K, HIDDEN, WIDTH, EXPERTS, LAYERS = 9, 3, 70, 48, 5, 3


def store_of(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = (LAYERS * EXPERTS, HIDDEN, 2 * WIDTH), (LAYERS * EXPERTS, WIDTH, HIDDEN)
    return ExpertTable(*(jnp.asarray(rng.standard_normal(shape) * 0.2, dtype) for shape in shapes))


def errand_of(seed, dtype=jnp.float32):
    """Rows, ids of which some are nobody's (a whole row's too), weights."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, EXPERTS, (TOKENS, TOP_K)).astype(np.int32)
    ids[4] = -1
    return (
        jnp.asarray(rng.standard_normal((TOKENS, HIDDEN)), dtype),
        ids,
        rng.standard_normal((TOKENS, TOP_K)).astype(np.float32),
    )


def looped(store, place, x, ids, weights):
    """The sums, slot by slot, in float64."""
    gate_up, down = (np.asarray(array, np.float64) for array in (store.gate_up, store.down))
    rows, out = np.asarray(x, np.float64), np.zeros((TOKENS, HIDDEN))
    for n, k in np.argwhere(ids >= 0):
        row = place * EXPERTS + ids[n, k]
        gate, up = np.split(rows[n] @ gate_up[row], 2)
        out[n] += weights[n, k] * (gate / (1 + np.exp(-gate)) * up @ down[row])
    return out


def run(lane, x, place, ids, weights, *, store=0, between=lambda x: x * 2):
    """Both sides of a layer: what ran between begin and end, and what the host gave."""

    def program(x, place, ids, weights):
        x = lane.begin(x, place, ids, weights, store=store)
        return lane.end(between(x))

    return jax.jit(program)(x, jnp.asarray(place, jnp.int32), ids, weights)


@pytest.mark.parametrize(("fed", "stored"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_an_errand_gives_the_loops_sums(fed, stored):
    stores = [store_of(1, stored), store_of(2, stored)]
    lane = HostExpertQueue(stores, num_experts=EXPERTS, num_threads=2)
    x, ids, weights = errand_of(3, fed)
    for number, store in enumerate(stores):
        for place in range(LAYERS):
            same, out = run(lane, x, place, ids, weights, store=number)
            np.testing.assert_allclose(out, looped(store, place, x, ids, weights), atol=2e-5)
            np.testing.assert_array_equal(same, x * 2)
            assert (np.asarray(out)[4] == 0).all()
    assert lane.counts().num_errands == 2 * LAYERS
    assert lane.counts().busy_s > 0


def test_errands_in_a_scan_are_those_of_its_layers():
    store = store_of(4)
    lane, x, rng = (
        HostExpertQueue([store], num_experts=EXPERTS, num_threads=3),
        errand_of(5)[0],
        np.random.default_rng(6),
    )
    ids = rng.integers(-1, EXPERTS, (LAYERS, TOKENS, TOP_K)).astype(np.int32)
    weights = rng.standard_normal((LAYERS, TOKENS, TOP_K)).astype(np.float32)
    reference = functools.partial(run_slots, size=EXPERTS, backend=MOE_BACKENDS["reference"])

    def layer(x, scanned, *, on_host):
        place, ids, weights = scanned
        if not on_host:
            return x + reference(x, ids, weights, store, place) * 0.05, None
        same, out = lane.end(lane.begin(x, place, ids, weights, store=0))
        return same + out * 0.05, None

    def layers(on_host):
        scanned = jnp.arange(LAYERS, dtype=jnp.int32), ids, weights
        return jax.jit(lambda x: jax.lax.scan(functools.partial(layer, on_host=on_host), x, scanned)[0])(x)

    np.testing.assert_allclose(layers(on_host=True), layers(on_host=False), rtol=1e-5, atol=1e-4)


def test_the_host_works_while_the_program_runs_on():
    """What stands between begin and end waits until the errand has been run: were it run by `end`, that would never
    be."""
    lane = HostExpertQueue([store_of(7)], num_experts=EXPERTS, num_threads=2)
    x, ids, weights = errand_of(8)

    def waits(x):
        until = time.monotonic() + 60
        while lane.counts().num_errands == 0 and time.monotonic() < until:
            continue
        return np.asarray(x) * lane.counts().num_errands

    same, out = run(
        lane, x, 1, ids, weights, between=lambda x: jax.pure_callback(waits, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    )
    np.testing.assert_array_equal(same, x)
    np.testing.assert_allclose(out, looped(store_of(7), 1, x, ids, weights), atol=2e-5)


def test_in_turn_gives_the_same_numbers():
    lane = HostExpertQueue([store_of(9)], num_experts=EXPERTS, num_threads=2)
    x, ids, weights = errand_of(10)
    together = run(lane, x, 2, ids, weights)
    lane.set_signals(in_turn=True)
    for ours, theirs in zip(run(lane, x, 2, ids, weights), together, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_unknown_expert_ends_the_step_and_the_lane():
    lane = HostExpertQueue([store_of(11)], num_experts=EXPERTS, num_threads=1)
    x, ids, weights = errand_of(12)
    wrong = np.where(ids == -1, EXPERTS, ids)
    with pytest.raises(jax.errors.JaxRuntimeError, match="an expert id is outside"):
        jax.block_until_ready(run(lane, x, 0, wrong, weights))
    with pytest.raises(jax.errors.JaxRuntimeError, match="an expert id was outside"):
        jax.block_until_ready(run(lane, x, 0, ids, weights))


def test_other_stores_are_run_from_the_next_errand_on():
    lane, (x, ids, weights) = (
        HostExpertQueue([store_of(20), store_of(21)], num_experts=EXPERTS, num_threads=2),
        errand_of(22),
    )
    begin = functools.partial(run, lane, x, 1, ids, weights, store=1)
    np.testing.assert_allclose(begin()[1], looped(store_of(21), 1, x, ids, weights), atol=2e-5)
    lane.restock([store_of(23), store_of(24)])
    np.testing.assert_allclose(begin()[1], looped(store_of(24), 1, x, ids, weights), atol=2e-5)
    with pytest.raises(AssertionError):
        lane.restock([store_of(23)])


def test_a_lane_that_is_gone_is_named_and_its_number_is_given_again():
    lane = HostExpertQueue([store_of(13)], num_experts=EXPERTS, num_threads=2)
    x, ids, weights = errand_of(14)
    begin = functools.partial(lane.begin, store=0)
    compiled = jax.jit(lambda *args: begin(*args)).lower(x, jnp.int32(0), ids, weights).compile()
    number = lane._number
    del lane, begin
    with pytest.raises(jax.errors.JaxRuntimeError, match="the lane of this program's engine is closed"):
        jax.block_until_ready(compiled(x, jnp.int32(0), ids, weights))
    assert HostExpertQueue([store_of(13)], num_experts=EXPERTS, num_threads=2)._number == number


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """The GPU's handlers, and what stands in for its driver, in one library."""
    file = tmp_path_factory.mktemp("driver") / "driver.so"
    sources, headers = Path(__file__).with_name("fake_driver.cpp"), (jax.ffi.include_dir(), toolchain.HERE)
    flags = [flag for flag in toolchain.FLAGS if flag != "-O3"]
    flags += ["-O1", f'-DREX_DRIVER="{file}"', *(f"-I{folder}" for folder in headers)]
    command = [*toolchain.compiler(), *flags, str(sources), "-o", str(file)]
    subprocess.run(command, check=True, timeout=300)
    library = ctypes.CDLL(str(file))
    library.enqueue_errands.restype = ctypes.c_char_p
    library.RexLaneOpen.restype = ctypes.c_int64
    library.abandon_errand.restype = ctypes.c_bool
    library.grant(ctypes.c_int(1 << 30))
    return library


def opened(driver, store):
    """A lane of the library's over a store, which its caller keeps; it is closed by who opened it."""
    arrays = [np.asarray(array) for array in (store.gate_up, store.down)]
    places, dtypes = np.array([array.ctypes.data for array in arrays], np.uintp), np.array([11], np.int32)
    sizes = np.array([EXPERTS, LAYERS * EXPERTS, HIDDEN, WIDTH], np.int64)
    return driver.RexLaneOpen(*(ctypes.c_int64(number) for number in (2, 1)), *map(pointer, (places, dtypes, sizes)))


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("words", [True, False])
def test_the_gpus_handlers_order_copies_and_signals(driver, words, in_turn):
    """Many errands are enqueued before the first has begun, all over one desk."""
    store, count = store_of(15), 60
    lane = opened(driver, store)
    driver.RexLaneSet(ctypes.c_int64(lane), ctypes.c_bool(in_turn), ctypes.c_bool(False))
    errands = [errand_of(seed) for seed in range(count)]
    x = np.stack([np.asarray(fed) for fed, _, _ in errands])
    told = np.stack([words_for(i % LAYERS, *errand[1:]) for i, errand in enumerate(errands)])
    out = np.full(x.shape, np.nan, np.float32)
    numbers = (ctypes.c_int64(lane), ctypes.c_bool(words), *map(ctypes.c_int64, (count, TOKENS, TOP_K, HIDDEN)))
    complaint = driver.enqueue_errands(*numbers, *map(pointer, (x, told, out)))
    assert complaint is None, complaint
    counts = np.zeros(3, np.int64)
    driver.RexLaneTold(ctypes.c_int64(lane), pointer(counts))
    driver.RexLaneClose(ctypes.c_int64(lane))
    assert counts[0] == count
    assert counts[2] == (not words)  # a driver that refuses words is called instead
    for index, (fed, ids, weights) in enumerate(errands):
        np.testing.assert_allclose(out[index], looped(store, index % LAYERS, fed, ids, weights), atol=2e-5)


@pytest.mark.parametrize("words", [True, False])
def test_a_lane_that_ends_lets_its_stream_go_and_gives_no_number(driver, words):
    """Two errands are enqueued, and the lane is closed before their input is there."""
    store, (fed, ids, weights) = store_of(16), errand_of(17)
    lane = opened(driver, store)
    x, told, out = np.array(fed), words_for(0, ids, weights), np.zeros((TOKENS, HIDDEN), np.float32)
    numbers = (ctypes.c_int64(lane), ctypes.c_bool(words), *map(ctypes.c_int64, (TOKENS, TOP_K, HIDDEN)))
    assert driver.abandon_errand(*numbers, *map(pointer, (x, told, out)), ctypes.c_int64(30)), "the stream still waits"
    assert np.isnan(out).all()


@pytest.mark.parametrize("granted", [0, 1])
def test_memory_that_the_driver_refuses_is_told_and_asked_for_again(driver, granted):
    """Two blocks are wanted: the signals' and the desk's."""
    store, (fed, ids, weights) = store_of(18), errand_of(19)
    lane = opened(driver, store)
    x, told, out = np.array(fed)[None], words_for(1, ids, weights)[None], np.zeros((1, TOKENS, HIDDEN), np.float32)
    numbers = (ctypes.c_int64(lane), ctypes.c_bool(True), *map(ctypes.c_int64, (1, TOKENS, TOP_K, HIDDEN)))
    send = functools.partial(driver.enqueue_errands, *numbers, *map(pointer, (x, told, out)))
    driver.grant(ctypes.c_int(granted))
    told_bytes = (2 * TOKENS * HIDDEN + 1 + 2 * TOKENS * TOP_K) * 4
    complaint = send().decode()
    assert complaint.startswith(
        f"the NVIDIA driver refused {told_bytes} bytes of the host's memory for {TOKENS} tokens"
    )
    assert complaint.endswith("let this process lock more (ulimit -l), or use host_backend='dispatch'")
    driver.grant(ctypes.c_int(1 << 30))
    assert send() is None
    driver.RexLaneClose(ctypes.c_int64(lane))
    np.testing.assert_allclose(out[0], looped(store, 1, fed, ids, weights), atol=2e-5)


def words_for(place, ids, weights):
    """What an errand is told of its slots."""
    return np.concatenate([[place], ids.ravel(), weights.view(np.int32).ravel()]).astype(np.int32)


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)
