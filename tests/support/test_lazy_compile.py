"""Within, a runner compiles what it runs and no more, and nothing is lost: a program that is not in its table is still
an error."""

import pytest

from oracles.driver import request
from oracles.testbeds import tiny_testbed
from routed_experts.execution.model_runner import ModelRunner
from support import lazy_compile


def test_only_what_is_run_is_compiled():
    testbed = tiny_testbed(precompile_bs_paddings=(2,), precompile_token_paddings=(8,))
    testbed.drive().run(request("greedy", [5, 7, 9], 4))
    programs = testbed.bench.runner._programs
    assert {key[0] for key in programs} == {"forward", "sample"}
    assert len(programs) < len(programs.jobs)
    with pytest.raises(KeyError):
        programs["no such program"]


def test_afterwards_runners_compile_all_beforehand():
    original = ModelRunner.compile
    with lazy_compile.lazy_compilation():
        assert ModelRunner.compile is not original
    assert ModelRunner.compile is original
