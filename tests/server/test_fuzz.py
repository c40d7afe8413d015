"""Random bytes and bodies: no 5xx, nothing hangs, and the engine is whole afterwards. Seeded, so a failure is
repeatable."""

import json
import random
import socket
import string
import time

import pytest

from support.engines import assert_idle

NUM_RAW, NUM_BODIES, NUM_THOROUGH, LOOK_EVERY = 200, 1_400, 10_000, 100  # the third: bodies in scripts/thorough
BODIES = {
    "/v1/completions": {
        "prompt": "a",
        "max_tokens": 2,
        "n": 1,
        "temperature": 0.5,
        "stop": ["x"],
        "logit_bias": {"5": 1},
        "echo": True,
        "logprobs": 1,
        "stream": False,
        "seed": 1,
        "stream_options": None,
        "return_routed_experts": True,
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "max_tokens": 2,
        "logprobs": True,
        "top_logprobs": 1,
        "chat_template_kwargs": {"a": 1},
        "return_routed_experts": True,
    },
    "/generate": {
        "text": "a",
        "sampling_params": {"max_new_tokens": 2, "temperature": 0, "stop": "x"},
        "return_logprob": True,
        "return_routed_experts": True,
        "routed_experts_start_len": 0,
        "rid": None,
    },
    "/v1/score": {
        "token_ids": [1, 2, 3],
        "return_routed_experts": True,
        "routed_experts": None,
        "routed_experts_start_len": 1,
    },
    "/tokenize": {"prompt": "a", "messages": None, "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/abort_request": {"rid": "x", "abort_all": False},
}
# As JSON text, for not everything that a client can write has a Python value.
VALUES = [
    "null",
    "true",
    "-1",
    "0",
    "1",
    "2",
    "1e400",
    "-0.0",
    "1.5",
    str(2**63),
    str(-(2**63)),
    "9" * 400,
    "NaN",
    "Infinity",
    '""',
    '"\\u0000"',
    '"\\ud800"',
    '"' + "x" * 5000 + '"',
    "[]",
    "[[]]",
    "[null]",
    "{}",
    '{"":{}}',
    '{"a":1,"a":2}',
    "[" * 70 + "]" * 70,
    "[" + "1," * 2000 + "1]",
    '["a",1,[2]]',
    '[{"role":"user"}]',
    '"\\ufeff"',
    '"<|im_end|>"',
    "[-1]",
    "[99999999999]",
    '[["a"]]',
    '{"5":"x"}',
    '"ref"',
    '"stats"',
]
HUGE = [
    '"' + "x" * 4_000_000 + '"',
    "[" + "1," * 1_000_000 + "1]",
    "[" * 1_000 + "]" * 1_000,
    "9" * 1_000_000,
]  # now and then


def mutated(rng, body):
    """JSON text of `body` with one to three fields replaced, added, dropped or doubled, and now and then damaged as
    text."""
    parts = {key: json.dumps(value) for key, value in body.items()}
    for _ in range(rng.randint(1, 3)):
        key = rng.choice([*parts, "".join(rng.choices(string.printable, k=rng.randint(0, 20)))])
        if rng.random() < 0.15 and len(parts) > 1:
            parts.pop(key, None)
        else:
            parts[key] = rng.choice(HUGE if rng.random() < 0.01 else VALUES)
    text = "{" + ",".join(f"{json.dumps(key)}:{value}" for key, value in parts.items()) + "}"
    if rng.random() < 0.1:
        position = rng.randrange(len(text))
        text = text[:position] + rng.choice(["", '"', "}", "\x00", "[", "\\"]) + text[position + 1 :]
    return text.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("path", BODIES)
def test_no_body_makes_a_server_error(server, engine, path):
    send_bodies(server, engine, path, NUM_BODIES // len(BODIES))


@pytest.mark.thorough
@pytest.mark.parametrize("path", BODIES)
def test_no_body_of_very_many_makes_a_server_error(server, engine, path):
    send_bodies(server, engine, path, NUM_THOROUGH // len(BODIES))


def send_bodies(server, engine, path, num_bodies):
    rng = random.Random(path)
    statuses = set()
    for count in range(num_bodies):
        body = mutated(rng, BODIES[path])
        start_time = time.process_time()  # server and engine are in this process; others may keep the machine busy
        kind = {"content-type": "application/json"}
        response = server.client.post(path, content=body, headers=kind, timeout=30)  # one that hangs is an error
        seconds = time.process_time() - start_time
        assert seconds < (8 if path == "/tokenize" and len(body) > 1e6 else 3), (seconds, body[:300])  # megabytes: work
        assert response.status_code < 500, (body, response.text[:500])
        statuses.add(response.status_code)
        if response.status_code >= 400:
            assert (
                response.json()["error"].keys() == {"message", "type", "param", "code"} and len(response.content) < 1400
            )
        if count % LOOK_EVERY == 0:
            server.wait_idle()
            assert_idle(engine)
    assert {200, 400} <= statuses <= {200, 400, 404, 409, 429}, (
        "the bodies must be both good and bad for this to say anything"
    )
    server.wait_idle()
    assert_idle(engine)


def malformed(rng):
    """Bytes that are almost a request."""
    pieces = [
        b"GET",
        b"POST",
        b"PRI",
        b"\x00",
        b" ",
        b"/generate",
        b"/v1/models",
        b"*",
        b"http://[::1",
        b" HTTP/1.1",
        b" HTTP/3.7",
        b"\r\n",
        b"\n",
        b"\r\n\r\n",
        b"Host: x\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: -5\r\n",
        b"Content-Length: 5, 6\r\n",
        b"Content-Length: 99999999999999999999\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked, gzip\r\n",
        b"Content-Type: application/json\r\n",
        b'5\r\n{"a":\r\n',
        b"zz\r\n",
        b"0\r\n\r\n",
        b"Expect: 100-continue\r\n",
        b"A" * 3000,
        b"Upgrade: websocket\r\nConnection: upgrade\r\n",
        b": \r\n",
        b"X: \xff\xfe\r\n",
        b"{}",
        b"\x80\x04N.",
        b"\x16\x03\x01\x02\x00",
        b"Connection: close\r\n",
    ]
    start = [b"POST /generate HTTP/1.1\r\n"] if rng.random() < 0.5 else []
    return b"".join(start + rng.choices(pieces, k=rng.randint(1, 12)))


def test_no_bytes_make_a_server_error_or_hang(server, engine):
    rng = random.Random(0)
    requests = [malformed(rng) for _ in range(NUM_RAW - 3)]
    many = b"".join(b"X-%d: a\r\n" % number for number in range(200))
    requests += [
        b"GET /health HTTP/1.1\r\n" + many + b"\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    ]
    requests += [b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n"]
    all_statuses = []
    for request in requests:
        start_time = time.monotonic()
        with socket.create_connection(server.address, timeout=5) as wire:
            answer = b""
            try:
                wire.sendall(request)
                wire.shutdown(socket.SHUT_WR)
                while chunk := wire.recv(65536):
                    answer += chunk
            except (ConnectionResetError, BrokenPipeError):  # it closed while we were still sending
                answer += b""
        assert time.monotonic() - start_time < 2, request[:200]
        statuses = [int(line.split(b" ")[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
        assert not [status for status in statuses if status >= 500], (request[:300], answer[:300])
        all_statuses += statuses
    assert all_statuses.count(400) > 50, "most of these must have been told that they are no HTTP"
    assert server.client.get("/health").status_code == 200
    server.wait_idle()
    assert_idle(engine)
