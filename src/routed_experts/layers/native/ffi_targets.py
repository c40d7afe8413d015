"""The native library's handlers, made known to XLA. Knows nothing of what they compute."""

import functools

import jax

from routed_experts.layers.native import toolchain

HANDLERS = (
    *(
        "RexExperts",
        "RexLinear",
        "RexAttention",
        "RexPrepare",
        "RexRouter",
        "RexRecordingRouter",
        "RexLayerRun",
        "RexChoose",
    ),
    "RexSelect",
)


@functools.cache
def registered() -> bool:
    """Register all handlers, once a process; compiles the library at first use. Raises OSError where it cannot be
    made."""
    library = toolchain.library()
    for name in HANDLERS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library[name]), platform="cpu")
    return True
