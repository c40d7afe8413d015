"""Move CPU arrays to pages of 2 MiB, so that reading them takes fewer address translations."""

import ctypes
import os
import sys
import threading
from collections.abc import Iterable, Sequence

from jax import Array

LARGE = 2**21  # bytes of a huge page
_COLLAPSE = 25  # madvise(2), Linux 6.1 and later


def advise_hugepages(arrays: Iterable[Array]) -> int:
    """Ask the kernel to collapse arrays of 2 MiB and more into huge pages; returns the bytes collapsed. Only
    complete huge pages of one mapping are collapsed. Addresses and contents do not change. Arrays on other devices,
    other systems and kernels that refuse are ignored: pages affect speed only. Takes about 0.2 s a GB."""
    return _collapse_all(_regions(arrays))


def advise_hugepages_beside(arrays: Iterable[Array]) -> threading.Thread:
    """The same in a thread, beside the steps that read the arrays; returns the thread. It knows addresses alone, so
    arrays may be freed meanwhile: then the kernel refuses, or collapses what is there."""
    thread = threading.Thread(target=_collapse_all, args=(_regions(arrays),), name="hugepages", daemon=True)
    thread.start()
    return thread


def _regions(arrays: Iterable[Array]) -> list[tuple[int, int]]:
    """Address and bytes of each array, of several devices of each shard, that is large enough."""
    if sys.platform != "linux":
        return []
    return [
        (shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
        for array in arrays
        for shard in array.addressable_shards
        if shard.device.platform == "cpu" and shard.data.nbytes >= LARGE
    ]


def _collapse_all(regions: Sequence[tuple[int, int]]) -> int:
    if not regions:
        return 0
    kernel = ctypes.CDLL(None)
    return sum(_collapse(kernel, address, num_bytes) for address, num_bytes in regions)


def _collapse(kernel: ctypes.CDLL, address: int, num_bytes: int) -> int:
    """Collapse the complete huge pages of one run of memory; returns their bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    begin, end = -(-address // page) * page, (address + num_bytes) // page * page
    refused = kernel.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _COLLAPSE)
    return 0 if refused else end - begin
