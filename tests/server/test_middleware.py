"""The access log: a line for every request, and one for each probe only at DEBUG."""

import logging

import pytest

from support.http_server import running

ACCESS_LOG = "routed_experts.server.access"
PROBES = ("/ready", "/health", "/health/live", "/ping", "/health_generate")


def access_levels(caplog):
    """Level of the last line of each path."""
    return {record.args[1]: record.levelno for record in caplog.records if record.name == ACCESS_LOG}


@pytest.mark.parametrize("is_started", [False, True], ids=["starting", "serving"])
def test_probes_are_logged_at_debug_and_other_requests_at_info(engine, caplog, is_started):
    caplog.set_level(logging.DEBUG, logger=ACCESS_LOG)
    with running(engine if is_started else None) as server:
        for path in (*PROBES, "/metrics", "/nowhere"):
            server.client.get(path)
        server.client.get("/version")  # by now the lines of the requests before it are written
    levels = access_levels(caplog)
    assert {path: levels[path] for path in PROBES} == dict.fromkeys(PROBES, logging.DEBUG)
    assert levels["/metrics"] == levels["/nowhere"] == logging.INFO
