"""Routed experts over HTTP: every dialect carries the rows that the engine recorded, and readers of its peers find
them."""

import asyncio
import base64
import hashlib
import io
import json
import threading

import httpx
import numpy as np
import pytest

from routed_experts.core.errors import EngineDeadError
from routed_experts.formats import record_from_meta_info, record_from_npy, record_from_response
from routed_experts.formats.archive import decode_record_and_tokens
from routed_experts.formats.meta_info import extract_routed_experts_from_meta_info
from support.http_server import parse_error, running, stream

PROMPT = "The router scores every expert"
L, M, K = 4, 3, 4  # layers, MoE layers and experts a token of the tiny MoE
SAMPLED = {"prompt": PROMPT, "max_tokens": 7, "temperature": 1.0, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def records(engine):
    """What the engine recorded for three choices of the prompt, as int32 [S - 1, L, K]."""
    params = {"max_new_tokens": 7, "temperature": 1.0, "seed": 11, "ignore_eos": True, "n": 3}
    answers = engine.generate(PROMPT, params, return_routed_experts=True)
    return [extract_routed_experts_from_meta_info(answer).reshape(-1, L, K) for answer in answers]


@pytest.fixture(scope="module")
def peers(engine):
    """Servers in the dialects of vLLM 0.21 and vLLM 0.33."""
    with (
        running(engine, routed_experts_dialect="vllm021") as old,
        running(engine, routed_experts_dialect="vllm") as new,
    ):
        yield {"vllm021": old, "vllm": new}


def rows(choice):
    return extract_routed_experts_from_meta_info(choice).reshape(-1, L, K)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("form", ["int32", "npy", "list"])
@pytest.mark.parametrize("layers", [None, "all", "moe"])
def test_every_choice_has_its_own_rows(server, records, form, layers, streamed):
    body = {
        **SAMPLED,
        "n": 3,
        "return_routed_experts": True,
        "routed_experts_format": form,
        "routed_experts_layers": layers,
    }
    if streamed:
        chunks = stream(server, "/v1/completions", body)
        holders = [
            chunk
            for chunk in chunks
            if any("routed_experts" in json.dumps(choice_body) for choice_body in chunk["choices"])
        ]
        assert len(holders) == 3, "rows come with the last chunk of each choice alone"
        assert sum("prompt_routed_experts" in chunk for chunk in chunks) == (1 if form == "list" else 0)
        prompt = next((chunk["prompt_routed_experts"] for chunk in chunks if "prompt_routed_experts" in chunk), None)
        whole = {"prompt_routed_experts": prompt, "choices": [chunk["choices"][0] for chunk in holders]}
        assert all(choice_body["finish_reason"] == "length" for choice_body in whole["choices"])
    else:
        whole = server.post("/v1/completions", body).json()
    for choice, expected in enumerate(records):
        record = record_from_response(whole, choice)
        assert np.array_equal(record.ids, expected[:, 1:]), (form, layers, choice)
        assert whole["choices"][choice]["meta_info"]["weight_version"] == "default"
        assert (record.num_rows, record.num_tokens) == (record.num_prompt_tokens + 6, record.num_prompt_tokens + 7)
    assert not np.array_equal(records[0], records[1]), "the choices must differ for this to say anything"


def test_int32_is_where_rl_frameworks_look(server, records):
    meta = server.post("/v1/completions", {**SAMPLED, "return_routed_experts": True}).json()["choices"][0]["meta_info"]
    assert meta["weight_version"] == "default" and meta["routed_experts_start_len"] == 0
    users_own = np.frombuffer(base64.b64decode(meta["routed_experts"].encode()), np.int32).reshape(-1, L, K)
    assert np.array_equal(users_own, records[0])


def test_vllm_021_splits_prompt_and_generation_by_default(peers, records):
    output = peers["vllm021"].post("/v1/completions", {**SAMPLED, "n": 3}).json()
    prompt = np.array(output["prompt_routed_experts"])
    for choice, expected in zip(output["choices"], records, strict=True):
        generated = np.array(choice["routed_experts"])
        assert generated.shape == (6, M, K), "gen_len - 1 rows, MoE layers alone"
        assert np.array_equal(np.concatenate([prompt, generated]), expected[:, 1:])
    quiet = peers["vllm021"].post("/v1/completions", {**SAMPLED, "return_routed_experts": False}).json()
    assert "prompt_routed_experts" not in quiet and "routed_experts" not in quiet["choices"][0]
    error = parse_error(peers["vllm021"].post("/v1/completions", {"prompt": ["a", "b"]}), 400)
    assert (error["code"], error["param"]) == ("list_unsuitable", "routed_experts_format")


def test_vllm_033_sends_an_npy_of_all_layers(peers, records):
    output = (
        peers["vllm"]
        .post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3})
        .json()
    )
    loaded = np.load(io.BytesIO(base64.b64decode(output["choices"][0]["routed_experts"])), allow_pickle=False)
    assert loaded.dtype == np.uint8 and loaded.shape[1:] == (L, K) and not loaded[:, 0].any()
    assert loaded.shape[0] == output["usage"]["total_tokens"] - 1
    output = peers["vllm"].post("/v1/completions", SAMPLED).json()["choices"][0]
    assert np.array_equal(rows(output), records[0])
    choice = peers["vllm"].post("/v1/completions", {**SAMPLED, "routed_experts_format": "int32"}).json()["choices"][0]
    assert "routed_experts" not in choice and np.array_equal(rows(choice), records[0]), (
        "a named format stands in its own place"
    )


def test_a_later_start_sends_only_the_later_rows(server, records, engine):
    prompt_len = len(engine.tokenizer.encode(PROMPT))
    for start in (0, 3, prompt_len):
        body = {**SAMPLED, "return_routed_experts": True, "routed_experts_prompt_start": start}
        choice = server.post("/v1/completions", body).json()["choices"][0]
        assert np.array_equal(rows(choice), records[0][start:])
        assert choice["meta_info"]["routed_experts_start_len"] == start
    body = {**SAMPLED, "return_routed_experts": True, "routed_experts_start_len": prompt_len + 1}
    error = parse_error(server.post("/v1/completions", body), 400)
    assert error["code"] == "invalid_start"


def test_no_new_tokens_give_a_row_for_every_token(server, records, engine):
    ids = engine.tokenizer.encode(PROMPT)
    for path, body in (
        ("/v1/completions", {"prompt": ids, "max_tokens": 0}),
        ("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}}),
    ):
        output = server.post(path, {**body, "return_routed_experts": True}).json()
        record = record_from_response(output)
        assert record.num_rows == record.num_tokens == len(ids)
        assert np.array_equal(record.ids, records[0][: len(ids), 1:])
        if path == "/generate":
            meta = output["meta_info"]
            assert output["text"] == "" and output["output_ids"] == [] and meta["completion_tokens"] == 0
            assert meta["finish_reason"] == {"type": "length", "length": 0}


def test_a_ref_is_fetched_from_its_url(server, records):
    body = {**SAMPLED, "n": 2, "return_routed_experts": True, "routed_experts_format": "ref", "request_id": "r1"}
    output = server.post("/v1/completions", body).json()
    for choice, expected in zip(output["choices"], records, strict=False):
        meta = choice["meta_info"]
        assert meta["routed_experts_ref"] == f"/v1/routing/r1?choice={choice['index']}" and "routed_experts" not in meta
        answer = server.client.get(meta["routed_experts_ref"])
        record = record_from_npy(answer.content, json.loads(answer.headers["x-routed-experts-info"]))
        assert np.array_equal(record.ids, expected[:, 1:])
        assert json.loads(answer.headers["x-routed-experts-info"]) == meta["routed_experts_info"]
        assert answer.headers["etag"] == f'"{hashlib.sha256(answer.content).hexdigest()}.npy"'
        assert int(answer.headers["content-length"]) == len(answer.content)
        head = server.client.head(meta["routed_experts_ref"])
        assert head.content == b"" and head.headers["etag"] == answer.headers["etag"]
        packed = server.client.get(meta["routed_experts_ref"] + "&format=safetensors").content
        decoded, tokens = decode_record_and_tokens(packed)
        assert decoded == record and tokens.size == record.num_tokens
        assert (
            server.client.get(meta["routed_experts_ref"], headers={"if-none-match": answer.headers["etag"]}).status_code
            == 304
        )
    assert parse_error(server.client.get("/v1/routing/r1?choice=2"), 404)["code"] == "routing_not_found"
    assert parse_error(server.client.get("/v1/routing/r1?choice=x"), 400)["param"] == "choice"
    assert parse_error(server.client.get("/v1/routing/r1?format=pickle"), 400)["code"] == "unknown_format"
    assert server.client.delete("/v1/routing/r1").status_code == 204
    assert parse_error(server.client.get("/v1/routing/r1"), 404)["code"] == "routing_not_found"
    assert server.state.store.nbytes == 0


def test_a_native_ref_and_its_stream(server, records):
    body = {
        "text": PROMPT,
        "sampling_params": {"max_new_tokens": 7, "temperature": 1.0, "seed": 11, "ignore_eos": True},
    }
    body |= {"return_routed_experts": True, "routed_experts_format": "ref", "rid": "native-1"}
    last = stream(server, "/generate", body)[-1]
    answer = server.client.get(last["meta_info"]["routed_experts_ref"])
    record = record_from_npy(answer.content, json.loads(answer.headers["x-routed-experts-info"]))
    assert np.array_equal(record.ids, records[0][:, 1:])
    server.client.delete("/v1/routing/native-1")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_fleet_hears_of_the_rows_before_an_answer_names_them(engine, streamed):
    reserved, notes = [], []
    fields = {"return_routed_experts": True, "routed_experts_format": "ref"}
    with running(engine) as server:

        async def note(entry):
            reserved.append(entry.request_id)
            notes.append(server.state.store.find(entry.request_id) is entry)

        server.state.on_rows_reserved = note
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3}, "rid": "mine", **fields}
        if streamed:
            stream(server, "/generate", body)
        else:
            assert server.post("/generate", body).status_code == 200
        assert reserved == ["mine"]
        score = {"token_ids": [5, 6, 7], "request_id": "scored", **fields}
        assert server.post("/v1/score", score).status_code == 200
        assert server.post("/generate", {"input_ids": [5], "rid": "other"}).status_code == 200
        assert reserved == ["mine", "scored"] and all(notes)

        async def fail(entry):
            raise EngineDeadError("the fleet has ended")

        server.state.on_rows_reserved = fail
        assert parse_error(server.post("/v1/score", score), 503) and parse_error(server.post("/generate", body), 503)
        server.wait_idle()
        assert not server.state.store.entries(), "nothing is left of calls that were not answered"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3}}, "rid"),
        ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3}}, "request_id"),
        ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 3}, "request_id"),
        ("/v1/score", {"token_ids": [5, 6, 7]}, "request_id"),
    ],
)
def test_a_fleet_hears_whether_an_id_was_made_or_a_client_gave_it(engine, path, body, field):
    entries = []
    body = {**body, "return_routed_experts": True, "routed_experts_format": "ref"}
    with running(engine) as server:

        async def note(entry):
            entries.append((entry.request_id, entry.is_made))

        server.state.on_rows_reserved = note
        assert server.post(path, body).status_code == 200
        made = entries[0][0]  # and given back by a client
        assert server.post(path, {**body, field: made}).status_code == 200
        response = server.client.post(path, json=body, headers={"x-request-id": "by-header"})
        assert response.status_code == 200
    assert entries == [(made, True), (made, False), ("by-header", False)]


def test_a_score_whose_rows_are_not_noted_ends_with_its_time_or_its_client(engine):
    """The fleet does not answer."""
    score = {"token_ids": [5, 6, 7], "return_routed_experts": True, "routed_experts_format": "ref"}
    waiting = threading.Event()

    async def wait(entry):
        waiting.set()
        await asyncio.Event().wait()

    for timeout_s in (2.0, 600.0):
        with running(engine, request_timeout=timeout_s) as server:
            assert server.post("/v1/score", score).status_code == 200
            server.state.on_rows_reserved = wait
            waiting.clear()
            named = {**score, "request_id": "mine"}
            if timeout_s < 600.0:
                assert parse_error(server.post("/v1/score", named), 408)["code"] == "request_timeout"
            else:
                with pytest.raises(httpx.ReadTimeout):
                    server.client.post("/v1/score", json=named, timeout=2.0)
            assert waiting.is_set()
            server.wait_idle()
            assert server.state.store.find("mine") is None


@pytest.mark.parametrize("name", ["rid", "request_id"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_id_that_is_refused_is_named_as_it_was_sent(server, path, name):
    prompt = {"prompt": [5]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = {**prompt, "max_tokens": 400, "ignore_eos": True}
    error = parse_error(server.post(path, {**body, name: "a b"}), 400)
    assert error["param"] == name and error["message"].startswith(f"{name}='a b'")
    with server.client.stream("POST", path, json={**body, name: "double", "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        for streamed in (False, True):
            error = parse_error(server.post(path, {**body, name: "double", "stream": streamed}), 409)
            assert error["param"] == name and error["message"].startswith(f"{name}='double")
        assert server.post("/abort_request", {"rid": "double"}).json()["aborted"] == 1
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_refused_call_of_the_same_id_leaves_the_rows_of_the_running_one(server):
    body = {"prompt": [5], "max_tokens": 400, "ignore_eos": True, "request_id": "twice"}
    body |= {"return_routed_experts": True, "routed_experts_format": "ref"}
    with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        for streamed in (False, True):
            error = parse_error(server.post("/v1/completions", {**body, "stream": streamed}), 409)
            assert (error["code"], error["param"]) == ("duplicate_request_id", "request_id")
            assert error["message"].startswith("request_id='twice")
        assert parse_error(server.client.get("/v1/routing/twice"), 409)["code"] == "routing_not_ready"
        assert server.post("/abort_request", {"rid": "twice"}).json()["aborted"] == 1
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.client.get("/v1/routing/twice").status_code == 200, "what there was when it was aborted"
    server.client.delete("/v1/routing/twice")


@pytest.mark.parametrize("dialect", ["sglang", "vllm021", "vllm"])
def test_asking_where_nothing_is_recorded_is_a_400_and_the_server_lives(dialect, engine_factory):
    with engine_factory() as plain, running(plain, routed_experts_dialect=dialect) as server:
        for path, body in (
            ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
            ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}),
        ):
            for streamed in (False, True):
                response = server.post(path, {**body, "stream": streamed, "return_routed_experts": True})
                error = parse_error(response, 400)
                assert (error["code"], error["param"]) == ("capture_disabled", "return_routed_experts")
                assert "--enable-return-routed-experts" in error["message"]
                assert server.post(path, {**body, "stream": streamed}).status_code == 200, (
                    "no dialect asks by itself here"
                )
        assert server.client.get("/v1/models").json()["data"][0]["moe"] is None


def test_a_server_without_a_tokenizer_serves_ids(engine_factory):
    with engine_factory(skip_tokenizer_init=True) as plain, running(plain) as server:
        output = server.post(
            "/v1/completions",
            {"prompt": [5, 6], "max_tokens": 3, "logprobs": 1, "return_token_ids": True, "ignore_eos": True},
        ).json()
        (choice,) = output["choices"]
        assert choice["text"] == "" and len(choice["token_ids"]) == 3
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        sampling = {"max_new_tokens": 2, "ignore_eos": True}
        generated = server.post("/generate", {"input_ids": [5], "sampling_params": sampling}).json()
        assert len(generated["output_ids"]) == 2
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/generate", {"text": "a"}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [5]}),
        ):
            parse_error(server.post(path, body), 400)


def test_native_rows_in_every_format(server, records):
    body = {
        "text": PROMPT,
        "sampling_params": {"max_new_tokens": 7, "temperature": 1.0, "seed": 11, "ignore_eos": True},
    }
    for form in ("int32", "npy", "list"):
        output = server.post("/generate", {**body, "return_routed_experts": True, "routed_experts_format": form}).json()
        assert np.array_equal(record_from_meta_info(output).ids, records[0][:, 1:])
        assert output["meta_info"]["routed_experts_info"]["layers"] == ("all" if form == "int32" else "moe")


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"return_routed_experts": True, "routed_experts_format": "xml"}, 400, "unknown_format"),
        ({"return_routed_experts": True, "routed_experts_layers": "some"}, 400, "unknown_layers"),
        ({"return_routed_experts": True, "routed_experts_start_len": -1}, 400, "invalid_start"),
        (
            {"return_routed_experts": True, "routed_experts_start_len": 1, "routed_experts_prompt_start": 2},
            400,
            "conflicting_parameters",
        ),
        ({"return_routed_experts": True, "routed_experts_weights": True}, 400, "unknown_field"),
        ({"return_routed_experts": True, "routed_experts_stream": True}, 400, "stream_required"),
        ({"routed_experts_format": "npy"}, 400, "routing_not_requested"),
        ({"routed_experts_start_len": 2}, 400, "routing_not_requested"),
        ({"return_routed_expert": True}, 400, "unknown_field"),
        ({"routed_experts_foo": None, "return_routing": True}, 400, "unknown_field"),
        ({"return_routed_experts": "yes"}, 400, "invalid_request"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_routing_options_that_cannot_be_met_are_refused_by_their_code(server, path, fields, status, code):
    prompt = {"/generate": {"text": "a"}, "/v1/completions": {"prompt": "a"}}.get(
        path, {"messages": [{"role": "user", "content": "a"}]}
    )
    assert parse_error(server.post(path, {**prompt, **fields}), status)["code"] == code


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})],
)
@pytest.mark.parametrize("value", [[True], [False], []])
def test_a_list_of_routing_options_is_for_generate_alone(server, path, body, value):
    error = parse_error(server.post(path, {**body, "return_routed_experts": value}), 400)
    assert (error["code"], error["param"]) == ("invalid_request", "return_routed_experts")


def test_an_option_among_sampling_parameters_means_what_it_means_beside_them(server):
    body, name = {"text": "a", "return_routed_experts": True}, "routed_experts_include_last"
    for fields in ({name: True}, {"sampling_params": {name: True}}, {name: True, "sampling_params": {name: True}}):
        response = server.post("/generate", {**body, **fields})
        assert response.json()["meta_info"]["routed_experts_info"]["include_last"] is True
    quiet = {"sampling_params": {name: False, "max_new_tokens": 1}}
    assert server.post("/generate", {**body, **quiet}).status_code == 200
    assert parse_error(server.post("/generate", {**body, name: True, **quiet}), 400)["code"] == "conflicting_parameters"
    assert parse_error(server.post("/generate", {**body, "sampling_params": {name: 1}}), 400)["param"] == name


@pytest.mark.parametrize("where", [{}, {"sampling_params": {}}])
def test_weights_of_the_routing_are_an_unknown_field_in_either_place(server, where):
    name = "routed_experts_weights"
    fields = {"sampling_params": {name: True}} if where else {name: True}
    error = parse_error(server.post("/generate", {"text": "a", "return_routed_experts": True, **fields}), 400)
    assert (error["code"], error["param"]) == ("unknown_field", name)


def test_rows_are_streamed_by_sampling_parameters(server):
    sampling = {"max_new_tokens": 4, "ignore_eos": True, "routed_experts_stream": True}
    chunks = stream(server, "/generate", {"text": PROMPT, "sampling_params": sampling, "return_routed_experts": True})
    assert len([chunk for chunk in chunks if "routed_experts" in chunk["meta_info"]]) > 1


def test_another_key_may_not_fetch(engine):
    with running(engine, api_key="k" * 16, admin_api_key="a" * 16) as server:
        body = {
            "prompt": "a",
            "max_tokens": 2,
            "return_routed_experts": True,
            "routed_experts_format": "ref",
            "request_id": "mine",
        }
        assert server.post("/v1/completions", body).status_code == 200
        assert server.client.get("/v1/routing/mine").status_code == 200
        other = {"authorization": "Bearer " + "a" * 16}
        assert (
            parse_error(server.client.get("/v1/routing/mine", headers=other), 403)["code"] == "routing_of_another_key"
        )
        assert parse_error(server.client.delete("/v1/routing/mine", headers=other), 403)


def test_a_store_of_no_bytes_refuses_refs(engine):
    with running(engine, routing_store_bytes=0) as server:
        error = parse_error(
            server.post("/generate", {"text": "a", "return_routed_experts": True, "routed_experts_format": "ref"}), 400
        )
        assert error["code"] == "ref_unavailable" and "--routing-store-bytes" in error["message"]


def joined(pieces):
    """Increments put together: (rows [R, L, K], start of the first); each begins where the one before ended."""
    starts = [record.start for record in pieces]
    assert starts == [starts[0] + sum(piece.num_rows for piece in pieces[:index]) for index in range(len(pieces))]
    return np.concatenate([record.ids for record in pieces]), starts[0]


@pytest.mark.parametrize("form", ["int32", "npy", "list"])
@pytest.mark.parametrize("start", [0, 3])
def test_rows_that_are_streamed_come_with_their_tokens_and_join_to_the_whole(server, records, engine, form, start):
    prompt_len = len(engine.tokenizer.encode(PROMPT))
    options = {
        "return_routed_experts": True,
        "routed_experts_format": form,
        "routed_experts_stream": True,
        "routed_experts_start_len": start,
    }
    chunks = stream(server, "/v1/completions", {**SAMPLED, "n": 2, **options})
    for index, expected in enumerate(records[:2]):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        holders = [chunk for chunk in own if "routed_experts_info" in json.dumps(chunk)]
        if form == "list":
            assert all("prompt_routed_experts" not in chunk["choices"][0] for chunk in chunks)
            (lent,) = (chunk["prompt_routed_experts"] for chunk in chunks if "prompt_routed_experts" in chunk)
            holders[0]["prompt_routed_experts"] = lent  # it comes once, with the first choice
        pieces = [
            record_from_response({**chunk, "choices": [{**chunk["choices"][0], "index": 0}]}) for chunk in holders
        ]
        ids, first = joined(pieces)
        assert first == start and np.array_equal(ids, expected[start:, 1:])
        assert pieces[0].num_rows == prompt_len - start, "the prompt's rows come with the first token"
        for index, piece in enumerate(pieces):
            assert piece.num_tokens == prompt_len + index + 1 == piece.start + piece.num_rows + 1, (
                "no row before its token is told"
            )
    body = {
        "text": PROMPT,
        "sampling_params": {"max_new_tokens": 7, "temperature": 1.0, "seed": 11, "ignore_eos": True},
    }
    events = stream(server, "/generate", {**body, **options})
    pieces = [record_from_meta_info(event) for event in events]
    ids, first = joined([piece for piece in pieces if piece is not None])
    assert first == start and np.array_equal(ids, records[0][start:, 1:])
    assert all(event["meta_info"]["routed_experts_info"]["sha256"] is None for event in events)
    assert [piece.num_tokens for piece in pieces] == [prompt_len + count for count in range(1, 8)]


def test_streamed_rows_of_a_long_prompt_come_in_pieces(server, engine):
    prompt = [number % 300 + 3 for number in range(480)]  # some 40 kB of rows
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 3, "ignore_eos": True, "temperature": 0}}
    options = {"return_routed_experts": True, "routed_experts_stream": True}
    whole = record_from_meta_info(server.post("/generate", {**body, "return_routed_experts": True}).json())
    for path, output in (
        ("/generate", body),
        ("/v1/completions", {"prompt": prompt, "max_tokens": 3, "ignore_eos": True, "temperature": 0}),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("routed_experts.server.routing.response.MAX_EVENT_PAYLOAD", 8 * 1024)
            events = stream(server, path, {**output, **options})
        holders = [event for event in events if "routed_experts_info" in json.dumps(event)]
        pieces = [record_from_response(event) for event in holders]
        assert len(holders) > 5 and np.array_equal(joined(pieces)[0], whole.ids)
        payloads = [
            event["meta_info"] if path == "/generate" else event["choices"][0]["meta_info"] for event in holders
        ]
        assert max(len(event["routed_experts"]) for event in payloads) <= 8 * 1024
        ends = [
            event["meta_info"]["finish_reason"] if path == "/generate" else event["choices"][0]["finish_reason"]
            for event in events
        ]
        assert [end is not None for end in ends] == [False] * (len(ends) - 1) + [True]


def test_the_engine_streams_rows_too(engine, records):
    params = {"max_new_tokens": 7, "temperature": 1.0, "seed": 11, "ignore_eos": True}
    outputs = list(engine.generate(PROMPT, params, stream=True, return_routed_experts=True, routed_experts_stream=True))
    assert np.array_equal(joined([record_from_meta_info(output) for output in outputs])[0], records[0][:, 1:])
