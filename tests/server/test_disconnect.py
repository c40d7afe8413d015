"""A client that leaves takes its request along: queued, in prefill, in decode, streamed or not, politely or by reset.

And one that stays but does not read, or takes too long, harms nobody."""

import contextlib
import json
import random
import socket
import struct
import threading

import pytest

from http_server import error_of, running, stream
from serving import assert_idle, on_engine_thread

LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
TRIALS = 50  # of each of the six kinds


def connect(server):
    return socket.create_connection(server.address, timeout=30)


def send(wire, path, body):
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    wire.sendall(head.encode() + content)


def leave(wire, *, reset):
    if reset:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.close()


def accepted(engine):
    return on_engine_thread(engine, lambda core: core.ledger.accepted)


def wait_accepted(engine, count):
    """Until the engine has taken in `count` requests; each look waits for a step."""
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
            said = {
                "/v1/completions": {"prompt": prompt, **LONG, "max_tokens": 150},
                "/v1/chat/completions": {"messages": [{"role": "user", "content": "a " * (len(prompt) // 2)}], "ignore_eos": True},
                "/generate": {"input_ids": prompt, "sampling_params": {"max_new_tokens": 150, "ignore_eos": True}},
            }[path]
            send(wire, path, {**said, "stream": streamed, "return_routed_experts": trial % 2 == 0})
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
        before = on_engine_thread(engine, lambda core: core.ledger.finished.get("abort", 0))
        body = {"input_ids": [5] * 8, "sampling_params": {"n": 4, "max_new_tokens": 480, "ignore_eos": True}, "stream": True}
        send(slow, "/generate", {**body, "return_logprob": True, "top_logprobs_num": 20})  # cumulative: far more than any buffer holds
        for _ in range(3):
            assert stream(server, "/v1/completions", {"prompt": "a", **LONG})[-1]["choices"][0]["finish_reason"] == "length"
        leave(slow, reset=True)
        assert_gone(server, engine)
        ended = on_engine_thread(engine, lambda core: dict(core.ledger.finished))
        assert ended.get("abort", 0) > before


def test_a_request_that_takes_too_long_is_a_408(engine):
    release = threading.Event()
    with running(engine, request_timeout=0.3) as server:
        blocker = threading.Thread(target=on_engine_thread, args=(engine, lambda core: release.wait(30)))
        blocker.start()
        try:
            assert error_of(server.post("/v1/completions", {"prompt": "a", **LONG}), 408)["code"] == "request_timeout"
            assert error_of(server.post("/generate", {"text": "a", "stream": True}), 408)["code"] == "request_timeout"
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
            threading.Event().wait(0.4)
            answer = server.client.get("/health")
            assert (answer.status_code, answer.json()["state"]) == (503, "stalled")
            assert server.client.get("/health/live").status_code == 200
        finally:
            release.set()
            blocker.join()
        while b"[DONE]" not in wire.recv(65536):
            continue
        assert server.client.get("/health").json()["state"] == "serving"
        assert_gone(server, engine)


def test_a_full_queue_is_a_429_that_says_when_to_come_back(engine):
    with running(engine) as server:
        scheduler = engine._assembly.core.scheduler
        limit = scheduler._args.max_queued_requests
        bodies = {"prompt": [[5]] * 256, "n": limit // 256 + 1, "max_tokens": 1}
        response = server.post("/v1/completions", bodies)
        assert error_of(response, 429)["code"] == "queue_full" and response.headers["retry-after"]
        assert error_of(server.post("/v1/completions", {**bodies, "stream": True}), 429), "before the stream begins"
    assert_idle(engine)
