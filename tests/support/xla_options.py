"""The options with which tests compile fast: those of `fast_compile`, and, for processes of their own, as XLA_FLAGS.
Imports no JAX."""

import importlib.metadata

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,  # parts are compiled apart, which costs more than it gains
}
if tuple(map(int, importlib.metadata.version("jax").split(".")[:2])) < (0, 11):  # the option is gone in JAX 0.11
    OPTIONS["xla_cpu_use_fusion_emitters"] = False

FAST_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
