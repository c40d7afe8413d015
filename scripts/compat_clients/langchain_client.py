"""langchain-openai: ChatOpenAI and OpenAI, at once and streamed, with usage, logprobs, content parts, n, and rows."""

import os

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI
from rows import decode_rows

url, model = os.environ["COMPAT_URL"], os.environ["COMPAT_MODEL"]
CLIENT_OPTIONS = {
    "model": model,
    "base_url": f"{url}/v1",
    "api_key": "none",
    "max_tokens": 8,
    "temperature": 0,
    "max_retries": 0,
}
QUESTION = "What is the capital of France?"


class ChatWithRows(ChatOpenAI):
    """Keeps what langchain leaves out of a choice, as its own subclasses for other vendors do."""

    def _create_chat_result(self, response, generation_info=None):
        result = super()._create_chat_result(response, generation_info)
        for generation, choice in zip(result.generations, response.choices, strict=True):
            generation.message.response_metadata["meta_info"] = choice.model_dump()["meta_info"]
        return result


def main():
    chat = ChatOpenAI(**CLIENT_OPTIONS, stream_usage=True)
    whole = chat.invoke(QUESTION)
    usage = whole.usage_metadata
    assert (
        whole.content
        and usage["output_tokens"] in range(1, 9)
        and whole.response_metadata["finish_reason"] in ("stop", "length")
    )
    streamed = list(chat.stream(QUESTION))
    assert "".join(chunk.content for chunk in streamed) == whole.content
    (details,) = [chunk.usage_metadata for chunk in streamed if chunk.usage_metadata]
    assert all(details[name] == usage[name] for name in ("input_tokens", "output_tokens"))
    assert chat.invoke([HumanMessage(content=[{"type": "text", "text": QUESTION}])]).content == whole.content
    details = (
        ChatOpenAI(**CLIENT_OPTIONS, logprobs=True, top_logprobs=2, seed=None)
        .invoke(QUESTION)
        .response_metadata["logprobs"]["content"]
    )
    assert len(details) == usage["output_tokens"] and whole.content.startswith(details[0]["token"])
    assert all(
        len(item["top_logprobs"]) == 2 and item["logprob"] == max(top["logprob"] for top in item["top_logprobs"])
        for item in details
    )
    with_rows = ChatWithRows(**CLIENT_OPTIONS, n=2, extra_body={"return_routed_experts": True})
    results = [with_rows.generate([[HumanMessage(content=QUESTION)]]).generations[0] for _ in range(2)]
    row_lists = [
        decode_rows(item.message.response_metadata, usage["total_tokens"]) for result in results for item in result
    ]
    assert len(row_lists) == 4 and all(rows == row_lists[0] for rows in row_lists), (
        "greedy: two choices, twice, the same rows"
    )
    assert all(item.message.content == whole.content for result in results for item in result)
    text = OpenAI(**CLIENT_OPTIONS)
    assert (reply := text.invoke("The sea")) and "".join(text.stream("The sea")) == reply
    print(
        "ChatOpenAI (invoke, stream with usage, content parts, logprobs, n, rows decoded, equal in two calls) "
        "and OpenAI, streamed too"
    )


main()
