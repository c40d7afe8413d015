"""Tests of several devices: a test marked `devices(n)` runs in a pytest process that has n CPU devices.

XLA counts its devices once, when it starts, so a process has one number of them. The plugin starts one child process
for the marked tests of a file and reports each of them under its own name, as if it had run here. In a process that
was started with `--num-devices n` the tests run directly, as a debugger wants it. What decides how a test runs and how
its failure is printed is passed on to the child; what selects tests is not, because the parent names them."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import pytest

OPTION_COUNT, OPTION_REPORTS = "--num-devices", "--device-reports"
PASSED_ON = (
    "--thorough",
    "--require-tpu-aot",
    "--require-netns",
    "--hypothesis-profile",
    "--hypothesis-seed",
    "--hypothesis-verbosity",
    "--tb",
    "--showlocals",
    "-W",
    "-o",
)
TIMEOUT_S = 900


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION_COUNT, type=int, default=1, help="CPU devices of this process; tests marked devices(n) run in it"
    )
    parser.addoption(OPTION_REPORTS, help="a file to which the reports of this process are written, as JSON lines")


class DevicesPlugin:
    """Runs marked tests in child processes; in a child it writes the reports that the parent reads."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._num_devices: int = config.getoption(OPTION_COUNT)
        self._reports_file: str | None = config.getoption(OPTION_REPORTS)
        self._reports: dict[tuple[Path, int], dict[str, list[pytest.TestReport]]] = {}
        if self._num_devices > 1:
            jax.config.update("jax_num_cpu_devices", self._num_devices)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        count = num_devices(item)
        if count is None or count == self._num_devices:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._run_on_devices(item, count):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        item.session._setupstate.teardown_exact(nextitem)  # what the test before has left for this one
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._reports_file is not None:
            data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
            with open(self._reports_file, "a", encoding="utf-8") as file:
                file.write(json.dumps(data) + "\n")

    def _run_on_devices(self, item: pytest.Item, count: int) -> list[pytest.TestReport]:
        key = (item.path, count)
        if key not in self._reports:
            group = [it for it in item.session.items if it.path == item.path and num_devices(it) == count]
            self._reports[key] = self._run_child(group, count)
        return self._reports[key][item.nodeid]

    def _run_child(self, items: list[pytest.Item], count: int) -> dict[str, list[pytest.TestReport]]:
        """The reports of these tests, by name; a test that the child did not finish fails with its output."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        reports: dict[str, list[pytest.TestReport]] = {item.nodeid: [] for item in items}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "reports.jsonl"
            file.touch()
            command += [f"--rootdir={self._config.rootpath}"]  # names of tests are relative to it
            command += passed_on(self._config)
            command += [f"{OPTION_COUNT}={count}", f"{OPTION_REPORTS}={file}", *reports]
            ending = _run_to_the_end(command, self._config.rootpath)
            for line in file.read_text(encoding="utf-8").splitlines():
                hook = self._config.hook.pytest_report_from_serializable
                report = hook(config=self._config, data=json.loads(line))
                reports[report.nodeid].append(report)
        for item in items:
            if "teardown" not in {report.when for report in reports[item.nodeid]}:
                reports[item.nodeid].append(_failure(item, f"no result from the process of {count} devices: {ending}"))
        return reports


def num_devices(item: pytest.Item) -> int | None:
    """Number of devices that a test requires; None without a mark."""
    marker = item.get_closest_marker("devices")
    return None if marker is None else int(marker.args[0])


def passed_on(config: pytest.Config) -> list[str]:
    """The options of this run that its child processes get, too. Some are of plugins that may be missing."""
    options: list[str] = []
    for name in PASSED_ON:
        value = config.getoption(name, default=None)
        if isinstance(value, bool):
            options += [name] if value else []
        else:
            values = value if isinstance(value, list) else [] if value is None else [value]
            options += [f"{name}={text}" if name.startswith("--") else name + text for text in values]
    return options


def _run_to_the_end(command: list[str], folder: Path) -> str:
    """Run a process, for TIMEOUT_S at most; returns how it ended, and the end of what it printed."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, env=_environment(), **output) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT_S)
            status = f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            status = f"ended after {TIMEOUT_S} s, the limit"
    return f"{status}\n{stdout[-4000:]}\n{stderr[-4000:]}"


def _environment() -> dict[str, str]:
    """That of this process, with its JIT cache and without the device count of others."""
    env = dict(os.environ)
    cache = jax.config.jax_compilation_cache_dir
    if cache is not None:
        env |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3"}
    return env


def _failure(item: pytest.Item, text: str) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, {}, outcome="failed", longrepr=text, when="call")
