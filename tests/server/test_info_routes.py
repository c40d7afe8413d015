"""Routes that describe the server, in the fields that clients of SGLang and vLLM read."""

import pytest

from support.engines import HeldThread, PausedRequests, on_engine_thread
from support.http_server import parse_error, running
from support.tiny_checkpoint import write_tiny_checkpoint


def idle_load(engine):
    total = engine.stats().total_pages * engine.server_args.page_size
    return {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_total_reqs": 0, "max_total_num_tokens": total}


def test_loads_of_an_idle_engine_are_zero(engine, server):
    server.wait_idle()
    body = server.client.get("/v1/loads?include=core").json()
    (load,) = body["loads"]
    assert load.items() >= {**idle_load(engine), "dp_rank": 0, "num_used_tokens": 0}.items()
    assert body["dp_rank_count"] == 1 and body["aggregate"]["total_running_reqs"] == 0
    assert server.client.get("/get_load").json() == [
        {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    ]
    assert server.client.get("/load").json() == {"server_load": 0}


def test_loads_count_requests_and_tokens_in_use(engine, server):
    """What slime polls until a server is idle."""
    server.wait_idle()
    paused = PausedRequests(engine, [5, 6, 7], [8, 9], sampling_params={"max_new_tokens": 400, "ignore_eos": True})
    (load,) = server.client.get("/v1/loads").json()["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (2, 0, 2)
    page = engine.server_args.page_size
    assert load["num_used_tokens"] % page == 0 and 2 * page <= load["num_used_tokens"] < load["max_total_num_tokens"]
    assert load["token_usage"] == pytest.approx(load["num_used_tokens"] / load["max_total_num_tokens"], abs=1e-4)
    assert server.client.get("/load").json() == {"server_load": 2}
    assert server.client.get("/get_load").json()[0]["num_reqs"] == 2
    state = server.client.get("/get_server_info").json()["internal_states"][0]
    assert (state["running_batch_size"], state["waiting_queue_size"], state["engine_paused"]) == (2, 0, True)
    assert len(state["running_batch_rids"]) == 2
    assert state["available_kv_tokens"] == load["max_total_num_tokens"] - load["num_used_tokens"]
    engine.abort(abort_all=True)
    engine.resume()
    paused.results()
    assert server.client.get("/v1/loads").json()["aggregate"]["total_total_reqs"] == 0


def test_a_data_rank_that_does_not_exist_is_refused(server):
    assert server.client.get("/v1/loads?dp_rank=0").json()["dp_rank_count"] == 1
    error = parse_error(server.client.get("/v1/loads?dp_rank=1"), 400)
    assert error["param"] == "dp_rank" and "one of 0" in error["message"]


def test_a_pause_is_told(server):
    server.post("/pause_generation", {"mode": "retract"})
    try:
        assert server.client.get("/get_server_info").json()["internal_states"][0]["engine_paused"] is True
    finally:
        server.post("/continue_generation", {})
    assert server.client.get("/get_server_info").json()["internal_states"][0]["engine_paused"] is False


def test_clients_find_the_folder_of_the_tokenizer(tmp_path, engine):
    folder = str(write_tiny_checkpoint(tmp_path))
    with running(engine, model_path=folder, served_model_name="nick") as server:
        assert server.client.get("/v1/models").json()["data"][0]["root"] == folder
        for path in ("/get_model_info", "/get_server_info"):
            info = server.client.get(path).json()
            assert info["model_path"] == info["tokenizer_path"] == folder, path
            assert info["served_model_name"] == "nick"


def test_server_info_has_the_fields_of_sglang(engine, server):
    info = server.client.get("/server_info").json()
    total = engine.stats().total_pages * engine.server_args.page_size
    expected = {"version": "0", "pp_size": 1, "tp_size": 1, "ep_size": 1, "max_total_num_tokens": total}
    assert info.items() >= expected.items()
    assert info["is_embedding"] is False and info["disaggregation_mode"] == "null"


@pytest.mark.parametrize("hold", ["pause", "release"])
def test_a_probe_of_a_server_that_holds_requests_answers_at_once_and_queues_nothing(engine, server, hold):
    accepted = engine.get_server_info()["requests_accepted"]
    if hold == "pause":
        engine.pause(mode="in_place")
    else:
        engine.release_memory_occupation(tags=["kv_cache"])
    try:
        answer = server.client.get("/health_generate", timeout=10)  # --stall-timeout is 30 s
        assert (answer.status_code, answer.json()) == (200, server.client.get("/health").json())
        assert answer.json()["state"] == "paused"
        assert engine.get_server_info()["requests_accepted"] == accepted
        assert server.client.get("/flush_cache").status_code == 200
    finally:
        engine.resume() if hold == "pause" else engine.resume_memory_occupation()
    assert server.client.get("/health_generate").json() == {"status": "ok"}


def test_a_probe_that_a_pause_overtakes_leaves_the_queue_in_time(engine):
    with running(engine, stall_timeout=1.5) as server:
        held = HeldThread(engine)
        try:
            probe = held.submit(server.client.get, "/health_generate")
            pause = held.submit(lambda: engine.pause(mode="in_place"))
        finally:
            held.release()
        try:
            pause.result()
            assert (probe.result().status_code, probe.result().json()["state"]) == (200, "paused")
            flushed = server.client.get("/flush_cache")
            assert flushed.status_code == 200, flushed.text
            assert engine.stats().waiting == 0
        finally:
            engine.resume()


def test_a_probe_without_a_token_in_time_is_aborted(engine):
    with running(engine, stall_timeout=0.2) as server:
        aborted = engine.get_server_info()["requests_finished"].get("abort", 0)
        held = HeldThread(engine)
        try:
            probes = [held.submit(server.client.get, "/health_generate")]
            probes.append(held.start(server.client.get, "/health_generate"))  # shares the run
            assert [parse_error(probe.result(), 503)["code"] for probe in probes] == ["stalled"] * 2
        finally:
            held.release()
        assert on_engine_thread(engine, lambda core: core.request_table.num_live) == 0
        assert engine.get_server_info()["requests_finished"].get("abort", 0) > aborted
        assert server.client.get("/health_generate").json() == {"status": "ok"}


def test_a_full_queue_is_no_fault_of_an_engine_that_makes_steps(engine):
    limit, endless = engine.server_args.max_queued_requests, {"max_new_tokens": 480, "ignore_eos": True}
    fill = {"input_ids": [[5]] * (limit // 128), "sampling_params": {"max_new_tokens": 1, "n": 128}}
    with running(engine) as server:
        body = {"input_ids": [5, 6], "sampling_params": endless, "stream": True}
        with server.client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            held = HeldThread(engine)
            try:
                filling = held.submit(server.post, "/generate", fill)
                probe = held.submit(server.client.get, "/health_generate")
            finally:
                held.release()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert filling.result().status_code == 200
        assert (probe.result().status_code, probe.result().json()["state"]) == (200, "serving"), probe.result().text


def test_only_an_admin_resets_the_statistics(engine):
    keys = {"api_key": "user-key-12345678", "admin_api_key": "admin-key-12345678"}
    with running(engine, **keys) as server:
        user, admin = ({"authorization": f"Bearer {key}"} for key in keys.values())
        refused = server.client.post("/v1/routing/reset", headers=user)
        assert parse_error(refused, 403)["code"] == "admin_key_required"
        assert server.client.post("/v1/routing/reset", headers=admin).json() == {"success": True}


def test_a_trainer_finds_the_switch_that_it_compares(engine, server):
    """slime ends where it is not its own --offload-rollout."""
    assert server.client.get("/server_info").json()["enable_memory_saver"] is False
    with running(engine, enable_memory_saver=True) as other:
        assert other.client.get("/get_server_info").json()["enable_memory_saver"] is True


def test_ids_of_requests_are_for_who_may_end_them(engine):
    keys = {"api_key": "key-of-users-1", "admin_api_key": "key-of-admins-1"}
    with running(engine, **keys) as guarded:
        paused = PausedRequests(engine, [5, 6, 7], sampling_params={"max_new_tokens": 400, "ignore_eos": True})

        def ids(key):
            headers = {"authorization": f"Bearer {key}"}
            (state,) = guarded.client.get("/get_server_info", headers=headers).json()["internal_states"]
            return len(state["running_batch_rids"])

        assert ids("key-of-users-1") == 0 and ids("key-of-admins-1") == 1
        engine.abort(abort_all=True)
        engine.resume()
        paused.results()
