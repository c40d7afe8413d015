"""One engine, server and client for the tests of agents: a model that writes calls and thoughts by script."""

import contextlib

import openai
import pytest

from support import lazy_compile
from support.agents import SCRIPTS, TEMPLATE
from support.engines import open_engine
from support.http_server import running
from support.scripted_checkpoint import write_scripted_checkpoint


@pytest.fixture(scope="package")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    write_scripted_checkpoint(folder, SCRIPTS, TEMPLATE, max_position_embeddings=2048)
    with contextlib.ExitStack() as stack:
        with lazy_compile.lazy_compilation():  # no longer: other packages' tests run before this fixture ends
            engine = stack.enter_context(open_engine(folder, enable_return_routed_experts=True))
        yield engine


@pytest.fixture(scope="package")
def server(engine):
    with running(engine) as server:
        yield server


@pytest.fixture(scope="package")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
