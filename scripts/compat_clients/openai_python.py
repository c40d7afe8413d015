"""OpenAI's Python client: lists, completions of text and ids, chat at once and streamed, typed errors, routed experts in extra_body."""

import os

import openai

url, model = os.environ["COMPAT_URL"], os.environ["COMPAT_MODEL"]
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
ROWS = {"return_routed_experts": True}


def main():
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [one.id for one in client.models.list()] == [model]
    said = client.completions.create(model=model, prompt="The sea", max_tokens=4, n=2, seed=1, logprobs=1, extra_body=ROWS)
    assert said.usage.completion_tokens == 8 and all(len(choice.logprobs.tokens) == 4 for choice in said.choices)
    assert all(choice.meta_info["routed_experts"] for choice in said.choices)
    assert client.completions.create(model=model, prompt=[[5, 6], [7]], max_tokens=2).choices[1].text is not None
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, temperature=0, extra_body=ROWS)
    assert whole.choices[0].meta_info["routed_experts_info"]["shape"][0] == whole.usage.total_tokens - 1
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, temperature=0, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=64, temperature=0)
    with client.chat.completions.stream(model=model, messages=MESSAGES, max_tokens=64, temperature=0) as events:
        assert events.get_final_completion().choices[0].message.content == whole.choices[0].message.content
    for wrong, kind in (({"temperature": -1}, openai.BadRequestError), ({"model": "gpt"}, openai.NotFoundError)):
        try:
            client.completions.create(**{"model": model, "prompt": "a", **wrong})
        except kind as error:
            assert error.code and error.type
        else:
            raise AssertionError(f"{wrong} was not refused")
    print("models, completions (text, ids, n, logprobs), chat, streams with usage, typed errors, rows of every choice")


main()
