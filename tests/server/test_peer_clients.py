"""What clients of SGLang and vLLM send and read, where their own tests look for it."""

import pytest

from routed_experts.core.errors import ConfigError
from routed_experts.server.limits import ServerSettings
from support.http_server import events, parse_error, running, stream

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5, 6, 7], "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_invocations_are_completions_or_chat(server, path, body):
    body |= {"max_tokens": 4, **GREEDY}
    expected, answer = server.post(path, body).json(), server.post("/invocations", body).json()
    for varies in ("id", "created"):
        expected.pop(varies), answer.pop(varies)
    assert answer["choices"] == expected["choices"] and answer.keys() == expected.keys()
    assert events(server.client.post("/invocations", json={**body, "stream": True}))[-1]["choices"]


def test_an_invocation_of_no_kind_is_refused(server):
    assert parse_error(server.post("/invocations", {"model": "tiny"}), 400)["param"] == "messages"
    assert parse_error(server.post("/invocations", {"prompt": None, "messages": None}), 400)["param"] == "messages"
    null = {"messages": [{"role": "user", "content": "a"}], "prompt": None}
    for body in ({"prompt": "a", "messages": None, "max_tokens": 1}, {**null, "max_tokens": 1}):
        assert server.post("/invocations", body).status_code == 200
    response = server.client.post("/invocations", content=b"[1", headers={"content-type": "application/json"})
    assert parse_error(response, 400)
    assert parse_error(server.post("/invocations", {"prompt": "a", "temperature": -1}), 400)["param"] == "temperature"


def test_a_prompt_is_cut_from_the_side_that_is_asked_for(engine, server):
    def prompt(**fields):
        body = {"prompt": list(range(1, 9)), "max_tokens": 1, "return_token_ids": True, **fields}
        return server.post("/v1/completions", body).json()["choices"][0]["prompt_token_ids"]

    assert prompt(truncate_prompt_tokens=3) == prompt(truncate_prompt_tokens=3, truncation_side="left") == [6, 7, 8]
    assert prompt(truncate_prompt_tokens=3, truncation_side="right") == [1, 2, 3]
    assert prompt(truncate_prompt_tokens=20) == prompt(truncation_side="left") == list(range(1, 9))
    room = engine.components.context_length - 5
    ids = prompt(prompt=[7] * engine.components.context_length, max_tokens=5, truncate_prompt_tokens=-1)
    assert ids == [7] * room
    text = "A text of several tokens, the last of which stay"
    whole = engine.tokenizer.encode(text)
    assert prompt(prompt=text, truncate_prompt_tokens=4) == whole[-4:]
    assert prompt(prompt=[whole, [9]], truncate_prompt_tokens=4) == whole[-4:]
    for fields, param in (
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 10**9}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
    ):
        response = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, **fields})
        assert parse_error(response, 400)["param"] == param


def test_a_chat_prompt_is_cut(server):
    body = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 1, "return_token_ids": True}
    whole = server.post("/v1/chat/completions", body).json()["prompt_token_ids"]
    cut = server.post("/v1/chat/completions", {**body, "truncate_prompt_tokens": 3}).json()
    assert cut["prompt_token_ids"] == whole[-3:] and cut["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(("dialect", "has_field"), [("sglang", True), ("vllm", False)])
def test_deltas_have_the_field_of_reasoning_where_sglangs_clients_read_it(engine, dialect, has_field):
    with running(engine, routed_experts_dialect=dialect) as server:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, **GREEDY}
        chunks = stream(server, "/v1/chat/completions", body)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert len(deltas) > 2
        assert all(("reasoning_content" in delta) is has_field for delta in deltas)
        assert all(delta.get("reasoning_content") is None for delta in deltas)


def test_chunks_hold_what_is_new_where_the_server_says_so(engine, server):
    body = {
        "text": "The router",
        "sampling_params": {"max_new_tokens": 6, "n": 2, "seed": 3, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    expected = server.post("/generate", body).json()
    with running(engine, incremental_streaming_output=True) as other:
        assert [one["text"] for one in other.post("/generate", body).json()] == [one["text"] for one in expected]
        chunks = stream(other, "/generate", body)
    for index, whole in enumerate(expected):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert len(own) > 1 and all(len(chunk["output_ids"]) < 6 for chunk in own)
        assert "".join(chunk["text"] for chunk in own) == whole["text"]
        assert [token for chunk in own for token in chunk["output_ids"]] == whole["output_ids"]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert [entry for chunk in own for entry in chunk["meta_info"][name]] == whole["meta_info"][name]
        assert own[-1]["meta_info"]["completion_tokens"] == 6


def test_routes_answer_with_the_prefix_of_a_proxy_and_without(engine):
    with running(engine, root_path="/llm", api_key="a-long-key") as server:
        for prefix in ("", "/llm"):
            assert server.client.get(f"{prefix}/v1/models").status_code == 200
            assert server.client.get(f"{prefix}/health", headers={"authorization": ""}).status_code == 200
            refused = server.client.get(f"{prefix}/v1/models", headers={"authorization": "Bearer other"})
            assert parse_error(refused, 401)
            body = {"prompt": "a", "max_tokens": 1, "return_routed_experts": True, "routed_experts_format": "ref"}
            url = server.post(f"{prefix}/v1/completions", body).json()["choices"][0]["meta_info"]["routed_experts_ref"]
            assert url.startswith("/llm/v1/routing/") and server.client.get(url).status_code == 200
        assert parse_error(server.client.get("/llm/llm/v1/models"), 404)
        assert parse_error(server.client.get("/llmv1/models"), 404)
    for wrong in ("llm", "/llm/", "/a b", "/a?b"):
        with pytest.raises(ConfigError, match="root_path"):
            ServerSettings(root_path=wrong)


def test_errors_have_the_words_that_clients_look_for(engine, server):
    too_many = engine.components.context_length + 1
    for path, prompt in (
        ("/v1/completions", {"prompt": [5]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        error = parse_error(server.post(path, {**prompt, "max_tokens": too_many}), 400)
        assert "max_completion_tokens is too large" in error["message"]
        assert "Requested token count exceeds the model's maximum context length" in error["message"]
        assert "This model's maximum context length is" in error["message"]
    error = parse_error(server.post("/v1/completions", {"prompt": "a", "max_tokens": "a"}), 400)
    assert error["message"] == "max_tokens='a': expected an integer or null, received text; correct the value"
    for fields, words in (
        ({"temperature": -1}, "temperature must be non-negative"),
        ({"top_p": 1.5}, "top_p must be in (0, 1]"),
    ):
        assert words in parse_error(server.post("/v1/completions", {"prompt": "a", **fields}), 400)["message"]
    error = parse_error(server.post("/v1/completions", {"prompt": None, "prompt_embeds": []}), 400)
    assert "Either prompt or prompt_embeds must be provided and non-empty." in error["message"]
    body = {"input_ids": [5, 6], "return_routed_experts": True, "routed_experts_start_len": 3}
    error = parse_error(server.post("/generate", body), 400)
    assert "is higher than the number of input tokens" in error["message"]
    error = parse_error(server.post("/generate", {**body, "routed_experts_start_len": -1}), 400)
    assert "is higher" not in error["message"]
    error = parse_error(server.post("/generate", {"text": ["a", "b"], "rid": ["x", "x"]}), 409)
    assert "Duplicate request ID" in error["message"]
    error = parse_error(
        server.post("/v1/completions", {"prompt": "a", "logit_bias": {"bad1": 1, "5": 1, "bad2": 2}}), 400
    )
    assert error["param"] == "logit_bias" and "'bad1', 'bad2'" in error["message"] and "'5'" not in error["message"]


def test_logprobs_of_ids_that_a_request_names(server):
    """SGLang's token_ids_logprob, and vLLM's logprob_token_ids: these ids and the sampled one, whatever is best."""
    params = {"max_new_tokens": 3, **GREEDY}
    body = {"input_ids": [5, 6, 7], "sampling_params": params, "return_logprob": True, "token_ids_logprob": [4, 9]}
    meta = server.post("/generate", body).json()["meta_info"]
    rows = meta["output_token_ids_logprobs"]
    assert [[token for _, token, _ in row] for row in rows] == [[4, 9]] * 3
    with_logprobs = {"max_tokens": 3, **GREEDY, "logprob_token_ids": [4, 9], "return_tokens_as_token_ids": True}
    completion = {"prompt": [5, 6, 7], "logprobs": 1, **with_logprobs}
    for chunks in (
        [server.post("/v1/completions", completion).json()],
        stream(server, "/v1/completions", completion),
    ):
        tops = [top for chunk in chunks for top in chunk["choices"][0]["logprobs"]["top_logprobs"]]
        for top, row, (own, token, _) in zip(tops, rows, meta["output_token_logprobs"], strict=True):
            assert top == {f"token_id:{token}": own} | {f"token_id:{other}": value for value, other, _ in row}
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, **with_logprobs}
    for entry in server.post("/v1/chat/completions", chat).json()["choices"][0]["logprobs"]["content"]:
        tokens = [top["token"] for top in entry["top_logprobs"]]
        assert tokens[0] == entry["token"] and set(tokens) == {entry["token"], "token_id:4", "token_id:9"}
    refused = server.post("/v1/completions", {**completion, "logprobs": None})
    assert parse_error(refused, 400)["param"] == "logprob_token_ids"
    refused = server.post("/v1/chat/completions", {**chat, "logprob_token_ids": [10**6]})
    assert parse_error(refused, 400)["param"] == "logprob_token_ids"


def test_the_token_itself_is_the_first_of_its_alternatives(server):
    body = {"prompt": "The router", "max_tokens": 6, "temperature": 2, "seed": 1, "logprobs": 2, "echo": True}
    for as_ids in (False, True):
        logprobs = server.post("/v1/completions", {**body, "return_tokens_as_token_ids": as_ids}).json()
        logprobs = logprobs["choices"][0]["logprobs"]
        for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
            assert next(iter(top)) == token and len(top) <= 3


def test_allowed_tokens_and_bad_words_in_every_dialect(engine, server):
    body = {"max_tokens": 4, "temperature": 1, "seed": 1, "ignore_eos": True, "allowed_token_ids": [11, 40]}
    for path, prompt in (
        ("/v1/completions", {"prompt": [5, 6]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        answer = server.post(path, {**body, **prompt, "return_token_ids": True}).json()
        assert set(answer["choices"][0]["token_ids"]) <= {11, 40}
    params = {"max_tokens": 4, "ignore_eos": True, "allowed_token_ids": [11, 40]}
    answer = server.post("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": params}).json()
    assert set(answer["choices"][0]["token_ids"]) <= {11, 40}
    answer = server.post("/generate", {"input_ids": [5, 6], "sampling_params": params}).json()
    assert set(answer["output_ids"]) <= {11, 40}
    plain = {"prompt": [5, 6], "max_tokens": 8, **GREEDY}
    text = server.post("/v1/completions", plain).json()["choices"][0]["text"]
    word = next(word for word in text.split() if word.isascii())
    assert word not in server.post("/v1/completions", {**plain, "bad_words": [word]}).json()["choices"][0]["text"]
    refused = server.post("/v1/completions", {**plain, "allowed_token_ids": [10**6]})
    assert parse_error(refused, 400)["param"] == "allowed_token_ids"


def test_answers_tell_their_times_where_the_server_says_so(engine, server):
    body = {"prompt": [5, 6, 7], "max_tokens": 8, **GREEDY}
    with running(engine, enable_per_request_metrics=True) as other:
        whole = other.post("/v1/completions", body).json()
        chunks = stream(other, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
        one = other.post("/v1/completions", {**body, "max_tokens": 1}).json()["metrics"]
    plain = server.post("/v1/completions", body).json()
    assert "metrics" not in plain and whole["choices"][0]["text"] == plain["choices"][0]["text"]
    assert all("metrics" not in chunk for chunk in chunks[:-1])
    for metrics in (whole["metrics"], chunks[-1]["metrics"]):
        assert metrics["time_to_first_token_ms"] > 0 and metrics["queue_time_ms"] >= 0
        assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 7)
        assert metrics["generation_time_ms"] > 0 and metrics["tokens_per_second"] > 0
    assert "mean_itl_ms" not in one and one["time_to_first_token_ms"] > 0


def test_token_routes_have_vllms_forms(engine, server):
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "logprobs": 0, **GREEDY}}
    answer = server.post("/inference/v1/generate", body).json()
    assert answer["output_mode"] == "tokens"
    (choice,) = answer["choices"]
    for entry in choice["logprobs"]["content"]:
        assert [top["token_id"] for top in entry["top_logprobs"]] == [entry["token_id"]]
    assert server.post("/inference/v1/abort_requests", {"request_ids": ["nobody"]}).status_code == 200
    assert parse_error(server.post("/inference/v1/abort_requests", {}), 400)["param"] == "request_ids"
