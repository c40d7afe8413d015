"""Lazy compilation: a model runner compiles a program when it first runs it, not all of them before the first step.

A runner's table has four samplers for each batch size, and most tests run one or two. The programs are those that are
shipped. Other tests prove that none is missing and that nothing compiles once an engine is ready."""

import contextlib
from collections.abc import Iterator

import pytest

from routed_experts.execution.model_runner import ModelRunner


class LazyPrograms(dict):
    """A runner's programs; a program is compiled when it is first looked up."""

    def __init__(self, jobs):
        super().__init__()
        self.jobs = jobs

    def __missing__(self, key):
        self[key] = program = self.jobs[key]().compile()
        return program


def compile_lazily(runner, **_):
    """Replaces `ModelRunner.compile`."""
    jobs = runner._jobs()
    runner._programs = LazyPrograms(jobs | runner._later_jobs)
    runner._later_jobs = {}
    return len(jobs)


@contextlib.contextmanager
def lazy_compilation() -> Iterator[None]:
    """Runners compile lazily inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "compile", compile_lazily)
        yield
