"""What a user can get wrong when a group starts: one sentence with exit code 1 or 2, without a traceback or a hang, and
before JAX starts a device for the group."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from routed_experts import Engine, ExpertOffloadConfig, PlacementConfig, follow
from routed_experts.cli import main
from routed_experts.core.dist_config import DistConfig
from routed_experts.core.errors import ConfigError, MachineError
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.engine.build.group_start import group_fields, join_group
from routed_experts.models.loading.checkpoint import Checkpoint, save
from routed_experts.placement import rebalance
from support.process_groups import free_address
from support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1, mlp_only_layers=[])


@pytest.fixture(autouse=True)
def restore_signals():
    """A server and a follower take SIGTERM and SIGINT."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


GROUP = "--nnodes 2 --dist-init-addr ADDRESS"
WRONG = {
    "rank": (GROUP + " --node-rank 2", 2, "--node-rank 2 must be an integer in 0..1"),
    "no process": ("--nnodes 0", 2, "--nnodes 0 must be"),
    "no address": ("--nnodes 2", 2, "--nnodes 2 needs --dist-init-addr"),
    "last port": ("--nnodes 2 --dist-init-addr 127.0.0.1:65535", 2, "port must be 1 to 65534"),
    "no port": ("--nnodes 2 --dist-init-addr localhost", 2, "is not host:port"),
    "other machine": ("--nnodes 2 --dist-init-addr 192.0.2.1:5000", 1, "cannot listen on 192.0.2.1:5000"),
    "no multiple": ("--nnodes 3 --dist-init-addr ADDRESS", 2, "--tp-size 2 counts the devices of all 3 processes"),
    "native experts": (GROUP + " --moe-backend native", 2, "--moe-backend 'native' with --nnodes 2"),
    "native attention": (GROUP + " --attention-backend native", 2, "--attention-backend 'native' with --nnodes 2"),
    "host experts": (GROUP + " --kt-num-gpu-experts 2", 2, "experts on the host with --nnodes 2"),
    "draft model": (GROUP + " --speculative-algorithm NEXTN", 2, "speculation by NEXTN with --nnodes 2"),
    "nobody comes": (GROUP + " --dist-timeout 1", 1, "processes 1 of 2 did not come to"),
    "no leader": (GROUP + " --node-rank 1 --dist-timeout 1", 1, "process 0 is not reached at"),
    "no folder": ("--nnodes 2 --dist-init-addr ADDRESS --model-path nowhere", 2, "no checkpoint folder nowhere"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_start_is_one_sentence_with_its_exit_code(folder, capfd, name):
    flags, code, expected = WRONG[name]
    words = flags.replace("ADDRESS", free_address()).split()
    model = [] if "--model-path" in words else [str(folder)]
    assert main(["serve", *model, "--tp-size", "2", "--port", "0", *words]) == code
    errors = capfd.readouterr().err
    assert "Traceback" not in errors
    (line,) = [line for line in errors.splitlines() if ": error: " in line]
    assert expected in line and len(line) < 1000, line


@pytest.mark.parametrize(("offset", "expected"), [(0, "--dist-init-addr"), (1, "JAX's coordinator, the next port")])
def test_ports_in_use_are_named(folder, capfd, offset, expected):
    address = free_address()
    host, port = address.rsplit(":", 1)
    flags = ["--tp-size", "2", "--nnodes", "2", "--dist-init-addr", address, "--port", "0"]
    with socket.create_server((host, int(port) + offset)):
        assert main(["serve", str(folder), *flags]) == 1
    assert expected in capfd.readouterr().err


def test_what_xla_was_told_is_compared_but_for_dumps_and_virtual_devices():
    """Also where no command line has looked at XLA_FLAGS."""
    program = "from routed_experts.engine.build.group_start import group_fields\n"
    program += "from routed_experts.core.dist_config import DistConfig\n"
    program += "print(group_fields(None, DistConfig(), None, None, 'auto')[\"XLA's options (of XLA_FLAGS)\"])"
    flags = (
        "",
        "--xla_force_host_platform_device_count=3 --xla_dump_to=nowhere --xla_dump_hlo_as_text",
        "--xla_gpu_deterministic_ops=true",
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program], env={**os.environ, "XLA_FLAGS": value}, stdout=subprocess.PIPE
        )
        for value in flags
    ]
    plain, own, other = (process.communicate(timeout=60)[0] for process in running)
    assert len(plain.strip()) == 16 and plain == own != other


def join_both(folder, theirs, dist_theirs=None, settings=None):
    """What a leader and a follower raise that are started with different values."""
    args, address = ServerArgs(model_path=str(folder), tp_size=2), free_address()
    common = {"nnodes": 2, "dist_init_addr": address, "dist_timeout": 1.5}
    theirs = ServerArgs(**{"model_path": str(folder), "tp_size": 2, **theirs})
    follower_dist = DistConfig(**{**common, "node_rank": 1, **(dist_theirs or {})})
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(join_group, args, DistConfig(**common))
        follower = pool.submit(join_group, theirs, follower_dist, **(settings or {}))
        return leader.exception(30), follower.exception(30)


@pytest.mark.parametrize(
    ("theirs", "dist_theirs", "settings", "expected"),
    [
        ({"tp_size": 4}, {}, {}, "tp_size (2 on process 0, 4 on 1)"),
        ({"deterministic": True}, {}, {}, "deterministic (False on process 0, True on 1)"),
        ({"max_total_tokens": 64}, {}, {}, "max_total_tokens (None on process 0, 64 on 1)"),
        ({}, {"watchdog_timeout": 9.0}, {}, "watchdog_timeout (30.0 on process 0, 9.0 on 1)"),
        ({}, {}, {"settings": {"XLA_FLAGS": "--xla_x"}}, "XLA_FLAGS (absent on process 0, --xla_x on 1)"),
        ({}, {}, {"load_format": "dummy"}, "load_format (auto on process 0, dummy on 1)"),
        ({}, {}, {"speculative": SpeculativeConfig()}, "speculative (none on process 0, absent on 1)"),
    ],
)
def test_a_process_that_differs_is_refused_with_both_values(folder, theirs, dist_theirs, settings, expected):
    leader, follower = join_both(folder, theirs, dist_theirs, settings)
    assert isinstance(follower, ConfigError) and expected in str(follower)
    assert isinstance(leader, MachineError) and expected in str(leader)


def test_a_folder_that_one_process_lacks_or_that_is_another_model_is_named(folder, tmp_path):
    leader, follower = join_both(folder, {"model_path": str(tmp_path / "none")})
    assert f"process 1 cannot start: no checkpoint folder {tmp_path / 'none'}" in str(follower)
    assert "process 1 cannot start: no checkpoint folder" in str(leader)
    other = write_tiny_checkpoint(tmp_path / "other", num_hidden_layers=1, mlp_only_layers=[], num_experts=32)
    leader, follower = join_both(folder, {"model_path": str(other)})
    assert re.search(r"config\.json \(\w{16} on process 0, \w{16} on 1\), tensors", str(follower))


def test_the_python_entrances_refuse_the_wrong_rank_at_once(folder):
    dist = DistConfig(nnodes=2, node_rank=1, dist_init_addr="127.0.0.1:5000")
    with pytest.raises(ConfigError, match=r"node_rank=1: an Engine is process 0 .* call routed_experts\.follow"):
        Engine(str(folder), tp_size=2, dist=dist)
    for wrong in (DistConfig(), DistConfig(nnodes=2, dist_init_addr="127.0.0.1:5000"), None):
        with pytest.raises(ConfigError, match=r"must be a DistConfig with nnodes > 1 and node_rank > 0"):
            follow(str(folder), tp_size=2, dist=wrong)
    with pytest.raises(ConfigError, match=r"tp_sise is no parameter of follow; did you mean tp_size\?|known are"):
        follow(str(folder), tp_sise=2, dist=dist)


def test_what_a_group_does_not_have_is_refused_before_a_socket_is_opened(folder):
    dist = DistConfig(nnodes=2, dist_init_addr="127.0.0.1:5000")
    with pytest.raises(ConfigError, match="model= with nnodes=2"):
        Engine(model=object(), tp_size=2, dist=dist)
    with pytest.raises(ConfigError, match="experts on the host with nnodes=2"):
        Engine(str(folder), tp_size=2, dist=dist, experts=ExpertOffloadConfig(kt_num_gpu_experts=2))
    with pytest.raises(ConfigError, match="tp_size=3 counts the devices of all 2 processes"):
        Engine(str(folder), tp_size=3, dist=dist)


def test_placements_and_lists_are_compared_by_their_contents():
    def fields(seed=1, **config):
        load = np.random.default_rng(seed).gamma(0.5, size=(3, 16))
        plan = rebalance(load, num_instances=20, num_devices=2)
        return group_fields(ServerArgs(tp_size=2), DistConfig(), PlacementConfig(plan=plan, **config), None, "auto")

    assert fields() == fields() and fields() != fields(seed=2) and fields() != fields(rebalance_every=10)
    assert all(len(value) <= 100 for value in fields().values())


def test_numbers_of_float_fields_are_compared_as_floats():
    def fields(number=float, **dist):
        args = ServerArgs(tp_size=2, mem_fraction_static=number(1))
        dist_config, speculative = DistConfig(watchdog_timeout=number(9), **dist), SpeculativeConfig()
        return group_fields(args, dist_config, None, speculative, "auto")

    assert fields() == fields(int) == fields(np.float64)
    assert fields() != fields(dist_timeout=7) == fields(dist_timeout=7.0)
    assert fields()["tp_size"] == "2" and fields()["deterministic"] == "False"


def test_a_copy_of_the_checkpoint_with_other_values_is_refused_by_the_name_of_a_tensor(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    with Checkpoint(folder) as checkpoint:
        name = sorted(checkpoint.names())[5]
        tensors = {each: checkpoint.read(each).copy() for each in checkpoint.names()}
    tensors[name] += 1
    save(other, json.loads((folder / "config.json").read_text()), tensors)
    leader, follower = join_both(folder, {"model_path": str(other)})
    for error in (leader, follower):
        assert re.search(
            rf"differs from process 0 in values of {name} \(\w{{16}} on process 0, \w{{16}} on 1\);", str(error)
        )
