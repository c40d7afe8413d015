"""pytest plugin that runs a peer's test file: imports of the peer's project find our stand-ins, results go to a file.

Environment: COMPAT_PEER (vllm, sglang or sglang-jax), COMPAT_CHECKOUT, COMPAT_MODEL_PATH, COMPAT_RESULTS (a JSON lines
file that gets [test id, outcome, first line of the reason])."""

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
CHECKOUT = Path(os.environ["COMPAT_CHECKOUT"])
sys.path.insert(0, str(HERE / "stand_ins"))

from compat_peers import placeholders, serving  # noqa: E402
from compat_peers.placeholders import PeersOwn  # noqa: E402

placeholders.install()
# Sizes of the model that a test names, in its module or class: those of the model of the tests stand instead.
SIZES = {"_QWEN3_30B_A3B_NUM_LAYERS": 6, "_QWEN3_30B_A3B_TOPK": 4, "abort_all_max_new_tokens": 1900}


def use_our_tokenizer() -> None:
    """Load the tokenizer of the model of the tests for every name of the hub."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return
    load: Any = AutoTokenizer.from_pretrained
    AutoTokenizer.from_pretrained = lambda name, *args, **options: load(
        name if Path(name).is_dir() else serving.model_path(), *args, **options
    )


def pytest_configure(config: pytest.Config) -> None:
    """Give vLLM's tests their helpers: `tests` is the folder of the checkout, but for the modules of ours."""
    use_our_tokenizer()
    if os.environ["COMPAT_PEER"] == "vllm":
        tests = ModuleType("tests")
        tests.__path__ = [str(CHECKOUT / "tests")]
        sys.modules["tests"] = tests
        for name in ("utils", "conftest"):
            module = importlib.import_module(f"tests_of_vllm.{name}")
            sys.modules[f"tests.{name}"] = module
            setattr(tests, name, module)
        config.pluginmanager.register(sys.modules["tests.conftest"], "vllm fixtures")
        config.pluginmanager.register(importlib.import_module("tests.entrypoints.conftest"), "vllm entry fixtures")
    if os.environ["COMPAT_PEER"] == "sglang-jax":
        sys.path.append(str(CHECKOUT / "test" / "srt"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the sizes of the model."""
    for item in items:
        for owner in (getattr(item, "module", None), getattr(item, "cls", None)):
            for name in SIZES:
                if hasattr(owner, name):
                    setattr(owner, name, SIZES[name])


def pytest_sessionfinish() -> None:
    """Leave no server behind."""
    serving.end_all()


def _reason(error: BaseException) -> str:
    """The first line that says why, without addresses and times."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _peers_own(error: BaseException | None) -> PeersOwn | None:
    """The use of the peer's own program that an error comes from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, PeersOwn):
            return error
        error = error.__cause__ or error.__context__
    return None


class _Results:
    """The worst outcome of each test, over its phases."""

    def __init__(self) -> None:
        self.path = Path(os.environ["COMPAT_RESULTS"])

    def write(self, test: str, outcome: str, reason: str) -> None:
        """Append a line."""
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps([test, outcome, reason]) + "\n")


RESULTS = _Results()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write each phase that decides something."""
    result: Any = yield
    report = result.get_result()
    error = call.excinfo.value if call.excinfo is not None else None
    own = _peers_own(error)
    if own is not None:
        RESULTS.write(item.nodeid, "not applicable", f"a unit test of the peer's own code: {own}")
    elif report.outcome == "skipped" and error is not None:
        RESULTS.write(item.nodeid, "skipped", f"skipped by its own condition: {_reason(error)}")
    elif report.outcome == "failed" and error is not None and report.when != "teardown":
        RESULTS.write(item.nodeid, "fails", ("at setup: " if report.when == "setup" else "") + _reason(error))
    elif report.outcome == "passed" and report.when == "call":
        RESULTS.write(item.nodeid, "pass", "")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be collected is one result."""
    if report.outcome == "failed":
        lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
        own = any("PeersOwn" in line for line in lines)
        text = (lines[-1][1:].strip() if lines else str(report.longrepr))[:300]
        RESULTS.write(report.nodeid, "not applicable" if own else "fails", text)
