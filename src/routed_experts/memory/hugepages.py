"""Arrays of the CPU on pages of 2 MiB, so that a core finds what it reads with one look instead of 512. Knows nothing
of what they hold."""

import ctypes
import os
import sys
from collections.abc import Iterable

from jax import Array

LARGE = 2**21  # bytes of a large page
_COLLAPSE = 25  # madvise(2), Linux 6.1 and later


def advise_hugepages(arrays: Iterable[Array]) -> int:
    """Have the kernel move arrays of 2 MiB and more to large pages where they lie, and give the bytes of those that it
    took. It moves what makes a whole large page of one mapping; edges stay. Addresses and contents stay. Arrays
    elsewhere, other systems and kernels that refuse are left as they are: pages change how long a read takes, and
    nothing else. Takes about 0.2 s a GB."""
    if sys.platform != "linux":
        return 0
    kernel = ctypes.CDLL(None)
    taken = 0
    for array in arrays:
        for shard in array.addressable_shards:
            if shard.device.platform == "cpu" and shard.data.nbytes >= LARGE:
                taken += _moved(kernel, shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
    return taken


def _moved(kernel: ctypes.CDLL, address: int, num_bytes: int) -> int:
    """Of one run of memory; its whole large pages are moved, which begin and end within it."""
    page = os.sysconf("SC_PAGE_SIZE")
    begin, end = -(-address // page) * page, (address + num_bytes) // page * page
    refused = kernel.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _COLLAPSE)
    return 0 if refused else end - begin
