"""The end of a fleet by two signals. In a Ray that runs already it is behind HAProxy, with the ids of its answers."""

import tempfile
from pathlib import Path

import httpx
import pytest

from routed_experts.fleet.host_processes import end_users_of
from support.fleet_ids import check_ids
from support.fleet_process import REPLICA, FleetProcess, actors, environment, ray_cluster, wait_until

HOLD = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
HOLD_S = "600"  # for which Serve keeps a replica that ends: longer than the test waits


@pytest.fixture
def fleet(folders):
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, tempfile.TemporaryDirectory(prefix="ha-") as work:
        variables = {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{work}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{work}/admin.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": work,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{work}/server-state",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{work}/metrics.sock",
        }
        try:
            with ray_cluster(folder, num_cpus=2, **variables) as (address, pid):
                flags = ["--num-replicas", "1", "--ray-address", address, "--shutdown-timeout", "300"]
                process = FleetProcess(folders / "w0", *flags, env=environment(**{HOLD: HOLD_S}))
                process.root_pid = pid
                try:
                    yield process.wait_ready()
                except BaseException:
                    print(process.log()[-4000:])
                    raise
                finally:
                    process.close()
        finally:
            end_users_of(work)


def test_a_second_signal_ends_the_command_while_serve_ends_the_replicas(fleet):
    (replica,) = actors(REPLICA, fleet.root_pid)
    assert f"{HOLD}={HOLD_S}".encode() in Path(f"/proc/{replica}/environ").read_bytes().split(b"\0")
    with fleet.client() as client:
        assert fleet.proxy == "HAProxy"
        check_ids(client)
        fleet.process.terminate()
        wait_until(lambda: has_stopped(client))
    assert fleet.process.poll() is None, "Serve holds the replica"
    assert fleet.stop() == 0, fleet.log()[-4000:]
    assert "Serve has the order to end the replicas" in fleet.log() and actors(REPLICA, fleet.root_pid) == [replica]


def test_a_second_signal_leaves_nothing_of_a_ray_that_serve_has_started(folders):
    flags = ["--num-replicas", "2", "--shutdown-timeout", "300"]
    fleet = FleetProcess(folders / "w0", *flags, env=environment(**{HOLD: HOLD_S}))
    try:
        with fleet.wait_ready().client() as client:
            fleet.process.terminate()
            wait_until(lambda: has_stopped(client))
        assert fleet.process.poll() is None, "Serve holds the replicas"
        assert fleet.stop() == 0, fleet.log()[-4000:]
        wait_until(lambda: actors("ray::", fleet.root_pid) == [], seconds=20)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{fleet.url}/health", trust_env=False)
    finally:
        fleet.close()


def has_stopped(client):
    try:
        return client.get("/ready").status_code == 503
    except httpx.TransportError:
        return True
