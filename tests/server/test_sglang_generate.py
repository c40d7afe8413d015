"""/generate and the routes around it, as SGLang's clients and the RL frameworks slime and verl use them."""

import base64

import numpy as np
import pytest

from routed_experts import extract_routed_experts_from_meta_info
from support.engines import on_engine_thread, open_engine
from support.http_server import parse_error, running, stream
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

PROMPT = "The router scores every expert"
GREEDY = {"temperature": 0, "max_new_tokens": 8}
LONG = {"max_new_tokens": 400, "ignore_eos": True}
L, K = 4, 4


def without_time(answer):
    meta = {
        key: value for key, value in answer["meta_info"].items() if key not in ("id", "e2e_latency", "cached_tokens")
    }
    return {**answer, "meta_info": meta}


def test_an_answer_is_the_engines_own(engine, server):
    kwargs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "return_routed_experts": True}
    output = server.post("/generate", {"text": PROMPT, "sampling_params": GREEDY, **kwargs}).json()
    expected = engine.generate(PROMPT, GREEDY, **kwargs)
    assert output.keys() == expected.keys() == {"text", "output_ids", "meta_info"}
    assert output["meta_info"].keys() == expected["meta_info"].keys()
    for key in ("output_token_logprobs", "input_token_logprobs"):
        logprobs, reference = output["meta_info"][key], expected["meta_info"][key]
        assert [entry[1:] for entry in logprobs] == [entry[1:] for entry in reference]
        assert [entry[0] for entry in logprobs[1:]] == pytest.approx([entry[0] for entry in reference[1:]], abs=1e-4)
    assert output["text"] == expected["text"] and output["output_ids"] == expected["output_ids"]
    assert output["meta_info"]["routed_experts"] == expected["meta_info"]["routed_experts"]


def test_many_prompts_and_choices_come_in_order(engine, server):
    prompts = [PROMPT, "The cat", "One two"]
    output = server.post("/generate", {"text": prompts, "sampling_params": GREEDY}).json()
    assert [result["text"] for result in output] == [engine.generate(prompt, GREEDY)["text"] for prompt in prompts]
    ids = [engine.tokenizer.encode(prompt) for prompt in prompts]
    assert [
        result["text"] for result in server.post("/generate", {"input_ids": ids, "sampling_params": GREEDY}).json()
    ] == [result["text"] for result in output]
    assert isinstance(server.post("/generate", {"input_ids": ids[0], "sampling_params": GREEDY}).json(), dict)
    sampled = {"n": 2, "sampling_seed": 4, "max_new_tokens": 5}
    expected = engine.generate(PROMPT, {"n": 2, "seed": 4, "max_new_tokens": 5})
    two = server.client.put("/generate", json={"text": PROMPT, "sampling_params": sampled}).json()
    assert [result["text"] for result in two] == [result["text"] for result in expected]


def test_rows_of_some_prompts_only(server):
    body = {"text": ["a", "b"], "sampling_params": GREEDY, "return_routed_experts": [False, True]}
    first, second = server.post("/generate", body).json()
    assert not [key for key in first["meta_info"] if "routed" in key] and second["meta_info"]["routed_experts"]
    assert (
        parse_error(server.post("/generate", {**body, "return_routed_experts": [True]}), 400)["param"]
        == "return_routed_experts"
    )
    listed = {**body, "routed_experts_format": "list"}
    assert parse_error(server.post("/generate", listed), 400)["code"] == "list_unsuitable"


def test_fields_of_each_prompt_are_lists(engine, server):
    """As SGLang's clients send them: parameters, ids, logprobs and rows differ by prompt."""
    prompts = [PROMPT, "The cat", "One two"]
    choices = {"max_new_tokens": 3, "temperature": 0.7, "sampling_seed": 5, "n": 2, "ignore_eos": True}
    sampling = [GREEDY, choices, {"max_new_tokens": 5, "ignore_eos": True}]
    body = {
        "text": prompts,
        "sampling_params": sampling,
        "rid": ["a", "b", "c"],
        "return_logprob": [True, False, True],
        "logprob_start_len": [0, -1, -1],
        "top_logprobs_num": [2, 0, 0],
        "return_routed_experts": [True, False, True],
        "routed_experts_start_len": [0, 0, 1],
        "extra_key": ["x", None, "y"],
    }
    answers = server.post("/generate", body).json()
    assert isinstance(answers, list), answers
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b-0", "b-1", "c"]
    assert [len(answer["output_ids"]) for answer in answers] == [8, 3, 3, 5]
    assert ["routed_experts" in answer["meta_info"] for answer in answers] == [True, False, False, True]
    assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [True, False, False, True]
    assert answers[0]["meta_info"]["input_token_logprobs"] and "input_token_logprobs" not in answers[3]["meta_info"]
    alone = engine.generate(
        PROMPT, GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=2, return_routed_experts=True
    )
    for key in ("text", "output_ids"):
        assert answers[0][key] == alone[key]
    assert answers[0]["meta_info"]["routed_experts"] == alone["meta_info"]["routed_experts"]
    rows = extract_routed_experts_from_meta_info(answers[3])
    assert rows.size == (answers[3]["meta_info"]["prompt_tokens"] + 5 - 1 - 1) * L * K


def test_lists_of_another_length_and_repeated_ids_are_refused(server):
    two = {"text": ["a", "b"], "sampling_params": GREEDY}
    for name, value in (
        ("sampling_params", [GREEDY]),
        ("rid", ["a", "b", "c"]),
        ("return_logprob", [True]),
        ("top_logprobs_num", [1, 2, 3]),
        ("return_routed_experts", [True]),
        ("extra_key", ["x"]),
    ):
        error = parse_error(server.post("/generate", {**two, name: value}), 400)
        assert error["param"] == name and "for 2 prompts" in error["message"]
    error = parse_error(server.post("/generate", {**two, "rid": ["a", "a"]}), 409)
    assert (error["param"], error["code"]) == ("rid", "duplicate_request_id")
    mixed = {**two, "sampling_params": [{"max_new_tokens": 0}, GREEDY]}
    assert parse_error(server.post("/generate", mixed), 400)["param"] == "sampling_params"
    zero = server.post("/generate", {**two, "sampling_params": [{"max_new_tokens": 0}] * 2}).json()
    assert [answer["output_ids"] for answer in zero] == [[], []]
    assert [answer["meta_info"]["finish_reason"] for answer in zero] == [{"type": "length", "length": 0}] * 2
    for length in (0.0, 2.0, False):
        error = parse_error(server.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": length}}), 400)
        assert error["param"] == "max_new_tokens"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text": "a", "sampling_params": {"min_new_tokens": 1000}}, "min_new_tokens=1000 is above"),
        ({"text": "a", "sampling_params": {"max_tokens": 1000}}, "max_tokens=1000: max_completion_tokens is"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 1000}}, "max_new_tokens=1000: max_completion_tokens is"),
        ({"text": "a", "max_new_tokens": 1000}, "max_new_tokens=1000: max_completion_tokens is"),
        ({"text": "a", "sampling_params": {"sampling_seed": 2**70}}, "sampling_seed is an integer of 71 bits"),
        ({"sampling_params": {"routed_experts_prompt_start": 99}, "text": "a"}, "routed_experts_prompt_start=99"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"min_new_tokens": 1000}]}, "text[1]: min_new_tokens=1000"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"sampling_seed": 2**70}]}, "text[1]: sampling_seed is"),
        (
            {"text": ["a", "b"], "sampling_params": [{}, {"routed_experts_stream": 5}]},
            "text[1]: routed_experts_stream=5",
        ),
        ({"text": ["a", "b"], "routed_experts_start_len": [0, 99]}, "text[1]: routed_experts_start_len=99"),
        ({"input_ids": [[5], [6]], "routed_experts_start_len": [0, 99]}, "input_ids[1]: routed_experts_start_len=99"),
        ({"input_ids": [[5], [6] * 20], "max_new_tokens": 500}, "input_ids[1]: max_new_tokens=500: max_comple"),
        ({"text": ["a", "b " * 20], "max_new_tokens": 500}, "text[1]: max_new_tokens=500: max_completion_tokens is"),
        ({"text": ["a", "b"], "extra_key": ["x", "x" * 4097]}, "text[1]: extra_key has 4097 characters"),
        ({"text": ["a", "b"], "extra_key": ["x", "x" * 4097], "cache_salt": "y"}, "text[1]: extra_key has 4097"),
        ({"text": ["a", ""]}, "text[1]='' must be text"),
    ],
)
def test_a_message_has_the_names_that_were_sent(server, fields, words):
    """Of the field, and of the prompt where each has its own value."""
    error = parse_error(server.post("/generate", {"return_routed_experts": True, **fields}), 400)
    assert error["message"].startswith(words)


def test_equal_prompts_of_one_seed_have_one_answer(server):
    """As documented: a seed belongs to a request, not to its place in the call."""
    sampled = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}
    body = {"text": [PROMPT] * 2, "sampling_params": [{**sampled, "sampling_seed": 3}] * 2}
    same = server.post("/generate", body).json()
    other = server.post("/generate", {**body, "sampling_params": sampled}).json()
    assert same[0]["output_ids"] == same[1]["output_ids"] and other[0]["output_ids"] != other[1]["output_ids"]


def test_a_call_may_have_as_many_prompts_as_the_queue_holds(server):
    body = {"input_ids": [[5]] * 401, "sampling_params": {"max_new_tokens": 1}}
    assert len(server.post("/generate", body).json()) == 401


def test_only_requested_refs_are_stored(server):
    body = {
        "text": ["a", "b"],
        "sampling_params": GREEDY,
        "return_routed_experts": [False, True],
        "routed_experts_format": "ref",
    }
    for streamed in (False, True):
        if streamed:
            chunks = {chunk["index"]: chunk for chunk in stream(server, "/generate", {**body, "rid": "some"})}
            first, second = chunks[0], chunks[1]
        else:
            first, second = server.post("/generate", {**body, "rid": "some"}).json()
        assert not [key for key in first["meta_info"] if "routed" in key]
        assert second["meta_info"]["routed_experts_info"]["shape"]
        assert second["meta_info"]["routed_experts_ref"] == "/v1/routing/some?choice=1"
        assert server.client.get("/v1/routing/some?choice=1").status_code == 200
        assert parse_error(server.client.get("/v1/routing/some?choice=0"), 404)["code"] == "routing_not_found"
        server.client.delete("/v1/routing/some")
    assert server.state.store.nbytes == 0


def test_a_stream_is_cumulative_and_ends_as_the_answer(server):
    body = {"text": PROMPT, "sampling_params": GREEDY, "return_logprob": True, "return_routed_experts": True}
    whole = server.post("/generate", body).json()
    chunks = stream(server, "/generate", body)
    assert len(chunks) == whole["meta_info"]["completion_tokens"]
    for count, chunk in enumerate(chunks, start=1):
        assert chunk["meta_info"]["completion_tokens"] == count == len(chunk["output_ids"])
        assert whole["text"].startswith(chunk["text"])
        assert (
            (chunk["meta_info"]["finish_reason"] is None)
            == (count < len(chunks))
            == ("routed_experts" not in chunk["meta_info"])
        )
    assert chunks[-1]["text"] == whole["text"] and chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["meta_info"]["routed_experts"] == whole["meta_info"]["routed_experts"]
    many = stream(server, "/generate", {"text": ["a", "b"], "sampling_params": GREEDY})
    assert {chunk["index"] for chunk in many} == {0, 1}


def test_what_slime_checks_on_a_response(engine, server):
    """It sends ids and SGLang's own sampling keys, reads (logprob, id) pairs, and counts the elements of the rows."""
    ids = engine.tokenizer.encode(PROMPT)
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 9,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    for start in (0, 4):
        payload = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "return_routed_experts": True}
        response = server.post("/generate", {**payload, "routed_experts_start_len": start})
        assert "spaces_between_special_tokens" in response.headers["x-ignored-params"]
        output = response.json()
        meta = output["meta_info"]
        tokens = ids + [item[1] for item in meta["output_token_logprobs"]]
        assert [item[1] for item in meta["output_token_logprobs"]] == output["output_ids"]
        flat = np.frombuffer(base64.b64decode(meta["routed_experts"].encode("ascii")), dtype=np.int32)
        assert flat.size == (len(tokens) - 1 - start) * L * K
        assert meta["routed_experts_start_len"] == start and meta["weight_version"] == "default"
        assert meta["finish_reason"]["type"] in ("stop", "length", "abort")
        assert meta["prompt_tokens"] == len(ids) and isinstance(meta["cached_tokens"], int)


def test_how_slime_controls_a_server(server):
    assert server.client.get("/health_generate").status_code == 200
    server.wait_idle()
    assert server.client.get("/flush_cache").json()["success"] is True
    assert server.client.get("/get_weight_version").json() == {"weight_version": "default", "update_count": 0}
    assert server.post("/abort_request", {"abort_all": True}).json()["aborted"] == 0
    assert server.post("/abort_request", {"rid": "nobody"}).json()["aborted"] == 0
    assert server.client.get("/get_model_info").json()["is_generation"] is True


def test_what_verl_reads(engine, server):
    ids = engine.tokenizer.encode(PROMPT)
    output = server.post(
        "/generate", {"input_ids": ids, "sampling_params": GREEDY, "return_routed_experts": True}
    ).json()
    rows = extract_routed_experts_from_meta_info(output).reshape(-1, L, K)
    assert rows.shape[0] == len(ids) + len(output["output_ids"]) - 1
    assert rows.flags.writeable and np.issubdtype(rows.dtype, np.integer)
    assert (rows[:, 0] == -1).all() and rows[:, 1:].min() >= 0 and rows[:, 1:].max() < 16


def test_an_id_in_use_is_a_conflict_and_an_abort_frees_it(server):
    body = {
        "text": PROMPT,
        "rid": "busy",
        "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
        "stream": True,
    }
    with server.client.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert response.headers["x-request-id"] == "busy"
        assert (
            parse_error(server.post("/generate", {"text": "a", "rid": "busy"}), 409)["code"] == "duplicate_request_id"
        )
        assert parse_error(server.client.get("/flush_cache"), 400)["code"] == "requests_running"
        assert server.post("/abort_request", {"rid": "busy"}).json()["aborted"] == 1
        events = [line for line in lines if line.startswith("data: ")]
    assert '"type":"abort"' in events[-2] and events[-1] == "data: [DONE]"
    server.wait_idle()
    assert server.client.get("/flush_cache").status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"text": "a", "sampling_params": {"max_new_token": 3}}, "max_new_token"),
        ({"text": "a", "sampling_params": {"n": 1e6}}, "n"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "json_schema"),
        ({"text": "a", "sampling_params": {"structural_tag": "{}"}}, "structural_tag"),
        ({"text": "a", "sampling_params": 5}, "sampling_params"),
        ({"text": "a", "custom_logit_processor": "import os"}, "custom_logit_processor"),
        ({"text": "a", "lora_path": "/etc"}, "lora_path"),
        ({"text": "a", "image_data": "http://127.0.0.1:1/"}, "image_data"),
        ({"text": "a", "top_logprobs_num": [1, 2]}, "top_logprobs_num"),
        ({"text": "a", "logprob_start_len": 10**6}, "logprob_start_len"),
        ({"text": "a", "rid": "../x"}, "rid"),
        ({"text": "a", "rid": "stats"}, "rid"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": []}, "text"),
        ({"text": "a", "session_params": {"id": 1}}, "session_params"),
    ],
)
def test_a_wrong_request_is_a_400_that_names_the_field(server, body, param):
    assert parse_error(server.post("/generate", body), 400)["param"] == param


def test_tokens_and_text_go_both_ways(engine, server):
    output = server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json()
    assert output["tokens"] == engine.tokenizer.encode(PROMPT) and output["count"] == len(output["tokens"]) == len(
        output["token_strs"]
    )
    assert output["max_model_len"] == 512
    assert server.post("/detokenize", {"tokens": output["tokens"]}).json()["prompt"] == PROMPT
    messages = [{"role": "user", "content": "a"}]
    rendered = engine.tokenizer.apply_chat_template(messages)
    assert server.post("/tokenize", {"messages": messages}).json()["tokens"] == engine.tokenizer.encode(
        rendered, add_special_tokens=False
    )
    info = server.client.get("/tokenizer_info").json()
    assert (info["eos_token"], info["pad_token"], info["bos_token"]) == ("<|im_end|>", "<|endoftext|>", None)
    assert info["chat_template"] == engine.tokenizer.chat_template
    for body in ({}, {"prompt": "a", "messages": messages}):
        assert parse_error(server.post("/tokenize", body), 400)["param"] == "prompt"
    for tokens in ([-1], [313], [2**40], [2**70]):
        assert parse_error(server.post("/detokenize", {"tokens": tokens}), 400)["param"] == "tokens"


def test_messages_that_go_on_are_tokens_up_to_the_last_one(engine, server):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Sure,"}]
    whole = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    cut = whole[: whole.rindex("Sure,") + len("Sure,")]
    tokens = server.post("/tokenize", {"messages": messages, "continue_final_message": True}).json()["tokens"]
    assert tokens == engine.tokenizer.encode(cut, add_special_tokens=False)
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert parse_error(server.post("/tokenize", both), 400)["param"] == "continue_final_message"


def test_lists_of_prompts_and_of_ids_are_lists_of_answers(engine, server):
    prompts = [PROMPT, "", "a b"]
    for path in ("/tokenize", "/v1/tokenize"):
        output = server.post(path, {"prompt": prompts, "return_token_strs": True}).json()
        single = [server.post(path, {"prompt": prompt, "return_token_strs": True}).json() for prompt in prompts]
        for name in ("tokens", "count", "token_strs"):
            assert output[name] == [one[name] for one in single], name
        assert server.post(path, {"prompt": []}).json()["tokens"] == []
    assert server.post("/tokenize", {"prompt": PROMPT}).json()["token_strs"] is None
    for path in ("/detokenize", "/v1/detokenize"):
        assert server.post(path, {"tokens": output["tokens"]}).json()["text"] == prompts
        assert server.post(path, {"tokens": []}).json() == {"prompt": "", "text": ""}
    for tokens in ([[5], 6], [[5], [10**6]], [["a"]], [[[5]]]):
        assert parse_error(server.post("/detokenize", {"tokens": tokens}), 400)["param"].startswith("tokens")
    assert server.client.get("/tokenizer_info").json()["tokenizer_class"] == engine.tokenizer.class_name
    with running(engine, routed_experts_dialect="vllm") as other:
        assert other.post("/detokenize", {"tokens": [5]}).json().keys() == {"prompt"}


def test_equal_prompts_under_one_seed_have_equal_answers_and_seeds_of_their_own_differ(engine, server):
    """In process and over HTTP; `n` and lists of seeds give different ones."""
    params = {"max_new_tokens": 8, "temperature": 1.0, "seed": 7}
    seeds = [{**params, "seed": seed} for seed in (7, 8)]

    def texts(answers):
        return [answer["text"] for answer in answers]

    one, two = texts(engine.generate([PROMPT] * 2, params))
    assert one == two
    assert texts(server.post("/generate", {"text": [PROMPT] * 2, "sampling_params": params}).json()) == [one, one]
    first, second = texts(engine.generate([PROMPT] * 2, seeds))
    assert first == one != second
    assert texts(server.post("/generate", {"text": [PROMPT] * 2, "sampling_params": seeds}).json()) == [one, second]
    both = texts(engine.generate([PROMPT] * 2, {**params, "n": 2}))
    assert both[:2] == both[2:] and both[0] == one != both[1]


def test_a_server_reports_what_it_is(server):
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny" and model["max_model_len"] == 512
    assert (model["root"], model["parent"]) == ("tiny", None)
    assert model["moe"] == {"num_layers": 4, "moe_layer_ids": [1, 2, 3], "num_experts": 16, "top_k": 4}
    assert server.client.get("/v1/models/tiny").json() == model
    assert parse_error(server.client.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert parse_error(server.post("/v1/completions", {"model": "gpt-4", "prompt": "a"}), 404)["param"] == "model"
    info = server.client.get("/get_server_info").json()
    assert info["enable_return_routed_experts"] is True and info["internal_states"][0]["num_running_reqs"] == 0
    assert server.client.get("/version").json() == {"version": "0"}


def test_metrics_count_what_was_served(server):
    def value(name):
        lines = [
            line
            for line in server.client.get("/metrics").text.splitlines()
            if line.startswith(f"routed_experts_{name} ")
        ]
        return float(lines[0].split()[-1])

    before = {
        name: value(name)
        for name in ("generation_tokens_total", "requests_accepted_total", "e2e_request_latency_seconds_count")
    }
    output = server.post(
        "/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    ).json()
    assert len(output) == 2
    assert value("generation_tokens_total") == before["generation_tokens_total"] + 10
    assert value("requests_accepted_total") == before["requests_accepted_total"] + 2
    assert value("e2e_request_latency_seconds_count") == before["e2e_request_latency_seconds_count"] + 2
    text = server.client.get("/metrics").text
    finished = sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("routed_experts_requests_finished_total{")
    )
    assert finished == value("requests_accepted_total"), "accepted = finished + in flight, and nothing is in flight"
    assert server.client.head("/metrics").content == b""


def test_the_openapi_document_names_every_route(server):
    document = server.client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    body = document["components"]["schemas"]["CompletionRequest"]
    assert {"prompt", "return_routed_experts", "stream_options"} <= body["properties"].keys()
    for path, methods in document["paths"].items():
        for method in methods:
            named = path.replace("{name}", "tiny")
            # A body of another type and a level that is none: no route does what it is for.
            content = None if method in ("get", "delete") else b"x"
            response = server.client.request(method, named, params={"level": "x"}, content=content)
            assert response.status_code not in (404, 405) or "routing" in path, (method, path)


def test_a_pause_holds_new_requests_until_it_is_ended(server, engine):
    """As slime does around a weight update: `{}` pauses, and aborts what runs."""
    with server.client.stream(
        "POST", "/generate", json={"input_ids": [5], "sampling_params": LONG, "stream": True}
    ) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.post("/pause_generation", {}).json()["mode"] == "abort"
        assert '"type":"abort"' in [line for line in lines if line.startswith("data: ")][-2]
    try:
        health = server.client.get("/health")
        assert (health.status_code, health.json()["state"]) == (200, "paused")
        assert server.client.get("/ready").status_code == 503
        with server.client.stream(
            "POST", "/generate", json={"text": "a", "sampling_params": GREEDY, "stream": True}
        ) as held_stream:
            assert (
                held_stream.status_code == 200
                and on_engine_thread(engine, lambda core: len(core.ranks[0].waiting)) == 1
            )
            assert server.client.post("/continue_generation", content=b"").json()["success"] is True
            assert [line for line in held_stream.iter_lines() if line][-1] == "data: [DONE]"
    finally:
        engine.resume()
    assert server.client.get("/health").json()["state"] == "serving"
    assert parse_error(server.post("/pause_generation", {"mode": "sideways"}), 400)["param"] == "mode"


def test_new_weights_come_from_below_one_root_alone(tmp_path):
    first, second = (
        write_tiny_checkpoint(tmp_path / "root" / "one"),
        write_tiny_checkpoint(tmp_path / "root" / "two", seed=1),
    )
    write_tiny_checkpoint(tmp_path / "outside")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "empty").mkdir()
    with (
        lazy_compilation(),
        open_engine(first, enable_return_routed_experts=True) as engine,
        running(engine, weights_root=str(tmp_path / "root")) as server,
    ):
        old = server.post("/generate", {"text": PROMPT, "sampling_params": GREEDY}).json()
        long = ("x" * 2000, "x" * 300, "a/" + "x" * 300 + "/b")
        for path in (
            "../outside",
            "link",
            str(tmp_path / "outside"),
            "/etc",
            "",
            "nowhere",
            "a\0b",
            "..",
            "two/../../outside",
            *long,
        ):
            response = server.post("/update_weights_from_disk", {"model_path": path})
            if path:
                assert parse_error(response, 400)["param"] == "model_path", path
            else:
                assert parse_error(response, 400)
        assert (
            "<path>" in parse_error(server.post("/update_weights_from_disk", {"model_path": "empty"}), 400)["message"]
        )
        assert server.client.get("/get_weight_version").json() == {"weight_version": "default", "update_count": 0}
        assert server.post("/generate", {"text": PROMPT, "sampling_params": GREEDY}).json()["text"] == old["text"]
        output = server.post("/update_weights_from_disk", {"model_path": "two", "weight_version": "step-7"}).json()
        served = {"weight_version": "step-7", "update_count": 1}
        assert output == {"success": True, "message": "updated", **served}
        assert server.client.get("/get_weight_version").json() == served
        new = server.post(
            "/generate", {"text": PROMPT, "sampling_params": GREEDY, "return_routed_experts": True}
        ).json()
        assert new["meta_info"]["weight_version"] == "step-7" and new["text"] != old["text"]
        assert [span[2] for span in new["meta_info"]["routed_experts_info"]["version_spans"]] == [1]
        assert new["meta_info"]["routed_experts_info"]["version_labels"] == {"1": "step-7"}
        assert parse_error(
            server.post("/update_weights_from_disk", {"model_path": str(second), "weight_version": "x" * 257}), 400
        )
        assert server.client.get("/get_weight_version").json() == served
    with running(None) as server:
        assert parse_error(server.post("/update_weights_from_disk", {"model_path": "two"}), 503)


def test_without_a_root_no_weights_are_taken(server):
    assert (
        parse_error(server.post("/update_weights_from_disk", {"model_path": "two"}), 403)["code"]
        == "weights_root_unset"
    )
