"""The backends that run on a CPU, by name: plain array code, and the native ones. A machine without a C++ compiler
fails here."""

from routed_experts.layers.attention import ATTENTION_BACKENDS
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.layers.native.ops import NATIVE_ATTENTION, NATIVE_KERNELS
from routed_experts.layers.permuted_moe import PERMUTED

MOE = {**MOE_BACKENDS, "native": NATIVE_KERNELS.moe, "permuted": PERMUTED}
ATTENTION = {**ATTENTION_BACKENDS, "native": NATIVE_ATTENTION}
