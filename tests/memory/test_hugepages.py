"""Large pages under arrays of the CPU: contents and addresses stay, and the kernel's own report names what was
moved."""

import ctypes
import os
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from routed_experts.memory.hugepages import LARGE, advise_hugepages, advise_hugepages_beside
from routed_experts.models.base.sharding import buffer_pointers


def mappings(low, high):
    """Those of this process that hold a part of [low, high), by /proc/self/smaps: where each begins and ends, its bytes
    of large pages."""
    spans = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(address, 16) for address in span.groups())
        elif line.startswith("AnonHugePages:") and begin < high and low < end:
            spans.append((begin, end, int(line.split()[1]) * 1024))
    return spans


def whole_pages(low, high):
    """Large pages that begin and end in [low, high)."""
    return max(0, high // LARGE - -(-low // LARGE))


def assert_on_large_pages(array):
    """All of it that can be: a page is large where one mapping holds it whole (NumPy requests large pages under its own
    arrays, and so splits the heap into several)."""
    (low,) = buffer_pointers(array)
    held = mappings(low, low + array.nbytes)
    assert held
    for begin, end, large in held:
        assert large >= LARGE * whole_pages(max(begin, low), min(end, low + array.nbytes)), held


def asked_for(array):
    """Bytes that were moved, of an array 0, 1, 2 ..., which keeps its place and contents."""
    buffers = buffer_pointers(array)
    moved = advise_hugepages([array])
    assert buffer_pointers(array) == buffers
    np.testing.assert_array_equal(array, np.arange(array.size))
    assert 0 <= moved <= array.nbytes
    return moved


def test_arrays_keep_address_and_contents_and_the_kernel_reports_what_was_moved():
    array = jnp.arange(5 * LARGE // 4, dtype=jnp.int32)
    if asked_for(array):  # a kernel before 6.1 and one that never refuses
        assert_on_large_pages(array)


def test_an_array_over_two_mappings_is_moved_in_each():
    array, page = jnp.arange(5 * LARGE // 4, dtype=jnp.int32), os.sysconf("SC_PAGE_SIZE")
    (low,) = buffer_pointers(array)
    border = -(-low // LARGE) * LARGE + 5 * LARGE // 2  # amid a large page
    rest = (low + array.nbytes) // page * page - border
    kernel, theirs = ctypes.CDLL(None), (ctypes.c_void_p(border), ctypes.c_size_t(rest))
    assert kernel.madvise(*theirs, 10) == 0  # MADV_DONTFORK: what a child does not get is another mapping
    try:
        assert len(mappings(low, low + array.nbytes)) > 1
        if asked_for(array):
            assert_on_large_pages(array)
    finally:
        assert kernel.madvise(*theirs, 11) == 0  # MADV_DOFORK


def test_small_arrays_are_left_alone():
    assert advise_hugepages([jnp.zeros(1000), jnp.zeros(LARGE // 4 - 1, jnp.float32)]) == 0


def test_beside_other_work_arrays_keep_their_contents_and_may_be_freed():
    array = jnp.arange(5 * LARGE // 4, dtype=jnp.int32)
    before = buffer_pointers(array)
    advise_hugepages_beside([array]).join()
    assert buffer_pointers(array) == before
    np.testing.assert_array_equal(array, np.arange(array.size))
    thread = advise_hugepages_beside([array])
    array.delete()
    thread.join()
    np.testing.assert_array_equal(jnp.arange(5 * LARGE // 4, dtype=jnp.int32)[-3:], np.arange(array.size)[-3:])
