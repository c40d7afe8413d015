"""Tools and reasoning on /v1/chat/completions, with the openai client, against a model that writes them.

What a parser makes of the text changes nothing else: tokens, logprobs, rows and usage are those of the text."""

import json
import pathlib
import sys

import openai
import pydantic
import pytest

from routed_experts.core.errors import ConfigError
from routed_experts.engine.requests.detokenizer import IncrementalDetokenizer
from routed_experts.engine.requests.tokenizer import ChatTemplate
from routed_experts.server.limits import ServerSettings
from support.agents import (
    ARGUMENTS,
    HARMONY_SCRIPTS,
    HARMONY_SPECIAL,
    HARMONY_TEMPLATE,
    NOW,
    SCRIPTS,
    WEATHER,
    messages,
)
from support.engines import open_engine
from support.http_server import parse_error, running, stream
from support.scripted_checkpoint import write_scripted_checkpoint

TOOLS = [WEATHER, NOW]
CHAT = "/v1/chat/completions"


def chat(server, *, script=None, status=200, **body):
    if script is not None:
        body["chat_template_kwargs"] = {"script": script} | body.get("chat_template_kwargs", {})
    response = server.post(CHAT, {"messages": messages(), "temperature": 0, **body})
    assert response.status_code == status, response.text
    return response.json()


def check_calls(calls):
    first, second = calls
    assert (first.function.name, json.loads(first.function.arguments)) == ("get_weather", ARGUMENTS)
    assert (second.function.name, json.loads(second.function.arguments)) == ("now", {})
    assert first.type == "function" and first.id != second.id and first.id.startswith("call_")


def test_calls_are_calls_and_text_beside_them_is_content(client):
    (choice,) = client.chat.completions.create(model="tiny", messages=messages(), tools=TOOLS, temperature=0).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    check_calls(choice.message.tool_calls)


def test_a_stream_brings_the_name_first_and_arguments_in_pieces(client):
    chunks = list(
        client.chat.completions.create(model="tiny", messages=messages(), tools=TOOLS, temperature=0, stream=True)
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in calls] == sorted(call.index for call in calls)
    for index, name in enumerate(("get_weather", "now")):
        first, *others = [call for call in calls if call.index == index]
        assert first.id and first.function.name == name
        assert all(call.id is None and call.function.name is None and call.function.arguments for call in others)
    pieces = [call.function.arguments for call in calls if call.index == 0]
    assert len(pieces) > 1 and json.loads("".join(pieces)) == ARGUMENTS
    assert "".join(delta.content or "" for delta in deltas) == "Let me look."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_stream_helper_and_parse_of_the_client_read_calls(client):
    with client.chat.completions.stream(model="tiny", messages=messages(), tools=TOOLS, temperature=0) as events:
        kinds = [event.type for event in events]
        final = events.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    check_calls(final.choices[0].message.tool_calls)

    class GetWeather(pydantic.BaseModel):
        city: str
        days: int

    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    strict_now = {
        "type": "function",
        "function": {"name": "now", "strict": True, "parameters": {"type": "object", "properties": {}}},
    }
    parsed = client.chat.completions.parse(model="tiny", messages=messages(), tools=[tool, strict_now], temperature=0)
    assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(**ARGUMENTS)


def test_results_of_tools_go_back_through_the_template(server, engine):
    first = chat(server, tools=TOOLS)["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "21"} for call in first["tool_calls"]]
    conversation = [*messages(), first, *results]
    answer = chat(server, messages=conversation, tools=TOOLS, return_token_ids=True)
    assert answer["choices"][0]["message"]["content"] == SCRIPTS["<final>"]
    prompt = engine.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert SCRIPTS["<calls>"] in prompt and "<|im_start|>tool\n21<|im_end|>" in prompt and '"city": {"type"' in prompt
    objects = json.loads(json.dumps(first))
    for call in objects["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    again = chat(server, messages=[*messages(), objects, *results], tools=TOOLS, return_token_ids=True)
    assert again["prompt_token_ids"] == answer["prompt_token_ids"]


def test_reasoning_is_apart_from_content_and_calls(server):
    (choice,) = chat(server, script="<thought>", tools=TOOLS)["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "The user wants the weather, so a call is due."
    assert message["content"] == "I look it up now:" and choice["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in stream(
            server,
            CHAT,
            {"messages": messages(), "temperature": 0, "tools": TOOLS, "chat_template_kwargs": {"script": "<thought>"}},
        )
    ]
    assert "".join(delta["reasoning_content"] or "" for delta in deltas) == message["reasoning_content"]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    arguments = "".join(call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ()))
    assert arguments == message["tool_calls"][0]["function"]["arguments"]


def test_reasoning_that_the_prompt_opens_needs_no_marker(server):
    (choice,) = chat(server, script="<think>\n")["choices"]
    assert choice["message"]["reasoning_content"] == "Only reasoning stands here first."
    assert choice["message"]["content"] == "Then this answer."
    cut = chat(server, script="<think>\n", max_tokens=2)["choices"][0]
    assert cut["message"]["content"] == "" and cut["message"]["reasoning_content"]
    assert SCRIPTS["<think>\n"].startswith(cut["message"]["reasoning_content"]) and cut["finish_reason"] == "length"


def test_reasoning_can_stay_in_the_content_or_be_left_out(server):
    whole = SCRIPTS["<thought>"]
    retained = chat(server, script="<thought>", separate_reasoning=False)["choices"][0]["message"]
    assert retained["content"] == whole and "reasoning_content" not in retained
    hidden = chat(server, script="<thought>", include_reasoning=False)["choices"][0]["message"]
    assert hidden["content"] == whole.partition("</think>\n\n")[2] and "reasoning_content" not in hidden
    with_calls = chat(server, script="<thought>", separate_reasoning=False, tools=TOOLS)["choices"][0]["message"]
    assert with_calls["content"] == whole.partition(" <tool_call>")[0] and len(with_calls["tool_calls"]) == 1


def test_thinking_is_turned_off_by_the_template(server, engine):
    for body in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        answer = chat(server, return_token_ids=True, **body)
        prompt = engine.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
        assert prompt.endswith("<think>\n\n</think>\n\n<plain>")
        assert answer["choices"][0]["message"]["content"] == SCRIPTS["<plain>"]


def test_the_dialect_of_vllm_names_reasoning_as_its_clients_do(engine):
    with running(engine, routed_experts_dialect="vllm021", reasoning_parser="qwen3") as server:
        message = chat(server, script="<thought>", return_routed_experts=False)["choices"][0]["message"]
        assert (
            message["reasoning"] == "The user wants the weather, so a call is due."
            and "reasoning_content" not in message
        )


def test_parsers_can_be_turned_off(engine):
    with running(engine, tool_call_parser="none", reasoning_parser="none") as server:
        (choice,) = chat(server, script="<thought>", tools=TOOLS)["choices"]
        assert choice["message"] == {"role": "assistant", "content": SCRIPTS["<thought>"], "refusal": None}
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("streams", [False, True])
def test_a_message_that_is_continued_may_be_in_the_middle_of_reasoning(server, streams):
    """The model goes on with the script whose name ends the message. The echo is content and is not parsed."""
    for content, reasoning in (
        ("<think>\n", "Only reasoning stands here first."),
        ("<think>\nFirst", None),
        ("<think>a</think> b", None),
    ):
        body = {"messages": [*messages(), {"role": "assistant", "content": content + "<plain>"}], "echo": True}
        body |= {"add_generation_prompt": False, "continue_final_message": True, "temperature": 0, "max_tokens": 100}
        if reasoning is not None:
            body["messages"][-1]["content"] = content
        answer = server.post(CHAT, body).json()["choices"][0]["message"]
        if streams:
            deltas = [chunk["choices"][0]["delta"] for chunk in stream(server, CHAT, body)]
            for name in ("content", "reasoning_content"):
                assert "".join(delta.get(name) or "" for delta in deltas) == (answer[name] or "")
        if reasoning is not None:
            expected = (content + "Then this answer.", reasoning)
        elif content.endswith("First"):
            expected = (content + "<plain>", SCRIPTS["<plain>"])
        else:
            expected = (content + "<plain>" + SCRIPTS["<plain>"], None)
        assert (answer["content"], answer["reasoning_content"]) == expected


def test_tokenize_counts_the_tools(server):
    chat_ids = chat(server, tools=TOOLS, return_token_ids=True)["prompt_token_ids"]
    body = {"messages": messages(), "tools": TOOLS}
    assert server.post("/tokenize", body).json()["tokens"] == chat_ids
    without = server.post("/tokenize", {"messages": messages()}).json()["tokens"]
    assert server.post("/tokenize", {**body, "tool_choice": "none"}).json()["tokens"] == without != chat_ids


def test_an_unknown_parser_ends_the_start():
    with pytest.raises(ConfigError, match="did you mean qwen3_coder"):
        ServerSettings(tool_call_parser="qwen3_codr")


def test_tool_choice_none_leaves_tools_out_of_prompt_and_answer(server):
    without = chat(server, return_token_ids=True)
    answer = chat(server, tools=TOOLS, tool_choice="none", return_token_ids=True)
    assert answer["prompt_token_ids"] == without["prompt_token_ids"]
    text = chat(server, tools=TOOLS, tool_choice="none", script="<calls>")["choices"][0]
    assert text["message"]["content"] == SCRIPTS["<calls>"] and text["finish_reason"] == "stop"


def test_one_call_at_most_without_parallel_calls(server):
    (choice,) = chat(server, tools=TOOLS, parallel_tool_calls=False)["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]


@pytest.mark.parametrize("stop", [None, "degrees", '"days"'])
def test_tokens_logprobs_rows_and_usage_are_those_of_the_text(server, engine, stop):
    """The parser sees the text of /v1/completions, cut where that is cut."""
    body = {
        "tools": TOOLS,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        "return_routed_experts": True,
    }
    body |= {"n": 2, "seed": 3, "temperature": 1.0} | ({} if stop is None else {"stop": stop})
    chat(server, tools=TOOLS)  # from here on the prompt is cached for all
    answer = chat(server, **body)
    names = ("n", "seed", "temperature", "stop", "return_token_ids", "return_routed_experts")
    plain_body = {name: body[name] for name in names if name in body} | {"logprobs": 2, "max_tokens": 100}
    plain = server.post("/v1/completions", {"prompt": answer["prompt_token_ids"], **plain_body}).json()
    chunks = stream(server, CHAT, {"messages": messages(), **body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    for index, (choice, expected) in enumerate(zip(answer["choices"], plain["choices"], strict=True)):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"] and chunk["choices"][0]["index"] == index]
        assert (
            choice["token_ids"]
            == expected["token_ids"]
            == [token for part in own for token in part.get("token_ids", ())]
        )
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert logprobs == expected["logprobs"]["token_logprobs"]
        streamed = [entry["logprob"] for part in own if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert logprobs == pytest.approx(streamed, abs=1e-5)
        assert choice["meta_info"]["routed_experts"] == expected["meta_info"]["routed_experts"]
        rows = [part["meta_info"]["routed_experts"] for part in own if "meta_info" in part]
        assert rows == [choice["meta_info"]["routed_experts"]]
        assert choice["stop_reason"] == expected["stop_reason"] == (stop if stop == '"days"' else None)
        arguments = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
        pieces = [call for part in own for call in part["delta"].get("tool_calls", ())]
        for number, whole in enumerate(arguments):
            assert whole == "".join(call["function"]["arguments"] for call in pieces if call["index"] == number)
    assert answer["usage"] == plain["usage"]
    if stop == '"days"':
        assert arguments == ['{"city": "Kö ln {\\"}]", ']


def test_a_call_cut_by_the_length_has_the_reason_length(server):
    (choice,) = chat(server, tools=TOOLS, max_tokens=7)["choices"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("streams", [False, True])
def test_the_beginning_of_an_end_marker_is_content_only_where_no_limit_has_cut_it(server, streams):
    body = {"messages": messages(), "tools": TOOLS, "temperature": 0, "chat_template_kwargs": {"script": "<open>"}}
    num_tokens = server.post(CHAT, body).json()["usage"]["completion_tokens"]
    for max_tokens, reason, content in ((num_tokens, "tool_calls", "Now:</tool_c"), (num_tokens - 1, "length", "Now:")):
        body["max_tokens"] = max_tokens  # the last token ends the text and adds nothing to it
        if streams:
            choices = [choice for chunk in stream(server, CHAT, body) for choice in chunk["choices"]]
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
        else:
            choices = server.post(CHAT, body).json()["choices"]
            text = choices[0]["message"]["content"]
        assert (text, choices[-1]["finish_reason"]) == (content, reason)


BAD_PARAMETERS = (
    [{"type": "array"}, "parameters.type is 'array'"],
    [{"type": "object", "properties": []}, "properties is a list of 0"],
    [{"properties": {"a": {"type": "text"}}}, "properties.a.type is 'text'"],
    [{"properties": {"a": 3}}, "properties.a is 3"],
    [{"required": "a"}, "required is 'a'"],
    [{"required": [1]}, "required holds"],
    [{"properties": {"a": {"anyOf": {"type": "string"}}}}, "anyOf is a dict"],
    [{"properties": {"a": {"items": [1], "anyOf": [{"type": 1}]}}}, "anyOf[0].type is 1"],
    [{"$defs": {"x": {"enum": "a"}}}, "$defs.x.enum is 'a'"],
)


@pytest.mark.parametrize(("parameters", "message"), BAD_PARAMETERS)
def test_a_faulty_schema_is_refused_with_its_place(server, parameters, message):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    error = parse_error(server.post(CHAT, {"messages": messages(), "tools": [NOW, tool]}), 400)
    assert (
        error["param"] == "tools"
        and error["message"].startswith("tools[1].function.parameters")
        and message in error["message"]
    )


def function(name):
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tools": [NOW, NOW]}, "tools", "of an earlier one"),
        ({"tools": [function("x" * 65)]}, "tools", "1 to 64"),
        ({"tools": [function("a b")]}, "tools", "1 to 64"),
        ({"tools": [function("")]}, "tools", "1 to 64"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools", "type function"),
        ({"tools": [{"type": "function"}]}, "tools", "function"),
        ({"tools": "now"}, "tools", "array"),
        ({"tools": [function(f"f{index}") for index in range(513)]}, "tools", "at most 512"),
        ({"tools": [NOW], "tool_choice": function("later")}, "tool_choice", "none of tools; known are now"),
        ({"tools": [NOW], "tool_choice": "some"}, "tool_choice", "unknown"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": function("now")}, "tool_choice", "there are no tools"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "choose one of none"),
    ],
)
def test_faulty_tools_and_choices_are_refused_by_name(server, body, param, message):
    error = parse_error(server.post(CHAT, {"messages": messages(), **body}), 400)
    assert error["param"] == param and message in error["message"], error


@pytest.mark.parametrize("arguments", ["{", "[1]", '"a"'])
def test_arguments_of_an_earlier_call_are_an_object(server, arguments):
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}
    body = {"messages": [*messages(), {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [NOW]}
    error = parse_error(server.post(CHAT, body), 400)
    assert error["message"].startswith("messages[1].tool_calls[0].function.arguments")


def test_a_template_without_a_place_for_tools_refuses_them(tiny_checkpoint, lazy_compilation):
    with open_engine(tiny_checkpoint) as plain, running(plain) as server:
        error = parse_error(server.post(CHAT, {"messages": messages(), "tools": [NOW]}), 400)
        assert error["param"] == "tools" and "no place" in error["message"]
        assert (
            server.post(
                CHAT, {"messages": messages(), "tools": [NOW], "tool_choice": "none", "max_tokens": 1}
            ).status_code
            == 200
        )


@pytest.fixture(scope="module")
def harmony_engine(tmp_path_factory, lazy_compilation):
    folder = tmp_path_factory.mktemp("harmony")
    write_scripted_checkpoint(folder, HARMONY_SCRIPTS, HARMONY_TEMPLATE, special=HARMONY_SPECIAL)
    with open_engine(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def harmony(harmony_engine):
    with running(harmony_engine) as server:
        yield server


def test_markers_that_are_special_tokens_reach_the_parser_and_no_client(harmony):
    body = {"tools": [WEATHER], "script": "<call>"}
    (choice,) = chat(harmony, **body)["choices"]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Rome <b>"}'}
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in stream(
            harmony,
            CHAT,
            {
                "messages": messages(),
                "tools": [WEATHER],
                "temperature": 0,
                "chat_template_kwargs": {"script": "<call>"},
            },
        )
    ]
    assert "".join(part["function"]["arguments"] for delta in deltas for part in delta.get("tool_calls", ())) == (
        '{"city": "Rome <b>"}'
    )
    assert not any(delta.get("content") for delta in deltas)
    text = chat(harmony, script="<call>")["choices"][0]["message"]
    assert text["content"] == '{"city": "Rome <b>"}' and "tool_calls" not in text, "without tools nothing is a call"


@pytest.mark.parametrize("settings", [{}, {"reasoning_parser": "none"}, {"tool_call_parser": "none"}])
def test_headers_are_no_content_where_reasoning_stays_in_it(harmony_engine, settings):
    body = {"chat_template_kwargs": {"script": "<call>"}, "temperature": 0, "separate_reasoning": False}
    if "reasoning_parser" in settings:
        del body["separate_reasoning"]
    with running(harmony_engine, **settings) as server:
        message = chat(server, **body)["choices"][0]["message"]
        chunks = stream(server, CHAT, {"messages": messages(), **body})
    streamed = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert message["content"] == streamed == '{"city": "Rome <b>"}'
    assert message.keys() == {"role", "content", "refusal"}


def test_other_special_tokens_stay_out_of_the_content(harmony):
    tokenizer = harmony.state.engine.tokenizer
    visible = tokenizer.special_ids(HARMONY_SPECIAL)
    assert len(visible) == 4 and tokenizer.special_ids(["no token", "e"]) == frozenset()
    for stop in ((), ("never",)):
        detokenizer = IncrementalDetokenizer(tokenizer, visible_special_ids=visible, stop=stop)
        ids = tokenizer.encode("a<|im_start|><|channel|>b<|im_end|>", add_special_tokens=False)
        assert detokenizer.push(ids) + detokenizer.finish() == "a<|channel|>b"


@pytest.mark.parametrize(
    ("arguments", "takes_text"),
    [
        ("call.function.arguments | tojson", False),
        ("call.function.arguments", True),
        ("'x' + call.function.arguments", True),
        ("call.function.arguments.items() | list | tojson", False),
        ("''", False),
    ],
)
def test_a_template_gets_arguments_as_it_writes_them(arguments, takes_text):
    source = "{% for m in messages %}{% for call in m.tool_calls %}{{ " + arguments + " }}{% endfor %}{% endfor %}"
    template = ChatTemplate(source, pathlib.Path("template"))
    assert template.takes_argument_text({}) is takes_text
    assert "tools" not in template.variables
    assert (
        "tools"
        in ChatTemplate("{% if tools is not defined %}{% set tools = none %}{% endif %}", pathlib.Path("t")).variables
    )


def check_weather(arguments):
    """Arguments of the schema of WEATHER, which the model did not mean to write."""
    assert isinstance(arguments["city"], str) and arguments.keys() <= {"city", "days"}


def test_a_named_tool_is_called_with_arguments_of_its_schema(client):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    body = {"model": "tiny", "messages": messages(), "tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    body |= {"temperature": 1.0, "extra_body": {"chat_template_kwargs": {"script": "<think>\n"}}}
    reasons = []
    for seed in range(4):
        (answer,) = client.chat.completions.create(**body, seed=seed).choices
        (call,) = answer.message.tool_calls
        assert call.function.name == "get_weather" and answer.message.content is None
        reasons.append(answer.finish_reason)
        if reasons[-1] == "tool_calls":
            check_weather(json.loads(call.function.arguments))
    assert reasons.count("tool_calls") >= 2 and set(reasons) <= {"tool_calls", "length"}, reasons


def test_a_required_call_is_one_of_the_tools(client):
    small = {
        "type": "object",
        "properties": {"on": {"enum": [True, "a::=b"]}},
        "required": ["on"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": small}} for name in ("left", "right")]
    body = {"model": "tiny", "messages": messages(), "tools": tools, "tool_choice": "required", "temperature": 1.0}
    names = set()
    for seed in range(8):
        for parallel in (True, False):
            stream = client.chat.completions.create(
                **body, seed=seed, max_tokens=300, parallel_tool_calls=parallel, stream=True
            )
            calls, reason = [], None
            for chunk in stream:
                reason = chunk.choices[0].finish_reason or reason
                for call in chunk.choices[0].delta.tool_calls or ():
                    if call.function.name:
                        calls.append([call.function.name, ""])
                    calls[call.index][1] += call.function.arguments
            if reason == "length":
                calls.pop()
            else:
                assert reason == "tool_calls" and calls and (parallel or len(calls) == 1)
            assert all(json.loads(arguments)["on"] in (True, "a::=b") for _, arguments in calls)
            names |= {name for name, _ in calls}
    assert names == {"left", "right"}


def test_without_the_extra_a_forced_call_is_refused_with_the_command_that_installs_it(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for choice in ("required", function("other")):
        body = {"messages": messages(), "tools": [function("other")], "tool_choice": choice}
        error = parse_error(server.post(CHAT, body), 400)
        assert "pip install" in error["message"] and "[structured]" in error["message"], error
        assert error["param"] == "tool_choice"
    assert chat(server, tools=TOOLS)["choices"][0]["finish_reason"] == "tool_calls", "auto needs no extra"


def test_structured_output_is_content_even_where_the_prompt_opens_reasoning(server):
    schema = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    (choice,) = chat(server, script="<think>\n", **body)["choices"]
    assert json.loads(choice["message"]["content"])["on"] in (True, False)


def test_calls_that_are_demanded_win_over_a_form_of_answers(server):
    """As an agent with a typed answer asks in the turn in which it must call."""
    form = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    text = {"type": "json_schema", "name": "x", "schema": form}
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "other", "parameters": nothing}}]
    body = {"response_format": {"type": "json_schema", "json_schema": text}, "parallel_tool_calls": False}
    for choice in ("required", function("other")):
        (answer,) = chat(server, tools=tools, tool_choice=choice, **body)["choices"]
        assert [call["function"]["arguments"] for call in answer["message"]["tool_calls"]] == ["{}"], answer
    both = {"messages": messages(), "tools": tools, "tool_choice": "required", "regex": "a"}
    assert parse_error(server.post(CHAT, both), 400)["param"] == "tool_choice"
