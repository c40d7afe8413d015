"""litellm by its three routes: openai/, hosted_vllm/ and text-completion-openai/, at once and streamed."""

import os

import litellm

url, model = os.environ["COMPAT_URL"], os.environ["COMPAT_MODEL"]
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def main():
    litellm.telemetry = False
    texts = {}
    for route in ("openai", "hosted_vllm"):
        said = {"model": f"{route}/{model}", "api_base": f"{url}/v1", "api_key": "none", "messages": MESSAGES, "max_tokens": 8}
        whole = litellm.completion(**said, temperature=0)
        texts[route] = whole.choices[0].message.content
        assert whole.usage.completion_tokens > 0 and texts[route]
        chunks = list(litellm.completion(**said, temperature=0, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == texts[route]
    assert texts["openai"] == texts["hosted_vllm"]
    said = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 6, "temperature": 0}
    text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="The sea", **said)
    assert text.choices[0].text and text.usage.prompt_tokens > 0
    try:
        litellm.completion(model="openai/gpt", messages=MESSAGES, api_base=f"{url}/v1", api_key="none", max_retries=0)
    except litellm.NotFoundError as error:
        assert "gpt" in str(error)
    else:
        raise AssertionError("a model that is not served was not refused")
    print("openai/, hosted_vllm/ (the same text, streamed too), text-completion-openai/, a typed 404")


main()
