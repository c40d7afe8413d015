"""/v1/responses and /v1/messages: the prompts, tokens and calls of /v1/chat/completions, in their dialects' forms."""

import json

import httpx
import pydantic
import pytest

from routed_experts.server.anthropic.message_blocks import to_input
from support.agents import ARGUMENTS, SCRIPTS, WEATHER, messages
from support.http_server import parse_error, running

FUNCTION = WEATHER["function"]
TOOLS = [{"type": "function", **FUNCTION}, {"type": "function", "name": "now", "parameters": None}]
BLOCK_TOOLS = [{"name": "get_weather", "input_schema": FUNCTION["parameters"]}, {"name": "now"}]


def with_script(script):
    return {"chat_template_kwargs": {"script": script}}


def chat_usage(server, **body):
    return server.post("/v1/chat/completions", {"messages": messages(), "temperature": 0, **body}).json()["usage"]


def test_items_are_content_and_calls_and_go_back_as_input(server, client):
    first = client.responses.create(model="tiny", input="How is the weather?", tools=TOOLS, temperature=0)
    message, call, other = first.output
    assert message.content[0].text == "Let me look." == first.output_text and first.status == "completed"
    assert (call.name, json.loads(call.arguments), other.name) == ("get_weather", ARGUMENTS, "now")
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "21"} for item in (call, other)]
    items = [*messages(), *(item.model_dump(exclude_none=True) for item in first.output), *results]
    last = client.responses.create(model="tiny", input=items, tools=TOOLS, temperature=0)
    assert last.output_text == SCRIPTS["<final>"]
    chat_tools = [WEATHER, {"type": "function", "function": {"name": "now"}}]
    usage = chat_usage(server, tools=chat_tools)
    assert (first.usage.input_tokens, first.usage.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    calls = [
        {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}} for item in (call, other)
    ]
    conversation = [*messages(), {"role": "assistant", "content": "Let me look.", "tool_calls": calls}]
    conversation += [{"role": "tool", "tool_call_id": item.call_id, "content": "21"} for item in (call, other)]
    assert last.usage.input_tokens == chat_usage(server, messages=conversation, tools=chat_tools)["prompt_tokens"]


@pytest.mark.parametrize("script", ["<calls>", "<thought>", "<plain>"])
def test_the_events_of_a_response_join_to_it(client, script):
    body = {"model": "tiny", "input": messages(), "tools": TOOLS, "temperature": 0, "extra_body": with_script(script)}
    whole = client.responses.create(**body)
    events = list(client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1].response

    def plain(response):
        return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]

    assert events[-1].type == "response.completed" and plain(final) == plain(whole)
    assert final.usage.total_tokens == whole.usage.total_tokens
    for index, item in enumerate(final.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added" and own[-1].type == "response.output_item.done"
        assert own[-1].item.model_dump() == item.model_dump()
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(event.delta for event in own if event.type.endswith(".delta")) == text
    if script == "<thought>":
        assert final.output[0].type == "reasoning" and final.usage.output_tokens_details.reasoning_tokens > 0


def test_the_stream_helper_and_parse_of_the_client_read_responses(client):
    with client.responses.stream(model="tiny", input="a", tools=TOOLS, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds and final.output[1].parsed_arguments == ARGUMENTS

    class Switch(pydantic.BaseModel):
        on: bool

    parsed = client.responses.parse(model="tiny", input="a", text_format=Switch, temperature=0)
    assert isinstance(parsed.output_parsed, Switch)


def test_a_response_of_a_length_is_incomplete(client):
    response = client.responses.create(model="tiny", input="a", max_output_tokens=1, temperature=0, instructions="b")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(client.responses.create(model="tiny", input="a", max_output_tokens=1, temperature=0, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.output[0].status == "incomplete"


def test_a_response_that_is_to_be_stored_says_that_it_is_not(server):
    """Agents ask for it by default."""
    response = server.post("/v1/responses", {"input": "a", "max_output_tokens": 2, "store": True})
    assert response.status_code == 200 and response.json()["store"] is False
    assert response.headers["x-ignored-params"] == "store"


def test_an_error_in_the_stream_of_a_response_is_an_event_of_it(engine):
    with running(engine, request_timeout=0.2) as server:
        engine.pause(mode="in_place")
        try:
            with server.client.stream("POST", "/v1/responses", json={"input": "a", "stream": True}) as response:
                lines = [line for line in response.iter_lines() if line]
        finally:
            engine.resume()
        server.wait_idle()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    last = events[-1]
    assert lines[-3:-1] == ["event: error", f"data: {json.dumps(last, separators=(',', ':'))}"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (last["type"], last["code"], last["param"]) == ("error", "request_timeout", None)
    assert last["error"]["message"] == last["message"] and "--request-timeout" in last["message"]


def test_fields_of_messages_without_effect_are_named(server):
    fields = {"metadata": {"user_id": "me"}, "service_tier": "auto", "max_tokens": 2}
    response = server.post("/v1/messages", {"messages": messages(), **fields})
    assert response.status_code == 200
    assert response.headers["x-ignored-params"] == "metadata, service_tier"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"text": {"format": {"type": "zz"}}}, "text.format", "invalid_grammar"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "invalid_grammar"),
        ({"reasoning": {"effort": "zz"}}, "reasoning.effort", "invalid_request"),
        ({"chat_template_kwargs": {"messages": "a"}}, "chat_template_kwargs", "invalid_request"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"top_logprobs": 2}, "top_logprobs", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"include": ["file_search_call.results"]}, "include", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "later"}}, "tool_choice", "invalid_request"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "invalid_request"),
        ({"input": []}, "input", "invalid_request"),
        ({"input": None}, "input", "invalid_request"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "invalid_request"),
        ({"input": [{"type": "computer_call"}]}, "input", "invalid_request"),
        ({"input": [{"type": "function_call", "name": "now", "arguments": "{}"}]}, "input", "invalid_request"),
        ({"return_routed_experts": True}, "return_routed_experts", "unknown_field"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_request"),
    ],
)
def test_what_a_response_cannot_be_is_refused_by_name(server, body, param, code):
    error = parse_error(server.post("/v1/responses", {"input": "a", **body}), 400)
    assert (error["param"], error["code"]) == (param, code), error
    assert param.rpartition(".")[2] in error["message"] or param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("path", "field", "choices"),
    [
        ("/v1/chat/completions", "function.parameters", ("required", {"type": "function", "function": {"name": "b"}})),
        ("/v1/responses", "parameters", ("required", {"type": "function", "name": "b"})),
        ("/v1/messages", "input_schema", ({"type": "any"}, {"type": "tool", "name": "b"})),
    ],
)
@pytest.mark.parametrize(
    ("own", "code", "words"),
    [
        ({"format": "nope"}, "invalid_grammar", "nope"),
        ({"not": {}}, "unsupported_grammar", '"not"'),
        ({"$ref": "#/nowhere"}, "invalid_grammar", "nowhere"),
        ({"default": json.loads("[" * 50 + "]" * 50)}, "grammar_too_deep", "deeper than 48 levels"),
    ],
)
def test_a_schema_that_a_demanded_call_cannot_follow_is_named_by_its_tool(
    server, path, field, choices, own, code, words
):
    schemas = {"a": {"type": "object"}, "b": {"type": "object", "properties": {"x": {"type": "string", **own}}}}

    def tool(name, schema):
        flat = {"name": name, field.rpartition(".")[2]: schema}
        nested = {"type": "function", "function": flat} if "." in field else {"type": "function", **flat}
        return flat if path == "/v1/messages" else nested

    body = {"input": "a"} if path == "/v1/responses" else {"messages": messages(), "max_tokens": 4}
    for choice in choices:
        asked = {**body, "tools": [tool(*pair) for pair in schemas.items()], "tool_choice": choice}
        error = parse_error(server.post(path, asked), 400)
        assert error["message"].startswith(f"tools[1].{field} "), error
        assert words in error["message"] and "call_1" not in error["message"]
        assert path == "/v1/messages" or (error["param"], error["code"]) == ("tools", code), error


@pytest.mark.parametrize("arguments", ['{"city": ', "[]", "NaN"])
def test_faulty_arguments_of_an_earlier_call_are_named_by_their_item(server, arguments):
    call = {"type": "function_call", "call_id": "a", "name": "now", "arguments": arguments}
    items = [{"role": "user", "content": "x"}, call, {"type": "function_call_output", "call_id": "a", "output": "y"}]
    error = parse_error(server.post("/v1/responses", {"input": items}), 400)
    assert error["message"].startswith("input[1].arguments is ") and error["param"] == "input"


def message(server, status=200, **body):
    response = server.post("/v1/messages", {"messages": messages(), "max_tokens": 100, "temperature": 0, **body})
    assert response.status_code == status, response.text
    return response.json()


def message_events(server, **body):
    """The events of a stream; the name of each is its type."""
    body = {"messages": messages(), "max_tokens": 100, "temperature": 0, "stream": True, **body}
    with server.client.stream("POST", "/v1/messages", json=body) as response:
        blocks = "".join(response.iter_text()).split("\n\n")
    assert blocks[-1] == ""
    parts = [block.split("\n") for block in blocks[:-1]]
    events = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name for name, _ in parts] == [f"event: {event['type']}" for event in events]
    return events


def test_blocks_are_text_and_uses_of_tools_and_go_back(server):
    first = message(server, tools=BLOCK_TOOLS, system="Be brief.")
    text, use, other = first["content"]
    assert text == {"type": "text", "text": "Let me look."} and first["stop_reason"] == "tool_use"
    assert (use["name"], use["input"], other["name"], other["input"]) == ("get_weather", ARGUMENTS, "now", {})
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "21"} for block in (use, other)]
    conversation = [
        *messages(),
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": results},
    ]
    last = message(server, messages=conversation, tools=BLOCK_TOOLS)
    assert last["content"] == [{"type": "text", "text": SCRIPTS["<final>"]}] and last["stop_reason"] == "end_turn"
    counted = server.post("/v1/messages/count_tokens", {"messages": conversation, "tools": BLOCK_TOOLS}).json()
    usage = last["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize("script", ["<calls>", "<thought>", "<plain>"])
def test_the_events_of_a_message_join_to_it(server, script):
    body = {"tools": BLOCK_TOOLS, **with_script(script)}
    whole = message(server, **body)
    start, *events, end, stop = message_events(server, **body)
    assert (start["type"], stop["type"]) == ("message_start", "message_stop") and start["message"]["content"] == []
    assert end["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    for index, block in enumerate(whole["content"]):
        begin, *deltas, finish = [event for event in events if event["index"] == index]
        assert (begin["type"], finish["type"]) == ("content_block_start", "content_block_stop")
        assert begin["content_block"]["type"] == block["type"]
        joined = "".join(next(value for key, value in delta["delta"].items() if key != "type") for delta in deltas)
        text = block.get("text") or block.get("thinking")
        assert (joined == text) if text else json.loads(joined) == block["input"]
    assert [block["type"] for block in whole["content"]] == {
        "<calls>": ["text", "tool_use", "tool_use"],
        "<thought>": ["thinking", "text", "tool_use"],
        "<plain>": ["text"],
    }[script]


def test_the_beginning_of_an_end_marker_is_text_only_where_no_limit_has_cut_it(server):
    body = {"tools": BLOCK_TOOLS, **with_script("<open>")}
    whole = message(server, **body)
    assert [block.get("text") for block in whole["content"]] == ["Now:", None, "</tool_c"]
    cut = message(server, max_tokens=whole["usage"]["output_tokens"] - 1, **body)  # the last token adds no text
    assert ([block.get("text") for block in cut["content"]], cut["stop_reason"]) == (["Now:", None], "max_tokens")


@pytest.mark.parametrize("script", ["<calls>", "<thought>", "<plain>"])
def test_an_answer_continues_the_last_message_of_the_assistant(server, script):
    """The script's name ends the message, so that the model goes on from there."""
    begun = f"I begin so: {script}"
    whole = message(server, tools=BLOCK_TOOLS, **with_script(script))["content"]
    for content in (begun, [{"type": "text", "text": "I begin so: "}, {"type": "text", "text": script}]):
        body = {"messages": [*messages(), {"role": "assistant", "content": content}], "tools": BLOCK_TOOLS}
        answer = message(server, **body)
        assert [{**block, "id": ""} for block in answer["content"]] == [{**block, "id": ""} for block in whole]
        assert "begin" not in json.dumps(answer)
        texts = [event["delta"].get("text", "") for event in message_events(server, **body) if "delta" in event]
        assert "".join(texts) == "".join(block.get("text", "") for block in whole)
    conversation = [*messages(), {"role": "assistant", "content": begun}]
    usage = message(server, messages=conversation)["usage"]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    expected = chat_usage(server, messages=conversation, **fields)["prompt_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected
    assert server.post("/v1/messages/count_tokens", {"messages": conversation}).json() == {"input_tokens": expected}


def test_text_that_continues_a_block_of_text_is_no_reasoning_and_may_be_in_chats(engine):
    with running(engine, reasoning_parser="deepseek-r1") as server:
        for begun, kinds in (("So: <plain>", ["text"]), ("So: <thought>", ["thinking", "text"])):
            answer = message(server, messages=[*messages(), {"role": "assistant", "content": begun}])
            assert [block["type"] for block in answer["content"]] == kinds, answer
        assert [block["type"] for block in message(server)["content"]] == ["thinking"]
        fields = {"continue_final_message": True, "add_generation_prompt": False, "temperature": 0}
        for begun, name in (("So: <plain>", "reasoning_content"), ("a</think> So: <plain>", "content")):
            body = {"messages": [*messages(), {"role": "assistant", "content": begun}], **fields}
            (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
            texts = {key: choice["message"][key] for key in ("reasoning_content", "content")}
            assert [key for key, text in texts.items() if text] == [name], texts


def test_a_last_message_that_cannot_be_continued_is_refused(server):
    use = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}
    last = {"role": "assistant", "content": [{"type": "text", "text": "a"}, use]}
    response = server.post("/v1/messages", {"messages": [*messages(), last], "max_tokens": 5})
    error = anthropic_error(response, 400)
    assert error["param"] == "messages[1]" and "tool_result" in error["message"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}, "output_config"),
        ({"tools": BLOCK_TOOLS, "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": BLOCK_TOOLS, "tool_choice": {"type": "tool", "name": "now"}}, "tool_choice"),
    ],
)
def test_a_last_message_of_the_assistant_beside_a_form_of_the_answer_is_refused(server, fields, name):
    body = {"messages": [*messages(), {"role": "assistant", "content": '{"begun'}], **fields}
    error = anthropic_error(server.post("/v1/messages", {**body, "max_tokens": 5}), 400)
    assert error["param"] == "messages[1]" and f"leave out messages[1] or {name}" in error["message"], error
    body.pop("output_config", None)  # no field of a count
    assert server.post("/v1/messages/count_tokens", body).status_code == 200


def test_tokens_of_a_conversation_that_ends_with_a_use_of_tools_are_counted(server):
    text, use = {"type": "text", "text": "a"}, {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {"x": 5}}
    body = {"messages": [*messages(), {"role": "assistant", "content": [text, use]}], "tools": BLOCK_TOOLS}
    call = {"id": "toolu_1", "type": "function", "function": {"name": "now", "arguments": {"x": 5}}}
    chat = [*messages(), {"role": "assistant", "content": "a", "tool_calls": [call]}]
    functions = {"name": "get_weather", "parameters": FUNCTION["parameters"]}, {"name": "now"}
    tools = [{"type": "function", "function": function} for function in functions]
    counted = server.post("/v1/messages/count_tokens", body).json()
    tokens = server.post("/tokenize", {"messages": chat, "tools": tools, "add_generation_prompt": False}).json()
    assert counted == {"input_tokens": len(tokens["tokens"])}


def test_a_last_message_that_the_template_leaves_out_is_refused(server):
    body = {"messages": [*messages(), {"role": "assistant", "content": "a"}]}
    body |= {"max_tokens": 5, "chat_template_kwargs": {"hide_last": True}}
    for path, fields, field in (
        ("/v1/messages", {}, "messages"),
        ("/v1/chat/completions", {"continue_final_message": True}, "continue_final_message"),
    ):
        error = server.post(path, {**body, **fields}).json()["error"]
        assert error["param"] == field and error["message"].startswith(f"{field}: the chat template leaves out"), error


def test_a_message_thinks_only_if_it_is_asked_to(server):
    without = message(server)["usage"]["input_tokens"] + message(server)["usage"]["cache_read_input_tokens"]
    usage = message(server, thinking={"type": "enabled", "budget_tokens": 1024})["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] < without, "the template closes thinking"


def test_reasons_of_the_end(server):
    assert message(server, max_tokens=1)["stop_reason"] == "max_tokens"
    stopped = message(server, stop_sequences=["answer"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "answer")
    cut = message(server, tools=BLOCK_TOOLS, max_tokens=6)
    assert cut["stop_reason"] == "max_tokens" and '{"city"' in cut["content"][-1]["input"]["arguments"]


def test_a_tool_that_must_be_used_is_used(server):
    choice = {"type": "tool", "name": "now"}
    closed = [{"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}]
    used = message(server, tools=closed, tool_choice=choice)
    assert [(block["type"], block["input"]) for block in used["content"]] == [("tool_use", {})]
    assert used["stop_reason"] == "tool_use"
    form = {"type": "json_schema", "schema": {"enum": ["left", "right"]}}
    (block,) = message(server, output_config={"format": form})["content"]
    assert json.loads(block["text"]) in ("left", "right")


def anthropic_error(response, status):
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error"} and body["type"] == "error" and "\n" not in body["error"]["message"]
    return body["error"]


IMAGE = [{"role": "user", "content": [{"type": "image", "source": {}}]}]


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "other"}, 404, "not_found_error", "model"),
        ({"messages": IMAGE}, 400, "invalid_request_error", "messages[0]"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        (
            {"tools": BLOCK_TOOLS, "tool_choice": {"type": "tool", "name": "x"}},
            400,
            "invalid_request_error",
            "tool_choice",
        ),
        ({"tools": BLOCK_TOOLS, "tool_choice": {"type": "all"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tools": [*BLOCK_TOOLS, BLOCK_TOOLS[0]]}, 400, "invalid_request_error", "tools"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "tools"),
        ({"thinking": {"type": "some"}}, 400, "invalid_request_error", "thinking"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"max_tokens": 100_000}, 400, "invalid_request_error", "max_tokens"),
        ({"system": [{"type": "image"}]}, 400, "invalid_request_error", "system[0]"),
    ],
)
def test_errors_of_messages_have_their_form(server, body, status, kind, param):
    response = server.post("/v1/messages", {"messages": messages(), "max_tokens": 5, **body})
    error = anthropic_error(response, status)
    assert (error["type"], error["param"]) == (kind, param), error


def test_messages_take_the_key_in_their_own_header(engine):
    body = {"messages": messages(), "max_tokens": 1}
    with (
        running(engine, api_key="key-of-users-1") as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        assert anthropic_error(client.post("/v1/messages", json=body), 401)["type"] == "authentication_error"
        wrong = client.post("/v1/messages", json=body, headers={"x-api-key": "key-of-users-2"})
        assert anthropic_error(wrong, 401)["type"] == "authentication_error"
        assert client.post("/v1/messages", json=body, headers={"x-api-key": "key-of-users-1"}).status_code == 200
        assert client.get("/v1/models", headers={"x-api-key": "key-of-users-1"}).status_code == 401
        assert server.post("/v1/messages", body).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "is_object"),
    [
        ('{"a": [1, null], "b": "\\ud83d\\ude00"}', True),
        ('{"a": "\\ud800"}', False),
        ('{"a": NaN}', False),
        ('{"a": [1e999]}', False),
        ('{"a": 1', False),
        ("[1]", False),
    ],
)
def test_arguments_that_json_cannot_hold_stay_text(arguments, is_object):
    assert to_input(arguments) == (json.loads(arguments) if is_object else {"arguments": arguments})
