"""OpenAI's Python client: lists, completions of text and ids, chat at once and streamed, logprobs, n, typed errors,
routed experts."""

import os
from typing import Literal

import openai
import pydantic
from rows import decode_rows

url, model = os.environ["COMPAT_URL"], os.environ["COMPAT_MODEL"]
CHAT = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
ROWS = {"return_routed_experts": True}


def main():
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [entry.id for entry in client.models.list()] == [model]
    complete(client)
    whole = chat_at_once(client)
    chat_streamed(client, whole)
    parsed(client)
    tools_called(client)
    for wrong, kind in (({"temperature": -1}, openai.BadRequestError), ({"model": "gpt"}, openai.NotFoundError)):
        try:
            client.completions.create(**{"model": model, "prompt": "a", **wrong})
        except kind as error:
            assert error.code and error.type and [error.param] == list(wrong), error
        else:
            raise AssertionError(f"{wrong} was not refused")
    summary = (
        "models, completions (text, ids, n, seed, logprobs), chat, streams with usage, .stream(), .parse() of answers "
        "and tool calls, typed errors"
    )
    print(f"{summary}; rows decoded: int32 = npy, streamed = at once, every choice")


def complete(client):
    kwargs = {"model": model, "prompt": "The sea", "max_tokens": 4, "n": 2, "seed": 1, "logprobs": 1}
    both, again = (client.completions.create(**kwargs, extra_body=ROWS) for _ in range(2))
    assert both.usage.completion_tokens == 8 and [choice.index for choice in both.choices] == [0, 1]
    assert [choice.text for choice in both.choices] == [choice.text for choice in again.choices], "the seed is the same"
    for choice, other in zip(both.choices, again.choices, strict=True):
        logprobs = choice.logprobs
        assert (
            "".join(logprobs.tokens) == choice.text
            and len(logprobs.token_logprobs) == 4
            and max(logprobs.token_logprobs) <= 0
        )
        assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
        total = both.usage.prompt_tokens + 4
        assert decode_rows(choice.model_dump(), total) == decode_rows(other.model_dump(), total)
    ids = client.completions.create(model=model, prompt=[[5, 6], [7]], max_tokens=2)
    assert [choice.index for choice in ids.choices] == [0, 1] and ids.usage.prompt_tokens == 3


def chat_at_once(client):
    whole = client.chat.completions.create(**CHAT, max_tokens=8, logprobs=True, top_logprobs=2, extra_body=ROWS)
    (choice,) = whole.choices
    logprobs = choice.logprobs.content
    assert len(logprobs) == whole.usage.completion_tokens and choice.message.content.startswith(logprobs[0].token)
    assert all(
        len(entry.top_logprobs) == 2 and entry.logprob == max(top.logprob for top in entry.top_logprobs)
        for entry in logprobs
    ), "greedy"
    as_npy = client.chat.completions.create(**CHAT, max_tokens=8, extra_body={**ROWS, "routed_experts_format": "npy"})
    total = whole.usage.total_tokens
    assert decode_rows(choice.model_dump(), total) == decode_rows(as_npy.choices[0].model_dump(), total)
    return whole


def chat_streamed(client, whole):
    options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": ROWS}
    chunks = list(client.chat.completions.create(**CHAT, max_tokens=8, **options))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == whole.choices[0].message.content
    )
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    (last,) = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    total = whole.usage.total_tokens
    assert last.finish_reason == whole.choices[0].finish_reason
    assert decode_rows(last.model_dump(), total) == decode_rows(whole.choices[0].model_dump(), total)
    long = client.chat.completions.create(**CHAT, max_tokens=64)
    with client.chat.completions.stream(**CHAT, max_tokens=64) as events:
        assert events.get_final_completion().choices[0].message.content == long.choices[0].message.content


class Weather(pydantic.BaseModel):
    """The weather of a city, in few tokens: every field is one of a few words."""

    city: Literal["Paris", "Oslo"]
    unit: Literal["C", "F"]
    is_sunny: bool


def parsed(client):
    """Answers as objects of a class, at once and streamed: the grammar leaves nothing else."""
    kwargs = {**CHAT, "max_tokens": 400, "response_format": Weather}
    (choice,) = client.chat.completions.parse(**kwargs).choices
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Weather), choice
    with client.chat.completions.stream(**kwargs) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion().choices[0].message.parsed
    assert final == choice.message.parsed and "content.done" in kinds, (final, kinds)


def tools_called(client):
    """Calls of tools that must be called, with parsed arguments; at once, streamed, and answered."""
    tool = openai.pydantic_function_tool(Weather, name="weather")
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        kwargs = {**CHAT, "max_tokens": 400, "tools": [tool], "tool_choice": choice}
        kwargs |= {"parallel_tool_calls": False}  # a small model calls until it has no tokens left
        message = client.chat.completions.parse(**kwargs).choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "weather" and isinstance(call.function.parsed_arguments, Weather), message
        with client.chat.completions.stream(**kwargs) as events:
            kinds = {event.type for event in events}
            (streamed,) = events.get_final_completion().choices[0].message.tool_calls
        assert streamed.function.parsed_arguments == call.function.parsed_arguments, streamed
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds, kinds
    turns = [
        *CHAT["messages"],
        {"role": "assistant", "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})]},
        {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"},
    ]
    answer = client.chat.completions.create(
        **{**CHAT, "messages": turns}, tools=[tool], tool_choice="none", max_tokens=4
    )
    assert answer.choices[0].message.tool_calls is None and answer.usage.completion_tokens <= 4


main()
