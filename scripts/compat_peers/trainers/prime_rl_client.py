"""prime-rl's functions against a server: readiness, weights from a folder, prefill scores, and the load that its
controller reads; and rollouts by the training client of verifiers, whose traces prime-rl makes samples of."""

import asyncio
import base64
import json
from pathlib import Path

import httpx
import numpy as np
import prime_rl.orchestrator.inference_metrics as inference_metrics
import prime_rl.utils.client as client
import pytest
import renderers.client
import verifiers.v1 as vf
from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.trajectories import trace_to_samples
from renderers.base import load_tokenizer
from renderers.configs import Qwen3RendererConfig
from verifiers.v1.clients.client import resolve_client
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import AgentInfo, Trace, TraceTask

from compat_peers import serving
from compat_peers.trainers.common import NUM_LAYERS, TOP_K, trained_server

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
FLAGS = ("--routed-experts-format", "packed", "--metrics-compat", "vllm", "--routed-experts-dialect", "vllm")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with trained_server(tmp_path_factory.mktemp("prime-rl"), *FLAGS) as (url, weights):
        yield url, weights


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The folder of a tokenizer of the model with Qwen's tags, which the renderer asks for and does not use here."""
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    tokenizer = load_tokenizer(serving.model_path())
    tokenizer.add_special_tokens({"additional_special_tokens": TAGS})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def pool(served, tokenizer):
    """prime-rl's handle of a server. Its connections end with the event loop that opened them."""
    pool = client.InferencePool(
        ClientConfig(base_url=f"{served[0]}/v1", wait_for_ready_timeout=60),
        "policy",
        train_client_type="renderer",
        renderer_config=Qwen3RendererConfig(thinking_retention="all"),
    )
    pool.train_client.renderer_model_name = tokenizer
    return pool


def run(coroutine, *, limit_s=200):
    return asyncio.run(asyncio.wait_for(coroutine, limit_s))


class Rollout:
    """A conversation as verifiers' interception server holds it: a trace, and a client that renders its turns."""

    def __init__(self, pool, **sampling):
        task = TraceTask(type="Task", data=vf.TaskData(prompt="The sea is"))
        self.trace = Trace(task=task, agent=AgentInfo(config=vf.AgentConfig()))
        self.client, self.messages, self.bodies = resolve_client(pool.train_client), [], []
        self.sampling = vf.SamplingConfig(temperature=1.0, top_p=1.0, logprobs=True, **sampling)

        async def keep(request):
            if request.method == "POST":
                self.bodies.append(json.loads(request.read()))

        self.client.client._client.event_hooks["request"].append(keep)

    async def turn(self, text):
        """Send a message; the response, which the trace has."""
        self.messages.append({"role": "user", "content": text})
        body = {"model": "policy", "messages": self.messages}
        turn = prepare_turn(self.trace, ChatDialect().parse_request(body).messages)
        response = await self.client.get_response(
            ChatDialect(), body, self.sampling, session_id=self.trace.id, turn=turn
        )
        turn.commit(response)
        self.messages.append(response.raw["choices"][0]["message"])
        return response

    def sample(self):
        """prime-rl's sample of the one branch, and its rows."""
        (sample,) = trace_to_samples(self.trace)
        rows = sample.routed_experts
        return sample, np.frombuffer(rows.data, rows.dtype).reshape(rows.shape)


@pytest.fixture
def sent(monkeypatch):
    """The rows of each answer of the token route, as they were sent: the token of row 0, and an array."""
    parse, found = renderers.client.parse_generate_response, []

    def keep(raw):
        (choice,) = json.loads(raw)["choices"]
        found.append((choice["routed_experts"]["start"], decoded(choice["routed_experts"])))
        return parse(raw)

    monkeypatch.setattr(renderers.client, "parse_generate_response", keep)
    return found


def decoded(rows):
    return np.frombuffer(base64.b64decode(rows["data"]), rows["dtype"]).reshape(rows["shape"])


def post(url, **body):
    answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=100)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_pool_is_ready_with_its_model(pool):
    async def main():
        await pool.wait_for_ready("policy")
        with pytest.raises(ValueError, match="Model other was not found"):
            await pool.wait_for_ready("other")

    run(main())


def test_prefill_scores_are_the_logprobs_of_the_prompt(served, pool):
    ids = [5, 9, 3, 7, 11, 40, 41]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    meta = httpx.post(f"{served[0]}/generate", json=body, timeout=100).json()["meta_info"]
    scores = run(pool.score(ids))
    assert scores[0] == 0 and np.allclose(
        scores[1:], [entry[0] for entry in meta["input_token_logprobs"][1:]], atol=1e-4
    )


def test_the_turns_of_a_rollout_are_a_sample_with_rows(served, pool, sent):
    """The second and third turn are bridged: they ask for the rows from their first new token on."""

    async def main():
        rollout = Rollout(pool, max_tokens=12, min_tokens=12, extra_body={"cache_salt": "1"})
        for text in ("The sea is", "and the sky", "and the sand"):
            response = await rollout.turn(text)
            assert response.finish_reason == "length" and response.usage.completion_tokens == 12
        return rollout

    rollout = run(main())
    sample, rows = rollout.sample()
    assert rows.dtype == np.uint8 and rows.shape == (len(sample.token_ids), NUM_LAYERS, TOP_K)
    assert sum(sample.mask) == 36 and (np.array(sample.logprobs)[sample.mask] < 0).all()
    assert [body["cache_salt"] for body in rollout.bodies] == ["1"] * 3, "a salt a policy"
    starts = [start for start, _ in sent]
    assert starts[0] == 0 < starts[1] < starts[2] and len(sent) == 3
    for (start, array), end in zip(sent, [*starts[1:], len(rows) - 1], strict=True):
        assert end - start > 12 and len(array) >= end - start
        first = start + (start > 0)  # a turn's last token has no row; verifiers repeats the one before
        assert np.array_equal(rows[first:end], array[first - start : end - start])
    fresh = decoded(
        post(served[0], token_ids=sample.token_ids, sampling_params={"max_tokens": 1})["choices"][0]["routed_experts"]
    )
    agree = [np.sort(one) == np.sort(two) for one, two in ((rows[:-1], fresh[:-1]), (rows[:-1], fresh[1:]))]
    assert agree[0].mean() > 0.98 > 0.7 > agree[1].mean(), "rows stand at their tokens"


def test_a_prompt_that_is_too_long_is_refused_before_it_is_sent(pool):
    async def main():
        rollout = Rollout(pool, max_tokens=4)
        with pytest.raises(ProviderError, match="exceeds maximum context length") as error:
            await rollout.turn("sea " * serving.CONTEXT)
        assert error.value.status_code == 400 and rollout.bodies == []

    run(main())


def test_weights_change_while_rollouts_run(served, pool, sent):
    """As prime-rl's orchestrator: pause and keep what runs, load, resume. Every rollout goes on and is whole."""
    url, weights = served

    async def main():
        rollouts = [Rollout(pool, max_tokens=200, min_tokens=200, extra_body={"cache_salt": "0"}) for _ in range(16)]
        tasks = [asyncio.create_task(rollout.turn(f"Story {number}")) for number, rollout in enumerate(rollouts)]
        async with httpx.AsyncClient(base_url=url) as http:
            while (await http.get("/v1/loads?include=core")).json()["aggregate"]["total_running_reqs"] < 1:
                assert not any(task.done() for task in tasks)
        for step in (1, 2):
            await pool.update_weights(Path(weights), step=step)
        assert not all(task.done() for task in tasks)
        return rollouts, await asyncio.gather(*tasks)

    before = httpx.get(f"{url}/get_weight_version").json()
    rollouts, responses = run(main())
    assert all(response.usage.completion_tokens == 200 for response in responses)
    for rollout in rollouts:
        sample, rows = rollout.sample()
        assert len(rows) == len(sample.token_ids) and sum(sample.mask) == 200
    assert httpx.get(f"{url}/get_weight_version").json() != before
    assert (Path(weights) / client.NCCL_READY_MARKER).is_file(), "it writes into the folder before the server reads it"


def test_an_evaluation_chats(pool):
    """verifiers' client of evaluations passes the harness's requests on, whole or streamed."""
    tool = {"name": "look", "description": "look", "parameters": {"type": "object", "properties": {}}}
    body = {"model": "policy", "messages": [{"role": "user", "content": "The sea is"}], "max_tokens": 8}
    body |= {"tools": [{"type": "function", "function": tool}], "temperature": 0}

    async def main():
        evaluation = resolve_client(pool.eval_client)
        whole = await evaluation.get_response(ChatDialect(), body, vf.SamplingConfig(), session_id="one")
        reply = await evaluation.relay(ChatDialect(), {**body, "stream": True}, session_id="one")
        parser = ChatDialect().stream_parser()
        async for chunk in reply.chunks:
            parser.feed(chunk)
        await reply.close()
        return whole, parser.finish()

    whole, streamed = run(main())
    assert whole.message.content == streamed.message.content != "" and whole.finish_reason == "length"


def test_a_refused_folder_is_an_error_at_once_and_the_server_goes_on(served, pool, tmp_path):
    with pytest.raises(httpx.HTTPStatusError) as error:
        run(pool.update_weights(tmp_path / "elsewhere", step=3), limit_s=20)
    assert error.value.response.status_code == 400
    assert httpx.get(f"{served[0]}/is_paused").json()["is_paused"] is False
    assert post(served[0], token_ids=[5, 9], sampling_params={"max_tokens": 2})["choices"][0]["token_ids"]


def test_adapters_are_refused_at_once(pool, tmp_path):
    with pytest.raises(httpx.HTTPStatusError) as error:
        run(pool.update_weights(tmp_path, lora_name="adapter"), limit_s=20)
    assert error.value.response.status_code == 400 and "adapter" in error.value.response.text


def test_the_controller_reads_the_load(served, pool):
    """Of its fields, those that an engine of vLLM gives."""
    loads = []
    collector = inference_metrics.InferenceMetricsCollector(
        pool.admin_clients, on_load=lambda samples: loads.extend(samples), log_to_wandb=False
    )

    async def main():
        assert await collector.probe()
        params = {"max_tokens": 1000, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=served[0], timeout=100) as http:
            body = {"token_ids": [5, 9], "sampling_params": params}
            task = asyncio.create_task(http.post("/inference/v1/generate", json=body))
            while loads[-1].running == 0:
                assert not task.done()
                await collector.collect_and_log()
            await task

    run(main())
    (first, *_, last) = loads
    assert first.kv_capacity_tokens == serving.POOL and first.max_model_len == serving.CONTEXT
    assert (first.running, first.waiting, first.preemptions_delta) == (0, 0, 0) and last.running == 1
    assert 0 < last.kv_usage < 1 and last.waiting_capacity == 0
