"""Prompt rows of format list, which all choices share: a choice that was prefilled by other weights has its own.

One request runs at a time, and weights are pushed while the first of two choices runs. The oracle of the second choice
is the same request on its own under the new weights."""

import concurrent.futures
import json
import time

import numpy as np
import pytest

from routed_experts import LLM, SamplingParams
from routed_experts.engine.loop.core import PauseMode
from routed_experts.formats import record_from_response
from support.engines import on_engine_thread, open_engine
from support.http_server import running
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

IDS = [5, 9, 3, 7, 11, 40, 41]
OPTIONS = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
BODIES = {
    "/v1/completions": {"prompt": IDS, **OPTIONS, "return_token_ids": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "How do experts work?"}],
        **OPTIONS,
        "return_token_ids": True,
    },
    "/inference/v1/generate": {"token_ids": IDS, "sampling_params": OPTIONS},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    for seed in (0, 1):
        write_tiny_checkpoint(root / f"seed{seed}", seed=seed)
    return [root / "seed0", root / "seed1"]


@pytest.fixture(scope="module")
def engine(folders):
    options = dict(enable_return_routed_experts=True, max_running_requests=1, precompile_bs_paddings=(1,))
    with lazy_compilation(), open_engine(folders[0], **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine):
    with running(engine) as server:
        yield server


def pushed_between(engine, folders, call):
    """The result of `call`, a request of two choices, with weights pushed while the first one runs."""
    engine.update_weights_from_disk(str(folders[0]))
    engine.pause(mode="in_place")
    deadline = time.monotonic() + 60

    def begin(core):
        core.resume()
        while max(core.request_table.find(rid).num_output for rid in core.request_table.live()) < 3:
            assert time.monotonic() < deadline
            engine.thread.deliver(core.step().outs)
        core.pause(PauseMode.IN_PLACE)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(call)
        try:
            while on_engine_thread(engine, lambda core: core.request_table.num_live) < 2:
                assert time.monotonic() < deadline and not result.done(), result
            on_engine_thread(engine, begin)
            engine.update_weights_from_disk(str(folders[1]), cache="keep")
        finally:
            engine.resume()
        return result.result(60)


def answers(server, path, n, *, stream=False, **options):
    """The response, or the chunks of a stream."""
    body = {**BODIES[path], "return_routed_experts": True, "routed_experts_format": "list", "stream": stream, **options}
    if "sampling_params" in body:
        body["sampling_params"] = {**body["sampling_params"], "n": n}
    else:
        body["n"] = n
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    if not stream:
        return [response.json()]
    lines = response.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def post(server, path, n, *, streamed=False):
    """The response, or what the chunks of a stream make together."""
    parts = answers(server, path, n, stream=streamed)
    if not streamed:
        return parts[0]
    whole = {"choices": [{"token_ids": []} for _ in range(n)]}
    for chunk in parts:
        whole |= {key: value for key, value in chunk.items() if key != "choices"}
        for part in chunk["choices"]:
            choice = whole["choices"][part["index"]]
            token_ids = choice["token_ids"] + (part.get("token_ids") or [])
            choice |= {key: value for key, value in part.items() if value is not None} | {"token_ids": token_ids}
    return whole


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_choice_of_other_weights_has_its_own_prompt_rows(server, engine, folders, path, streamed):
    engine.update_weights_from_disk(str(folders[0]))
    old = post(server, path, 2)
    assert all("prompt_routed_experts" not in choice for choice in old["choices"])
    whole = pushed_between(engine, folders, lambda: post(server, path, 2, streamed=streamed))
    new = post(server, path, 1)
    first, second = (record_from_response(whole, choice) for choice in range(2))
    before, after = record_from_response(old), record_from_response(new)
    assert not np.array_equal(before.prompt.ids, after.prompt.ids), "the test needs weights that route otherwise"
    assert np.array_equal(first.prompt.ids, before.prompt.ids)
    assert np.array_equal(second.ids, after.ids) and whole["choices"][1]["token_ids"] == new["choices"][0]["token_ids"]
    assert [len(record.version_spans) for record in (first, second)] == [2, 1]
    assert whole["prompt_routed_experts"] == before.prompt.ids.tolist()
    assert whole["choices"][1]["prompt_routed_experts"] == after.prompt.ids.tolist()
    assert "prompt_routed_experts" not in whole["choices"][0]


@pytest.mark.parametrize("path", BODIES)
def test_streamed_rows_of_a_choice_of_other_weights_begin_with_its_own_prompt_rows(server, engine, folders, path):
    engine.update_weights_from_disk(str(folders[0]))
    before = record_from_response(post(server, path, 1))
    chunks = pushed_between(engine, folders, lambda: answers(server, path, 2, stream=True, routed_experts_stream=True))
    after = record_from_response(post(server, path, 1))
    for index, expected in enumerate((before, after)):
        own = [chunk for chunk in chunks if [choice["index"] for choice in chunk["choices"]] == [index]]
        holders = [chunk for chunk in own if "routed_experts_info" in chunk["choices"][0]]
        pieces = [
            record_from_response({**chunk, "choices": [{**chunk["choices"][0], "index": 0}]}) for chunk in holders
        ]
        assert np.array_equal(pieces[0].ids, expected.prompt.ids), "the prompt's rows come with the first token"
        assert [piece.start for piece in pieces[1:]] == list(range(after.num_prompt_tokens, after.num_tokens - 1))
        fields = [("prompt_routed_experts" in chunk, "prompt_routed_experts" in chunk["choices"][0]) for chunk in own]
        assert [pair for pair in fields if any(pair)] == [(index == 0, index == 1)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_choices_that_end_before_their_first_token_have_no_prompt_rows(server, engine, path, stream):
    engine.pause(mode="in_place")
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            result = pool.submit(answers, server, path, 2, stream=stream)
            while on_engine_thread(engine, lambda core: core.request_table.num_live) < 2:
                assert not result.done(), result
            engine.abort(abort_all=True)
            engine.resume()
            parts = result.result(60)
    finally:
        engine.resume()
    fields = [part["prompt_routed_experts"] for part in parts if "prompt_routed_experts" in part]
    assert fields == ([] if stream else [None])
    assert not any("prompt_routed_experts" in choice for part in parts for choice in part["choices"])


def test_prompts_alone_share_their_rows(server):
    body = {"prompt": IDS, "n": 2, "max_tokens": 0, "temperature": 0}
    options = {"return_routed_experts": True, "routed_experts_format": "list"}
    whole = server.post("/v1/completions", {**body, **options}).json()
    records = [record_from_response(whole, choice) for choice in range(2)]
    assert records[0].num_rows == len(IDS) and np.array_equal(records[0].ids, records[1].ids)
    assert all("prompt_routed_experts" not in choice for choice in whole["choices"])


def test_each_output_of_the_llm_has_its_own_prompt_rows(folders):
    with lazy_compilation():
        llm = LLM(str(folders[0]), max_num_seqs=1, enable_return_routed_experts=True)
        params = SamplingParams(n=2, **OPTIONS)
        try:
            (output,) = pushed_between(llm.engine, folders, lambda: llm.generate([IDS], params))
            (new,) = llm.generate([IDS], SamplingParams(n=1, **OPTIONS))
        finally:
            llm.engine.shutdown()
    first, second = output.outputs
    assert np.array_equal(output.prompt_routed_experts, first.prompt_routed_experts)
    assert not np.array_equal(first.prompt_routed_experts, second.prompt_routed_experts)
    for choice, own in ((second, new.outputs[0].record), (first, first.record)):
        joined = np.concatenate([choice.prompt_routed_experts, choice.routed_experts])
        assert np.array_equal(joined, own.ids)
