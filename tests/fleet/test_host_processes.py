"""Processes of this machine that Ray has started: their groups, and their end where Ray has lost hold of them."""

import signal
import socket
import subprocess
import sys

from routed_experts.core.server_args import ServerArgs
from routed_experts.fleet.host_processes import end_users_of
from routed_experts.fleet.settings import FleetSettings
from routed_experts.fleet.spec import ReplicaSpec
from routed_experts.fleet.start import Fleet
from routed_experts.server.limits import ServerSettings

# In a process without JAX, which warns of every fork.
GROUPS = """
import subprocess, sys
from routed_experts.fleet.host_processes import own_process_groups
def leads():
    command = [sys.executable, "-c", "import os; print(os.getpgid(0) == os.getpid())"]
    return subprocess.run(command, preexec_fn=lambda: None, stdout=subprocess.PIPE, text=True).stdout.strip()
print(leads())
with own_process_groups():
    print(leads())
print(leads())
"""


def start(*words):
    """A process that waits."""
    command = [sys.executable, "-c", "print(flush=True); input()", *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def test_processes_lead_groups_of_their_own_within_and_not_before_or_after():
    out = subprocess.run([sys.executable, "-c", GROUPS], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert out.split() == ["False", "True", "False"]


def test_what_uses_a_folder_is_ended_and_nothing_else(tmp_path):
    folder = tmp_path / "work"
    users = [start(f"{folder}/haproxy.cfg"), start("-f", f"{folder}/admin.sock")]
    others = [start(f"{folder}2/haproxy.cfg"), start(f"--file={folder}"), start()]
    assert sorted(end_users_of(str(folder))) == sorted(process.pid for process in users)
    for process in users:
        process.communicate(timeout=20)
        assert process.returncode == -signal.SIGTERM
    for process in others:
        assert process.poll() is None
        process.communicate(b"\n")
    assert end_users_of(str(folder)) == []


def test_a_ray_of_its_own_is_lost_when_nobody_listens_any_more():
    spec = ReplicaSpec(args=ServerArgs(model_path="demo"), server=ServerSettings(), fleet=FleetSettings())
    fleet = Fleet(spec, variables={}, on_phase=lambda name, detail: None)
    assert fleet.has_lost_ray is False, "none was started"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fleet._own_ray = f"127.0.0.1:{listener.getsockname()[1]}"
        assert fleet.has_lost_ray is False
    assert fleet.has_lost_ray is True
