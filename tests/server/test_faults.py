"""Faults under load, in numbers: aborts, pauses, flushes, weight updates, refused requests, a full store. Every
accepted request has exactly one outcome, no page and no row leaks, and after each kind a request is served. Disconnects
are in test_disconnect."""

import concurrent.futures
import json
import time

import numpy as np
import pytest

from routed_experts.formats import record_from_npy, record_from_response
from support.engines import assert_idle, on_engine_thread, open_engine
from support.http_server import parse_error, running
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

LONG = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 480, "ignore_eos": True},
    "return_routed_experts": True,
}
SHORT = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 3, "ignore_eos": True},
    "return_routed_experts": True,
}
ENDS = {"stop", "length", "abort", "timeout", "rejected", "error"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    for seed in (0, 1):
        write_tiny_checkpoint(folder / f"seed{seed}", seed=seed)
    broken = write_tiny_checkpoint(folder / "truncated")
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def engine(root):
    with lazy_compilation(), open_engine(root / "seed0", enable_return_routed_experts=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine, root):
    with running(engine, weights_root=str(root), routing_store_bytes=500) as server:
        yield server


@pytest.fixture(autouse=True)
def whole(server, engine):
    """After each kind: served, idle, nothing leaked, and one outcome for each that was accepted."""
    before = on_engine_thread(engine, lambda core: core.request_table.accepted)
    yield before
    server.client.post("/continue_generation")
    assert len(server.post("/generate", SHORT).json()["output_ids"]) == 3
    server.wait_idle()
    assert_idle(engine)
    accepted, finished = on_engine_thread(
        engine, lambda core: (core.request_table.accepted, dict(core.request_table.finished))
    )
    assert accepted == sum(finished.values()) and set(finished) <= ENDS and accepted > before


def begun(server, engine, bodies):
    """Calls in threads of their own, all of them taken in before the first step of any; their futures."""
    engine.pause(mode="in_place")
    pool = concurrent.futures.ThreadPoolExecutor(len(bodies))
    futures = [pool.submit(server.post, "/generate", body) for body in bodies]
    pool.shutdown(wait=False)
    while on_engine_thread(engine, lambda core: core.request_table.num_live) < len(bodies):  # held: none can end
        assert not any(future.done() for future in futures), [
            future.result().text[:300] for future in futures if future.done()
        ]
    engine.resume()
    return futures


def rows_fit(output):
    """The row law for what an abort left."""
    record, tokens = record_from_response(output), output["output_ids"]
    assert (record is None) == (not tokens) or record.num_rows == 0, output["meta_info"]["finish_reason"]
    assert not tokens or record.num_rows == 3 + len(tokens) - 1


def test_200_aborts_by_id(server, engine):
    for round_ in range(25):
        calls = begun(server, engine, [{**LONG, "rid": f"r{round_}-{index}"} for index in range(8)])
        assert (
            sum(server.post("/abort_request", {"rid": f"r{round_}-{index}"}).json()["aborted"] for index in range(8))
            == 8
        )
        for call in calls:
            output = call.result(30).json()
            assert output["meta_info"]["finish_reason"]["type"] == "abort"
            rows_fit(output)


def test_10_aborts_of_all_of_32(server, engine):
    for _ in range(10):
        calls = begun(server, engine, [LONG] * 32)
        assert server.post("/abort_request", {"abort_all": True}).json()["aborted"] == 32
        for call in calls:
            output = call.result(30).json()
            assert output["meta_info"]["finish_reason"]["type"] == "abort"
            rows_fit(output)


def test_200_requests_that_are_too_long_touch_no_page(server, engine):
    def pages(core):
        return core.ranks[0].pages.allocator.num_free, core.request_table.accepted

    before = on_engine_thread(engine, pages)
    for trial in range(100):
        length = 512 + trial
        assert (
            parse_error(server.post("/generate", {"input_ids": [5] * length}), 400)["code"] == "context_length_exceeded"
        )
        body = {"input_ids": [5] * 12, "sampling_params": {"max_new_tokens": 501 + trial}}
        assert parse_error(server.post("/generate", body), 400)["param"] == "max_new_tokens"
    assert on_engine_thread(engine, pages) == before


def test_20_rounds_of_a_full_store_never_give_short_rows(server):
    urls = []
    for trial in range(20):
        body = {**SHORT, "routed_experts_format": "ref", "rid": f"kept{trial}"}
        url = server.post("/generate", body).json()["meta_info"]["routed_experts_ref"]
        urls.append(url)
        for old in urls:
            answer = server.client.get(old)
            if answer.status_code == 200:
                record = record_from_npy(answer.content, json.loads(answer.headers["x-routed-experts-info"]))
                assert record.num_rows == 5
            else:
                assert parse_error(answer, 404)["code"] == "routing_not_found" and old != url, "the newest is there"
    assert server.state.store.nbytes <= 500 and server.client.get(urls[0]).status_code == 404


def test_50_flushes_and_50_pauses_under_load(server, engine):
    greedy = {**LONG, "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}}
    expected, modes = server.post("/generate", greedy).json(), ("in_place", "retract")
    for trial in range(50):
        calls = begun(server, engine, [greedy] * 4)
        flushed = server.client.post("/flush_cache")
        assert flushed.status_code == 200 or parse_error(flushed, 400)["code"] == "requests_running"
        assert server.post("/pause_generation", {"mode": modes[trial % 2]}).status_code == 200
        assert server.client.get("/health").json()["state"] == "paused", "and not stalled"
        assert server.client.post("/continue_generation").status_code == 200
        for call in calls:
            output = call.result(30).json()
            assert output["output_ids"] == expected["output_ids"]
            assert np.array_equal(record_from_response(output).ids, record_from_response(expected).ids)


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0, 315_360_000.0])
def test_a_clock_that_jumps_ends_nothing(server, engine, monkeypatch, jump_s):
    """The wall clock of the machine is set, by a day or ten years, while requests run and rows are stored."""
    url = server.post("/generate", {**SHORT, "routed_experts_format": "ref"}).json()["meta_info"]["routed_experts_ref"]
    calls = begun(server, engine, [LONG] * 4)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    assert server.client.get("/health").json()["state"] == "serving"
    assert server.client.get(url).status_code == 200, "rows have not expired"
    for call in calls:
        output = call.result(60).json()
        assert output["meta_info"]["finish_reason"]["type"] == "length" and 0 < output["meta_info"]["e2e_latency"] < 600
        rows_fit(output)


def test_good_and_refused_updates_under_load(server, engine, is_thorough):
    """Four good and six refused ones; twenty and thirty in a thorough run."""
    version = server.client.get("/get_weight_version").json()["update_count"]
    for trial in range(30 if is_thorough else 6):
        calls = begun(server, engine, [{**LONG, "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}] * 4)
        if trial % 3 == 2:
            for path in ("truncated", "empty", "nowhere"):
                assert parse_error(server.post("/update_weights_from_disk", {"model_path": path}), 400)
        else:
            output = server.post(
                "/update_weights_from_disk", {"model_path": f"seed{trial % 2}", "flush_cache": trial % 2 == 0}
            ).json()
            version += 1
            assert output["update_count"] == version
        assert server.client.get("/get_weight_version").json() == {
            "weight_version": "default",
            "update_count": version,
        }
        for call in calls:
            record = record_from_response(call.result(30).json())
            assert record.num_rows == 42 and record.version_spans[0][0] == 0 and record.version_spans[-1][1] == 42
            versions = [span[2] for span in record.version_spans]
            assert versions == sorted(versions) and versions[-1] <= version
