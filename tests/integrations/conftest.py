"""Tunix's tests: its own warnings and dtype promotion, and one engine for all."""

import importlib.util
import warnings

import jax
import pytest

if importlib.util.find_spec("tunix") is not None:
    with warnings.catch_warnings():  # of Tunix's libraries, as they are imported
        warnings.simplefilter("ignore")
        from support import tunix_runs


@pytest.fixture(autouse=True, scope="module")
def tunix_promotion():
    """Tunix mixes dtypes, also on threads of its own."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session")
def demo_engine():
    """The demo model in float32. Each cluster pushes its weights before its first rollout."""
    with tunix_runs.demo_engine() as engine:
        yield engine


@pytest.fixture
def cluster(demo_engine):
    """A cluster that is not trained yet."""
    return tunix_runs.make_cluster(demo_engine)
