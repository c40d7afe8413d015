"""One engine and one server for all tests of the HTTP surface. Knows no test."""

import pytest

from support.http_server import running
from support.serving import borrow


@pytest.fixture(scope="package")
def engine():
    with borrow(enable_return_routed_experts=True) as engine:
        yield engine


@pytest.fixture(scope="package")
def server(engine):
    with running(engine) as server:
        yield server
