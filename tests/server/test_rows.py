"""Rows beyond the usual: that of the last token, and byte ranges of stored rows."""

import concurrent.futures
import json

import ml_dtypes
import numpy as np
import pytest

from routed_experts.core.io_struct import RoutingOptions
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats import record_from_npy, record_from_response
from routed_experts.formats.wire import encode_rows
from routed_experts.server.limits import MAX_EVENT_PAYLOAD
from routed_experts.server.routing.response import payload_bytes, split_for_events
from support.engines import on_engine_thread
from support.http_server import parse_error, stream

PROMPT = "the router scores every expert"


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
@pytest.mark.parametrize("max_tokens", [0, 7])
def test_the_last_token_has_its_row_if_requested(server, path, max_tokens):
    options = {"return_routed_experts": True, "routed_experts_include_last": True}
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "n": 2, "seed": 11, "ignore_eos": True}
    if path == "/generate":
        body = {
            "text": PROMPT,
            "sampling_params": {"max_new_tokens": max_tokens, "n": 2, "sampling_seed": 11, "ignore_eos": True},
        }
    for streamed in (False, True):
        output = (
            stream(server, path, {**body, **options}) if streamed else server.post(path, {**body, **options}).json()
        )
        if path == "/generate":
            ended = [event for event in output if event["meta_info"]["finish_reason"]]
        else:
            ended = [
                {"choices": [choice]}
                for event in (output if streamed else [output])
                for choice in event["choices"]
                if "meta_info" in choice
            ]
        records = [
            record_from_response(event, event["choices"][0]["index"] if "choices" in event else 0) for event in ended
        ]
        assert len(records) == 2
        for event, record in zip(ended, records, strict=True):
            meta = event.get("meta_info") or event["choices"][0]["meta_info"]
            assert record.num_rows == record.num_tokens == record.num_prompt_tokens + max_tokens
            assert meta["routed_experts_info"]["include_last"] is True


@pytest.mark.parametrize("form", ["int32", "npy", "list", "ref"])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_an_abort_before_the_first_token_leaves_no_rows(server, engine, path, form):
    rid = f"held-{form}-{path.rpartition('/')[2]}"
    named = {"text": PROMPT, "rid": rid} if path == "/generate" else {"prompt": PROMPT, "request_id": rid}
    body = {**named, "return_routed_experts": True, "routed_experts_format": form}
    engine.pause(mode="in_place")
    try:
        with server.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert server.post("/abort_request", {"rid": rid}).json()["aborted"] == 1
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    finally:
        engine.resume()
    last = json.loads(lines[-1])
    holder = last["choices"][0] if "choices" in last else last
    meta = holder["meta_info"]
    info = meta.get("routed_experts_info") or holder["routed_experts_info"]
    assert info["shape"][0] == 0 and info["num_tokens"] == info["num_prompt_tokens"]
    if form == "ref":
        stored = server.client.get(meta["routed_experts_ref"])
        record = record_from_npy(stored.content, json.loads(stored.headers["x-routed-experts-info"]))
        assert record.num_rows == 0 and record.num_tokens == info["num_tokens"]
        assert server.client.delete(meta["routed_experts_ref"].partition("?")[0]).status_code in (200, 204)
    else:
        assert meta.get("routed_experts", holder.get("routed_experts")) is None
        assert record_from_response(last) is None


@pytest.mark.parametrize("mode", ["full", "stream", "stream of rows"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_the_prompt_is_described_by_the_first_choice_with_a_token(server, engine, path, mode):
    sampling = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "n": 2}
    sampling |= {"prompt_logprobs": 1} if mode == "full" else {}
    body = {
        "/v1/completions": {"prompt": PROMPT, **sampling},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], **sampling},
        "/inference/v1/generate": {"token_ids": [5, 6, 7, 8], "sampling_params": sampling},
    }[path]
    options = {"return_routed_experts": True, "routed_experts_format": "list"}
    options |= {"routed_experts_stream": True} if mode == "stream of rows" else {}

    def answers(rid):
        call = {**body, **options, "request_id": rid}
        return [server.post(path, call).json()] if mode == "full" else stream(server, path, call)

    whole = answers("whole")
    engine.pause(mode="in_place")
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            call = pool.submit(answers, "held")
            while on_engine_thread(engine, lambda core: core.request_table.num_live) < 2:
                assert not call.done(), call.result()
            assert server.post("/abort_request", {"rid": "held-0"}).json()["aborted"] == 1
            engine.resume()
            output = call.result(30)
    finally:
        engine.resume()
    choices = [choice for part in output for choice in part["choices"]]
    assert {choice["index"]: choice["finish_reason"] for choice in choices} == {0: "abort", 1: "length"}
    (expected,) = (part["prompt_routed_experts"] for part in whole if "prompt_routed_experts" in part)
    (rows,) = (part["prompt_routed_experts"] for part in output if "prompt_routed_experts" in part)
    assert rows == expected and rows, "once, and not null before"
    if mode == "full":
        record = record_from_response(output[0], 1)
        assert record == record_from_response(whole[0], 1) and record_from_response(output[0], 0) is None
        described, same = (part[0]["choices"][1] if path == "/v1/completions" else part[0] for part in (output, whole))
        assert described["prompt_logprobs"] == same["prompt_logprobs"] and described["prompt_logprobs"]


def test_parts_of_a_ref_join_to_the_whole(server):
    body = {
        "prompt": PROMPT,
        "max_tokens": 7,
        "return_routed_experts": True,
        "routed_experts_format": "ref",
        "request_id": "parts",
    }
    url = server.post("/v1/completions", body).json()["choices"][0]["meta_info"]["routed_experts_ref"]
    whole = server.client.get(url)
    size, tag = len(whole.content), whole.headers["etag"]
    assert whole.headers["accept-ranges"] == "bytes"

    def part(byte_range, **headers):
        return server.client.get(url, headers={"range": byte_range, **headers})

    for byte_range, first, last in (
        ("bytes=0-99", 0, 99),
        ("bytes=9-", 9, size - 1),
        ("bytes=-30", size - 30, size - 1),
        ("bytes=5-5", 5, 5),
        (f"bytes=50-{size + 9}", 50, size - 1),
        (f"bytes=-{size + 9}", 0, size - 1),
    ):
        response = part(byte_range, **{"if-range": tag})
        assert response.status_code == 206 and response.content == whole.content[first : last + 1], byte_range
        assert response.headers["content-range"] == f"bytes {first}-{last}/{size}"
        assert int(response.headers["content-length"]) == last - first + 1
        assert response.headers["etag"] == tag and "x-routed-experts-info" in response.headers
    for byte_range in ("bytes=0-1,5-6", "rows=0-1", "bytes=9-5", "bytes=-", "bytes=a-b", "bytes=\u0665-"):
        assert part(byte_range.encode()).content == whole.content, byte_range
    assert part("bytes=0-1", **{"if-range": '"another"'}).status_code == 200
    for byte_range in (f"bytes={size}-", "bytes=-0", "bytes=999999999999999999-"):
        refused = part(byte_range)
        assert (
            parse_error(refused, 416)["code"] == "range_not_satisfiable"
            and refused.headers["content-range"] == f"bytes */{size}"
        )
    assert server.client.head(url, headers={"range": "bytes=0-1"}).headers["content-length"] == str(size)
    server.client.delete("/v1/routing/parts")


def make_record(num_rows, *, num_experts, weights_dtype):
    """Random rows of eight layers, of which two are dense; those of half the tokens are of the prompt."""
    random = np.random.default_rng(num_experts)
    ids = random.permuted(np.tile(np.arange(num_experts - 8, num_experts), (num_rows, 6, 1)), axis=-1)
    weights = random.standard_normal(ids.shape) * 10.0 ** random.integers(-30, 30, ids.shape)
    return RoutedExperts(
        ids=ids.astype(np.uint8 if num_experts <= 256 else np.uint16),
        start=0,
        num_tokens=num_rows + 1,
        num_prompt_tokens=num_rows // 2,
        layer_ids=(1, 2, 3, 4, 5, 7),
        num_hidden_layers=8,
        num_experts=num_experts,
        version_spans=((0, num_rows, 0),),
        weights=None if weights_dtype is None else weights.astype(weights_dtype),
    )


@pytest.mark.parametrize("weights_dtype", [None, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("num_experts", [128, 300])
@pytest.mark.parametrize("layers", ["all", "moe"])
@pytest.mark.parametrize("form", ["int32", "npy", "packed", "list"])
def test_no_event_of_streamed_rows_is_above_the_limit(form, layers, num_experts, weights_dtype):
    """Sizes are those of the JSON; of lists, and of the keys of a packed payload, they are upper bounds."""
    record = make_record(1200, num_experts=num_experts, weights_dtype=weights_dtype)
    options = RoutingOptions(enabled=True, format=form, layers=layers, stream=True)
    parts = split_for_events(record, options)
    assert np.array_equal(np.concatenate([part.ids for part in parts]), record.ids)
    for part in parts:
        fields = encode_rows(part, options)
        values = [value for name, value in fields.items() if name != "routed_experts_info"]
        texts = [value if isinstance(value, str) else json.dumps(value, separators=(",", ":")) for value in values]
        size = sum(map(len, texts))
        assert size <= payload_bytes(part, options) <= MAX_EVENT_PAYLOAD
        if form in ("int32", "npy"):
            assert size == payload_bytes(part, options)
    assert (
        payload_bytes(record[: parts[0].num_rows + 1], options) > MAX_EVENT_PAYLOAD
    )  # no part is smaller than it may be


@pytest.mark.parametrize("form", ["int32", "npy", "list"])
def test_rows_are_counted_as_they_are_sent_by_every_route(server, form):
    def count():
        name = f'routed_experts_capture_payload_bytes_total{{format="{form}"}}'
        lines = server.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    options = {"return_routed_experts": True, "routed_experts_format": form, "routed_experts_layers": "all"}
    for path, body in (
        ("/v1/score", {"token_ids": list(range(3, 40))}),
        ("/v1/completions", {"prompt": list(range(3, 40)), "max_tokens": 0}),
    ):
        before = count()
        answer = server.post(path, {**body, **options}).json()
        holder = answer["data"][0] if path == "/v1/score" else answer["choices"][0]
        rows = holder["meta_info"]["routed_experts"] if form == "int32" else holder["routed_experts"]
        size = len(rows) if isinstance(rows, str) else len(json.dumps(rows, separators=(",", ":")))
        if form == "list":
            prompt = holder.get("prompt_routed_experts") or answer.get("prompt_routed_experts")
            assert size + len(json.dumps(prompt, separators=(",", ":"))) <= count() - before
        else:
            assert count() - before == size
