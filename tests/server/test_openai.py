"""/v1/completions and /v1/chat/completions: responses hold the engine's output, in OpenAI's form."""

import math
from itertools import chain

import pytest

from routed_experts import extract_routed_experts_from_meta_info
from support.engines import letter_bias
from support.http_server import parse_error, running, stream

PROMPT = "The router scores every expert"
GREEDY = {"temperature": 0, "max_tokens": 8}
CONTINUE = "continue_final_message"


def engine_text(engine, prompt, **params):
    return engine.generate(prompt, {"temperature": 0, "max_new_tokens": 8, **params})


def completion(server, **body):
    response = server.post("/v1/completions", {"prompt": PROMPT, **GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_completion_is_what_the_engine_says(engine, server):
    expected = engine_text(engine, PROMPT)
    output = completion(server, model="tiny")
    (choice,) = output["choices"]
    assert choice["text"] == expected["text"]
    assert choice["finish_reason"] == expected["meta_info"]["finish_reason"]["type"]
    assert output["object"] == "text_completion" and output["model"] == "tiny"
    assert "routed_experts" not in choice["meta_info"]
    usage = output["usage"]
    assert (
        usage["completion_tokens"] == len(expected["output_ids"])
        and usage["prompt_tokens"] == expected["meta_info"]["prompt_tokens"]
    )
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_text_ids_and_lists_of_them_are_the_same_prompts(engine, server):
    ids = engine.tokenizer.encode(PROMPT)
    other = engine.tokenizer.encode("The cat sat")
    texts = [choice["text"] for choice in completion(server, prompt=[PROMPT, "The cat sat"])["choices"]]
    assert texts == [engine_text(engine, PROMPT)["text"], engine_text(engine, "The cat sat")["text"]]
    assert completion(server, prompt=ids)["choices"][0]["text"] == texts[0]
    listed = completion(server, prompt=[ids, other])
    assert [choice["text"] for choice in listed["choices"]] == texts
    assert [choice["index"] for choice in listed["choices"]] == [0, 1]
    assert listed["usage"]["prompt_tokens"] == len(ids) + len(other)
    assert completion(server, add_special_tokens=False)["choices"][0]["text"] == texts[0]


def test_choices_are_those_of_the_seed(engine, server):
    params = {"temperature": 1.0, "seed": 7, "n": 3}
    expected = [result["text"] for result in engine.generate(PROMPT, {"max_new_tokens": 8, **params})]
    output = completion(server, **params)
    assert [choice["text"] for choice in output["choices"]] == expected
    assert len(set(expected)) > 1, "the choices must differ for this to say anything"
    assert completion(server, **params)["choices"] == output["choices"]
    other = completion(server, temperature=1.0, seed=-7)["choices"][0]["text"]
    assert other != expected[0], "a negative seed is a seed of its own"


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_joins_to_the_full_response(server, echo):
    body = {
        "prompt": [PROMPT, "The cat"],
        "n": 2,
        "temperature": 1.0,
        "seed": 3,
        "max_tokens": 9,
        "logprobs": 2,
        "echo": echo,
    }
    whole = server.post("/v1/completions", body).json()
    chunks = stream(server, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    *chunks, last = chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all(chunk["usage"] is None and chunk["object"] == "text_completion" for chunk in chunks)
    for choice in whole["choices"]:
        pieces = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        joined = {
            key: list(chain.from_iterable(piece["logprobs"][key] for piece in pieces)) for key in choice["logprobs"]
        }
        assert (
            joined["tokens"] == choice["logprobs"]["tokens"]
            and joined["text_offset"] == choice["logprobs"]["text_offset"]
        )
        first = 1 if echo else 0  # the first token of a prompt has no logprob
        assert joined["token_logprobs"][:first] == choice["logprobs"]["token_logprobs"][:first] == [None] * first
        assert joined["token_logprobs"][first:] == pytest.approx(choice["logprobs"]["token_logprobs"][first:], abs=1e-4)
        assert [len(top or ()) for top in joined["top_logprobs"]] == [
            len(top or ()) for top in choice["logprobs"]["top_logprobs"]
        ]


def test_echo_gives_the_prompt_with_its_logprobs_as_evaluators_read_them(engine, server):
    ids = engine.tokenizer.encode(PROMPT)
    output = completion(server, prompt=[ids], echo=True, logprobs=1, max_tokens=1)["choices"][0]
    logprobs, expected = (
        output["logprobs"],
        engine.generate(
            input_ids=ids,
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=1,
        )["meta_info"],
    )
    assert len(logprobs["tokens"]) == len(ids) + 1 == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"])
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:-1] == pytest.approx(
        [logprob[0] for logprob in expected["input_token_logprobs"][1:]], abs=1e-5
    )
    assert logprobs["token_logprobs"][-1] == pytest.approx(expected["output_token_logprobs"][0][0], abs=1e-5)
    assert output["text"].startswith(PROMPT) and "".join(logprobs["tokens"]) == output["text"]
    for token, value, top in zip(
        logprobs["tokens"][1:], logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
    ):
        assert top[token] == value and max(top.values()) >= value and len(top) <= 2
    # The text of each token stands where text_offset says.
    assert all(
        output["text"][at:].startswith(token)
        for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    )


def test_no_new_tokens_compute_the_prompt_alone(server):
    output = completion(server, max_tokens=0, echo=True, logprobs=0)
    (choice,) = output["choices"]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert (
        output["usage"]["completion_tokens"] == 0
        and len(choice["logprobs"]["tokens"]) == output["usage"]["prompt_tokens"]
    )
    assert (
        "".join(
            chunk["choices"][0]["text"]
            for chunk in stream(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 0})
        )
        == ""
    )


def test_defaults_of_length_are_each_surfaces_own(server):
    output = server.post("/v1/completions", {"prompt": PROMPT, "ignore_eos": True}).json()
    assert output["usage"]["completion_tokens"] == 16
    output = server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
    ).json()
    assert output["usage"]["total_tokens"] == 512, "chat fills the context"
    output = server.post("/generate", {"text": PROMPT, "sampling_params": {"ignore_eos": True}}).json()
    assert output["meta_info"]["completion_tokens"] == 128
    near = server.post("/v1/completions", {"prompt": [[5] * 505], "ignore_eos": True}).json()
    assert near["usage"]["completion_tokens"] == 7, "a default is cut to what fits"


def test_stop_strings_end_the_text_and_are_named(engine, server):
    bias = {str(token): value for token, value in letter_bias(engine).items()}
    free = completion(server, logit_bias=bias, max_tokens=20, ignore_eos=True)["choices"][0]["text"]
    stop = free[6:9]
    output = completion(server, logit_bias=bias, max_tokens=20, ignore_eos=True, stop=[stop, "never"])["choices"][0]
    assert output["text"] == free[: free.index(stop)]
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", stop)
    included = completion(
        server, logit_bias=bias, max_tokens=20, ignore_eos=True, stop=stop, include_stop_str_in_output=True
    )["choices"][0]
    assert included["text"] == free[: free.index(stop)] + stop
    chunks = stream(
        server,
        "/v1/completions",
        {"prompt": PROMPT, "logit_bias": bias, "temperature": 0, "max_tokens": 20, "stop": stop},
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == output["text"]


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count the experts"}]


def chat(server, **body):
    response = server.post("/v1/chat/completions", {"messages": MESSAGES, **GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_chat_renders_the_checkpoints_template(engine, server):
    text = engine.tokenizer.apply_chat_template(MESSAGES)
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    expected = engine.generate(input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 8})
    output = chat(server)
    message = output["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", expected["text"])
    assert output["object"] == "chat.completion"
    assert output["usage"]["prompt_tokens"] == expected["meta_info"]["prompt_tokens"]
    parts = [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        MESSAGES[1],
    ]
    assert chat(server, messages=parts, max_tokens=None, max_completion_tokens=8)["choices"][0]["message"] == message


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason(server):
    whole = chat(server, n=2, temperature=1.0, seed=5)
    chunks = stream(
        server, "/v1/chat/completions", {"messages": MESSAGES, "n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 8}
    )
    for choice in whole["choices"]:
        pieces = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice["index"]]
        assert pieces[0]["delta"] == {"role": "assistant", "content": "", "reasoning_content": None}
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        assert "".join(piece["delta"].get("content", "") for piece in pieces) == choice["message"]["content"]
    assert all("usage" not in chunk and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    options = {"continuous_usage_stats": True, "include_usage": True}
    chunks = stream(
        server, "/v1/chat/completions", {"messages": MESSAGES, **GREEDY, "ignore_eos": True, "stream_options": options}
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, *range(1, 9), 8]


def test_usage_in_a_stream_is_as_asked(engine, server):
    """vLLM's rules: usage in every chunk needs usage at the end; --enable-force-include-usage adds both."""
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True}

    def usages(server, **options):
        fields = {"stream_options": options} if options else {}
        return [chunk.get("usage") for chunk in stream(server, "/v1/completions", {**body, **fields})]

    for options in (
        {},
        {"continuous_usage_stats": True},
        {"include_usage": False, "continuous_usage_stats": True},
        {"include_usage": None},
    ):
        assert not any(usages(server, **options)), options
    assert all(usages(server, include_usage=True, continuous_usage_stats=True))
    *chunks, last = usages(server, include_usage=True)
    assert not any(chunks) and last["completion_tokens"] == 3
    with running(engine, enable_force_include_usage=True) as other:
        for options in ({}, {"include_usage": False}, {"include_usage": True}):
            actual = usages(other, **options)
            assert all(actual) and actual[-1]["completion_tokens"] == 3, options
        assert "usage" in other.post("/v1/completions", body).json()


def test_values_that_other_servers_take(server):
    """Numbers as text, biases beyond 100 (clamped), and two names of the length, of which the newer one counts."""
    output = chat(server, max_tokens=3, max_completion_tokens=5, ignore_eos=True)
    assert output["usage"]["completion_tokens"] == 5
    body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "seed": 3}
    for text, number in (("0.5", 0.5), ("1", 1), ("0", 0.0), ("1e-1", 0.1)):
        texts = [completion(server, **{**body, "temperature": value})["choices"][0]["text"] for value in (text, number)]
        assert texts[0] == texts[1], text
    ids = [
        completion(server, **{**body, "logit_bias": {"5": bias, "7": -bias}, "return_token_ids": True})["choices"][0]
        for bias in (100, 101, 1e30)
    ]
    assert ids[0]["token_ids"] == ids[1]["token_ids"] == ids[2]["token_ids"] == [5] * 6


def test_chat_logprobs_name_the_sampled_token_and_its_bytes(engine, server):
    output = chat(server, logprobs=True, top_logprobs=3)["choices"][0]
    content = output["logprobs"]["content"]
    assert (
        b"".join(bytes(entry["bytes"]) for entry in content)
        .decode("utf-8", "replace")
        .startswith(output["message"]["content"])
    )
    for entry in content:
        assert len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0 and math.isfinite(entry["logprob"])
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"]), "greedy takes the best"
        assert entry["token"] == entry["top_logprobs"][0]["token"]
    assert chat(server, logprobs=False)["choices"][0]["logprobs"] is None


def test_ids_of_prompt_and_answer_are_returned_on_request(engine, server):
    output = completion(server, return_token_ids=True)["choices"][0]
    expected = engine_text(engine, PROMPT)
    assert output["token_ids"] == expected["output_ids"] and output["prompt_token_ids"] == engine.tokenizer.encode(
        PROMPT
    )


def test_a_stream_without_generated_tokens_has_the_ids_of_the_prompt(engine, server):
    body = {"prompt": PROMPT, "max_tokens": 0, "return_token_ids": True}
    ids = engine.tokenizer.encode(PROMPT)
    for echo, chunks in ((echo, stream(server, "/v1/completions", body | {"echo": echo})) for echo in (False, True)):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if "prompt_token_ids" in choice]
        assert [choice["prompt_token_ids"] for choice in choices] == [ids] and choices[0]["token_ids"] == [], echo


def test_ids_of_a_chat_prompt_stand_where_vllm_has_them(engine, server):
    output = chat(server, return_token_ids=True)
    prompt = output["prompt_token_ids"]
    assert prompt == output["choices"][0]["prompt_token_ids"] and len(prompt) == output["usage"]["prompt_tokens"]
    plain = chat(server)
    assert plain["prompt_token_ids"] is None and plain["prompt_logprobs"] is None, "null, as clients of vLLM expect"
    plain = completion(server)["choices"][0]
    assert plain["prompt_token_ids"] is plain["token_ids"] is plain["prompt_logprobs"] is None
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 4,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    for path, fields in (
        ("/v1/chat/completions", body),
        ("/v1/completions", {**body, "messages": None, "prompt": "a"}),
    ):
        fields = {name: value for name, value in fields.items() if value is not None}
        chunks = stream(server, path, fields)
        at_top = ["prompt_token_ids" in chunk for chunk in chunks]
        assert at_top == [path.endswith("chat/completions"), *[False] * (len(chunks) - 1)], path
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert sum("prompt_token_ids" in choice for choice in choices) == 1, "once, and not in every chunk"
        assert sum(len(choice.get("token_ids", ())) for choice in choices) == 4


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_prompt_logprobs_are_the_engines_by_token_id(engine, server, path):
    text = PROMPT if path == "/v1/completions" else engine.tokenizer.apply_chat_template(MESSAGES)
    ids = engine.tokenizer.encode(text)
    expected = engine.generate(
        input_ids=ids,
        sampling_params={"temperature": 0, "max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
    )["meta_info"]
    prompt = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
    body = {**prompt, "temperature": 0, "max_tokens": 2, "prompt_logprobs": 2, "n": 2}
    answer = server.post(path, body).json()
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None], "those of the answer are not requested"
    for fields in answer["choices"] if path == "/v1/completions" else [answer]:
        first, *others = fields["prompt_logprobs"]
        assert first is None and len(others) == len(ids) - 1
        for entry, own, top in zip(
            others, expected["input_token_logprobs"][1:], expected["input_top_logprobs"][1:], strict=True
        ):
            assert next(iter(entry)) == str(own[1]), "the token of the prompt is first"
            assert set(entry) == {str(own[1])} | {str(alternative[1]) for alternative in top}
            for rank, (logprob, token_id, token_text) in enumerate(top, 1):
                known = entry[str(token_id)]
                assert (known["rank"], known["decoded_token"]) == (rank, token_text)
                assert known["logprob"] == pytest.approx(logprob, abs=1e-4)
            assert entry[str(own[1])]["logprob"] == pytest.approx(own[0], abs=1e-4)
    zero = server.post(path, {**body, "prompt_logprobs": 0, "n": 1}).json()
    (zero,) = zero["choices"] if path == "/v1/completions" else [zero]
    assert all(len(entry) == 1 for entry in zero["prompt_logprobs"][1:]), "0: the token alone"


def test_alternatives_of_prompt_and_answer_are_counted_apart(server):
    choice = completion(server, prompt_logprobs=4, logprobs=1, echo=True)["choices"][0]
    assert all(1 <= len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])
    assert all(4 <= len(entry) <= 5 for entry in choice["prompt_logprobs"][1:])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_tokens_are_written_by_their_ids_on_request(server, path):
    prompt = {"prompt": PROMPT, "logprobs": 2} if path == "/v1/completions" else {"messages": MESSAGES}
    prompt |= {} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 2}
    body = {**prompt, **GREEDY, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = server.post(path, body).json()["choices"][0]
    expected = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    if path == "/v1/completions":
        assert choice["logprobs"]["tokens"] == expected
        assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
    else:
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == expected
        assert all(top["token"].startswith("token_id:") for entry in content for top in entry["top_logprobs"])
        assert any(entry["bytes"] for entry in content), "the bytes stay those of the text"


def test_tokens_are_written_by_their_ids_where_the_server_says_so(engine):
    with running(engine, return_tokens_as_token_ids=True) as other:
        assert completion(other, logprobs=0)["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
        named = completion(other, logprobs=0, return_tokens_as_token_ids=False)["choices"][0]
        assert "".join(named["logprobs"]["tokens"]) == named["text"], "a request wins"


def test_an_answer_continues_the_final_message(engine, server):
    """The prompt ends with the message's content, to the character, as that of transformers does."""
    messages = [*MESSAGES, {"role": "assistant", "content": "The experts are "}]
    open_prompt = engine.tokenizer.apply_chat_template(MESSAGES)
    fields = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    answer = chat(server, messages=messages, **fields)
    assert engine.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False) == (
        open_prompt + "The experts are "
    )
    expected = engine.generate(input_ids=answer["prompt_token_ids"], sampling_params=GREEDY)["text"]
    assert answer["choices"][0]["message"]["content"] == expected
    assert chat(server, messages=messages, **fields, echo=True)["choices"][0]["message"]["content"] == (
        "The experts are " + expected
    )
    chunks = stream(server, "/v1/chat/completions", {"messages": messages, **GREEDY, **fields, "echo": True})
    texts = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == "The experts are " + expected
    twice = [*MESSAGES, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "a"}]
    ids = chat(server, messages=twice, **fields)["prompt_token_ids"]
    assert engine.tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\na")


def test_an_end_is_named_as_sglang_and_as_vllm_name_it(engine, server):
    text = engine_text(engine, PROMPT)["text"]
    choice = completion(server, stop=text[4:6])["choices"][0]
    assert choice["matched_stop"] == choice["stop_reason"] == text[4:6]
    choice = completion(server)["choices"][0]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("length", None)
    (eos,) = engine.tokenizer.eos_token_ids
    choice = completion(server, logit_bias={str(eos): 100})["choices"][0]
    assert (choice["matched_stop"], choice["stop_reason"]) == (eos, None), "vLLM's field names what was requested"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_rows_stand_where_sglangs_clients_look(server, path):
    """`sglext` of the response; of several choices a list, one entry a choice."""
    prompt = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    body = {**prompt, "max_tokens": 5, "temperature": 0, "return_routed_experts": True}
    answer = server.post(path, body).json()
    payload = answer["choices"][0]["meta_info"]["routed_experts"]
    assert answer["sglext"] == {"routed_experts": payload}
    rows = extract_routed_experts_from_meta_info({"meta_info": {"routed_experts": answer["sglext"]["routed_experts"]}})
    assert rows.size == (answer["usage"]["total_tokens"] - 1) * 4 * 4
    two = server.post(path, {**body, "n": 2}).json()
    assert two["sglext"]["routed_experts"] == [choice["meta_info"]["routed_experts"] for choice in two["choices"]]
    chunks = stream(server, path, {**body, "stream_options": {"include_usage": True}})
    (extension,) = [chunk for chunk in chunks if "sglext" in chunk]
    assert extension["choices"] == [] and extension["sglext"] == answer["sglext"] and chunks[-1]["usage"]
    assert "sglext" not in server.post(path, {**body, "return_routed_experts": False}).json()
    npy = server.post(path, {**body, "routed_experts_format": "npy"}).json()
    assert "sglext" not in npy, "vLLM's form has a place of its own"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 129}, "n"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": "a", "n": "5"}, "n"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**18}, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "stop": ["a"] * 5}, "stop"),
        ({"prompt": "a", "stop": ""}, "stop"),
        ({"prompt": "a", "seed": 2**63}, "seed"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "temperature": "warm"}, "temperature"),
        ({"prompt": "a", "temperature": "nan"}, "temperature"),
        ({"prompt": "a", "temperature": "-3"}, "temperature"),
        ({"prompt": "a", "top_p": " 1"}, "top_p"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream_options": {"include_usage": None}}, "stream_options"),
        ({"prompt": "a", "stream_options": {}, "stream": False}, "stream_options"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "a", "request_id": "a b"}, "request_id"),
    ],
)
def test_a_wrong_completion_is_a_400_that_names_the_field(server, body, param):
    assert parse_error(server.post("/v1/completions", body), 400)["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "a" * 65, "content": "a"}]}, "messages[0].role"),
        ({"messages": MESSAGES, "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"messages": MESSAGES, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True}, CONTINUE),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "response_format"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"x": {"y": 1}}}, "chat_template_kwargs"),
    ],
)
def test_a_wrong_chat_is_a_400_that_names_the_field(server, body, param):
    assert parse_error(server.post("/v1/chat/completions", body), 400)["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "field", "engines_name"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 10**6}, "max_tokens", "max_new_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 10**6}, "max_completion_tokens", None),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": -1}, "max_completion_tokens", None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 600}]}, "messages", "input_ids"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**6}, "max_tokens", "max_new_tokens"),
        ("/v1/completions", {"prompt": [10**6]}, "prompt", "input_ids"),
        ("/generate", {"text": "a " * 600}, "text", "prompt="),
        ("/generate", {"text": [""]}, "text", "prompt"),
        ("/generate", {"input_ids": [10**6]}, "input_ids", "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt", "text"),
    ],
)
def test_an_error_names_the_field_of_its_route_and_not_the_engines_parameter(server, path, body, field, engines_name):
    error = parse_error(server.post(path, body), 400)
    assert error["param"] == field and field in error["message"]
    assert engines_name is None or engines_name not in error["message"], error["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "min_tokens": 9}, "raise max_tokens"),
        ("/v1/chat/completions", {"max_tokens": 2, "min_tokens": 9}, "raise max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 2, "min_tokens": 9}, "raise max_completion_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 9999}, "max_completion_tokens=9999: max_completion_tokens"),
        ("/v1/completions", {"prompt": ["a", "b " * 20], "max_tokens": 500}, "prompt[1]: max_tokens=500: max_"),
        ("/v1/completions", {"prompt": [[5], [6] * 20], "max_tokens": 500}, "prompt[1]: max_tokens=500: max_"),
        ("/v1/completions", {"prompt": [[5], [999]]}, "prompt[1] holds the token id 999"),
        ("/v1/completions", {"prompt": ["a", "", ""]}, "prompt[1] holds no text"),
        ("/v1/completions", {"prompt": [""]}, "prompt holds no text"),
    ],
)
def test_a_length_is_refused_by_the_name_that_was_sent(server, path, body, words):
    if "chat" in path:
        body = {**body, "messages": [{"role": "user", "content": "a"}]}
    error = parse_error(server.post(path, body), 400)
    assert words in error["message"] and error["param"] in {*body} - {"messages"}
