"""SkyRL's remote inference client against a server: token ids in and out, tokens, chat, pause, caches and sleep."""

import asyncio

import pytest
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import PauseMode, RemoteInferenceClient

from compat_peers.trainers.common import NUM_LAYERS, TOP_K, trained_server

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with trained_server(tmp_path_factory.mktemp("skyrl"), "--routed-experts-dialect", "vllm") as (url, _):
        yield url


def run(url, use, **options):
    """Call `use` with a client, in an event loop that ends with it."""

    async def main():
        client = RemoteInferenceClient(
            proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="policy", **options
        )
        try:
            return await asyncio.wait_for(use(client), 100)
        finally:
            await client.teardown()

    return asyncio.run(main())


def test_token_ids_in_and_out(url):
    params = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
    output = run(url, lambda client: client.generate({"prompt_token_ids": PROMPTS, "sampling_params": params}))
    assert [len(ids) for ids in output["response_ids"]] == [6, 6] and output["stop_reasons"] == ["length", "length"]
    assert [len(logprobs) for logprobs in output["response_logprobs"]] == [6, 6]


def test_rows_come_packed(url):
    params = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}

    async def use(client):
        return await client.generate({"prompt_token_ids": PROMPTS, "sampling_params": params})

    output = run(url, use, enable_return_routed_experts=True)
    for prompt, rows in zip(PROMPTS, output["rollout_expert_indices"], strict=True):
        assert rows.shape == (len(prompt) + 5, NUM_LAYERS - 1, TOP_K) or rows.shape[1:] == (NUM_LAYERS, TOP_K)


def test_text_and_ids(url):
    async def use(client):
        ids = await client.tokenize(["The sea", "is"])
        return ids, await client.detokenize(ids)

    ids, texts = run(url, use)
    assert texts == ["The sea", "is"] and all(ids)


def test_chat_and_completion(url):
    chat = {"json": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "session_id": "s"}}

    async def use(client):
        return await client.chat_completion(chat), await client.completion({"json": {"prompt": "a", "max_tokens": 3}})

    for answer in run(url, use):
        assert answer["model"] == "policy" and answer["usage"]["completion_tokens"] <= 3


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.WAIT])
def test_a_pause_holds_requests_and_loses_none(url, mode):
    params = {"max_tokens": 300, "temperature": 0.0, "ignore_eos": True}

    async def use(client):
        task = asyncio.create_task(client.generate({"prompt_token_ids": PROMPTS, "sampling_params": params}))
        await asyncio.sleep(0.5)
        answers = [await client.pause(mode=mode), await client.reset_prefix_cache(), await client.resume()]
        return await task, answers

    output, answers = run(url, use)
    assert all(answer[url]["status"] == 200 for answer in answers), answers
    assert [len(ids) for ids in output["response_ids"]] == [300, 300]


def test_sleep_and_wake_up(url):
    async def use(client):
        answers = [await client.sleep(level=1), await client.wake_up()]
        world = await client.get_world_size()
        params = {"max_tokens": 3, "ignore_eos": True}
        return answers, world, await client.generate({"prompt_token_ids": PROMPTS, "sampling_params": params})

    answers, world, output = run(url, use)
    assert all(answer[url]["status"] == 200 for answer in answers), answers
    assert world[0] == 1 and [len(ids) for ids in output["response_ids"]] == [3, 3]
