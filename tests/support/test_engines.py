"""What a test leaves on a shared engine is an error of that test, and other tests do not meet it. The engine has
settings that no other test has: one is shut down here."""

import pytest

from support.engines import assert_idle, shared_engine

pytest_plugins = ("pytester",)

CONFTEST = """
import pytest
from support import engines

def pytest_configure(config):
    config.pluginmanager.register(engines, "shared_engines")

@pytest.fixture(scope="module")
def engine():
    with engines.shared_engine(enable_return_routed_experts=True, random_seed=17) as engine:
        yield engine
"""
PAUSES = """
from support.engines import PausedRequests

def test_fails_with_live_requests(engine):
    PausedRequests(engine, [5, 6, 7], [8, 9], max_new_tokens=20, sampling_params={"ignore_eos": True})
    raise ValueError("before it resumes")

def test_finds_an_idle_engine(engine):
    assert engine.paused is None
    assert engine.generate(input_ids=[5, 6, 7], max_new_tokens=3)["meta_info"]["prompt_tokens"] == 3
"""
SHUTS_DOWN = """
from support import engines

def test_shuts_the_engine_down():
    engines._shared_engines[frozenset({"enable_return_routed_experts": True, "random_seed": 17}.items())].shutdown()
"""
GENERATES = """
def test_finds_an_engine_that_runs(engine):
    assert engine.generate(input_ids=[5, 6, 7], max_new_tokens=3)["meta_info"]["prompt_tokens"] == 3
"""


def run(pytester, **files):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(**files)
    result = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    return result.parseoutcomes(), str(result.stdout)


@pytest.fixture
def engine():
    with shared_engine(enable_return_routed_experts=True, random_seed=17) as engine:
        yield engine


def test_requests_that_a_failed_test_leaves_are_its_error_and_end(pytester, engine):
    counts, output = run(pytester, test_1=PAUSES, test_2=GENERATES)
    assert counts == {"passed": 2, "failed": 1, "errors": 1}
    assert "ERROR at teardown of test_fails_with_live_requests" in output
    assert "left a shared engine paused (in_place), with 2 live requests" in output
    assert_idle(engine)


def test_an_engine_that_a_test_shuts_down_is_its_error_and_is_replaced(pytester):
    counts, output = run(pytester, test_1=GENERATES, test_2=SHUTS_DOWN, test_3=GENERATES)
    assert counts == {"passed": 3, "errors": 1}
    assert "left a shared engine shut down" in output
