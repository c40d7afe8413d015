"""A Ray that runs already: a fleet of two replicas of two processes each, routed by session through Serve's Python
proxy; engines for frameworks that own the placement group; and what a user can get wrong there."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import httpx
import pytest

from support.fleet_ids import check_ids
from support.fleet_load import Load
from support.fleet_process import (
    ADMIN,
    FOLLOWER,
    KEY,
    REPLICA,
    SIZES,
    FleetProcess,
    actors,
    environment,
    ray_cluster,
    wait_until,
)

MADE_ID = re.compile(r"(r\d+)-[0-9a-f]{32}")
QUEUED = 12  # requests that may wait on a replica
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, ray_cluster(folder, num_cpus=4) as actual:
        yield actual


def run_command(folder, *flags):
    """The command, to its end; it is expected to refuse."""
    command = [sys.executable, "-m", "routed_experts", "serve", str(folder), "--port", "0", *SIZES, *flags]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)


def check_refusal(done, code, *words):
    assert done.returncode == code, (done.returncode, done.stderr[-2000:])
    assert "Traceback" not in done.stderr
    error = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(error) == 1 and error[0].startswith("routed-experts serve: error: "), done.stderr[-2000:]
    for word in words:
        assert word in error[0], error


@pytest.fixture(scope="module")
def fleet(cluster, folders):
    address, pid = cluster
    flags = ["--num-replicas", "2", "--ray-address", address, "--routing-policy", "session", "--nnodes", "2"]
    flags += ["--tp-size", "2", "--enable-return-routed-experts", "--weights-root", str(folders)]
    flags += ["--api-key", KEY, "--admin-api-key", ADMIN, "--shutdown-timeout", "3", "--stream-interval", "0"]
    flags += ["--max-queued-requests", str(QUEUED)]
    process = FleetProcess(folders / "w0", *flags)
    process.root_pid = pid
    try:
        yield process.wait_ready()
    except BaseException:
        print(process.log()[-4000:])
        raise
    finally:
        process.close()


@pytest.fixture
def admin(fleet):
    with fleet.client(ADMIN) as client:
        yield client


def whole(client):
    response = client.get("/ready")
    replicas = response.json().get("replicas", [])
    return response.status_code == 200 and [replica["state"] for replica in replicas] == ["serving"] * 2


def test_more_than_the_cluster_has_is_refused_with_what_is_free(cluster, folders):
    address, _ = cluster
    done = run_command(folders / "w0", "--num-replicas", "50", "--ray-address", address)
    check_refusal(done, 2, "--num-replicas 50 do not fit (CPU: 50 needed, 4 free)", "set --num-replicas 4")
    done = run_command(
        folders / "w0", "--num-replicas", "3", "--nnodes", "2", "--tp-size", "2", "--ray-address", address
    )
    too_many = "--num-replicas 3 of 2 processes each do not fit (CPU: 6 needed, 4 free)"
    check_refusal(done, 2, too_many, "set --num-replicas 2")


def test_a_model_that_does_not_load_is_one_sentence(cluster, folders):
    address, _ = cluster
    done = run_command(folders / "empty", "--num-replicas", "2", "--ray-address", address)
    check_refusal(done, 2, "a replica does not start: ", "config.json")


def test_a_cluster_that_is_not_there_is_one_sentence(folders):
    done = run_command(folders / "w0", "--num-replicas", "2", "--ray-address", "127.0.0.1:9")
    check_refusal(done, 1, "--ray-address '127.0.0.1:9': Ray is not reached")


def run_driver(module, cluster, folders, **more):
    """A driver of its own, as a framework has one; what it passed."""
    spec = {"address": cluster[0], "pid": cluster[1], "folders": str(folders), **more}
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(spec)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Unhandled error" not in done.stderr, "an outcome that nobody has read"
    return json.loads(done.stdout.splitlines()[-1])["passed"]


def test_an_engine_group_lives_in_the_bundles_that_it_is_given(cluster, folders):
    assert run_driver("support.engine_group_driver", cluster, folders) is True


def test_calls_of_an_engine_group_that_wait_take_no_thread_of_the_call_that_ends_the_wait(cluster, folders):
    checks = ["push", "pause", "release"]
    assert run_driver("support.engine_group_calls", cluster, folders, checks=checks) == checks


def test_engines_of_a_group_draw_samples_of_their_own_and_keep_what_is_prepared(cluster, folders):
    checks = ["samples", "prepared", "options"]
    assert run_driver("support.engine_group_calls", cluster, folders, checks=checks) == checks


def test_a_call_of_an_engine_group_that_fails_leaves_no_request(cluster, folders):
    checks = ["refused", "interrupted"]
    assert run_driver("support.engine_group_calls", cluster, folders, checks=checks) == checks


def test_an_engine_of_a_group_takes_as_many_calls_as_it_has_room_for(cluster, folders):
    assert run_driver("support.engine_group_calls", cluster, folders, checks=["many"]) == ["many"]


def test_an_engine_of_a_group_whose_follower_has_died_is_a_lost_one(cluster, folders):
    assert run_driver("support.engine_group_calls", cluster, folders, checks=["follower"]) == ["follower"]


def test_followers_run_and_the_session_stays_on_one_replica(fleet, admin):
    assert fleet.proxy == "Python proxy"
    assert len(actors(FOLLOWER, fleet.root_pid)) == 2 and len(actors(REPLICA, fleet.root_pid)) == 2
    replicas = set()
    for session in range(8):
        tags = set()
        for _ in range(6):
            response = admin.post(
                "/generate", json={"input_ids": [5, 6, 7], "max_new_tokens": 2}, headers={"x-session-id": f"s{session}"}
            )
            tags.add(MADE_ID.fullmatch(response.json()["meta_info"]["id"])[1])
        assert len(tags) == 1, "a session changes its replica"
        replicas |= tags
    assert len(replicas) == 2


def test_a_full_replica_refuses_its_sessions_while_another_has_room(fleet, admin):
    """And the routes that continue it are answered beside the requests that wait."""

    def post(session):
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}
        with fleet.client() as own:
            return own.post("/generate", json=body, headers={"x-session-id": session})

    def tag(response):
        return MADE_ID.fullmatch(response.json()["meta_info"]["id"])[1]

    of_session = {session: tag(post(session)) for session in (f"s{number}" for number in range(8))}
    other = next(session for session, replica in of_session.items() if replica != of_session["s0"])
    assert admin.post("/pause_generation", json={"mode": "retract"}).status_code == 200
    with ThreadPoolExecutor(QUEUED + 2) as pool:
        try:
            waiting = [pool.submit(post, "s0") for _ in range(QUEUED + 1)]
            refused = next(as_completed(waiting, timeout=60))
            assert refused.result().status_code == 429 and refused.result().headers["retry-after"]
            with_room = pool.submit(post, other)
        finally:
            assert admin.post("/continue_generation", json={}).status_code == 200
        waiting.remove(refused)
        assert {tag(future.result(60)) for future in waiting} == {of_session["s0"]}
        assert tag(with_room.result(60)) == of_session[other]


def test_a_fleet_beside_a_fleet_is_refused(fleet, cluster, folders):
    done = run_command(folders / "w0", "--num-replicas", "1", "--ray-address", cluster[0])
    assert done.returncode == 2 and ("do not fit" in done.stderr or "Ray Serve runs in this Ray already" in done.stderr)
    assert fleet.process.poll() is None


def test_weights_move_in_every_process_of_every_replica(fleet, admin):
    with Load(fleet, num_threads=4) as load:
        load.wait_for(5)
        response = admin.post("/update_weights_from_disk", json={"model_path": "w1", "weight_version": "step-7"})
        assert response.status_code == 200, response.text
        load.wait_for(10)
        refused = admin.post("/update_weights_from_disk", json={"model_path": "other"})
        assert refused.status_code == 400 and "process 0" in refused.json()["error"]["message"]
        load.wait_for(5)
    assert load.failures() == [] and admin.get("/get_weight_version").json() == {
        "weight_version": "step-7",
        "update_count": 1,
    }
    load.check_versions({0, 1})


def test_a_client_that_leaves_a_stream_is_noticed_through_the_python_proxy(fleet, admin):
    body = {"input_ids": [5, 6], "stream": True, "sampling_params": {"max_new_tokens": 480, "ignore_eos": True}}
    with fleet.client() as client, client.stream("POST", "/generate", json=body) as response:
        next(response.iter_lines())

    def idle():
        lines = admin.get("/metrics").text.splitlines()
        return all(line.endswith(" 0.0") for line in lines if line.startswith("routed_experts_requests_running{"))

    wait_until(idle, seconds=10)


def test_the_death_of_a_follower_ends_its_replica_alone_and_both_come_back(fleet, admin):
    outcomes, started = [], threading.Barrier(9)

    def stream(number):
        body = {"input_ids": [5 + number, 6], "stream": True, "max_new_tokens": 450, "sampling_params": GREEDY}
        lines, error = [], None
        try:
            headers = {"x-session-id": f"s{number}"}
            with fleet.client() as own, own.stream("POST", "/generate", json=body, headers=headers) as response:
                source = response.iter_lines()
                lines.append(next(source))
                started.wait(60)
                lines += [line for line in source if line]
        except httpx.HTTPError as raised:
            error = raised
        outcomes.append((lines, error))

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    started.wait(60)
    os.kill(actors(FOLLOWER, fleet.root_pid)[0], signal.SIGKILL)
    for thread in threads:
        thread.join(90)
    assert len(outcomes) == 8
    whole_ones = 0
    for lines, error in outcomes:
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        reasons = [event["meta_info"]["finish_reason"] for event in events if "meta_info" in event]
        failed = any("error" in event for event in events)
        if error is None and not failed:
            whole_ones += 1
            assert lines[-1] == "data: [DONE]" and reasons[-1]["type"] == "length"
            assert len(events[-1]["output_ids"]) == 450
        else:
            assert reasons == [None] * len(reasons), "no cut answer has an end"
            assert failed or not any("[DONE]" in line for line in lines), "an error event, or no end at all"
    assert 0 < whole_ones < 8, whole_ones
    wait_until(lambda: whole(admin), seconds=90)
    versions = {(entry["weight_version"], entry["update_count"]) for entry in admin.get("/ready").json()["replicas"]}
    assert versions == {("step-7", 1)} and len(actors(FOLLOWER, fleet.root_pid)) == 2


def test_an_answer_through_the_python_proxy_has_the_id_of_its_request(fleet):
    assert fleet.proxy == "Python proxy"
    with fleet.client() as client:
        check_ids(client)


def test_sigterm_drains_the_fleet_and_ends_everything(fleet, admin):
    """The last test of this fleet: what runs ends within --shutdown-timeout, with its rows, and nothing is left."""
    ended, started = [], threading.Event()

    def read():
        body = {"input_ids": [5, 6, 7], "stream": True, "return_routed_experts": True, "sampling_params": GREEDY}
        with fleet.client() as own, own.stream("POST", "/generate", json={**body, "max_new_tokens": 480}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    ended[:] = [json.loads(line.removeprefix("data: "))]
                    started.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert started.wait(30)
    assert fleet.stop() == 0
    thread.join(10)
    meta = ended[0]["meta_info"]
    assert meta["finish_reason"]["type"] in ("length", "abort") and meta["routed_experts"]
    for kind in (REPLICA, FOLLOWER, "ray::CoordinatorActor"):
        wait_until(lambda kind=kind: actors(kind, fleet.root_pid) == [], seconds=20)
    with pytest.raises(httpx.ConnectError):
        admin.get("/health")
