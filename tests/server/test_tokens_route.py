"""POST /inference/v1/generate and packed rows: token ids in and out give what /generate gives, in vLLM's form."""

import base64
import io
import json
import re

import numpy as np
import pytest

from routed_experts.formats import extract_routed_experts_from_meta_info, packed, record_from_response
from support.engines import open_engine
from support.http_server import parse_error, running, stream
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

ROUTE = "/inference/v1/generate"
IDS = [5, 9, 3, 7, 11, 40, 41]
LENGTHS = ("max_tokens", "max_new_tokens", "min_tokens", "min_new_tokens")
GREEDY = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}


def tokens(server, sampling=GREEDY, **fields):
    response = server.post(ROUTE, {"model": "tiny", "token_ids": IDS, "sampling_params": sampling, **fields})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def native(server):
    """The same request on /generate."""
    body = {
        "input_ids": IDS,
        "sampling_params": {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
        "return_routed_experts": True,
    }
    return server.post("/generate", body).json()


def decoded(payload):
    return np.load(io.BytesIO(base64.b64decode(payload)), allow_pickle=False)


def test_ids_logprobs_and_rows_are_those_of_generate(server, native):
    output = tokens(server, {**GREEDY, "logprobs": 3}, request_id="mine", return_token_ids=True)
    assert output["request_id"] == "mine" and output["prompt_token_ids"] == IDS
    (choice,) = output["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert choice["token_ids"] == native["output_ids"] and output["kv_transfer_params"] is None
    assert choice["meta_info"]["weight_version"] == native["meta_info"]["weight_version"]
    content, meta = choice["logprobs"]["content"], native["meta_info"]
    assert [(entry["logprob"], entry["token_id"]) for entry in content] == [
        (logprob, token) for logprob, token, _ in meta["output_token_logprobs"]
    ]
    for entry, top in zip(content, meta["output_top_logprobs"], strict=True):
        assert entry["token"] == f"token_id:{entry['token_id']}"
        assert [other["token_id"] for other in entry["top_logprobs"]] == [token for _, token, _ in top]
    usage = output["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 9, 16)
    rows = decoded(choice["routed_experts"])
    assert rows.dtype == np.uint8 and rows.shape == (15, 4, 4) and not rows[:, 0].any(), "dense layers are 0"
    assert record_from_response(output) == record_from_response(native)


def test_rows_come_unasked_and_may_be_declined_or_start_later(server):
    assert tokens(server, return_routed_experts=False)["choices"][0]["routed_experts"] is None
    whole = decoded(tokens(server)["choices"][0]["routed_experts"])
    for sampling, fields in (
        ({**GREEDY, "routed_experts_prompt_start": 4}, {}),
        (GREEDY, {"routed_experts_start_len": 4}),
    ):
        choice = tokens(server, sampling, **fields)["choices"][0]
        assert (
            np.array_equal(decoded(choice["routed_experts"]), whole[4:]) and choice["routed_experts_info"]["start"] == 4
        )


def test_prompt_logprobs_are_those_of_generate_by_token_id(server, native):
    output = tokens(server, {**GREEDY, "prompt_logprobs": 2})
    first, *others = output["prompt_logprobs"]
    meta = native["meta_info"]
    assert first is None and len(others) == len(IDS) - 1
    pairs = zip(others, meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:], strict=True)
    for by_id, (logprob, token, text), top in pairs:
        assert next(iter(by_id)) == str(token) and by_id[str(token)]["logprob"] == logprob
        assert by_id[str(token)]["decoded_token"] == text
        for rank, (value, other, _) in enumerate(top[:2], start=1):
            assert by_id[str(other)]["logprob"] == value and by_id[str(other)]["rank"] == rank
        assert len(by_id) in (2, 3) and (by_id[str(token)]["rank"] is None) == (len(by_id) == 3)
    assert output["choices"][0]["logprobs"] is None, "they are of the prompt alone"
    assert tokens(server)["prompt_logprobs"] is None


@pytest.mark.parametrize("fields", [{}, {"routed_experts_stream": True}, {"routed_experts_format": "packed"}])
def test_a_stream_joins_to_the_whole(server, fields):
    sampling = {**GREEDY, "logprobs": 2, "n": 2, "temperature": 1, "seed": 4}
    whole = tokens(server, sampling, **{key: value for key, value in fields.items() if key != "routed_experts_stream"})
    body = {"token_ids": IDS, "sampling_params": sampling, "stream_options": {"include_usage": True}, **fields}
    *events, last = stream(server, ROUTE, body)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert len({event["request_id"] for event in events}) == 1 and all(event["usage"] is None for event in events)
    for index, choice in enumerate(whole["choices"]):
        parts = [part for event in events for part in event["choices"] if part["index"] == index]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [entry for part in parts for entry in part["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert parts[-1]["token_ids"], "the last chunk has the last token"
        rows = np.concatenate(
            [extract_routed_experts_from_meta_info(part) for part in parts if "routed_experts" in part]
        )
        assert np.array_equal(rows, extract_routed_experts_from_meta_info(choice))
        with_rows = [part for part in parts if "routed_experts" in part]
        assert len(with_rows) == (len(parts) if "routed_experts_stream" in fields else 1)


def holders(path, output, *, streamed):
    """What holds the rows of choice 0, in each event that has some."""
    events = output if streamed else [output]
    if path == "/generate":
        return [event for event in events if "routed_experts" in event["meta_info"]]
    if path == "/v1/score":
        return events[0]["data"][:1]
    return [choice for event in events for choice in event["choices"] if "routed_experts" in choice]


BODIES = {
    "/generate": {"input_ids": IDS, "sampling_params": {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True}},
    "/v1/completions": {"prompt": IDS, **GREEDY},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "experts"}], **GREEDY},
    "/v1/score": {"token_ids": IDS},
    ROUTE: {"token_ids": IDS, "sampling_params": GREEDY},
    "/skyrl/v1/generate": {"token_ids": IDS, "sampling_params": GREEDY},
}


@pytest.mark.parametrize("mode", ["at once", "streamed", "rows streamed"])
@pytest.mark.parametrize("path", BODIES)
def test_packed_rows_are_the_same_on_every_route(server, path, mode):
    body = {**BODIES[path], "return_routed_experts": True, "routed_experts_format": "packed"}
    expected = server.post(path, {**body, "routed_experts_format": "int32"}).json()
    streamed = mode != "at once" and path != "/v1/score"
    body |= {"routed_experts_stream": True} if mode == "rows streamed" and streamed else {}
    output = stream(server, path, body) if streamed else server.post(path, body).json()
    actual, start = [], 0
    for holder in holders(path, output, streamed=streamed):
        rows = holder.get("routed_experts") or holder["meta_info"]["routed_experts"]
        assert list(rows) == ["data", "shape", "start", "dtype"], "renderers cuts data out by its first key"
        assert rows["dtype"] == "uint8" and rows["start"] == start
        array = packed.decode(rows)
        assert list(array.shape) == rows["shape"] and not array[:, 0].any()
        start += len(array)
        actual.append(extract_routed_experts_from_meta_info(holder))
    (whole,) = (
        expected["data"] if path == "/v1/score" else [expected if path == "/generate" else expected["choices"][0]]
    )
    assert np.array_equal(np.concatenate(actual), extract_routed_experts_from_meta_info(whole))
    assert len(actual) > 1 or mode != "rows streamed" or path == "/v1/score"


def test_the_bytes_of_packed_rows_are_as_renderers_cuts_them(server):
    raw = server.post(ROUTE, {"token_ids": IDS, "sampling_params": GREEDY, "routed_experts_format": "packed"}).content
    assert raw.count(b'"routed_experts":{"data":"') == 1
    data = raw.split(b'"routed_experts":{"data":"')[1].split(b'"')[0]
    payload = json.loads(raw)["choices"][0]["routed_experts"]
    assert np.array_equal(packed.decode({**payload, "data": memoryview(data)}), packed.decode(payload))


def test_a_server_may_pack_by_default(engine):
    with running(engine, routed_experts_format="packed") as server:
        assert tokens(server)["choices"][0]["routed_experts"]["dtype"] == "uint8"


def test_skyrl_gets_packed_rows_without_asking(server, native):
    output = server.post("/skyrl/v1/generate", {"model": "tiny", "token_ids": IDS, "sampling_params": GREEDY}).json()
    assert output["choices"][0]["token_ids"] == native["output_ids"]
    assert packed.decode(output["choices"][0]["routed_experts"]).shape == (15, 4, 4)
    assert record_from_response(output) == record_from_response(native)


def test_no_tokenizer_is_needed(tmp_path):
    with (
        lazy_compilation(),
        open_engine(
            write_tiny_checkpoint(tmp_path), enable_return_routed_experts=True, skip_tokenizer_init=True
        ) as bare,
        running(bare) as server,
    ):
        output = tokens(server, {**GREEDY, "logprobs": 1, "prompt_logprobs": 1})
        choice = output["choices"][0]
        assert len(choice["token_ids"]) == 9 == len(choice["logprobs"]["content"])
        assert decoded(choice["routed_experts"]).shape == (15, 4, 4)
        assert {entry["decoded_token"] for entry in output["prompt_logprobs"][1].values()} == {None}
        events = stream(server, ROUTE, {"token_ids": IDS, "sampling_params": GREEDY})
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == choice["token_ids"]
        stops = {"token_ids": IDS, "sampling_params": {"stop": ["x"]}}
        assert parse_error(server.post(ROUTE, stops), 400)["param"] == "stop"


def test_without_a_length_the_rest_of_the_context_is_generated(server, engine):
    output = tokens(server, {"temperature": 0, "ignore_eos": True}, return_routed_experts=False)
    limits = engine.input_processor.limits
    assert len(output["choices"][0]["token_ids"]) == min(limits.context_length, limits.pool_tokens) - len(IDS)


def test_a_stop_id_ends_and_is_told(server):
    stop = tokens(server)["choices"][0]["token_ids"][4]
    choice = tokens(server, {**GREEDY, "stop_token_ids": [stop]})["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"][-1]) == ("stop", stop, stop)


def test_structured_outputs_are_followed(server):
    choice = tokens(server, {"max_tokens": 20, "structured_outputs": {"regex": "(ab){3}"}})["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert server.post("/detokenize", {"tokens": choice["token_ids"]}).json()["prompt"].startswith("ababab")


def test_names_without_effect_are_named(server):
    body = {"token_ids": IDS, "sampling_params": {**GREEDY, "output_kind": 1, "spaces_between_special_tokens": True}}
    response = server.post(ROUTE, {**body, "priority": 0, "output_mode": "tokens", "features": None})
    assert response.status_code == 200
    assert response.headers["x-ignored-params"] == "output_kind, spaces_between_special_tokens"


@pytest.mark.parametrize(
    ("fields", "sampling", "param", "code"),
    [
        ({"features": {"mm_hashes": {}}}, {}, "features", "unsupported_parameter"),
        ({"content_parts": [{"type": "image"}]}, {}, "content_parts", "unsupported_parameter"),
        ({"kv_transfer_params": {"a": 1}}, {}, "kv_transfer_params", "unsupported_parameter"),
        ({"priority": 3}, {}, "priority", "unsupported_parameter"),
        ({"output_mode": "text"}, {}, "output_mode", "unsupported_parameter"),
        ({}, {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "conflicting_parameters"),
        ({}, {"logprob_token_ids": [4]}, "logprob_token_ids", "unsupported_parameter"),
        ({}, {"prompt_logprob_token_ids": [[4]]}, "prompt_logprob_token_ids", "unsupported_parameter"),
        ({}, {"max_tokenz": 4}, "max_tokenz", "unknown_field"),
        ({}, {"max_tokens": 0}, "max_tokens", "invalid_request"),
        ({}, {"max_tokens": 100_000}, "max_tokens", "context_length_exceeded"),
        ({}, {"temperature": "hot"}, "temperature", "invalid_request"),
        ({}, {"logprobs": 99}, "logprobs", "invalid_request"),
        ({}, {"max_tokens": 2, "max_new_tokens": 3}, "max_new_tokens", "invalid_request"),
        ({}, {"max_new_tokens": 100_000}, "max_new_tokens", "context_length_exceeded"),
        ({}, {"max_new_tokens": 2.5}, "max_new_tokens", "invalid_request"),
        ({}, {"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens", "invalid_request"),
        ({}, {"max_new_tokens": 3, "min_tokens": 4}, "min_tokens", "invalid_request"),
        ({}, {"max_tokens": 3, "min_new_tokens": 4}, "min_new_tokens", "invalid_request"),
        ({}, {"max_new_tokens": 300, "min_new_tokens": 100_000}, "min_new_tokens", "invalid_request"),
        ({}, {"sampling_seed": 1.5}, "sampling_seed", "invalid_request"),
        ({"routed_experts_prompt_start": 99}, {}, "routed_experts_prompt_start", "invalid_start"),
        ({}, {"routed_experts_prompt_start": -1}, "routed_experts_prompt_start", "invalid_start"),
        ({}, {"logit_bias": {"5": "x"}}, "logit_bias", "invalid_request"),
        ({"stream_options": {"include_usage": True}}, {}, "stream_options", "stream_required"),
        ({"extra_key": "x" * 4097}, {}, "extra_key", "invalid_request"),
        ({"stream": True}, {"prompt_logprobs": 1}, "prompt_logprobs", "conflicting_parameters"),
        ({}, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "unsupported_parameter"),
        ({}, {"thinking_token_budget": 0}, "thinking_token_budget", "unsupported_parameter"),
        ({"token_ids": []}, {}, "token_ids", "invalid_request"),
        ({"token_ids": [313]}, {}, "token_ids", "invalid_request"),
        ({"token_ids": [[1], [2]]}, {}, "token_ids", "invalid_request"),
        ({"token_ids": "text"}, {}, "token_ids", "invalid_request"),
        ({"token_ids": None, "prompt": "text"}, {}, "prompt", "unknown_field"),
        ({"model": "another"}, {}, "model", "model_not_found"),
        ({"request_id": "a b"}, {}, "request_id", "invalid_request"),
        ({"routed_experts_format": "zip"}, {}, "routed_experts_format", "unknown_format"),
        ({"data_parallel_rank": 5}, {}, "data_parallel_rank", None),
    ],
)
def test_what_cannot_be_is_refused_by_name(server, fields, sampling, param, code):
    body = {"token_ids": IDS, "sampling_params": sampling, **fields}
    error = parse_error(server.post(ROUTE, body), 404 if code == "model_not_found" else 400)
    assert error["param"] == param and code in (None, error["code"])
    message = error["message"]
    if param in LENGTHS:
        other = [name for name in LENGTHS if name not in sampling]
        assert param in message and not [name for name in other if re.search(rf"\b{name}\b", message)]
    else:
        assert param in message or "token ids" in message or "model" in message


def test_parameters_that_are_refused_may_be_sent_unset(server):
    unset = {"truncate_prompt_tokens": None, "logits_processors": [], "stop_regex": "", "guided_decoding": {}}
    unset |= {"prompt_logprob_start": 0, "thinking_token_budget": False}
    assert tokens(server, {**GREEDY, **unset})["choices"] == tokens(server, GREEDY)["choices"]


def test_two_lengths_that_differ_are_named_as_they_were_sent(server):
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 2, "max_new_tokens": 3}}
    message = parse_error(server.post(ROUTE, body), 400)["message"]
    assert message.startswith("max_new_tokens is 3, but must be the value of max_tokens, 2;")


def test_texts_and_large_biases_are_read_as_on_v1(server):
    expected = tokens(server, {**GREEDY, "logit_bias": {"5": 100}})["choices"][0]["token_ids"]
    sampling = {**GREEDY, "temperature": "0.0", "logit_bias": {"5": 1000}}
    assert tokens(server, sampling)["choices"][0]["token_ids"] == expected == [5] * 9


@pytest.mark.parametrize("include", [True, False, None])
def test_usage_in_every_chunk_needs_usage_in_the_stream(server, include):
    body = {"token_ids": IDS, "sampling_params": GREEDY}
    body["stream_options"] = {"include_usage": include, "continuous_usage_stats": True}
    chunks = stream(server, ROUTE, body)
    assert all(("usage" in chunk) is (include is True) for chunk in chunks)


def test_usage_is_forced_here_too(engine):
    with running(engine, enable_force_include_usage=True) as server:
        chunks = stream(server, ROUTE, {"token_ids": IDS, "sampling_params": GREEDY})
        assert all(chunk["usage"]["prompt_tokens"] == len(IDS) for chunk in chunks)


def test_the_header_of_routers_names_the_data_rank(server):
    body = {"token_ids": IDS, "sampling_params": GREEDY}
    assert server.post(ROUTE, body, headers={"x-data-parallel-rank": "0"}).status_code == 200
    for rank in ("7", "x"):
        refused = parse_error(server.post(ROUTE, body, headers={"x-data-parallel-rank": rank}), 400)
        assert refused["param"] == "data_parallel_rank"
