"""langchain-openai: ChatOpenAI and OpenAI, at once and streamed, with usage, logprobs, content parts and rows in extra_body."""

import os

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI

url, model = os.environ["COMPAT_URL"], os.environ["COMPAT_MODEL"]


def main():
    said = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "max_tokens": 8, "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**said, stream_usage=True)
    whole = chat.invoke("What is the capital of France?")
    assert whole.content and whole.usage_metadata["output_tokens"] > 0 and whole.response_metadata["finish_reason"] in ("stop", "length")
    streamed = list(chat.stream("What is the capital of France?"))
    assert "".join(chunk.content for chunk in streamed) == whole.content
    assert any(chunk.usage_metadata for chunk in streamed)
    parts = chat.invoke([HumanMessage(content=[{"type": "text", "text": "What is the capital of France?"}])])
    assert parts.content == whole.content
    told = ChatOpenAI(**said, logprobs=True, top_logprobs=2, seed=None).invoke("hello")
    assert len(told.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2
    rows = ChatOpenAI(**said, extra_body={"return_routed_experts": True}).invoke("hello")
    assert rows.content is not None
    text = OpenAI(**said).invoke("The sea")
    assert isinstance(text, str) and text
    print("ChatOpenAI (invoke, stream with usage, content parts, logprobs, extra_body) and OpenAI")


main()
