"""The plugin reports what happened in the process of several devices: failures, crashes and missing tests fail here."""

from pathlib import Path

import pytest

from support import devices

pytest_plugins = ("pytester",)

CONFTEST = """
from support.devices import DevicesPlugin, add_options

def pytest_addoption(parser):
    add_options(parser)

def pytest_configure(config):
    config.addinivalue_line("markers", "devices(n)")
    config.pluginmanager.register(DevicesPlugin(config), "devices")
"""
TESTS = """
import os
import jax
import pytest

pytestmark = pytest.mark.devices(2)

def test_passes():
    assert len(jax.devices()) == 2

def test_fails():
    assert len(jax.devices()) == 1

def test_skips():
    pytest.skip("no reason")

@pytest.fixture
def broken():
    yield
    raise ValueError("a fixture that breaks")

def test_with_a_broken_fixture(broken):
    pass

def test_crashes():
    os._exit(7)

def test_after_a_crash():
    pass
"""
ONLY_IN_THE_PARENT = """
import jax
import pytest

if len(jax.devices()) == 1:
    @pytest.mark.devices(2)
    def test_is_not_there():
        pass
"""
READS_OPTIONS = """
import hypothesis
import pytest

@pytest.mark.devices(2)
def test_of_two_devices(request, pytestconfig):
    option = pytestconfig.getoption
    assert hypothesis.settings.get_current_profile_name() == "short"
    assert option("--hypothesis-seed") == "7" and option("--require-tpu-aot") and option("--tb") == "line"
    assert option("--thorough")
    assert option("-W") == ["error::UserWarning"] and pytestconfig.getini("xfail_strict") is True
    assert option("-k") == "" and not option("--exitfirst")  # the parent selects
"""
OPTIONS_CONFTEST = CONFTEST.replace(
    "    add_options(parser)",
    """    add_options(parser)
    parser.addoption("--require-tpu-aot", action="store_true")
    parser.addoption("--thorough", action="store_true")
    hypothesis.settings.register_profile("short", max_examples=1)
""",
).replace("from support", "import hypothesis\nfrom support")
NEVER_ENDS = """
import threading
import pytest

@pytest.mark.devices(2)
def test_never_ends():
    threading.Event().wait()
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """That of the runs below and of their processes: without a plugin that takes seconds to import, as in our own."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:schemathesis")


@pytest.fixture
def run(pytester):
    def outcomes(tests, conftest=CONFTEST, options=()):
        """In this process, which has imported JAX; with options, some of which would stay set, in one of its own."""
        pytester.makeconftest(conftest)
        pytester.makepyfile(tests)
        runpytest = pytester.runpytest_subprocess if options else pytester.runpytest_inprocess
        result = runpytest("-q", "-p", "no:cacheprovider", *options)
        return result.parseoutcomes(), str(result.stdout)

    return outcomes


def test_failures_and_crashes_are_reported(run):
    counts, output = run(TESTS)
    assert counts == {"passed": 2, "failed": 3, "skipped": 1, "errors": 1}  # the call with a broken fixture passed
    assert "exit status 7" in output and "a fixture that breaks" in output


def test_the_process_gets_the_options_that_decide_how_a_test_runs(run):
    options = ["--hypothesis-profile=short", "--hypothesis-seed=7", "--require-tpu-aot", "--thorough", "--tb=line"]
    options += ["-W", "error::UserWarning", "-o", "xfail_strict=true", "-k", "two", "-x"]
    assert run(READS_OPTIONS, OPTIONS_CONFTEST, options)[0] == {"passed": 1}
    assert run(READS_OPTIONS, OPTIONS_CONFTEST)[0] == {"failed": 1}  # without them it can fail


def test_a_test_that_the_process_does_not_find_fails(run):
    counts, output = run(ONLY_IN_THE_PARENT)
    assert counts == {"failed": 1} and "test_is_not_there" in output


def test_a_process_that_takes_too_long_is_ended_and_fails(run, monkeypatch):
    monkeypatch.setattr(devices, "TIMEOUT_S", 3)
    counts, output = run(NEVER_ENDS)
    assert counts == {"failed": 1} and "ended after 3 s" in output


def test_the_test_after_one_of_several_devices_is_set_up(pytester):
    pytester.makeconftest(CONFTEST)
    one_device, two_devices = "def test_passes():\n    pass\n", "import pytest\n\n@pytest.mark.devices(2)\n"
    files = {"a/test_1.py": one_device, "a/test_2.py": two_devices + one_device, "b/test_3.py": one_device}
    for name, text in files.items():
        file = pytester.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    result = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider")
    assert result.parseoutcomes() == {"passed": 3}
