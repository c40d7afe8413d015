"""The end of the fleet that the other files of this folder share: the last of them."""

import os
import signal
import urllib.parse

import httpx
import pytest

from support.fleet_process import ADMIN, END_S, actors, wait_until


def test_a_signal_to_the_process_group_drains_the_fleet_and_leaves_nothing(fleet_session):
    """As a shell or a supervisor sends it: Ray, HAProxy and this command have it from one group."""
    port = urllib.parse.urlsplit(fleet_session.url).port
    with fleet_session.client(ADMIN) as admin:
        assert admin.get("/ready").status_code == 200
    os.killpg(fleet_session.process.pid, signal.SIGTERM)
    assert fleet_session.process.wait(END_S) == 0, fleet_session.log()[-4000:]
    wait_until(lambda: actors("ray::", fleet_session.root_pid) == [], seconds=20)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
