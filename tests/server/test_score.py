"""/v1/score is Engine.score over HTTP: the same numbers, rows where the dialects have them, and rows of an answer
played back."""

import dataclasses
import json
import time

import numpy as np
import pytest

from routed_experts.formats import record_from_npy, record_from_response
from routed_experts.formats.wire import encode_routed_experts
from routed_experts.server.limits import MAX_SCORING_CALLS
from support.engines import open_engine
from support.http_server import parse_error, running
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

TOKENS, OTHERS = [5, 9, 200, 17, 3, 88, 41, 7], [11, 12, 13]


def score(server, **body):
    response = server.post("/v1/score", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_scores_are_the_engines(engine, server):
    response = score(server, token_ids=[TOKENS, OTHERS, [4]])
    expected = engine.score([TOKENS, OTHERS, [4]])
    assert [entry["index"] for entry in response["data"]] == [0, 1, 2] and response["usage"]["total_tokens"] == 12
    for entry, output in zip(response["data"], expected, strict=True):
        assert np.array_equal(np.asarray(entry["logprobs"], np.float32), output.logprobs)
        assert entry["meta_info"] == {
            "prompt_tokens": output.token_ids.size,
            "weight_version": "default",
            "update_count": 0,
            "prefill_weight_versions": [{"version": "default", "start": 0, "end": output.token_ids.size}],
            "version_spans": [[0, output.token_ids.size, 0]],
            "version_labels": {"0": "default"},
        }
    assert score(server, token_ids=TOKENS)["data"][0]["logprobs"] == response["data"][0]["logprobs"], (
        "one sequence needs no list"
    )


def test_labels_after_a_query_and_items_are_scored_as_sglang_does(engine, server):
    """Against a softmax over the whole vocabulary: the next token's top logprobs after each prompt."""
    query, items, labels = [5, 9, 200], [[17, 3], [88], [41, 7, 6]], [11, 12, 300]
    fields = {"query": query, "items": items, "label_token_ids": labels}
    for item_first in (False, True):
        prompts = [[*item, *query] if item_first else [*query, *item] for item in items]
        expected = [[engine.score([*prompt, label]).logprobs[-1] for label in labels] for prompt in prompts]
        plain = score(server, **fields, item_first=item_first)
        assert np.allclose(plain["scores"], np.exp(expected), rtol=1e-5)
        among = np.asarray(score(server, **fields, item_first=item_first, apply_softmax=True)["scores"])
        assert np.allclose(among, plain["scores"] / np.sum(plain["scores"], axis=1, keepdims=True), rtol=1e-5)
        assert np.allclose(among.sum(axis=1), 1, atol=1e-9)
    assert plain["object"] == "scoring" and plain["usage"] == {
        "prompt_tokens": 15,
        "completion_tokens": 0,
        "total_tokens": 15,
    }
    whole = score(server, query=query, items=[items[0]], label_token_ids=list(range(256)))["scores"]
    assert 0.2 < np.sum(whole) <= 1 + 1e-6, "probabilities over most of the vocabulary"
    text = score(server, query="The sea ", items=["is", "was"], label_token_ids=labels)["scores"]
    ids = [engine.tokenizer.encode(f"The sea {item}") for item in ("is", "was")]
    assert text == score(server, query=[], items=ids, label_token_ids=labels)["scores"]
    assert score(server, query="The sea ", items="is", label_token_ids=labels)["scores"] == text[:1]


@pytest.mark.parametrize("form", ["int32", "npy", "list", "ref"])
def test_a_row_of_every_token_comes_in_every_format(engine, server, form):
    fields = {
        "return_routed_experts": True,
        "routed_experts_format": form,
        "routed_experts_start_len": 3,
        "request_id": "scored",
    }
    (response,) = score(server, token_ids=TOKENS, **fields)["data"]
    expected = engine.score(TOKENS).routed_experts[3:]
    if form == "ref":
        answer = server.client.get(response["meta_info"]["routed_experts_ref"])
        record = record_from_npy(answer.content, json.loads(answer.headers["x-routed-experts-info"]))
        server.client.delete("/v1/routing/scored")
    else:
        record = record_from_response(
            {"choices": [response], "prompt_routed_experts": response.get("prompt_routed_experts")}
        )
    assert record == expected and record.num_rows == len(TOKENS) - 3
    info = response.get("routed_experts_info") or response["meta_info"]["routed_experts_info"]
    assert info["include_last"] is True


def test_a_score_has_the_time_of_its_call(server, monkeypatch):
    monkeypatch.setattr(server.state, "created", 1)
    assert abs(score(server, token_ids=TOKENS)["created"] - time.time()) < 60


def test_rows_of_an_answer_played_back_give_its_logprobs(server):
    """Capture, then teacher forcing on the captured routes, both over HTTP."""
    body = {"input_ids": TOKENS, "sampling_params": {"max_new_tokens": 12, "seed": 3}, "return_logprob": True}
    response = server.post("/generate", {**body, "return_routed_experts": True}).json()
    sequence = TOKENS + response["output_ids"]
    (replayed,) = score(server, token_ids=sequence, routed_experts=response["meta_info"])["data"]
    logprobs = [entry[0] for entry in response["meta_info"]["output_token_logprobs"]]
    np.testing.assert_allclose(replayed["logprobs"][len(TOKENS) - 1 :], logprobs, atol=1e-5)


def test_routes_that_no_router_takes_are_executed(engine, server):
    record = engine.score(TOKENS).routed_experts
    drifted = dataclasses.replace(record, ids=((record.ids + 5) % 16).astype(np.uint8))
    payload = encode_routed_experts(drifted, payload_format="npy", layers="moe")
    response = score(server, token_ids=[TOKENS, OTHERS], routed_experts=[payload, None], return_routed_experts=True)
    expected = engine.score([TOKENS, OTHERS], routed=[drifted, None])
    for entry, output in zip(response["data"], expected, strict=True):
        assert np.array_equal(np.asarray(entry["logprobs"], np.float32), output.logprobs)
    assert np.array_equal(record_from_response({"choices": response["data"]}, 0).ids, drifted.ids), (
        "what ran is what was given"
    )
    assert score(server, token_ids=TOKENS)["data"][0]["logprobs"] != response["data"][0]["logprobs"]


def test_many_tokens_are_scored_some_after_the_others(engine, server, monkeypatch):
    monkeypatch.setattr("routed_experts.server.routing.score.SCORE_CHUNK_TOKENS", len(TOKENS))
    scores = score(server, token_ids=[TOKENS, OTHERS, TOKENS])["data"]
    for entry, alone in zip(scores, engine.score([TOKENS, OTHERS, TOKENS]), strict=True):
        np.testing.assert_allclose(entry["logprobs"], alone.logprobs, atol=1e-5)
    monkeypatch.setattr("routed_experts.server.routing.score.MAX_SCORED_TOKENS", 10)
    assert "at most 10 a call" in parse_error(server.post("/v1/score", {"token_ids": [TOKENS] * 11}), 400)["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": TOKENS, "query": "a"}, "query"),
        ({"token_ids": TOKENS, "items": ["b"]}, "items"),
        ({"token_ids": TOKENS, "label_token_ids": [5]}, "label_token_ids"),
        ({"token_ids": TOKENS, "apply_softmax": True}, "apply_softmax"),
        ({"token_ids": TOKENS, "item_first": True}, "item_first"),
        *(
            ({"query": [5], "items": [[6]], "label_token_ids": [5], name: value}, name)
            for name, value in {
                "routed_experts_start_len": 1,
                "routed_experts_prompt_start": 1,
                "routed_experts_format": "npy",
                "routed_experts_layers": "moe",
                "routed_experts_stream": True,
                "routed_experts_include_last": True,
            }.items()
        ),
        ({"query": "a", "items": ["b"]}, "label_token_ids"),
        ({"query": [1] * 20_000, "items": [[]] * 100, "label_token_ids": [0] * 1000}, "items"),
        ({"query": [1] * 20_000, "items": [[1]] * 100, "label_token_ids": [0]}, "items"),
        ({"query": "a", "label_token_ids": [5]}, "items"),
        ({"query": "a", "items": [[5]], "label_token_ids": [5]}, "items"),
        ({"query": [5], "items": "b", "label_token_ids": [5]}, "items"),
        ({"query": [], "items": [[]], "label_token_ids": [5]}, "query"),
        ({"query": [313], "items": [[5]], "label_token_ids": [5]}, "items"),
        ({"query": [5], "items": [[6]], "label_token_ids": [313]}, "label_token_ids"),
        ({"query": [5], "items": [[6]], "label_token_ids": [-1]}, "label_token_ids"),
        ({"query": [5], "items": [[6]] * 257, "label_token_ids": [5]}, "items"),
        (
            {"query": [5], "items": [[6]], "label_token_ids": [5], "return_routed_experts": True},
            "return_routed_experts",
        ),
        ({"token_ids": [[]]}, "token_ids"),
        ({"token_ids": [1, [2]]}, "token_ids"),
        ({"token_ids": [313]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [5] * 513}, "token_ids"),
        ({"token_ids": [[1]] * 257}, "token_ids"),
        ({"token_ids": TOKENS, "routed_experts": {}}, "routed_experts"),
        ({"token_ids": TOKENS, "routed_experts": [None, None]}, "routed_experts"),
        ({"token_ids": TOKENS, "routed_experts": {"routed_experts": "AAAA"}}, "routed_experts"),
        ({"token_ids": TOKENS, "routed_experts_start_len": 1}, "routed_experts_start_len"),
        (
            {"token_ids": TOKENS, "return_routed_experts": True, "routed_experts_start_len": 9},
            "routed_experts_start_len",
        ),
        (
            {"token_ids": [TOKENS] * 2, "return_routed_experts": True, "routed_experts_format": "list"},
            "routed_experts_format",
        ),
        ({"token_ids": TOKENS, "request_id": "../x"}, "request_id"),
        ({"token_ids": [[1] * 512] * 256 + [[1]]}, "token_ids"),
    ],
)
def test_a_wrong_score_is_a_400_that_names_the_field(server, body, param):
    assert parse_error(server.post("/v1/score", body), 400)["param"] == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": [[1], [2], [313, 1]]}, "token_ids[2] holds the token id 313, outside 0..312"),
        ({"token_ids": [313, 1]}, "token_ids holds the token id 313"),
        ({"token_ids": [[1], [5] * 513]}, "token_ids[1] has 513 tokens"),
        ({"token_ids": [[1], [], []]}, "token_ids[1] is empty"),
        ({"query": [5], "items": [[6], [7, 313]], "label_token_ids": [5, 6]}, "items[1] holds the token id 313"),
        ({"query": [5], "items": [[313]], "label_token_ids": [5, 6]}, "items holds the token id 313"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2, 1 << 14])
def test_a_sequence_that_is_refused_is_named_by_its_index(server, monkeypatch, fields, message, chunk):
    monkeypatch.setattr("routed_experts.server.routing.score.SCORE_CHUNK_TOKENS", chunk)
    error = parse_error(server.post("/v1/score", fields), 400)
    assert error["message"].startswith(message) and error["param"] == message.partition("[")[0].split()[0]


def test_rows_of_another_sequence_are_refused(engine, server):
    response = score(server, token_ids=OTHERS, return_routed_experts=True)["data"][0]
    error = parse_error(server.post("/v1/score", {"token_ids": TOKENS, "routed_experts": response}), 400)
    assert error["code"] == "routing_alignment" and error["param"] == "routed_experts"


@pytest.mark.parametrize(
    "sizes",
    [
        {"shape": [10**13, 2, 0], "top_k": 0, "prompt_rows": 10**13, "version_spans": [[0, 10**13, 0]]},
        {"shape": [0, 2**62, 2], "num_hidden_layers": 2**62, "layers": "all", "prompt_rows": 0, "version_spans": []},
    ],
    ids=["rows", "layers"],
)
def test_sizes_that_a_payload_does_not_carry_are_refused(server, sizes):
    rows = score(server, token_ids=TOKENS, return_routed_experts=True)["data"][0]["meta_info"]
    num_tokens = sizes["shape"][0] + 1
    info = rows["routed_experts_info"] | sizes | {"num_tokens": num_tokens, "num_prompt_tokens": num_tokens}
    info |= {"sha256": None, "include_last": False}
    rows |= {"routed_experts": "", "routed_experts_info": info}
    error = parse_error(server.post("/v1/score", {"token_ids": TOKENS, "routed_experts": rows}), 400)
    assert error["code"] == "routing_format" and error["param"] == "routed_experts"


def test_where_nothing_is_recorded_nothing_is_replayed(server, engine_factory):
    rows = score(server, token_ids=TOKENS, return_routed_experts=True)["data"][0]["meta_info"]
    with engine_factory() as plain, running(plain) as other:
        assert score(other, token_ids=TOKENS)["data"][0]["logprobs"]
        for fields in ({"return_routed_experts": True}, {"routed_experts": rows}):
            error = parse_error(other.post("/v1/score", {"token_ids": TOKENS, **fields}), 400)
            assert error["code"] == "capture_disabled" and error["param"] == next(iter(fields))


def test_a_score_too_many_is_a_503(server):
    executor = server.state.score_executor
    executor.num_running += MAX_SCORING_CALLS
    try:
        assert parse_error(server.post("/v1/score", {"token_ids": TOKENS}), 503)["code"] == "too_many_requests"
    finally:
        executor.num_running -= MAX_SCORING_CALLS
    assert executor.num_running == 0 and score(server, token_ids=TOKENS)


def test_a_version_is_named_anew_and_old_prefixes_are_not_matched(tmp_path):
    with (
        lazy_compilation(),
        open_engine(write_tiny_checkpoint(tmp_path), enable_return_routed_experts=True) as engine,
        running(engine) as server,
    ):
        body = {"input_ids": TOKENS * 4, "sampling_params": {"max_new_tokens": 2}, "return_routed_experts": True}
        for _ in range(2):
            old = server.post("/generate", body).json()["meta_info"]
        assert old["cached_tokens"] and old["weight_version"] == "default"
        response = server.post("/update_weight_version", {"new_version": "step-12"}).json()
        served = {"weight_version": "step-12", "update_count": 1}
        assert response == {"success": True, "message": "updated", "new_version": "step-12", **served}
        assert server.client.get("/get_weight_version").json() == served
        new = server.post("/generate", body).json()["meta_info"]
        assert new["cached_tokens"] == 0 and new["weight_version"] == "step-12"
        assert [span[2] for span in new["routed_experts_info"]["version_spans"]] == [1]
        assert new["routed_experts"][:40] == old["routed_experts"][:40], "the weights are the same"
        for wrong in ("x" * 257, 10**400, True, None, [13], 1.5, {"a": "b"}):
            error = parse_error(server.post("/update_weight_version", {"new_version": wrong}), 400)
            assert error["param"] in ("new_version", None), wrong
        assert server.client.get("/get_weight_version").json() == served, "a refused label is no update"
        assert (
            server.post("/update_weight_version", {"new_version": 13, "abort_all_requests": False}).json()[
                "new_version"
            ]
            == "13"
        )
