"""The native kernels' products of rows with weights of bfloat16, one way for all processors: each takes its fastest."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from routed_experts.layers.native import toolchain
from routed_experts.layers.native.toolchain import Bf16Gains


def has_tiles() -> bool:
    """Whether the processor has tiles, and the system lets this process use them."""
    return toolchain.measured_bf16_gains(toolchain.library()).tiles > 0


def has_pairs() -> bool:
    """Whether the processor has an instruction for pairs (AVX512-BF16). Others multiply and add a half at a time, and
    round otherwise."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "avx512_bf16" in cpuinfo.read_text().split()


@contextlib.contextmanager
def products_as_if(*, pairs: float, tiles: float) -> Iterator[None]:
    """Multiply as if these gains over floats had been measured, and as before afterwards."""
    library = toolchain.library()
    toolchain.use_bf16(library, Bf16Gains(pairs, tiles))
    try:
        yield
    finally:
        toolchain.use_bf16(library, toolchain.own_bf16_gains(library))


def products_in_pairs() -> contextlib.AbstractContextManager[None]:
    """Round rows to bfloat16 and multiply pairs: what a processor rounds then does not depend on which way it is
    faster."""
    return products_as_if(pairs=2.0, tiles=0.0)
