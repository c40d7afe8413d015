"""One engine and one server for the tests of the HTTP surface."""

import pytest

from support.http_server import running


@pytest.fixture(scope="package")
def engine(engine_factory):
    with engine_factory(enable_return_routed_experts=True) as engine:
        yield engine


@pytest.fixture(scope="package")
def server(engine):
    with running(engine) as server:
        yield server
