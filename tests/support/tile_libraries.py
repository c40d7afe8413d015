"""C++ that includes the native headers, compiled with tiles (native/tiles.h) emulated and, where the processor has
them, with its own."""

import ctypes
import subprocess
from pathlib import Path

import jax

from routed_experts.layers.native import toolchain
from support.bf16_products import has_tiles

# Compiles in half of the time. The last option fuses products and sums where -O3 does, so bits are the same.
FEW_OPTIMISATIONS = ("-O1", "-fexpensive-optimizations")
EMULATED = ("-DREX_EMULATED_TILES", *FEW_OPTIMISATIONS)  # no engine has them
BUILDS = {"emulated": EMULATED, "emulated, short vectors": (*EMULATED, "-mno-avx512f")}
START = """
extern "C" bool start() {
  rex::tiles_are_faster = true, rex::pairs_are_faster = false;
  return rex::request_tiles();
}
"""


def tile_libraries(folder: Path, source: str) -> dict[str, ctypes.CDLL]:
    """`source` by build, ready to multiply in tiles; "processor" where this one has them."""
    file = folder / "tiles.cpp"
    file.write_text(source + START)
    builds = BUILDS | ({"processor": ()} if has_tiles() else {})
    if "avx512f" not in toolchain.processor().split():  # without these instructions both are the same library
        del builds["emulated, short vectors"]
    compilers = {}
    for number, (build, flags) in enumerate(builds.items()):
        command = [*(toolchain.compiler() or ()), *toolchain.FLAGS, *toolchain.simd_flags(), *flags]
        command += [f"-I{toolchain.HERE}", f"-I{jax.ffi.include_dir()}", str(file), "-o", str(folder / f"{number}.so")]
        compilers[build] = command[-1], subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    libraries = {}
    for build, (made, compiler) in compilers.items():
        errors = compiler.communicate(timeout=300)[1]
        assert compiler.returncode == 0, errors
        libraries[build] = ctypes.CDLL(made)
        libraries[build].start.restype = ctypes.c_bool
        assert libraries[build].start()
    return libraries
