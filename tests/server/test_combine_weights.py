"""Combine weights over HTTP: the same arrays as those of the engine, in every form and dialect, and played back."""

import contextlib
import dataclasses

import numpy as np
import pytest

from routed_experts.formats import record_from_meta_info, record_from_response
from routed_experts.formats.archive import decode_record
from routed_experts.formats.wire import encode_routed_experts
from routed_experts.server.routing import response
from support.engines import open_engine
from support.http_server import parse_error, running, stream
from support.lazy_compile import lazy_compilation

PROMPT = [5, 9, 200, 17, 3, 88, 41, 7]
ASKED = {"return_routed_experts": True, "return_routed_experts_weights": True}
BODIES = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 7, "seed": 11, "temperature": 1.0, "ignore_eos": True},
    "/generate": {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 7, "sampling_seed": 11, "temperature": 1.0, "ignore_eos": True},
    },
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def weighing(request, tiny_checkpoint):
    """An engine that records weights, a server of it, and the record of the answer to each body."""
    flags = {"enable_return_routed_experts": True, "enable_return_routed_experts_weights": True}
    with contextlib.ExitStack() as stack:
        with lazy_compilation():  # no longer: a test below asks for the shared engine
            engine = stack.enter_context(
                open_engine(tiny_checkpoint, **flags, routed_experts_weights_dtype=request.param)
            )
        server = stack.enter_context(running(engine))
        sampling = {"max_tokens": 7, "seed": 11, "temperature": 1.0, "ignore_eos": True}
        answer = engine.generate(input_ids=PROMPT, sampling_params=sampling, **ASKED)
        record = record_from_meta_info(answer)
        assert record.weights.dtype.name == request.param
        yield engine, server, record, [*PROMPT, *answer["output_ids"]]


@pytest.mark.parametrize("form", ["int32", "npy", "packed", "list"])
@pytest.mark.parametrize("path", BODIES)
def test_every_form_has_the_weights_of_the_engine(weighing, path, form):
    _, server, record, _ = weighing
    body = {**BODIES[path], **ASKED, "routed_experts_format": form}
    assert record_from_response(server.post(path, body).json()) == record
    ids = record_from_response(server.post(path, body | {"return_routed_experts_weights": False}).json())
    assert ids == dataclasses.replace(record, weights=None)
    if form == "list":
        return
    assert streamed_records(server, path, body)[-1] == record
    parts = streamed_records(server, path, {**body, "routed_experts_stream": True})
    assert np.array_equal(np.concatenate([part.weights for part in parts]), record.weights)


def streamed_records(server, path, body):
    """The records with rows of the events of a stream."""
    holders = [holder for event in stream(server, path, body) for holder in event.get("choices", [event])]
    records = [record_from_meta_info(holder) for holder in holders]
    return [record for record in records if record is not None and record.num_rows]


def test_a_ref_keeps_them_beside_the_ids(weighing):
    _, server, record, _ = weighing
    body = {**BODIES["/v1/completions"], **ASKED, "routed_experts_format": "ref", "request_id": "weighed"}
    [choice] = server.post("/v1/completions", body).json()["choices"]
    url = choice["meta_info"]["routed_experts_ref"]
    assert choice["meta_info"]["routed_experts_info"]["weights"] == record.weights.dtype.name
    assert decode_record(server.client.get(f"{url}&format=safetensors").content) == record
    assert server.client.delete("/v1/routing/weighed").status_code == 204


def test_a_list_counts_the_weights_of_every_choice(weighing, monkeypatch):
    """12 ids a row of 4 layers, and 12 weights of 3 MoE layers: prompt rows come once, their weights in each choice."""
    _, server, _, _ = weighing
    body = {**BODIES["/v1/completions"], **ASKED, "routed_experts_format": "list", "n": 3}
    rows, weighed = len(PROMPT) + 3 * 7, 3 * (len(PROMPT) + 7)
    for limit, status in ((12 * rows + 12 * weighed, 200), (12 * rows + 12 * weighed - 1, 400)):
        monkeypatch.setattr(response, "MAX_LISTED_IDS", limit)
        answer = server.post("/v1/completions", {**body, "routed_experts_layers": "moe"})
        assert answer.status_code == status
    assert f"up to {12 * rows + 12 * weighed} numbers" in answer.json()["error"]["message"]


def test_stored_rows_count_their_weights(weighing):
    _, server, record, tokens = weighing
    body = {**BODIES["/v1/completions"], **ASKED, "routed_experts_format": "ref", "request_id": "counted"}
    server.post("/v1/completions", body)
    assert server.state.store.nbytes == record.ids.nbytes + record.weights.nbytes + 4 * len(tokens)
    server.client.delete("/v1/routing/counted")


def test_a_server_says_what_it_records(weighing):
    _, server, record, _ = weighing
    info = server.client.get("/get_server_info").json()
    assert info["enable_return_routed_experts_weights"] is True
    assert info["routed_experts_weights_dtype"] == record.weights.dtype.name


def test_a_score_returns_and_replays_them(weighing):
    engine, server, record, tokens = weighing
    halved = dataclasses.replace(record, weights=record.weights / record.weights.dtype.type(2))
    payload = encode_routed_experts(halved, payload_format="npy", layers="moe")
    body = {"token_ids": tokens, "routed_experts": payload, "replay_weights": True, **ASKED}
    [entry] = server.post("/v1/score", body).json()["data"]
    expected = engine.score(tokens, routed=halved, replay_weights=True)
    assert np.array_equal(np.asarray(entry["logprobs"], np.float32), expected.logprobs)
    assert record_from_meta_info(entry) == expected.routed_experts
    assert not np.array_equal(expected.logprobs, engine.score(tokens, routed=halved).logprobs)
    [quiet] = server.post("/v1/score", {"token_ids": tokens, "return_routed_experts": True}).json()["data"]
    assert record_from_meta_info(quiet).weights is None


def test_what_cannot_be_given_is_refused_by_name(weighing, server):
    _, own, record, tokens = weighing
    for path, body in BODIES.items():
        error = parse_error(server.post(path, {**body, **ASKED}), 400)
        assert error["param"] == "return_routed_experts_weights" and "--enable-return" in error["message"]
        alone = parse_error(own.post(path, {**body, "return_routed_experts_weights": True}), 400)
        assert alone["param"] == "return_routed_experts_weights" and "has no effect" in alone["message"]
    ids = encode_routed_experts(dataclasses.replace(record, weights=None), payload_format="npy", layers="moe")
    for fields, text in (
        ({"routed_experts": ids, "replay_weights": True}, "no combine weights"),
        ({"replay_weights": True}, "without records to replay"),
    ):
        error = parse_error(own.post("/v1/score", {"token_ids": tokens, **fields}), 400)
        assert text in error["message"] and error["param"] in ("routed_experts", "replay_weights")
