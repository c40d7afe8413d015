"""What dies in a fleet, and what that costs: a replica its running requests and its kept rows, the coordinator nothing.
Weights are never mixed (K8)."""

import json
import os
import re
import signal
import threading
import time

import httpx
import openai
import pytest

from support.fleet_load import Load
from support.fleet_process import COORDINATOR, KEY, REPLICA, actors, wait_until
from support.http_server import parse_error

MADE_ID = re.compile(r"(r\d+)-[0-9a-f]{32}")


def version_of(client):
    return client.get("/get_weight_version").json()["update_count"]


def update(admin, folder, **more):
    return admin.post("/update_weights_from_disk", json={"model_path": folder, **more})


def kill(kind, fleet):
    """SIGKILL one process of this kind; its id."""
    pid = actors(kind, fleet.root_pid)[0]
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_whole(admin, seconds=60):
    def whole():
        body = admin.get("/ready").json()
        replicas = body.get("replicas", [])
        is_whole = len(replicas) == 2 and {replica["state"] for replica in replicas} == {"serving"}
        return body if is_whole and "problem" not in body else None

    return wait_until(whole, seconds)


def deaths(admin):
    return float(re.search(r"^routed_experts_replica_deaths_total (\S+)$", admin.get("/metrics").text, re.MULTILINE)[1])


def test_updates_under_load_never_mix_versions_and_fail_no_request(fleet, admin):
    first = version_of(admin)
    returned, committed, labels = [], {first}, {}
    with Load(fleet) as load:
        load.wait_for(30)
        for number, label in enumerate(("step-1", "step-1", 0, "step-1")):  # repeats, and goes back
            answer = update(admin, f"w{1 + number % 2}", weight_version=label).json()
            version = answer["update_count"]  # what was refused has had a count, too
            assert answer["weight_version"] == str(label) and version > max(committed)
            labels[version] = str(label)
            returned.append((version, time.monotonic()))
            committed.add(version)
            load.wait_for(25)
            for refused in ("other", "empty"):
                error = parse_error(update(admin, refused), 400)
                assert re.search(r"r\d+: .*; r\d+: .*the old weights serve on in all replicas", error["message"])
            assert version_of(admin) == version
            load.wait_for(25)
        answer = admin.post("/update_weight_version", json={"new_version": "step-1", "abort_all_requests": False})
        last = answer.json()["update_count"]
        assert last > max(committed)
        labels[last] = "step-1"
        returned.append((last, time.monotonic()))
        load.wait_for(20)
    assert len(load.met) >= 250 and load.failures() == []
    load.check_versions({*committed, last}, returned)
    load.check_labels(labels)
    error = parse_error(update(admin, "w1", weight_version="x" * 257), 400)
    assert error["param"] == "weight_version" and version_of(admin) == last
    parse_error(update(admin, "../w1"), 400)
    parse_error(update(admin, "nowhere"), 400)


def test_one_of_two_updates_at_once_is_refused(fleet, admin):
    first, answers = version_of(admin), []
    threads = [threading.Thread(target=lambda: answers.append(update(admin, "w1"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    done = [answer for answer in answers if answer.status_code == 200]
    counts = {answer.json()["update_count"] for answer in done}
    assert done and len(counts) == len(done) and version_of(admin) == max(counts) and min(counts) > first
    for answer in answers:
        if answer.status_code != 200:
            assert parse_error(answer, 409)["code"] == "update_in_progress"


def test_the_death_of_the_coordinator_costs_no_request(fleet, admin):
    label = "before the death"
    assert update(admin, "w2", weight_version=label).status_code == 200
    version = version_of(admin)
    with Load(fleet) as load:
        load.wait_for(10)
        kill(COORDINATOR, fleet)
        refused = wait_until(lambda: (r := admin.get("/ready")).status_code == 503 and r, seconds=10, pause=0.0)
        assert refused.json().get("error", {}).get("code") == "fleet_unavailable" or "problem" in refused.json()
        assert admin.get("/health").status_code == 200 and admin.get("/metrics").status_code == 200
        load.wait_for(20)
        body = wait_whole(admin)
        assert body["update_count"] == version and body["weight_version"] == label
        answer = update(admin, "w1").json()
        assert (answer["weight_version"], answer["update_count"]) == (label, version + 1)
        load.wait_for(10)
    assert load.failures() == []
    load.check_versions({version, version + 1})


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05])
def test_a_coordinator_that_dies_in_an_update_leaves_one_version(fleet, admin, delay):
    """Wherever it dies: the next one ends the update or drops it, and no request has met both in the wrong order."""
    first = version_of(admin)
    with Load(fleet) as load:
        load.wait_for(5)
        answers = []
        caller = threading.Thread(target=lambda: answers.append(update(admin, "w1")))
        caller.start()
        threading.Event().wait(delay)
        kill(COORDINATOR, fleet)
        caller.join(60)
        load.wait_for(10)
        body = wait_whole(admin)
        version = body["update_count"]
        assert version >= first
        assert answers[0].status_code in (200, 503)
        if answers[0].status_code == 200:
            assert version == answers[0].json()["update_count"] > first
        load.wait_for(10)
    assert load.failures() == []
    load.check_versions({first, version})


def test_the_death_of_a_replica_costs_its_requests_alone_and_nothing_cut_looks_whole(fleet, admin):
    """20 streams, an openai client among them."""
    assert update(admin, "w2").status_code == 200
    version, before = version_of(admin), deaths(admin)
    retained = {}
    with fleet.client() as client:
        while len(retained) < 2:
            answer = client.post(
                "/generate",
                json={
                    "input_ids": [5, 6, 7],
                    "max_new_tokens": 3,
                    "return_routed_experts": True,
                    "routed_experts_format": "ref",
                },
            ).json()["meta_info"]
            retained[MADE_ID.fullmatch(answer["id"])[1]] = answer["routed_experts_ref"]
    outcomes, started, go = [], threading.Barrier(21), threading.Event()

    def stream(number):
        body = {"input_ids": [5 + number, 6, 7], "stream": True, "sampling_params": {"ignore_eos": True}}
        body["max_new_tokens"] = 480
        lines, error = [], None
        try:
            with fleet.client() as own, own.stream("POST", "/generate", json=body) as response:
                source = response.iter_lines()
                lines.append(next(source))
                started.wait(60)
                go.wait(60)
                lines += [line for line in source if line]
        except httpx.HTTPError as raised:
            error = raised
        outcomes.append((lines, error))

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    started.wait(60)
    kill(REPLICA, fleet)
    killed = time.monotonic()
    go.set()
    for thread in threads:
        thread.join(60)
    cut = [(lines, error) for lines, error in outcomes if error is not None]
    whole = [lines for lines, error in outcomes if error is None]
    assert len(outcomes) == 20 and cut and whole, "some were on each replica"
    for lines, error in cut:
        assert isinstance(error, httpx.RemoteProtocolError), error
        assert not any("[DONE]" in line for line in lines)
        finish = [
            json.loads(line.removeprefix("data: "))["meta_info"]["finish_reason"] for line in lines if "{" in line
        ]
        assert finish == [None] * len(finish), "no cut answer has an end"
    for lines in whole:
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "length"
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        for _ in range(10):
            assert client.completions.create(model="w0", prompt="The", max_tokens=3).choices[0].finish_reason
    body = wait_whole(admin)
    print(f"whole again {time.monotonic() - killed:.1f} s after the kill")
    tags = {replica["replica"] for replica in body["replicas"]}
    assert {replica["update_count"] for replica in body["replicas"]} == {version}, "the new one has the weights"
    assert {replica["weight_version"] for replica in body["replicas"]} == {body["weight_version"]}, "and their label"
    assert deaths(admin) == before + 1
    gone = (retained.keys() - tags).pop()
    with fleet.client() as client:
        for _ in range(4):
            assert parse_error(client.get(retained[gone]), 404)["code"] == "routing_gone"
            assert client.get(retained[(retained.keys() & tags).pop()]).status_code == 200


def test_a_replica_that_dies_in_an_update_is_out_and_comes_back_with_the_new_weights(fleet, admin):
    """The call itself may be cut with the replica that had it; the update goes on."""
    first = version_of(admin)
    with Load(fleet, num_threads=4) as load:
        load.wait_for(5)
        answers = []

        def call():
            try:
                answers.append(update(admin, "w1").status_code)
            except httpx.HTTPError as error:
                answers.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        threading.Event().wait(0.03)
        kill(REPLICA, fleet)
        caller.join(60)
        body = wait_whole(admin)
        version = body["update_count"]
        assert {replica["update_count"] for replica in body["replicas"]} == {version}
        load.wait_for(10)
    assert version > first or answers[0] != 200
    load.check_versions({first, version})
    assert len(load.failures()) <= 8, "what ran on it, and what was on its way"
    for failure in load.failures():
        assert isinstance(failure, httpx.TransportError) or failure[0] in (500, 502, 503), failure
