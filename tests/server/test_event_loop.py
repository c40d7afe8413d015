"""The event loop stays free: what is large is done in threads, what waits long in threads of its own, and nothing is
done twice."""

import contextlib
import io
import json
import threading

import numpy as np
import pytest

from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.server.limits import INLINE_BYTES, MAX_UNKNOWN_NAMES, MAX_WAITING_PAUSES
from routed_experts.server.routing import routes
from routed_experts.server.routing_store import StoredRows
from support.engines import on_engine_thread
from support.http_server import parse_error, stream

FILLER = {"user": "x" * INLINE_BYTES}  # a body of this size is large, whatever its other fields


@pytest.fixture
def seen(monkeypatch):
    """(what, thread) of each call of the tokenizer and of the codec, which do their work all the same."""
    calls = []

    def watch(owner, name):
        real = getattr(owner, name)

        def recording(*args, **kwargs):
            calls.append((name, threading.get_ident()))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, recording)

    for name in ("encode", "decode", "token_string"):
        watch(Tokenizer, name)
    watch(routes, "npy_bytes")
    return calls


def loop_thread(server):
    """The thread of the server's event loop."""
    threads, done = [], threading.Event()
    server.loop.call_soon_threadsafe(lambda: (threads.append(threading.get_ident()), done.set()))
    assert done.wait(10)
    return threads[0]


@pytest.mark.parametrize(
    ("path", "body", "work"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "add_special_tokens": False}, "encode"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}, "encode"),
        ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 0, "echo": True}, "decode"),
        ("/tokenize", {"prompt": "a b c", "return_token_strs": True}, "encode"),
        ("/tokenize", {"prompt": "a b c", "return_token_strs": True}, "token_string"),
        ("/detokenize", {"tokens": [5, 6]}, "decode"),
    ],
)
def test_text_of_a_large_body_is_not_the_event_loops_work(server, seen, path, body, work):
    events = loop_thread(server)
    for filler, is_large in (({}, False), (FILLER, True)):
        seen.clear()
        response = server.post(path, {**body, **filler})
        assert response.status_code == 200, response.text
        threads = [thread for name, thread in seen if name == work]
        assert threads, "the work was done"
        if is_large:
            assert events not in threads
        elif path != "/v1/completions" or work == "encode":  # other threads decode what was generated
            assert events in threads, "small ones need no thread"


def test_too_many_prompts_are_refused_before_any_is_tokenised(server, seen):
    for special in (None, False):
        error = parse_error(
            server.post("/v1/completions", {"prompt": ["a"] * 1025, "add_special_tokens": special}), 400
        )
        assert error["param"] == "prompt" and "1024" in error["message"]
    assert not [name for name, _ in seen if name == "encode"]


def stored_rows(num_rows):
    record = RoutedExperts(
        ids=np.arange(num_rows * 8, dtype=np.uint32).astype(np.uint8).reshape(num_rows, 1, 8),
        start=0,
        num_tokens=num_rows + 1,
        num_prompt_tokens=1,
        layer_ids=(0,),
        num_hidden_layers=1,
        num_experts=256,
        version_spans=((0, num_rows, 0),),
    )
    return StoredRows(record=record, token_ids=np.zeros(num_rows + 1, np.int32), owner="")


@pytest.mark.parametrize("num_rows", [10, INLINE_BYTES])
def test_rows_to_fetch_are_encoded_once_for_their_headers(server, seen, num_rows):
    store, rows = server.state.store, stored_rows(num_rows)
    server.loop.call_soon_threadsafe(lambda: store.fill(store.reserve("kept", owner="", choices=[0]), 0, rows))
    head = server.client.head("/v1/routing/kept")
    same = server.client.get("/v1/routing/kept", headers={"if-none-match": head.headers["etag"]})
    again = server.client.head("/v1/routing/kept")
    assert (head.status_code, same.status_code, again.headers["etag"]) == (200, 304, head.headers["etag"])
    assert len(seen) == 1, "the first alone encodes"
    whole = server.client.get("/v1/routing/kept")
    assert int(head.headers["content-length"]) == len(whole.content) and whole.headers["etag"] == head.headers["etag"]
    assert np.array_equal(np.load(io.BytesIO(whole.content)), rows.record.ids)
    assert (loop_thread(server) in {thread for _, thread in seen}) == (num_rows == 10), (
        "large rows are encoded in a thread"
    )
    assert json.loads(head.headers["x-routed-experts-info"]) == json.loads(whole.headers["x-routed-experts-info"])
    assert server.client.delete("/v1/routing/kept").status_code == 204


def test_a_name_too_many_is_refused_at_once(server):
    unknown = {f"zz{number:03d}_{'y' * 50}": 1 for number in range(MAX_UNKNOWN_NAMES + 1)}
    error = parse_error(server.post("/generate", {"text": "a", **unknown}), 400)
    assert error["code"] == "too_many_fields"
    unknown.popitem()
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1}, **unknown, "nothing": None}
    assert server.post("/generate", body).status_code == 200


def test_pauses_that_wait_block_no_other_thread(server, engine):
    """More of them than the shared pool has threads; other calls are answered meanwhile, and one too many is
    refused."""
    answers = []

    def pause():
        answers.append(server.post("/pause_generation", {"mode": "wait"}).status_code)

    body = {
        "input_ids": [5],
        "sampling_params": {"max_new_tokens": 480, "ignore_eos": True},
        "stream": True,
        "rid": "long",
    }
    release, stuck = threading.Event(), threading.Event()

    def block(core):
        stuck.set()
        release.wait(60)

    with server.client.stream("POST", "/generate", json=body) as response, contextlib.ExitStack() as stack:
        lines = response.iter_lines()
        next(lines)
        blocker = threading.Thread(target=on_engine_thread, args=(engine, block))
        blocker.start()
        stack.callback(blocker.join)
        stack.callback(release.set)
        assert stuck.wait(10)
        threads = [threading.Thread(target=pause) for _ in range(MAX_WAITING_PAUSES)]
        for thread in threads:
            thread.start()
        while server.state.pause_executor.num_running < MAX_WAITING_PAUSES:
            assert server.client.get("/health/live").status_code == 200
        assert server.client.get("/metrics", timeout=5).status_code == 200
        assert server.post("/tokenize", {"prompt": "a", **FILLER}, timeout=5).status_code == 200
        assert parse_error(server.post("/pause_generation", {"mode": "wait"}), 503)["code"] == "too_many_requests"
        release.set()
        assert [line for line in lines if line][-1] == "data: [DONE]"
        for thread in threads:
            thread.join(20)
    assert answers == [200] * MAX_WAITING_PAUSES and engine.paused == "wait"
    assert server.post("/continue_generation", {}).status_code == 200
    assert stream(server, "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}})
