"""Fast compilation: without LLVM's optimisations and XLA's newer emitters. Programs compile in a quarter of the time
and run slower.

For tests that compare numbers with a tolerance, interpret kernels of another device, or run kernels written in C++. A
test that promises equal bits over different XLA programs uses the programs as they are shipped."""

import contextlib
from collections.abc import Iterator

import jax
import pytest
from jax._src import (
    compiler,
)  # one process has one XLA_FLAGS, and JAX no public switch for the options of every program

from support.xla_options import OPTIONS


@contextlib.contextmanager
def fast_compilation() -> Iterator[None]:
    """CPU programs compiled inside the block get `OPTIONS`, then their own options."""
    shipped = compiler.get_compile_options

    def options(*args, backend=None, env_options_overrides=None, **more):
        defaults = OPTIONS if getattr(backend, "platform", None) == "cpu" else {}
        return shipped(
            *args, backend=backend, env_options_overrides={**defaults, **(env_options_overrides or {})}, **more
        )

    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", options)
        yield
    jax.clear_caches()
