"""How every test runs: on the CPU, with strict promotion, and with the TPU compiler where it is installed. Knows no
test."""

import gc
import importlib.util
import logging
import os
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported by anybody

import hypothesis
import jax
import pytest

from support import at_first_use, cheaply

hypothesis.settings.register_profile("unhurried", deadline=None)  # a first call compiles
if "CI" not in os.environ:  # there hypothesis' own profile rules: derandomized, no deadline
    hypothesis.settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-tpu-aot",
        action="store_true",
        help="where libtpu is missing, fail the tests marked tpu_aot, not skip them",
    )


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and config.pluginmanager.hasplugin("cacheprovider"):
        jax.config.update(
            "jax_compilation_cache_dir", str(config.cache.mkdir("jax"))
        )  # .pytest_cache: of this checkout alone
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now lives as long as the process: no collection of garbage need look at it (0.4 s each)."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def programs_of_a_module() -> Iterator[None]:
    """Let go of a module's compiled programs: each maps memory of its own, and a process may hold only so many mappings
    (vm.max_map_count, 65,530); one more ends it."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def compiled_cheaply() -> Iterator[None]:
    """For a module whose programs take longer to compile than to run, and that proves nothing of the bits of XLA's
    programs."""
    with cheaply.compiled():
        yield


@pytest.fixture(scope="module")
def compiled_at_first_use() -> Iterator[None]:
    """For a module of engines that does not ask when their programs are compiled, and runs few of them."""
    with at_first_use.compiled():
        yield


@pytest.fixture(autouse=True)
def logs_of_a_test() -> Iterator[None]:
    """A command that ran in this process has set up logs to the standard error of its test, which is closed afterwards:
    take them back, so that servers of later tests do not write there."""
    yield
    root, ours = logging.getLogger(), logging.getLogger("routed_experts")
    if any(type(one) is logging.StreamHandler for one in root.handlers):
        root.handlers[:] = [one for one in root.handlers if type(one) is not logging.StreamHandler]
        ours.setLevel(logging.NOTSET)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("tpu_aot") and importlib.util.find_spec("libtpu") is None:
        reason = "needs libtpu: pip install 'routed-experts[tpu-aot]'"
        if item.config.getoption("--require-tpu-aot"):  # as CI does: there these tests always run
            pytest.fail(reason)
        pytest.skip(reason)
