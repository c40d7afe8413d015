"""schemathesis on our own OpenAPI document: bodies that fit it and bodies that do not. No 5xx, and only what the
document declares.

Which of them must be refused is not asked here: names that we do not know are accepted without effect, and values are
checked beyond what a schema says; test_refusals and the 400s of each surface have that."""

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from routed_experts.server.app import TABLE
from support.engines import assert_idle, open_engine
from support.http_server import running
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = {  # of those without a body every path is as declared
    GenerationMode.POSITIVE: [(method, entry.path.replace(":path", "")) for entry in TABLE for method in entry.methods],
    GenerationMode.NEGATIVE: [(method, entry.path) for entry in TABLE for method in entry.methods if entry.body],
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One of its own: weight versions rise in here."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    with lazy_compilation(), open_engine(folder, enable_return_routed_experts=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine):
    with running(engine, request_timeout=20) as server:
        yield server


@pytest.fixture(scope="module")
def session():
    with requests.Session() as session:
        session.trust_env = False
        yield session


def wake_up(engine):
    """Should the case have released memory, take it back."""
    if "weights" in engine.released:
        engine.update_weights_from_disk(engine.server_args.model_path)
    engine.resume_memory_occupation()


def answered(server, engine, session, operation, mode, num_cases):
    """The statuses of the cases of one operation."""
    statuses = []

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=num_cases, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    def check(case):
        response = case.call(session=session, timeout=30)
        case.validate_response(response, checks=CHECKS)
        assert response.status_code < 500, (case.as_curl_command()[:1000], response.text[:500])
        if response.status_code >= 400:
            assert response.json()["error"].keys() == {"message", "type", "param", "code"}
        statuses.append(response.status_code)
        engine.resume()  # should this have been a pause
        wake_up(engine)

    check()
    server.wait_idle()
    assert_idle(engine)
    return statuses


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("num_cases", [6, pytest.param(25, marks=pytest.mark.thorough)])
def test_only_what_the_document_declares_is_answered(server, engine, session, num_cases, mode):
    """So many cases of each operation and kind."""
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    statuses = {
        (method, path): answered(server, engine, session, schema[path][method], mode, num_cases)
        for method, path in OPERATIONS[mode]
    }
    assert len(statuses) >= 12 and sum(len(codes) for codes in statuses.values()) >= 24 * num_cases
    assert not [operation for operation, codes in statuses.items() if not codes]
    if mode.is_positive:
        accepted_paths = {entry.path for entry in TABLE if entry.body} & {
            path for (_, path), codes in statuses.items() if 200 in codes
        }
        assert len(accepted_paths) >= 5, (
            f"bodies are drawn at random, and few kinds of them are ever taken: {accepted_paths}"
        )
