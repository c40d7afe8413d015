"""Large pages under arrays of the CPU: contents and addresses stay, and the kernel's own account says what was moved."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from routed_experts.memory.large_pages import LARGE, ask_for_large_pages
from routed_experts.models.shards import buffers_of


def large_bytes(address):
    """Bytes of large pages in the mapping that holds `address`, by /proc/self/smaps."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def test_arrays_keep_place_and_contents_and_the_kernel_says_what_was_moved():
    array = jnp.arange(5 * LARGE // 4, dtype=jnp.int32)
    (address,) = buffers_of(array)
    moved = ask_for_large_pages([array])
    assert buffers_of(array) == {address}
    np.testing.assert_array_equal(array, np.arange(5 * LARGE // 4))
    assert 0 <= moved <= array.nbytes
    if moved:  # a kernel before 6.1 and one that is told never to refuse
        assert large_bytes(address + LARGE) >= 4 * LARGE  # whole ones that begin and end in the array


def test_small_arrays_are_left_alone():
    assert ask_for_large_pages([jnp.zeros(1000), jnp.zeros(LARGE // 4 - 1, jnp.float32)]) == 0
