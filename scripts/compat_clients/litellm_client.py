"""litellm by its three routes: openai/, hosted_vllm/ and text-completion-openai/, at once and streamed, with logprobs,
n and rows."""

import os

import litellm
from rows import decode_rows

url, model = os.environ["COMPAT_URL"], os.environ["COMPAT_MODEL"]
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
CLIENT_OPTIONS = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0}


def main():
    litellm.telemetry = False
    first, second = (chat(route) for route in ("openai", "hosted_vllm"))
    assert first == second, "two routes, one server: the same text and the same rows"
    text = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="The sea", max_tokens=6, logprobs=1, **CLIENT_OPTIONS
    )
    logprobs = text.choices[0].logprobs
    assert (
        text.usage.completion_tokens == 6
        and len(logprobs.token_logprobs) == 6
        and "".join(logprobs.tokens) == text.choices[0].text
    )
    chunks = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="The sea", max_tokens=6, stream=True, **CLIENT_OPTIONS
    )
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == text.choices[0].text
    try:
        litellm.completion(model="openai/gpt", messages=MESSAGES, api_base=f"{url}/v1", api_key="none", max_retries=0)
    except litellm.NotFoundError as error:
        assert "gpt" in str(error)
    else:
        raise AssertionError("a model that is not served was not refused")
    print(
        "openai/, hosted_vllm/ (same text and rows, streams with usage, n, logprobs), "
        "text-completion-openai/ (streams), a typed 404"
    )


def chat(route):
    """Text and rows by one route; the rows in every way that litellm hands them on."""
    kwargs = {**CLIENT_OPTIONS, "model": f"{route}/{model}", "messages": MESSAGES, "max_tokens": 8}
    rows_asked = {"extra_body": {"return_routed_experts": True}}
    whole = litellm.completion(**kwargs, logprobs=True, top_logprobs=2, **rows_asked)
    (choice,) = whole.choices
    content, logprobs = choice.message.content, choice.logprobs.content
    assert (
        len(logprobs) == whole.usage.completion_tokens
        and content.startswith(logprobs[0].token)
        and len(logprobs[0].top_logprobs) == 2
    )
    rows = decode_rows(choice.provider_specific_fields, whole.usage.total_tokens)
    both = litellm.completion(**kwargs, n=2, **rows_asked)
    assert [chosen.message.content for chosen in both.choices] == [content] * 2, "greedy, so both say the same"
    assert all(
        decode_rows(chosen.provider_specific_fields, whole.usage.total_tokens) == rows for chosen in both.choices
    )
    chunks = list(litellm.completion(**kwargs, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == content
    (usage,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usage.completion_tokens == whole.usage.completion_tokens and usage.prompt_tokens == whole.usage.prompt_tokens
    return content, rows


main()
