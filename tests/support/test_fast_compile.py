"""Fast compilation applies where a test requests it, and nowhere else."""

import jax
import jax.numpy as jnp
import pytest

from support import fast_compile


def test_options_reach_the_compiler_within_and_not_after(monkeypatch):
    monkeypatch.setitem(
        fast_compile.OPTIONS, "no_such_option", True
    )  # the only trace that an option leaves: one that is refused
    double = jax.jit(lambda x: 2 * x)
    with fast_compile.fast_compilation():
        for compiling in (lambda: double(jnp.ones(3)), lambda: double.lower(jnp.ones(3)).compile()):
            with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
                compiling()
    assert double(jnp.ones(3)).tolist() == [2, 2, 2]


def test_options_of_a_program_of_its_own_go_before():
    double = jax.jit(lambda x: 2 * x, compiler_options={"no_such_option": True})
    with fast_compile.fast_compilation(), pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        double(jnp.ones(3))


def test_programs_of_before_are_not_met_within_nor_those_of_within_after():
    traces = []

    @jax.jit
    def double(x):
        traces.append(1)
        return 2 * x

    double(jnp.ones(3))
    with fast_compile.fast_compilation():
        double(jnp.ones(3))
    double(jnp.ones(3))
    assert len(traces) == 3
