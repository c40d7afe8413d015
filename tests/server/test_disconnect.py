"""A client that leaves ends its request: queued, in prefill, in decode, streamed or not, by close or by reset. A client
that stays but does not read, or takes too long, harms no other."""

import contextlib
import json
import random
import socket
import struct
import threading
import time

import httpx
import numpy as np
import pytest

from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.server import sse
from routed_experts.server.http_protocol import LimitedProtocol
from routed_experts.server.routing_store import StoredRows
from support.engines import assert_idle, on_engine_thread
from support.http_server import parse_error, running, stream

LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
TRIALS = 50  # of each of the six kinds


def connect(server):
    return socket.create_connection(server.address, timeout=30)


def send(wire, path, body):
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    wire.sendall(head.encode() + content)


def leave(wire, *, reset):
    if reset:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.close()


def accepted(engine):
    return on_engine_thread(engine, lambda core: core.request_table.accepted)


def wait_accepted(engine, count):
    """Until the engine has accepted `count` requests; each look waits for a step."""
    while accepted(engine) < count:
        continue


def assert_gone(server, engine):
    """Once the server has nothing open the engine has nothing left, one command later."""
    server.wait_idle()
    assert_idle(engine)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_client_that_leaves_frees_everything(server, engine, phase, streamed):
    rng = random.Random(f"{phase}{streamed}")
    with contextlib.ExitStack() as stack:
        if phase == "queued":  # four others hold every slot
            for number in range(4):
                other = stack.enter_context(connect(server))
                send(other, "/v1/completions", {"prompt": [5 + number] * 20, **LONG, "max_tokens": 480, "stream": True})
                assert b"data: " in other.recv(65536) or b"data: " in other.recv(65536)
        for trial in range(TRIALS):
            before = accepted(engine)
            wire = connect(server)
            prompt = [rng.randrange(3, 300) for _ in range(300 if phase == "prefill" else 10)]
            path = ("/v1/completions", "/v1/chat/completions", "/generate")[trial % 3]
            output = {
                "/v1/completions": {"prompt": prompt, **LONG, "max_tokens": 150},
                "/v1/chat/completions": {
                    "messages": [{"role": "user", "content": "a " * (len(prompt) // 2)}],
                    "ignore_eos": True,
                },
                "/generate": {"input_ids": prompt, "sampling_params": {"max_new_tokens": 150, "ignore_eos": True}},
            }[path]
            send(wire, path, {**output, "stream": streamed, "return_routed_experts": trial % 2 == 0})
            wait_accepted(engine, before + 1)
            if phase == "decode" and streamed:
                text = b""
                while text.count(b"data: ") < 3:
                    text += wire.recv(65536)
            leave(wire, reset=trial % 2 == 1)
    assert_gone(server, engine)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_half_a_request_is_given_up(server, engine):
    head = b"POST /generate HTTP/1.1\r\n"
    for part in (head, head + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"):
        for reset in (False, True):
            wire = connect(server)
            wire.sendall(part)
            leave(wire, reset=reset)
    assert_gone(server, engine)


def test_a_reader_that_does_not_read_is_aborted_and_the_others_are_served(engine):
    with running(engine) as server:
        slow = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(server.address)
        before = on_engine_thread(engine, lambda core: core.request_table.finished.get("abort", 0))
        body = {
            "input_ids": [5] * 8,
            "sampling_params": {"n": 4, "max_new_tokens": 480, "ignore_eos": True},
            "stream": True,
        }
        send(
            slow, "/generate", {**body, "return_logprob": True, "top_logprobs_num": 20}
        )  # cumulative: far more than any buffer holds
        for _ in range(3):
            assert (
                stream(server, "/v1/completions", {"prompt": "a", **LONG})[-1]["choices"][0]["finish_reason"]
                == "length"
            )
        leave(slow, reset=True)
        assert_gone(server, engine)
        ended = on_engine_thread(engine, lambda core: dict(core.request_table.finished))
        assert ended.get("abort", 0) > before


def slow_reader(server):
    """A connection whose reader takes next to nothing."""
    slow = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.settimeout(30)
    slow.connect(server.address)
    return slow


def num_bytes_left(wire):
    """Bytes to read until the end, which may be a reset."""
    count = 0
    with contextlib.suppress(ConnectionResetError):
        while chunk := wire.recv(65536):
            count += len(chunk)
    return count


def keep_rows(server, name, num_bytes):
    """Put rows of this size into the server's store."""
    record = RoutedExperts(
        ids=np.zeros((num_bytes // 8, 1, 8), np.uint8),
        start=0,
        num_tokens=num_bytes // 8 + 1,
        num_prompt_tokens=1,
        layer_ids=(0,),
        num_hidden_layers=1,
        num_experts=256,
        version_spans=((0, num_bytes // 8, 0),),
    )
    store, rows = (
        server.state.store,
        StoredRows(record=record, token_ids=np.zeros(record.num_tokens, np.int32), owner=""),
    )
    server.loop.call_soon_threadsafe(lambda: store.fill(store.reserve(name, owner="", choices=[0]), 0, rows))


HUGE = {
    "input_ids": [5] * 8,
    "sampling_params": {"n": 4, "max_new_tokens": 480, "ignore_eos": True},
    "return_logprob": True,
    "top_logprobs_num": 20,
}


LARGE = 32 << 20  # more than the system's own buffers of a connection hold


@pytest.mark.parametrize("streamed", [False, True])
def test_a_reader_that_stays_and_never_reads_is_cut_off(engine, streamed, monkeypatch):
    """Its own end stays open; a pool of one connection shows when the server's is gone."""
    monkeypatch.setattr(LimitedProtocol, "write_timeout_s", 0.3)
    monkeypatch.setattr(LimitedProtocol, "max_connections", 1)
    with running(engine) as server, slow_reader(server) as slow:
        if streamed:
            before = accepted(engine)
            send(slow, "/generate", {**HUGE, "stream": True})
            wait_accepted(engine, before + 1)
        else:
            keep_rows(server, "large", LARGE)
            slow.sendall(b"GET /v1/routing/large HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n")
            assert slow.recv(12) == b"HTTP/1.1 200"
        while (answer := httpx.get(server.url + "/health/live", trust_env=False)).status_code == 503:
            assert parse_error(answer, 503)["code"] == "too_many_connections" and answer.headers["retry-after"]
        assert answer.status_code == 200
        assert_gone(server, engine)
        assert num_bytes_left(slow) < LARGE


def test_a_reader_that_is_slow_but_reads_gets_it_all(engine, monkeypatch):
    """It is behind for four times the deadline, and in each it takes enough."""
    monkeypatch.setattr(LimitedProtocol, "write_timeout_s", 0.5)
    with running(engine) as server, slow_reader(server) as slow:
        keep_rows(server, "large", LARGE // 2)
        slow.sendall(b"GET /v1/routing/large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        count, silence, start_time = 0, threading.Event(), time.monotonic()
        while chunk := slow.recv(65536):
            count += len(chunk)
            if time.monotonic() - start_time < 2.0:
                silence.wait(0.002)
        assert count > LARGE // 2, "no byte is missing"


def test_a_stream_that_is_not_read_has_an_end(engine, monkeypatch):
    """The deadline of the whole stream holds where that of a single write does not."""
    monkeypatch.setattr(sse, "STREAM_GRACE_S", 0.2)
    with running(engine, request_timeout=1.0) as server, slow_reader(server) as slow:
        before = accepted(engine)
        send(slow, "/generate", {**HUGE, "stream": True})
        wait_accepted(engine, before + 1)
        assert_gone(server, engine)


def test_a_request_that_takes_too_long_is_a_408(engine):
    release = threading.Event()
    with running(engine, request_timeout=0.3) as server:
        blocker = threading.Thread(target=on_engine_thread, args=(engine, lambda core: release.wait(30)))
        blocker.start()
        try:
            assert (
                parse_error(server.post("/v1/completions", {"prompt": "a", **LONG}), 408)["code"] == "request_timeout"
            )
            assert (
                parse_error(server.post("/generate", {"text": "a", "stream": True}), 408)["code"] == "request_timeout"
            )
            assert server.client.get("/health/live").status_code == 200, "probes never enter the engine's thread"
        finally:
            release.set()
            blocker.join()
        assert_gone(server, engine)


def test_a_step_that_is_stuck_shows_in_health_and_recovers(engine):
    release, stuck = threading.Event(), threading.Event()

    def block(core):
        stuck.set()
        release.wait(30)

    with running(engine, stall_timeout=0.2) as server, connect(server) as wire:
        send(wire, "/v1/completions", {"prompt": "a", **LONG, "max_tokens": 480, "stream": True})
        assert wire.recv(100)
        blocker = threading.Thread(target=on_engine_thread, args=(engine, block))
        blocker.start()
        try:
            assert stuck.wait(10)
            while (answer := server.client.get("/health")).status_code == 200:  # until stall_timeout has gone by
                assert answer.json()["state"] == "serving"
            assert (answer.status_code, answer.json()["state"]) == (503, "stalled")
            assert server.client.get("/health/live").status_code == 200
        finally:
            release.set()
            blocker.join()
        while b"[DONE]" not in wire.recv(65536):
            continue
        assert server.client.get("/health").json()["state"] == "serving"
        assert_gone(server, engine)


def test_a_full_queue_is_a_429_with_retry_after(engine):
    with running(engine) as server:
        scheduler = engine.components.core.ranks[0]
        limit = scheduler._args.max_queued_requests
        half = {"prompt": [[5]] * (limit // 8), "n": 4, "max_tokens": 1}
        engine.pause(mode="in_place")
        try:
            with connect(server) as first:
                before = accepted(engine)
                send(first, "/v1/completions", half)
                wait_accepted(engine, before + limit // 2)
                more = {**half, "n": 5}
                response = server.post("/v1/completions", more)
                assert parse_error(response, 429)["code"] == "queue_full" and response.headers["retry-after"]
                response = server.post("/v1/completions", {**more, "stream": True})
                assert parse_error(response, 429), "before the stream begins"
        finally:
            engine.resume()
        server.wait_idle()
    assert_idle(engine)


def test_a_call_that_no_queue_holds_is_a_400(engine):
    with running(engine) as server:
        limit = engine.components.core.ranks[0]._args.max_queued_requests
        bodies = {"prompt": [[5]] * 256, "n": limit // 256 + 1, "max_tokens": 1}
        for stream in (False, True):
            error = parse_error(server.post("/v1/completions", {**bodies, "stream": stream}), 400)
            assert error["param"] == "n" and f"max_queued_requests={limit}" in error["message"]
    assert_idle(engine)


COUNTERS = ("prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_count")


def read_counters(server):
    lines = server.client.get("/metrics").text.splitlines()
    return [
        float(line.rpartition(" ")[2])
        for name in COUNTERS
        for line in lines
        if line.startswith(f"routed_experts_{name}")
    ]


def counters_after(server, before):
    """Once another call has been counted: the engine's last output comes after the connection has gone."""
    server.wait_idle()
    deadline = time.monotonic() + 30
    while (now := read_counters(server))[2] == before[2]:
        assert time.monotonic() < deadline
    return now


@pytest.mark.parametrize("is_stream", [True, False])
def test_what_a_client_leaves_is_counted(engine, is_stream):
    with running(engine) as server:
        prompt, generated, calls = read_counters(server)
        before = accepted(engine)
        with connect(server) as wire:
            send(wire, "/v1/completions", {"prompt": [5, 6, 7], "stream": is_stream, **LONG})
            wait_accepted(engine, before + 1)
            if is_stream:
                while b"data: " not in wire.recv(65536):
                    continue
        now = counters_after(server, (prompt, generated, calls))
        assert now[0] == prompt + 3 and now[2] == calls + 1
        assert not is_stream or now[1] > generated
        assert_gone(server, engine)


def test_what_a_client_leaves_is_counted_beside_a_choice_that_fails(engine):
    """The first choice ends with an error: a row of it is not known."""

    def forget_a_row(core):
        """Of the first choice; False before it is there."""
        first, _ = sorted(core.ranks.running, key=lambda req: req.source.choice)
        if first.num_committed < 6:
            return False
        core.capturers[0].host_cache.clear(core.ranks[0].pages.kv_slots(first, 4, 5))
        return True

    with running(engine) as server:
        counters, before = read_counters(server), accepted(engine)
        with connect(server) as wire:
            body = {"prompt": [5, 6, 7], "stream": True, "n": 2, "return_routed_experts": True}
            send(wire, "/v1/completions", {**body, **LONG, "temperature": 1.0})
            wait_accepted(engine, before + 2)
            while b"data: " not in wire.recv(65536):
                continue
            while not on_engine_thread(engine, forget_a_row):
                continue
        now = counters_after(server, counters)
        assert now[0] == counters[0] + 3 and now[1] > counters[1] and now[2] == counters[2] + 1
        assert_gone(server, engine)
    engine.flush_cache()


def test_a_broken_invariant_turns_the_server_degraded_and_it_goes_on_serving(engine):
    with running(engine) as server:
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        lost = on_engine_thread(
            engine, lambda core: core.ranks[0].pages.allocator.allocate(1)
        )  # a page without an owner
        try:
            server.state.integrity._next_check = 0  # a second has gone by
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
            while (answer := server.client.get("/health")).status_code == 200:  # until it has looked
                continue
            assert answer.json()["state"] == "degraded" and answer.json()["broken"]
            assert (
                server.client.get("/health/live").status_code == 200 and server.client.get("/ready").status_code == 503
            )
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
            assert 'routed_experts_invariant_violations_total{name="' in server.client.get("/metrics").text
        finally:
            on_engine_thread(engine, lambda core: core.ranks[0].pages.allocator.free(lost))
    assert_idle(engine)
