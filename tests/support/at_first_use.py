"""Programs of a model runner that are compiled when they are first run, not all before the first step. Knows no test.

A runner's table has four samplers for each size of a batch, of which most tests run one or two. The programs are those
that are shipped, bit for bit; what is tested elsewhere with all of them is that none is missing and that nothing
compiles once an engine is ready."""

import contextlib
from collections.abc import Iterator

import pytest

from routed_experts.execution.model_runner import ModelRunner


class AtFirstUse(dict):
    """A runner's programs, each compiled when it is first looked up."""

    def __init__(self, jobs):
        super().__init__()
        self.jobs = jobs

    def __missing__(self, key):
        self[key] = program = self.jobs[key]().compile()
        return program


def compile_at_first_use(runner, **_):
    """In place of `ModelRunner.compile`. Not where it matters when something is compiled."""
    runner._programs = AtFirstUse(runner._jobs())
    return len(runner._programs.jobs)


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Within, no runner compiles a program before it runs it."""
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(ModelRunner, "compile", compile_at_first_use)
        yield
