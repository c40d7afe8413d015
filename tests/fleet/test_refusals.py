"""What a user can get wrong about a fleet: one sentence with exit code 2, before Ray is started or imported."""

import dataclasses
import pickle
import socket
import sys
import types

import pytest

from routed_experts.cli import main
from routed_experts.core.dist_config import DistConfig
from routed_experts.core.errors import ConfigError
from routed_experts.core.server_args import ServerArgs
from routed_experts.fleet import serve_environment
from routed_experts.fleet.settings import FleetSettings
from routed_experts.fleet.spec import ReplicaSpec, check_resources, group_template, host_bundle
from routed_experts.server.limits import ServerSettings

WRONG = {
    "none": ("--num-replicas 0", "--num-replicas 0 must be an integer in 1..10000"),
    "less than none": ("--num-replicas -3", "--num-replicas -3 must be"),
    "too many": ("--num-replicas 10001", "--num-replicas 10001 must be"),
    "no number": ("--num-replicas two", "--num-replicas: 'two' is no integer; give one"),
    "unknown policy": ("--num-replicas 2 --routing-policy random", "choose one of least_loaded, session"),
    "policy of one": ("--routing-policy session", "with --num-replicas 1 routes to the one engine"),
    "no address": ("--num-replicas 2 --ray-address=", "--ray-address '' names no Ray cluster"),
    "no time to start": (
        "--num-replicas 2 --replica-startup-timeout 0",
        "--replica-startup-timeout 0.0 must be 1 to 86400",
    ),
    "no time to load": ("--num-replicas 2 --weight-update-timeout nan", "--weight-update-timeout nan must be 1 to"),
    "a rank": ("--num-replicas 2 --nnodes 2 --node-rank 1", "--node-rank 1 with --num-replicas: Ray starts"),
    "rank 0": ("--num-replicas 2 --nnodes 2 --node-rank 0", "--node-rank 0 with --num-replicas: Ray starts"),
    "an address": (
        "--num-replicas 2 --nnodes 2 --dist-init-addr 127.0.0.1:5000",
        "--dist-init-addr '127.0.0.1:5000' with --num-replicas: each replica chooses its own",
    ),
    "no process": ("--num-replicas 2 --nnodes 0", "--nnodes 0 must be"),
    "no Ray": ("--num-replicas 2", "serve --num-replicas: ray is not installed; run"),
    "no Ray, but an address": ("--ray-address auto", "ray is not installed; run"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_start_is_one_sentence(name, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "ray", None)  # as where the extra is missing
    flags, expected = WRONG[name]
    try:
        code = main(["serve", "demo", *flags.split()])
    except SystemExit as exit_:  # of argparse
        code = exit_.code
    error = capfd.readouterr().err
    assert code == 2 and expected in error and "Traceback" not in error
    assert len([line for line in error.splitlines() if "error: " in line]) == 1 and len(error.splitlines()) <= 3
    if "not installed" in expected:
        assert "[ray]" in error


def test_a_port_in_use_is_reported_before_ray_is_started(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))  # installed, and without anything to start
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        assert main(["serve", "demo", "--num-replicas", "2", "--port", str(port)]) == 1
    error = capfd.readouterr().err
    assert f"error: cannot listen on 127.0.0.1:{port} (Address already in use); choose another --port" in error
    assert "Traceback" not in error and len(error.splitlines()) <= 3


def spec(**fields):
    fleet = FleetSettings(num_replicas=fields.pop("num_replicas", 2))
    return ReplicaSpec(
        args=fields.pop("args", ServerArgs(model_path="demo")), server=ServerSettings(), fleet=fleet, **fields
    )


@pytest.mark.parametrize(
    ("fields", "num_generating"),
    [
        ({}, 1024 + 32),
        ({"max_running_requests": 600, "max_queued_requests": 5}, 605),
        ({"precompile_bs_paddings": (8, 600)}, 1024 + 600),
        ({"precompile_bs_paddings": (8,), "tp_size": 4, "dp_size": 4}, 1024 + 4 * 8),
    ],
)
def test_routes_have_room_beside_all_requests_that_an_engine_runs_and_queues(fields, num_generating):
    """Else the route that continues a paused replica would wait behind the requests that wait for it."""
    replica = spec(args=ServerArgs(model_path="demo", **fields))
    assert replica.max_ongoing_requests == num_generating + 64


def test_random_weights_are_those_of_every_process():
    assert spec().parts["load_format"] == "auto" and spec(load_format="dummy").parts["load_format"] == "dummy"


def test_a_tp_size_that_the_processes_of_a_replica_do_not_divide_is_refused():
    with pytest.raises(
        ConfigError, match=r"tp_size=3 counts the devices of the 2 processes of a replica; choose a mult"
    ):
        spec(
            args=ServerArgs(model_path="demo", tp_size=3),
            dist=group_template(nnodes=2, node_rank=None, dist_init_addr=None),
        )


def test_what_does_not_fit_is_refused_with_the_table_of_what_is_free():
    check_resources(spec(), {"CPU": 2.0})
    with pytest.raises(ConfigError, match=r"num_replicas=2 do not fit \(CPU: 2 needed, 1 free\); set num_replicas=1"):
        check_resources(spec(), {"CPU": 1.0})
    with pytest.raises(ConfigError, match=r"CPU: 2 needed, 0 free\); add hosts, or stop what else runs"):
        check_resources(spec(), {})
    dist = group_template(nnodes=2, node_rank=None, dist_init_addr=None)
    large = spec(args=ServerArgs(model_path="demo", tp_size=16), dist=dist, num_replicas=4)
    check_resources(large, {"CPU": 8.0, "GPU": 64.0})
    table = r"\(CPU: 8 needed, 64 free, GPU: 64 needed, 40 free\); set num_replicas=2"
    with pytest.raises(ConfigError, match=rf"num_replicas=4 of 2 processes each do not fit {table}"):
        check_resources(large, {"CPU": 64.0, "GPU": 40.0})


def test_a_process_takes_the_accelerators_of_its_devices_and_a_cpu():
    assert host_bundle(8, 1, {"CPU": 64.0, "GPU": 8.0}) == {"CPU": 1.0, "GPU": 8.0}
    assert host_bundle(16, 2, {"CPU": 64.0, "TPU": 16.0}) == {"CPU": 1.0, "TPU": 8.0}
    assert host_bundle(2, 2, {"CPU": 64.0}) == {"CPU": 1.0}


def test_one_engine_is_no_fleet_unless_a_ray_is_named():
    assert not FleetSettings().is_fleet
    assert FleetSettings(num_replicas=2).is_fleet and FleetSettings(ray_address="auto").is_fleet


def test_the_spec_travels_whole_and_shows_no_key():
    server = ServerSettings(api_key="secret-of-users", admin_api_key="secret-of-admins")
    sent = dataclasses.replace(spec(), server=server)
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert "secret" not in repr(sent)


def test_the_processes_of_a_replica_keep_their_timeouts():
    dist = group_template(nnodes=2, node_rank=None, dist_init_addr=None, dist_timeout=20.0, watchdog_timeout=5.0)
    assert (dist.nnodes, dist.is_leader, dist.dist_timeout, dist.watchdog_timeout) == (2, True, 20.0, 5.0)
    assert group_template(nnodes=1, node_rank=None, dist_init_addr=None) == DistConfig()


@pytest.mark.parametrize(
    ("policy", "is_installed", "expected"),
    [("least_loaded", True, "1"), ("least_loaded", False, "0"), ("session", True, "0")],
)
def test_the_environment_of_ray_names_the_proxy_and_keeps_off_our_port(monkeypatch, policy, is_installed, expected):
    monkeypatch.setattr(serve_environment, "haproxy_is_installed", lambda: is_installed)
    fleet = FleetSettings(num_replicas=2, routing_policy=policy)
    chosen = dataclasses.replace(spec(), fleet=fleet)
    variables = serve_environment.serve_environment(chosen, work_folder="/tmp/x")
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == expected
    low, high = (int(variables[f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT"]) for end in ("MIN", "MAX"))
    assert not low <= ServerSettings().port <= high
    assert ("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC" in variables) is (expected == "1")


def test_a_session_policy_behind_haproxy_is_refused():
    serve_environment.check_proxy("session", serve_environment.PYTHON_PROXY)
    serve_environment.check_proxy("least_loaded", serve_environment.HAPROXY)
    with pytest.raises(ConfigError, match="start that Ray with RAY_SERVE_ENABLE_HA_PROXY=0, or choose least_loaded"):
        serve_environment.check_proxy("session", serve_environment.HAPROXY)
