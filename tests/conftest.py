"""Settings and fixtures of all tests: CPU, strict dtype promotion, repeatable properties, engines that files share."""

import contextlib
import gc
import importlib.util
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported by anybody
# PyTorch's threads wait for one another by spinning. Its models here are tiny, and test processes share the cores: with
# a thread a core each oracle takes several times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import jax
import pytest

from routed_experts import Engine
from support import engines, fast_compile, lazy_compile
from support.devices import DevicesPlugin, add_options
from support.network_namespaces import can_make_namespaces
from support.one_program import one_program_for_all_threads
from support.tiny_checkpoint import write_tiny_checkpoint

LONG_FILES = {Path(__file__).with_name(name) for name in ("test_benchmarks.py", "test_docs.py")}
CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
HAS_TUNIX = importlib.util.find_spec("tunix") is not None

# A first call compiles, so there is no deadline. A run meets the same examples every time; scripts/fuzz draws new ones.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.register_profile("fuzz", deadline=None, derandomize=False, print_blob=True)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-tpu-aot",
        action="store_true",
        help="where libtpu is missing, fail the tests marked tpu_aot, not skip them",
    )
    parser.addoption(
        "--require-netns",
        action="store_true",
        help="where network namespaces cannot be made, fail the tests marked netns, not skip them",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run the tests marked thorough, too, and the others as often as they can be: scripts/thorough",
    )
    parser.addoption(
        "--with-ray",
        action="store_true",
        help="collect tests/fleet/with_ray, which needs the extra ray (scripts/fleet runs it)",
    )
    parser.addoption(
        "--require-tunix",
        action="store_true",
        help="where Tunix is missing, end the run with an error, not without tests/integrations (scripts/tunix)",
    )
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_traceback_in_locations_limit", 0)  # of every operation: a twentieth of tracing and lowering
    config.pluginmanager.register(DevicesPlugin(config), "devices")
    config.pluginmanager.register(engines, "shared_engines")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and config.pluginmanager.hasplugin("cacheprovider"):
        jax.config.update(
            "jax_compilation_cache_dir", str(config.cache.mkdir("jax"))
        )  # .pytest_cache: of this checkout alone
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    if config.getoption("--require-tunix") and not HAS_TUNIX:
        raise pytest.UsageError("Tunix is not installed: scripts/tunix runs its tests in an environment of their own")
    if on_gpu():
        check_gpu()


def on_gpu() -> bool:
    """True in a run that was started for a GPU: `scripts/test --gpu`."""
    return os.environ["JAX_PLATFORMS"].partition(",")[0] in ("cuda", "gpu", "rocm")


def check_gpu() -> None:
    """End the run with one sentence where JAX finds no GPU: each test would fail with the traceback of that."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: JAX's own, where its CUDA plugin is missing
        reason = next(iter(str(error).splitlines()), "this JAX has no such platform")
        raise pytest.UsageError(
            f"the tests marked gpu need a GPU, and JAX finds none (JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}: "
            f"{reason}); on a machine with one, install a JAX with CUDA: "
            '.venv/bin/python -m pip install "jax[cuda12]"; scripts/test runs the other tests on the CPU'
        ) from None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """On a GPU only files with tests marked `gpu` are imported: other files may need packages that are missing. What
    needs Ray is collected with --with-ray, what needs Tunix where it is installed."""
    if "integrations" in (collection_path.name, collection_path.parent.name) and not HAS_TUNIX:
        return True
    if collection_path.name == "with_ray" and not config.getoption("--with-ray"):
        return True
    if on_gpu() and collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        return "mark.gpu" not in collection_path.read_text(encoding="utf-8") or None
    return None


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU the tests marked `gpu` are deselected, and the summary reports it; so are those marked `thorough`
    without the option. With it, tests that run more often in a thorough run are marked, too. Long files that would be
    last are first: at the end of a run all processes have work."""
    items.sort(key=lambda item: item.path not in LONG_FILES)  # a stable sort
    if config.getoption("thorough"):
        for item in items:
            if "is_thorough" in getattr(item, "fixturenames", ()):
                item.add_marker("thorough")
    if on_gpu():
        return
    left_out = {"gpu"} if config.getoption("thorough") else {"gpu", "thorough"}
    deselected = [item for item in items if any(map(item.get_closest_marker, left_out))]
    if deselected:
        gone = set(deselected)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=deselected)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--with-ray"):
        terminalreporter.write_line("tests/fleet/with_ray: not collected; scripts/fleet runs it, with Ray")
    if not HAS_TUNIX:
        terminalreporter.write_line(
            "tests/integrations (tests marked tunix): not collected; scripts/tunix runs them, with Tunix"
        )
    if not on_gpu():
        if not config.getoption("thorough"):
            terminalreporter.write_line("tests marked thorough: deselected; scripts/thorough runs them")
        platform = os.environ["JAX_PLATFORMS"]
        terminalreporter.write_line(
            f"tests marked gpu: deselected (JAX_PLATFORMS={platform}); on a machine with a GPU run scripts/test --gpu"
        )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze what is imported: it lives as long as the process, and a garbage collection that scans it takes 0.4 s.
    Tracing makes objects by the million that live on: by Python's own thresholds collections take a twentieth of a
    run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 20)


@pytest.fixture(autouse=True, scope="module")
def clear_programs() -> Iterator[None]:
    """Drop the compiled programs of a module: each maps memory, and a process may hold vm.max_map_count mappings
    (65,530)."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def is_thorough(request: pytest.FixtureRequest) -> bool:
    """Whether this is a run of scripts/thorough: tests run as often as they can be, and programs are as shipped."""
    return bool(request.config.getoption("thorough"))


@pytest.fixture(scope="module")
def fast_compilation() -> Iterator[None]:
    """Compile without optimisations: for modules whose programs compile longer than they run and prove no bits."""
    with fast_compile.fast_compilation():
        yield


@pytest.fixture(scope="module")
def one_program() -> Iterator[None]:
    """Compile what the threads of an interpreted kernel of Mosaic GPU run once, and not in each thread."""
    with one_program_for_all_threads():
        yield


@pytest.fixture
def fast_in_every_run(is_thorough) -> Iterator[None]:
    """Compile without optimisations, but in scripts/thorough: for what other modules have as it is shipped."""
    with contextlib.nullcontext() if is_thorough else fast_compile.fast_compilation():
        yield


@pytest.fixture(scope="module")
def lazy_compilation() -> Iterator[None]:
    """Compile each program of an engine at its first run: for modules that do not test when programs are compiled."""
    with lazy_compile.lazy_compilation():
        yield


@pytest.fixture(scope="session")
def engine_factory() -> Callable[..., AbstractContextManager[Engine]]:
    """`with engine_factory(**args) as engine`: the shared engine of these settings, with an empty cache."""
    return engines.shared_engine


@pytest.fixture(scope="module")
def tiny_engine(engine_factory) -> Iterator[Engine]:
    """The shared engine of the tiny MoE with capture on."""
    with engine_factory(enable_return_routed_experts=True) as engine:
        yield engine


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """Folder of the tiny MoE with its tokenizer, seed 0; only read."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny_checkpoint"))


@pytest.fixture(autouse=True)
def reset_logging() -> Iterator[None]:
    """Remove the log handlers that a command set up in this process: the standard error of its test is closed."""
    yield
    root, package_logger = logging.getLogger(), logging.getLogger("routed_experts")
    if any(type(handler) is logging.StreamHandler for handler in root.handlers):
        root.handlers[:] = [handler for handler in root.handlers if type(handler) is not logging.StreamHandler]
        package_logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def keep_signal_handlers() -> Iterator[None]:
    """Undo what a server that ran in this process left: it ignores signals at its end, and processes of later tests
    would inherit that."""
    before = {sig: signal.getsignal(sig) for sig in (signal.SIGINT, signal.SIGTERM)}
    yield
    for sig, handler in before.items():
        if signal.getsignal(sig) != handler and handler is not None:
            signal.signal(sig, handler)


@pytest.fixture(autouse=True)
def keep_compilation_cache() -> Iterator[None]:
    """Undo what a command set in this process: later tests would read and write programs of the user's cache."""
    before = {name: getattr(jax.config, name) for name in CACHE_SETTINGS}
    yield
    for name, value in before.items():
        if getattr(jax.config, name) != value:
            jax.config.update(name, value)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("tpu_aot") and importlib.util.find_spec("libtpu") is None:
        reason = "needs libtpu: pip install 'routed-experts[tpu-aot]'"
        if item.config.getoption("--require-tpu-aot"):  # as CI does: there these tests always run
            pytest.fail(reason)
        pytest.skip(reason)
    if item.get_closest_marker("netns") and not can_make_namespaces():
        reason = "needs root and `ip netns`"
        if item.config.getoption("--require-netns"):
            pytest.fail(reason)
        pytest.skip(reason)
