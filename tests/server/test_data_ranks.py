"""HTTP answers of an engine with data ranks: the rank that a request names and ran in, refusals, and metrics."""

import httpx
import pytest

from support.engines import open_engine
from support.http_server import parse_error, running
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = [pytest.mark.devices(2), pytest.mark.usefixtures("fast_compilation")]

BODY = {
    "input_ids": [3, 1, 4, 1, 5] * 4,
    "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
}
COMPLETION = {"model": "tiny", "prompt": "a b c", "max_tokens": 2, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    sizes = {"tp_size": 2, "dp_size": 2, "enable_return_routed_experts": True}
    with lazy_compilation(), open_engine(folder, **sizes) as engine, running(engine) as server:
        yield server


def tokens_by_rank(server):
    head = "routed_experts_dp_tokens_total{rank="
    lines = [line.split("} ") for line in server.client.get("/metrics").text.splitlines() if line.startswith(head)]
    return [float(count) for _, count in sorted(lines)]


def test_a_request_names_its_rank_in_every_dialect(server):
    for rank in (1, 0):
        meta = server.post("/generate", BODY | {"data_parallel_rank": rank}).json()["meta_info"]
        assert meta["dp_rank"] == rank
        for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
            before = tokens_by_rank(server)
            response = server.post(path, body | {"data_parallel_rank": rank})
            assert response.status_code == httpx.codes.OK, response.text
            fed = [now - then for now, then in zip(tokens_by_rank(server), before, strict=True)]
            assert fed[rank] > 0 and sum(fed) == fed[rank], path


@pytest.mark.parametrize(("path", "body"), [("/generate", BODY), ("/v1/completions", COMPLETION)])
def test_another_rank_is_refused_by_name(server, path, body):
    response = server.post(path, body | {"data_parallel_rank": 2})
    error = parse_error(response, httpx.codes.BAD_REQUEST)
    assert error["param"] == "data_parallel_rank" and "0..1, a data rank (dp_size=2)" in error["message"]


def test_metrics_and_info_tell_of_the_ranks(server):
    server.post("/generate", BODY)
    text = server.client.get("/metrics").text
    for rank in "01":
        for state in ("free", "cached", "active"):
            assert f'routed_experts_kv_pages{{rank="{rank}",state="{state}"}}' in text
    (ratio,) = [line for line in text.splitlines() if line.startswith("routed_experts_dp_padding_ratio ")]
    assert float(ratio.split()[1]) >= 1
    info = server.client.get("/get_server_info").json()
    assert (info["tp_size"], info["dp_size"]) == (2, 2)
