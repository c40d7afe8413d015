"""Jobs of a host expert queue against float64 loops: inside a program of the CPU, and through the GPU's handlers over a
stand-in for its driver (fake_driver.cpp), whose stream runs behind the thread that enqueues."""

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


def random_store(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = (LAYERS * EXPERTS, HIDDEN, 2 * WIDTH), (LAYERS * EXPERTS, WIDTH, HIDDEN)
    arrays = ((rng.standard_normal(shape) * 0.2).astype(jnp.dtype(dtype)) for shape in shapes)
    return ExpertTable(*(jax.device_put(array, jax.devices("cpu")[0]) for array in arrays))


def random_inputs(seed, dtype=jnp.float32):
    """Rows, ids of which some are -1 (those of a whole row, too), weights."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, EXPERTS, (TOKENS, TOP_K)).astype(np.int32)
    ids[4] = -1
    return (
        jnp.asarray(rng.standard_normal((TOKENS, HIDDEN)), dtype),
        ids,
        rng.standard_normal((TOKENS, TOP_K)).astype(np.float32),
    )


def sums_by_loop(store, layer, x, ids, weights):
    """The sums, slot by slot, in float64."""
    gate_up, down = (np.asarray(array, np.float64) for array in (store.gate_up, store.down))
    rows, out = np.asarray(x, np.float64), np.zeros((TOKENS, HIDDEN))
    for n, k in np.argwhere(ids >= 0):
        row = layer * EXPERTS + ids[n, k]
        gate, up = np.split(rows[n] @ gate_up[row], 2)
        out[n] += weights[n, k] * (gate / (1 + np.exp(-gate)) * up @ down[row])
    return out


def run(queue, x, layer, ids, weights, *, store=0, between=lambda x: x * 2):
    """Both sides of a layer: what ran between submit and wait, and the job's sums."""

    def program(x, layer, ids, weights):
        x = queue.submit(x, layer, ids, weights, store=store)
        return queue.wait(between(x))

    return jax.jit(program)(x, jnp.asarray(layer, jnp.int32), ids, weights)


@pytest.mark.parametrize(("fed", "stored"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_a_job_gives_the_loops_sums(fed, stored):
    stores = [random_store(1, stored), random_store(2, stored)]
    queue = HostExpertQueue(stores, num_experts=EXPERTS, num_threads=2)
    x, ids, weights = random_inputs(3, fed)
    for number, store in enumerate(stores):
        for layer in range(LAYERS):
            same, out = run(queue, x, layer, ids, weights, store=number)
            np.testing.assert_allclose(out, sums_by_loop(store, layer, x, ids, weights), atol=2e-5)
            np.testing.assert_array_equal(same, x * 2)
            assert (np.asarray(out)[4] == 0).all()
    assert queue.stats().num_jobs == 2 * LAYERS
    assert queue.stats().busy_s > 0


def test_jobs_in_a_scan_are_those_of_its_layers():
    store = random_store(4)
    queue = HostExpertQueue([store], num_experts=EXPERTS, num_threads=3)
    x, rng = random_inputs(5)[0], np.random.default_rng(6)
    ids = rng.integers(-1, EXPERTS, (LAYERS, TOKENS, TOP_K)).astype(np.int32)
    weights = rng.standard_normal((LAYERS, TOKENS, TOP_K)).astype(np.float32)
    reference = functools.partial(run_slots, size=EXPERTS, backend=MOE_BACKENDS["reference"])
    table = jax.device_put(store, jax.devices()[0])

    def layer(x, scanned, *, on_host):
        index, ids, weights = scanned
        if not on_host:
            return x + reference(x, ids, weights, table, index) * 0.05, None
        same, out = queue.wait(queue.submit(x, index, ids, weights, store=0))
        return same + out * 0.05, None

    def layers(on_host):
        scanned = jnp.arange(LAYERS, dtype=jnp.int32), ids, weights
        return jax.jit(lambda x: jax.lax.scan(functools.partial(layer, on_host=on_host), x, scanned)[0])(x)

    np.testing.assert_allclose(layers(on_host=True), layers(on_host=False), rtol=1e-5, atol=1e-4)


def test_a_deferred_job_is_awaited_a_layer_later():
    """Three jobs are outstanding at once: of the layer, deferred in it, and deferred in the layer before."""
    store, count = random_store(25), 7
    queue = HostExpertQueue([store], num_experts=EXPERTS, num_threads=2)
    x, *_ = random_inputs(26)
    layers, inputs = np.arange(count, dtype=np.int32) % LAYERS, [random_inputs(30 + i)[1:] for i in range(2 * count)]
    ids, weights = (np.stack(parts).reshape(2, count, TOKENS, TOP_K) for parts in zip(*inputs, strict=True))

    def layer(x, scanned):
        index, (ids, later_ids), (weights, later_weights) = scanned
        x = queue.submit(x, index, ids, weights, store=0)
        x = queue.submit(x, index, later_ids, later_weights, store=0, deferred=True)
        x, now = queue.wait(x)
        x, late = queue.wait(x, deferred=True)
        return x, (now, late)

    def program(x):
        nothing = jnp.full((TOKENS, 1), -1), jnp.zeros((TOKENS, 1))
        x = queue.submit(x, jnp.zeros((), jnp.int32), *nothing, store=0, deferred=True)
        x, sums = jax.lax.scan(layer, x, (layers, tuple(ids), tuple(weights)))
        return sums, queue.wait(x, deferred=True)[1]

    for _ in range(2):  # nothing is left of a step for the next
        (now, late), last = jax.jit(program)(x)
        late = [*late, last]
        assert (np.asarray(late[0]) == 0).all()
        for i in range(count):
            expected = [sums_by_loop(store, layers[i], x, ids[part, i], weights[part, i]) for part in (0, 1)]
            np.testing.assert_allclose(now[i], expected[0], atol=2e-5)
            np.testing.assert_allclose(late[i + 1], expected[1], atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_of_weights_are_those_of_the_store(dtype):
    """Two jobs are outstanding at once; id -1 is zeros."""
    stores = [random_store(40), random_store(41, dtype)]
    queue = HostExpertQueue(stores, num_experts=EXPERTS, num_threads=3)
    ids, x = [np.array(ids, np.int32) for ids in ([4, 0, -1], [2, 2, 1])], random_inputs(42)[0]

    def program(x, layer):
        for chunk in ids:
            x = queue.submit_weights(x, layer, chunk, store=1)
        x, first = queue.wait_weights(x, 3, store=1)
        return first, queue.wait_weights(x, 3, store=1)[1]

    for layer in range(LAYERS):
        for table, chunk in zip(jax.jit(program)(x, jnp.int32(layer)), ids, strict=True):
            for copied, array in ((table.gate_up, stores[1].gate_up), (table.down, stores[1].down)):
                rows = np.asarray(array, np.float32)[layer * EXPERTS + chunk]
                rows[chunk == -1] = 0
                assert copied.dtype == dtype
                np.testing.assert_array_equal(np.asarray(copied, np.float32), rows)


def test_the_host_works_while_the_program_runs_on():
    """What stands between submit and wait runs until the job has run: if the wait ran the job, that would never end."""
    queue = HostExpertQueue([random_store(7)], num_experts=EXPERTS, num_threads=2)
    x, ids, weights = random_inputs(8)

    def waits(x):
        until = time.monotonic() + 60
        while queue.stats().num_jobs == 0 and time.monotonic() < until:
            continue
        return np.asarray(x) * queue.stats().num_jobs

    def between(x):
        return jax.pure_callback(waits, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    same, out = run(queue, x, 1, ids, weights, between=between)
    np.testing.assert_array_equal(same, x)
    np.testing.assert_allclose(out, sums_by_loop(random_store(7), 1, x, ids, weights), atol=2e-5)


def test_serial_jobs_give_the_same_numbers():
    queue = HostExpertQueue([random_store(9)], num_experts=EXPERTS, num_threads=2)
    x, ids, weights = random_inputs(10)
    together = run(queue, x, 2, ids, weights)
    queue.set_signals(serial=True)
    for actual, expected in zip(run(queue, x, 2, ids, weights), together, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_an_unknown_expert_ends_the_step_and_the_queue():
    queue = HostExpertQueue([random_store(11)], num_experts=EXPERTS, num_threads=1)
    x, ids, weights = random_inputs(12)
    wrong = np.where(ids == -1, EXPERTS, ids)
    with pytest.raises(jax.errors.JaxRuntimeError, match="an expert id is outside"):
        jax.block_until_ready(run(queue, x, 0, wrong, weights))
    with pytest.raises(jax.errors.JaxRuntimeError, match="an earlier job failed: an expert id is outside"):
        jax.block_until_ready(run(queue, x, 0, ids, weights))


def test_a_wait_without_a_job_and_a_job_too_many_are_errors():
    queue = HostExpertQueue([random_store(11)], num_experts=EXPERTS, num_threads=1)
    x, ids, weights = random_inputs(12)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a wait for a job that was never submitted"):
        jax.block_until_ready(jax.jit(queue.wait)(x))

    def four(x):
        for _ in range(4):
            x = queue.submit(x, jnp.int32(0), ids, weights, store=0)
        return x

    with pytest.raises(jax.errors.JaxRuntimeError, match="too many jobs are outstanding"):
        jax.block_until_ready(jax.jit(four)(x))


def test_other_stores_are_run_from_the_next_job_on():
    queue = HostExpertQueue([random_store(20), random_store(21)], num_experts=EXPERTS, num_threads=2)
    x, ids, weights = random_inputs(22)
    submit = functools.partial(run, queue, x, 1, ids, weights, store=1)
    np.testing.assert_allclose(submit()[1], sums_by_loop(random_store(21), 1, x, ids, weights), atol=2e-5)
    queue.swap_weights([random_store(23), random_store(24)])
    np.testing.assert_allclose(submit()[1], sums_by_loop(random_store(24), 1, x, ids, weights), atol=2e-5)
    with pytest.raises(AssertionError):
        queue.swap_weights([random_store(23)])


def test_a_closed_queue_is_named_and_its_number_is_reused():
    queue = HostExpertQueue([random_store(13)], num_experts=EXPERTS, num_threads=2)
    x, ids, weights = random_inputs(14)
    submit = functools.partial(queue.submit, store=0)
    compiled = jax.jit(lambda *args: submit(*args)).lower(x, jnp.int32(0), ids, weights).compile()
    number = queue._number
    del queue, submit
    with pytest.raises(jax.errors.JaxRuntimeError, match="the host expert queue of this program's engine is closed"):
        jax.block_until_ready(compiled(x, jnp.int32(0), ids, weights))
    assert HostExpertQueue([random_store(13)], num_experts=EXPERTS, num_threads=2)._number == number


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
    for name in ("enqueue_jobs", "enqueue_deferred_jobs", "enqueue_weights"):
        getattr(library, name).restype = ctypes.c_char_p
    library.RexQueueOpen.restype = ctypes.c_int64
    library.abandon_jobs.restype = ctypes.c_bool
    library.grant(ctypes.c_int(1 << 30))
    return library


def open_queue(driver, store):
    """A queue of the library over a store, both owned by the caller, who closes them."""
    arrays = [np.asarray(array) for array in (store.gate_up, store.down)]
    pointers, dtypes = np.array([array.ctypes.data for array in arrays], np.uintp), np.array([11], np.int32)
    sizes = np.array([EXPERTS, LAYERS * EXPERTS, HIDDEN, WIDTH], np.int64)
    return driver.RexQueueOpen(*map(ctypes.c_int64, (2, 1)), *map(pointer, (pointers, dtypes, sizes)))


def int64s(*numbers):
    return map(ctypes.c_int64, numbers)


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("words", [True, False])
def test_the_gpus_handlers_order_copies_and_signals(driver, words, serial):
    """Many jobs are enqueued before the first has begun, all over the same staging buffers."""
    store, count = random_store(15), 60
    queue = open_queue(driver, store)
    driver.RexQueueSetSignals(ctypes.c_int64(queue), ctypes.c_bool(serial), ctypes.c_bool(False))
    jobs = [random_inputs(seed) for seed in range(count)]
    x = np.stack([np.asarray(fed) for fed, _, _ in jobs])
    packed = np.stack([job_words(i % LAYERS, *job[1:]) for i, job in enumerate(jobs)])
    out = np.full(x.shape, np.nan, np.float32)
    numbers = (ctypes.c_int64(queue), ctypes.c_bool(words), *int64s(count, TOKENS, TOP_K, HIDDEN))
    error = driver.enqueue_jobs(*numbers, *map(pointer, (x, packed, out)))
    assert error is None, error
    stats = np.zeros(3, np.int64)
    driver.RexQueueStats(ctypes.c_int64(queue), pointer(stats))
    driver.RexQueueClose(ctypes.c_int64(queue))
    assert stats[0] == count
    assert stats[2] == (not words)  # a driver that refuses words is called instead
    for index, (fed, ids, weights) in enumerate(jobs):
        np.testing.assert_allclose(out[index], sums_by_loop(store, index % LAYERS, fed, ids, weights), atol=2e-5)


@pytest.mark.parametrize("words", [True, False])
def test_the_gpus_handlers_keep_deferred_jobs_apart(driver, words):
    store, count = random_store(50), 40
    queue = open_queue(driver, store)
    jobs, deferred = ([random_inputs(first + i) for i in range(count)] for first in (100, 200))
    x = np.stack([np.asarray(fed) for fed, _, _ in jobs])
    packed = [np.stack([job_words(i % LAYERS, *job[1:]) for i, job in enumerate(part)]) for part in (jobs, deferred)]
    sums = [np.full(x.shape, np.nan, np.float32) for _ in range(2)]
    numbers = (ctypes.c_int64(queue), ctypes.c_bool(words), *int64s(count, TOKENS, TOP_K, HIDDEN))
    error = driver.enqueue_deferred_jobs(*numbers, *map(pointer, (x, *packed, *sums)))
    driver.RexQueueClose(ctypes.c_int64(queue))
    assert error is None, error
    for part, out in zip((jobs, deferred), sums, strict=True):
        for index, (_, ids, weights) in enumerate(part):
            expected = sums_by_loop(store, index % LAYERS, x[index], ids, weights)
            np.testing.assert_allclose(out[index], expected, atol=2e-5)


@pytest.mark.parametrize("words", [True, False])
def test_the_gpus_handlers_copy_weights(driver, words):
    store, count, experts = random_store(51), 30, 2
    queue, rng = open_queue(driver, store), np.random.default_rng(52)
    layers, ids = np.arange(count) % LAYERS, rng.integers(0, EXPERTS, (count, experts))
    packed = np.concatenate([layers[:, None], ids], axis=1).astype(np.int32)
    arrays = [np.asarray(array) for array in (store.gate_up, store.down)]
    copies = [np.full((count, experts, *array.shape[1:]), np.nan, np.float32) for array in arrays]
    numbers = (ctypes.c_int64(queue), ctypes.c_bool(words), *int64s(count, experts, HIDDEN, WIDTH))
    error = driver.enqueue_weights(*numbers, *map(pointer, (packed, *copies)))
    driver.RexQueueClose(ctypes.c_int64(queue))
    assert error is None, error
    for copied, array in zip(copies, arrays, strict=True):
        np.testing.assert_array_equal(copied, array[layers[:, None] * EXPERTS + ids])


@pytest.mark.parametrize("words", [True, False])
def test_a_queue_that_closes_releases_its_stream_and_gives_nan(driver, words):
    """Two jobs are enqueued, and the queue is closed before their inputs arrive."""
    store, (fed, ids, weights) = random_store(16), random_inputs(17)
    queue = open_queue(driver, store)
    x, packed, out = np.array(fed), job_words(0, ids, weights), np.zeros((TOKENS, HIDDEN), np.float32)
    numbers = (ctypes.c_int64(queue), ctypes.c_bool(words), *int64s(TOKENS, TOP_K, HIDDEN))
    assert driver.abandon_jobs(*numbers, *map(pointer, (x, packed, out)), *int64s(30)), "the stream still waits"
    assert np.isnan(out).all()


@pytest.mark.parametrize("granted", [0, 1])
def test_memory_that_the_driver_refuses_is_an_error_and_is_requested_again(driver, granted):
    """Two allocations are needed: of the signals, and of the staging buffer."""
    store, (fed, ids, weights) = random_store(18), random_inputs(19)
    queue = open_queue(driver, store)
    x, packed, out = np.array(fed)[None], job_words(1, ids, weights)[None], np.zeros((1, TOKENS, HIDDEN), np.float32)
    numbers = (ctypes.c_int64(queue), ctypes.c_bool(True), *int64s(1, TOKENS, TOP_K, HIDDEN))
    enqueue = functools.partial(driver.enqueue_jobs, *numbers, *map(pointer, (x, packed, out)))
    driver.grant(ctypes.c_int(granted))
    num_bytes = (2 * TOKENS * HIDDEN + 1 + 2 * TOKENS * TOP_K) * 4
    error = enqueue().decode()
    assert error.startswith(f"the NVIDIA driver refused {num_bytes} bytes of the host's memory for {TOKENS} tokens")
    assert error.endswith("let this process lock more (ulimit -l), or serve fewer tokens a step")
    driver.grant(ctypes.c_int(1 << 30))
    assert enqueue() is None
    driver.RexQueueClose(ctypes.c_int64(queue))
    np.testing.assert_allclose(out[0], sums_by_loop(store, 1, fed, ids, weights), atol=2e-5)


def job_words(layer, ids, weights):
    """A job's layer and slots, as its program packs them."""
    return np.concatenate([[layer], ids.ravel(), weights.view(np.int32).ravel()]).astype(np.int32)


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)
