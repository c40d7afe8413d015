"""Structured output over HTTP and in Python: the fields of each dialect, the openai client's own helpers, streams,
errors in the form of the dialect."""

import asyncio
import concurrent.futures
import json
import threading

import jsonschema_rs
import openai
import pydantic
import pytest

from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.sampling_params import SamplingParams
from support.http_server import parse_error, stream

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
MESSAGES = [{"role": "user", "content": "Who are you?"}]
RANDOM = {"temperature": 1.0, "max_tokens": 150}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
DEEP = {"type": "array"}
for _ in range(50):
    DEEP = {"type": "array", "items": DEEP}


def is_person(text):
    return jsonschema_rs.is_valid(PERSON, json.loads(text))


def chat(server, **body):
    response = server.post("/v1/chat/completions", {"messages": MESSAGES, **RANDOM, **body})
    assert response.status_code == 200, response.text
    return response.json()


FIELDS = [
    {"response_format": FORMAT},
    {"structured_outputs": {"json": PERSON}},
    {"structured_outputs": {"json": json.dumps(PERSON)}},
    {"guided_json": PERSON},
    {"json_schema": json.dumps(PERSON)},
]


@pytest.mark.parametrize("seed", range(3))
def test_every_field_gives_the_same_person(server, seed):
    texts = set()
    for fields in FIELDS:
        (choice,) = chat(server, seed=seed, **fields)["choices"]
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None
        texts.add(choice["message"]["content"])
    (text,) = texts
    assert is_person(text)
    prompt = {"prompt": "Who are you?", **RANDOM, "seed": seed}
    answers = {server.post("/v1/completions", prompt | fields).json()["choices"][0]["text"] for fields in FIELDS}
    assert len(answers) == 1 and all(map(is_person, answers))


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"regex": "[a-c]{4}"}, lambda text: len(text) == 4 and set(text) <= set("abc")),
        ({"guided_regex": "(x|y)=[0-9]"}, lambda text: text[:2] in ("x=", "y=") and text[2].isdecimal()),
        ({"guided_choice": ["left", "right"]}, lambda text: text in ("left", "right")),
        ({"structured_outputs": {"choice": ["é", "ü"]}}, lambda text: text in ("é", "ü")),
        ({"ebnf": 'root ::= "a" [0-9] "!"'}, lambda text: text[0] == "a" and text[1].isdecimal() and text[2:] == "!"),
        ({"guided_grammar": 'start: "b" /[0-9]/'}, lambda text: text[0] == "b" and len(text) == 2),
        ({"structured_outputs": {"grammar": 'start: "q"+ "."'}}, lambda text: text.strip("q") == "."),
    ],
)
def test_other_forms(server, fields, check):
    for seed in range(3):
        (choice,) = chat(server, seed=seed, **fields)["choices"]
        if choice["finish_reason"] == "stop":
            assert check(choice["message"]["content"])


@pytest.mark.parametrize(
    "field", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_object(server, field):
    ended = 0
    for seed in range(6):
        (choice,) = chat(server, seed=seed, max_tokens=200, **field)["choices"]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
            ended += 1
        else:
            assert choice["finish_reason"] == "length" and choice["message"]["content"].lstrip()[0] == "{"
    assert ended


def test_text_asks_for_nothing(server):
    plain = chat(server, seed=1, max_tokens=9)
    for fields in ({"response_format": {"type": "text"}}, {"regex": "", "json_schema": "", "guided_choice": None}):
        assert chat(server, seed=1, max_tokens=9, **fields)["choices"] == plain["choices"]


def test_a_stream_is_the_whole_answer(server):
    whole = chat(server, seed=5, response_format=FORMAT, logprobs=True, top_logprobs=2, n=2)
    body = {"messages": MESSAGES, **RANDOM, "seed": 5, "response_format": FORMAT, "logprobs": True, "top_logprobs": 2}
    texts, logprobs, ends = {0: "", 1: ""}, {0: [], 1: []}, {}
    for event in stream(server, "/v1/chat/completions", {**body, "n": 2, "stream": True}):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
            logprobs[choice["index"]] += (choice.get("logprobs") or {}).get("content") or []
            ends |= {choice["index"]: choice["finish_reason"]} if choice.get("finish_reason") else {}
    for choice in whole["choices"]:
        assert texts[choice["index"]] == choice["message"]["content"] and is_person(texts[choice["index"]])
        assert logprobs[choice["index"]] == choice["logprobs"]["content"]
        assert ends[choice["index"]] == choice["finish_reason"] == "stop"


def test_sglangs_route_and_engine(engine, server):
    sampling = {"temperature": 1.0, "max_new_tokens": 150, "sampling_seed": 3, "json_schema": json.dumps(PERSON)}
    body = {"text": "Who?", "sampling_params": sampling, "return_logprob": True, "return_routed_experts": True}
    answer = server.post("/generate", body).json()
    own = engine.generate("Who?", sampling, return_logprob=True, return_routed_experts=True)
    assert answer["text"] == own["text"] and is_person(answer["text"])
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert len(own["meta_info"]["output_token_logprobs"]) == len(own["output_ids"])
    rows = own["meta_info"]["prompt_tokens"] + len(own["output_ids"]) - 1
    record = engine.generate("Who?", sampling, return_routed_experts=True)["meta_info"]
    assert record["routed_experts_info"]["num_tokens"] == rows + 1
    both = engine.generate(["Who?", "What?"], [sampling, {"temperature": 0.0, "max_new_tokens": 4}])
    assert both[0]["text"] == own["text"] and len(both[1]["output_ids"]) == 4
    empty = {"json_schema": "", "regex": "", "ebnf": ""} | {"max_new_tokens": 3}
    assert server.post("/generate", {"text": "a", "sampling_params": empty}).status_code == 200


def test_async_generate(engine):
    async def run():
        return await engine.async_generate("Who?", {"json_schema": PERSON, "max_new_tokens": 150, "seed": 8})

    assert is_person(asyncio.run(run())["text"])


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_the_openai_client_parses(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    parsed = 0
    for seed in range(6):
        try:
            answer = client.chat.completions.parse(
                model="tiny", messages=MESSAGES, response_format=Person, max_tokens=120, seed=seed
            )
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(answer.choices[0].message.parsed, Person)
        parsed += 1
    assert parsed


ERRORS = [
    ({"response_format": {"type": "yaml"}}, "response_format", "invalid_grammar"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_grammar"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "banana"}}}}, "response_format",
     "invalid_grammar"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format",
     "unsupported_grammar"),
    ({"structured_outputs": {"json": DEEP}}, "structured_outputs.json", "grammar_too_deep"),
    ({"guided_json": "{"}, "guided_json", "invalid_grammar"),
    ({"guided_choice": []}, "guided_choice", "invalid_grammar"),
    ({"regex": "("}, "regex", "invalid_grammar"),
    ({"regex": "a" * 300_000}, "regex", "grammar_too_large"),
    ({"ebnf": "start: nowhere"}, "ebnf", "invalid_grammar"),
    ({"regex": "a", "ebnf": 'start: "a"'}, "ebnf", "conflicting_parameters"),
    ({"regex": "a", "allowed_token_ids": [4]}, "regex", "conflicting_parameters"),
    ({"response_format": {"type": "json_object"}, "bad_words": ["a"]}, "response_format", "conflicting_parameters"),
    ({"guided_choice": ["a"], "bad_words": ["a"]}, "guided_choice", "conflicting_parameters"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code"), ERRORS)
def test_a_grammar_that_cannot_be_served_is_a_400_that_names_the_field(server, fields, param, code):
    for path, body in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "a"})):
        error = parse_error(server.post(path, body | fields), 400)
        assert (error["param"], error["code"]) == (param, code) and param in error["message"]


def test_the_unsupported_keyword_is_named(server):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    error = parse_error(server.post("/v1/completions", {"prompt": "a", "guided_json": schema}), 400)
    assert "uniqueItems" in error["message"]
    sampling = {"json_schema": json.dumps(schema)}
    error = parse_error(server.post("/generate", {"text": "a", "sampling_params": sampling}), 400)
    assert error["param"] == "json_schema" and "uniqueItems" in error["message"]


def test_refused_grammars_lose_nothing(engine, server):
    """Streams run while bad grammars are refused; each ends as it does alone."""
    body = {"prompt": "The router", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    alone = server.post("/v1/completions", body).json()["choices"][0]["text"]
    stop = threading.Event()

    def refuse():
        count = 0
        while not stop.is_set():
            bad = ERRORS[count % len(ERRORS)][0]
            assert server.post("/v1/completions", {"prompt": "a"} | bad).status_code == 400
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        refusing = pool.submit(refuse)
        texts = list(pool.map(lambda _: server.post("/v1/completions", body).json()["choices"][0]["text"], range(8)))
        stop.set()
        assert refusing.result() > 0
    assert set(texts) == {alone}
    assert engine.check_integrity() == []


def test_an_engine_without_a_tokenizer_refuses_by_name(engine_factory):
    with engine_factory(skip_tokenizer_init=True) as engine, pytest.raises(InvalidRequestError, match="no tokenizer"):
        engine.generate(input_ids=[1, 2], sampling_params=SamplingParams(regex="a"))
