"""/v1/routing/stats: counts are those of the records, and metrics give the same."""

import threading

import numpy as np
import pytest

from routed_experts.formats import record_from_response
from support.engines import on_engine_thread
from support.http_server import parse_error, running

BODY = {
    "input_ids": list(range(3, 40)),
    "sampling_params": {"max_new_tokens": 9, "ignore_eos": True},
    "return_routed_experts": True,
}


def counted(record, tokens):
    """[M, E] by a loop."""
    counts = np.zeros((3, 16), np.int64)
    for token in tokens:
        for layer in range(3):
            for expert in record.ids[token - record.start, layer]:
                counts[layer, expert] += 1
    return counts


@pytest.fixture
def record(server, engine):
    """Rows of one request after a reset, every token fed once, the last among them."""
    engine.flush_cache()
    assert server.client.post("/v1/routing/reset").json() == {"success": True}
    return record_from_response(server.post("/generate", {**BODY, "routed_experts_include_last": True}).json())


def test_counts_are_those_of_the_rows(server, record):
    output = server.client.get("/v1/routing/stats").json()
    assert (output["layer_ids"], output["num_experts"], output["top_k"]) == ([1, 2, 3], 16, 4)
    assert output["num_tokens"] == {"prompt": 37, "generated": 9}
    prompt, generated = counted(record, range(37)), counted(record, range(37, 46))
    assert np.array_equal(output["counts"]["prompt"], prompt) and np.array_equal(
        output["counts"]["generated"], generated
    )
    assert output["window"] == {"num_tokens": 46, "counts": output["counts"]}
    load = prompt + generated
    for layer in range(3):
        share = [count / load[layer].sum() for count in load[layer] if count]
        assert output["imbalance"][layer] == pytest.approx(max(load[layer]) * 16 / sum(load[layer]))
        assert output["entropy"][layer] == pytest.approx(-sum(p * np.log(p) for p in share) / np.log(16))
        assert output["dead_experts"][layer] == sum(count == 0 for count in load[layer])


def test_metrics_give_the_same(server, record, engine):
    output = server.client.get("/v1/routing/stats").json()
    lines = server.client.get("/metrics").text.splitlines()
    metrics = {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if line.startswith("routed_experts_"))
    }
    for name, key in (
        ("expert_load_imbalance", "imbalance"),
        ("expert_entropy", "entropy"),
        ("dead_experts", "dead_experts"),
    ):
        assert [metrics[f'routed_experts_{name}{{layer="{layer}"}}'] for layer in (1, 2, 3)] == pytest.approx(
            output[key]
        )
    assert not [name for name in metrics if "expert_tokens" in name], "many series come only when they are wanted"
    with running(engine, expert_metrics=True) as other:
        text = other.client.get("/metrics").text
    each = [line for line in text.splitlines() if line.startswith("routed_experts_expert_tokens_total{")]
    assert len(each) == 48 and sum(float(line.rsplit(" ", 1)[1]) for line in each) == 46 * 3 * 4


def test_a_reader_learns_that_nothing_has_changed(server, record):
    first = server.client.get("/v1/routing/stats")
    headers = {"if-none-match": first.headers["etag"]}
    same = server.client.get("/v1/routing/stats", headers=headers)
    assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", first.headers["etag"])
    assert server.post("/generate", BODY).status_code == 200
    assert server.client.get("/v1/routing/stats", headers=headers).status_code == 200
    assert server.client.post("/v1/routing/reset").status_code == 200
    nothing = server.client.get("/v1/routing/stats").json()
    assert (
        nothing["num_tokens"] == {"prompt": 0, "generated": 0}
        and nothing["imbalance"] == [None] * 3 == nothing["entropy"]
    )


def test_without_capture_there_is_nothing_to_report(engine_factory):
    with engine_factory() as plain, running(plain) as server:
        assert parse_error(server.client.get("/v1/routing/stats"), 400)["code"] == "capture_disabled"
        assert parse_error(server.client.post("/v1/routing/reset"), 400)["code"] == "capture_disabled"
        assert "expert_entropy" not in server.client.get("/metrics").text


def test_a_stuck_engine_keeps_no_scrape_waiting(engine):
    release, stuck = threading.Event(), threading.Event()

    def block(core):
        stuck.set()
        release.wait(30)

    with running(engine, stall_timeout=0.2) as server:
        blocker = threading.Thread(target=on_engine_thread, args=(engine, block))
        blocker.start()
        try:
            assert stuck.wait(10)
            assert parse_error(server.client.get("/v1/routing/stats"), 503)["code"] == "stalled"
            assert server.client.get("/metrics", timeout=5).status_code == 200
            assert server.client.get("/metrics", timeout=5).status_code == 200
        finally:
            release.set()
            blocker.join()
        assert server.client.get("/v1/routing/stats").status_code == 200
