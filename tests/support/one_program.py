"""One program for all threads of a kernel of Mosaic GPU that JAX interprets.

The interpreter runs each warpgroup of each program of the grid in a thread of its own and compiles there what all of
them run: that takes most of a test's time."""

import contextlib
import threading
from collections.abc import Iterator

import jax
import pytest
from jax._src.pallas.mosaic.interpret import thread_map  # its threads have no public switch


@contextlib.contextmanager
def one_program_for_all_threads() -> Iterator[None]:
    """Interpreted kernels inside the block compile once what their threads run. Threads have the same arguments, but
    for values."""
    programs, lock = {}, threading.Lock()

    def run(jaxpr, consts, *args):
        def evaluate(consts, *args):
            jax.core.eval_jaxpr(jaxpr, consts, *args)

        with lock:
            if jaxpr not in programs:
                programs[jaxpr] = jax.jit(evaluate).lower(consts, *args).compile()
        programs[jaxpr](consts, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thread_map, "_run_jaxpr", run)
        yield
