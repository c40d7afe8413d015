"""Programs that are quick to compile and slow to run: without LLVM's optimisations and XLA's newer emitters (3 s for
12). Knows no test.

For tests that judge numbers with a tolerance, interpret kernels of another device, or run kernels that are C++, whose
bits do not hang on this. What is promised by the bit over different programs of XLA is tested with programs as they are
shipped: without this."""

import contextlib
from collections.abc import Iterator

import jax
import pytest
from jax._src import (
    compiler,
)  # one process has one XLA_FLAGS, and JAX no public switch for the options of every program

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())  # of a process, for XLA_FLAGS


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Within, whatever is compiled for the CPU is compiled with `OPTIONS`, and options of its own."""
    given = compiler.get_compile_options

    def options(*args, backend=None, env_options_overrides=None, **more):
        ours = OPTIONS if getattr(backend, "platform", None) == "cpu" else {}
        return given(*args, backend=backend, env_options_overrides={**ours, **(env_options_overrides or {})}, **more)

    jax.clear_caches()
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(compiler, "get_compile_options", options)
        yield
    jax.clear_caches()
