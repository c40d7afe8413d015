"""`routed-experts serve` over two processes: HTTP by process 0, SIGTERM to either, a death under load."""

import json
import re
import shutil
import signal
import sys
import threading
import urllib.error
import urllib.request

import pytest

from support.process_groups import GroupProcess, free_address, processes
from support.tiny_checkpoint import write_tiny_checkpoint

SIZES = "--precompile-bs-paddings 2 --precompile-token-paddings 16 --max-running-requests 2 --page-size 4".split()
SIZES += "--context-length 256 --max-total-tokens 1024 --tp-size 2 --enable-return-routed-experts".split()
SIZES += "--moe-backend reference --attention-backend reference".split()  # array code, which is compiled soonest
COMMIT = "a" * 40
BODY = {"prompt": "the expert", "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), num_hidden_layers=1, mlp_only_layers=[], num_experts=8
    )


def serve(folder, rank, address, *flags, devices=1):
    dist = ["--nnodes", "2", "--node-rank", str(rank), "--watchdog-timeout", "60", "--dist-init-addr", address]
    port = ["--port", "0"] if rank == 0 else []
    command = [sys.executable, "-m", "routed_experts", "serve", str(folder), *SIZES, *dist, *port, *flags]
    return GroupProcess(command, fast=True, devices=devices)


def url_of(leader):
    """The URL of the ready line."""
    for line in iter(leader.lines.get, None):
        if (match := re.search(r"http://\S+", line)) is not None:
            return match[0]
    raise AssertionError(leader.log())


class Stream:
    """A streamed answer that is read in a thread; `first` is set with its first event."""

    def __init__(self, url):
        self.first, self.events = threading.Event(), []
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(BODY).encode(), {"content-type": "application/json"}
        )
        self._thread = threading.Thread(target=self._read, args=(request,))
        self._thread.start()

    def _read(self, request):
        with urllib.request.urlopen(request, timeout=60) as response:
            for line in response:
                if line.startswith(b"data: "):
                    self.events.append(line[6:].strip())
                    self.first.set()

    def join(self):
        self._thread.join(60)
        assert self.events[-1] == b"[DONE]"
        return [json.loads(event) for event in self.events[:-1]]


@pytest.fixture
def repository(folder, tmp_path, monkeypatch):
    """The id of a repository that is in the cache of downloads, without a network."""
    files = tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    shutil.copytree(folder, files)
    (files.parents[1] / "refs").mkdir()
    (files.parents[1] / "refs" / "main").write_text(COMMIT)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return "org/tiny"


# Process 1 has to tell process 0, which then drains as after a signal of its own.
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_sigterm_of_either_process_drains_the_group(repository, rank):
    """Of a model that both processes find by the id of its repository."""
    address = free_address()
    with processes(serve(repository, 0, address), serve(repository, 1, address)) as members:
        url = url_of(members[0])
        stream = Stream(url)
        assert stream.first.wait(60)
        members[rank].signal(signal.SIGTERM)
        events = stream.join()
        text = "".join(event["choices"][0]["text"] for event in events)
        assert events[-1]["choices"][0]["finish_reason"] == "length" and text
        assert [member.exit_code(30) for member in members] == [0, 0], [member.log()[-1500:] for member in members]
        assert "Traceback" not in members[0].log() + members[1].log()
        if rank == 1:
            assert "asked to end: the group drains" in members[0].log()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_sigterm_while_the_group_loads_ends_every_process_with_0(folder, rank):
    address = free_address()
    with processes(serve(folder, 0, address), serve(folder, 1, address)) as members:
        members[rank].wait_log("rendezvous ")
        members[rank].signal(signal.SIGTERM)
        assert [member.exit_code(30) for member in members] == [0, 0], [member.log()[-1500:] for member in members]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_a_signal_to_process_0_before_all_have_come_ends_those_that_have_with_0(folder, number):
    address = free_address()
    flags = ["--nnodes", "4", "--tp-size", "4"]
    with processes(serve(folder, 0, address, *flags), serve(folder, 1, address, *flags)) as members:
        members[0].wait_log("process 1 of 4 has come from 127.0.0.1:")
        members[0].signal(number)
        assert [member.exit_code(30) for member in members] == [0, 0], [member.log()[-1500:] for member in members]
        assert "process 0 was asked to end before all processes had come" in members[1].log()
        assert "Traceback" not in members[0].log() + members[1].log()


def probe(url, path="/health"):
    """Status and body of a probe."""
    try:
        with urllib.request.urlopen(url.removesuffix("/health") + path, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error) if error.headers["content-type"] == "application/json" else None


def server_info(url, key=None):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/get_server_info", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def metric(url, name):
    """A sample of /metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        (line,) = [line for line in response.read().decode().splitlines() if line.startswith(f"routed_experts_{name} ")]
    return float(line.rsplit(" ", 1)[1])


def test_a_follower_answers_probes_and_its_death_under_load_ends_streams_with_an_error_and_the_server_with_3(folder):
    address = free_address()
    flags = ["--port", "0", "--api-key", "12345678"]
    with processes(
        serve(folder, 0, address, "--admin-api-key", "of-admins-1"), serve(folder, 1, address, *flags)
    ) as members:
        log = members[1].wait_log("probes: ")
        assert "process 1 serves no requests; ignored: --api-key" in log
        follower = re.search(r"probes: (http://\S+)", log)[1]
        assert probe(follower) == (503, {"state": "starting", "node_rank": 1, "nnodes": 2, "order": 0})
        assert probe(follower, "/health/live")[0] == 200 and probe(follower, "/ready")[0] == 503
        url = url_of(members[0])
        members[1].wait_log("following")
        assert probe(follower)[1]["state"] == "following" and probe(follower, "/ready")[0] == 200
        assert probe(follower, "/v1/models")[0] == 404 and probe(follower, "/metrics")[0] == 404
        for info in (server_info(url), server_info(url, "of-admins-1")):
            assert info["nnodes"] == 2 and [entry["rank"] for entry in info["followers"]] == [1]
            assert info["followers"][0]["order_lag"] >= 0
        assert "address" not in server_info(url)["followers"][0], "for administrators alone"
        assert info["followers"][0]["address"].startswith("127.0.0.1:")
        stream = Stream(url)
        assert stream.first.wait(60)
        assert probe(follower)[1]["order"] > 0 and metric(url, 'order_lag{rank="1"}') >= 0
        members[1].signal(signal.SIGKILL)
        last = stream.join()[-1]
        assert last["error"]["code"] == "peer_lost", last
        assert members[0].exit_code(20) == 3


def test_processes_with_unequal_devices_say_how(folder):
    address = free_address()
    with processes(serve(folder, 0, address), serve(folder, 1, address, devices=2)) as members:
        codes = [member.exit_code(60) for member in members]
        assert codes == [2, 2], [member.log() for member in members]
        for member in members:
            assert "processes must have equal devices: process 0 has 1 x cpu" in member.log()
            assert "Traceback" not in member.log()


def test_the_doctor_checks_a_group_without_a_model():
    address = free_address()
    flags = ["--nnodes", "2", "--dist-init-addr", address, "--node-rank"]
    base = [sys.executable, "-m", "routed_experts", "doctor", *flags]
    with processes(GroupProcess([*base, "0"]), GroupProcess([*base, "1"])) as members:
        assert [member.exit_code(60) for member in members] == [0, 0], [member.log() for member in members]
        for member in members:
            text = "".join(iter(member.lines.get, None))
            assert "devices: 2 of all processes, 1 here" in text and "a sum of 1 MiB over all devices" in text
            assert text.endswith("all checks passed\n")
