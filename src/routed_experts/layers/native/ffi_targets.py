"""Registers the handlers of the native library with XLA."""

import functools

import jax

from routed_experts.layers.native import toolchain

HANDLERS = (
    *(
        "RexExperts",
        "RexLinear",
        "RexAttention",
        "RexKvWrite",
        "RexLatentAttention",
        "RexDeltaRule",
        "RexQkNormRope",
        "RexQkPrepare",
        "RexGateHeads",
        "RexNorm",
        "RexGate",
        "RexAddGated",
        "RexRouter",
        "RexRecordingRouter",
        "RexLayerStack",
        "RexArgmax",
        "RexLogprobs",
        "RexTiedLinear",
    ),
    "RexSelect",
)


@functools.cache
def register_ffi_targets() -> bool:
    """Register all handlers, once a process; compiles the library at first use. Raises OSError where it cannot be
    made."""
    library = toolchain.library()
    for name in HANDLERS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library[name]), platform="cpu")
    return True
