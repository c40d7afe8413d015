"""Access and refusals: keys, limits, malformed bodies, and the classes of weakness known from serving engines."""

import ast
import contextlib
import gzip
import json
import logging
import random
import re
import socket
import time
from pathlib import Path

import pytest

import routed_experts.server
from routed_experts.cli.flag_help import MEANINGS
from routed_experts.core.errors import ConfigError
from routed_experts.server.app import TABLE
from routed_experts.server.body import check_depth
from routed_experts.server.errors import ApiError
from routed_experts.server.limits import HEADER_TIMEOUT_S, MAX_HEADER_BYTES, MAX_JSON_DEPTH, ServerSettings
from support.http_server import parse_error, running

KEY, ADMIN = "key-of-users-1", "key-of-admins-1"
PATHS = sorted(
    {re.sub(r"\{.*?\}", "x", entry.path) for entry in TABLE} | {"/openapi.json", "/version", "/nowhere", "/v1"}
)
ADMIN_PATHS = {
    "/v1/routing/reset",
    "/flush_cache",
    "/remember_rollouts",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/pause",
    "/resume",
    "/update_weights",
    "/reset_prefix_cache",
    "/abort_requests",
    "/inference/v1/abort_requests",
    "/sleep",
    "/wake_up",
    "/release_memory_occupation",
    "/resume_memory_occupation",
}
PROBES = {"/health", "/health/live", "/ready", "/ping", "/liveness", "/health_generate"}


@pytest.fixture(scope="module")
def guarded(engine):
    with running(engine, api_key=KEY, admin_api_key=ADMIN) as server:
        yield server


def raw(server, request, *, timeout=15, ends=True):
    """Bytes to the server, and what it answers until it closes. `ends`: nothing more is sent, and the server is told
    so."""
    with socket.create_connection(server.address, timeout=timeout) as wire:
        wire.sendall(request)
        if ends:
            wire.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := wire.recv(65536):
            answer += chunk
    return answer


@pytest.mark.parametrize("path", PATHS)
def test_without_the_key_only_probes_answer(guarded, path):
    for sent in ("", "Bearer wrong-key-wrong", KEY, "Basic " + KEY):
        for method in ("GET", "POST", "DELETE", "OPTIONS", "HEAD"):
            response = guarded.client.request(method, path, headers={"authorization": sent})
            if path in PROBES:
                assert response.status_code in (200, 405)
            else:
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer"
    assert KEY not in guarded.client.request("POST", path, headers={"authorization": "Bearer nonsense-" + KEY[:4]}).text


def test_admin_routes_need_the_admin_key(guarded):
    assert parse_error(guarded.client.get("/flush_cache"), 403)["code"] == "admin_key_required"
    assert parse_error(guarded.post("/abort_request", {"abort_all": True}), 403)
    with_admin = {"authorization": "Bearer " + ADMIN}
    guarded.wait_idle()
    assert guarded.client.get("/flush_cache", headers=with_admin).status_code == 200
    assert guarded.client.get("/v1/models", headers=with_admin).status_code == 200
    assert guarded.client.get("/v1/models").status_code == 200


def test_the_table_marks_the_admin_routes():
    """By name, so that a route that loses its mark is noticed."""
    assert {entry.path for entry in TABLE if entry.admin} == ADMIN_PATHS
    for path in ADMIN_PATHS:
        assert all(entry.admin for entry in TABLE if entry.path == path)


@pytest.mark.parametrize("end", ["%0A", "%0D", "%00", "%0D%0A", "%0a%0a", "%E2%80%A8", "%C2%85"])
@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_a_control_character_hides_no_admin_route(guarded, engine, path, end):
    for key, status in ((None, 401), ("wrong-key-wrong", 401), (KEY, 404), (ADMIN, 404)):
        sent = f"Authorization: Bearer {key}\r\n" if key else ""
        request = f"POST {path}{end} HTTP/1.1\r\nHost: x\r\n{sent}Content-Length: 0\r\nConnection: close\r\n\r\n"
        assert int(raw(guarded, request.encode()).split(b" ", 2)[1]) == status, (key, path + end)
    assert not engine.paused


def test_an_admin_key_alone_guards_admin_routes_alone(engine):
    with running(engine, admin_api_key=ADMIN) as server:
        assert server.client.get("/v1/models").status_code == 200
        for path in sorted(ADMIN_PATHS):
            assert parse_error(server.post(path, {}), 401)["code"] == "missing_api_key"
            assert (
                parse_error(server.post(path, {}, headers={"authorization": "Bearer " + KEY}), 401)["code"]
                == "invalid_api_key"
            )
            assert raw(server, f"POST {path}%0A HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()).startswith(
                b"HTTP/1.1 404"
            )
        server.wait_idle()
        assert server.client.get("/flush_cache", headers={"authorization": "Bearer " + ADMIN}).status_code == 200


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models",
        "/v1//models",
        "/v1/models/",
        "/V1/models",
        "/v1/%6dodels",
        "/v1%2fmodels",
        "/health/../v1/models",
        "/health/%2e%2e/v1/models",
        "/./v1/models",
        "/v1/models%00",
        "/health/",
        "//health",
        "/health;/v1/models",
        "/health?x=/v1/models",
        "/HEALTH",
        "/ready/x",
        "http://127.0.0.1/v1/models",
        "http://evil/v1/models",
        "http://evil/health",
        "/%68ealth",
        "/v1/models#/health",
        "/ping/../flush_cache",
        "/flush_cache/",
        "//flush_cache",
        "/%66lush_cache",
        "/FLUSH_CACHE",
        "/.%2fhealth",
        "/health%2f..%2fflush_cache",
        "*",
        "/v1/models\\health",
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "evil.example"])
def test_no_spelling_of_a_path_gets_past_the_key(guarded, target, host):
    answer = raw(guarded, f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    status = int(answer.split(b" ", 2)[1])
    assert status in (400, 401) or (status == 200 and b'"state"' in answer), answer[:200]
    assert b'"object":"list"' not in answer and b"freed_pages" not in answer


def test_no_secret_leaves(guarded, engine):
    bodies = [
        guarded.client.get(path).text
        for path in ("/get_server_info", "/get_model_info", "/metrics", "/v1/models", "/openapi.json")
    ]
    bodies.append(
        guarded.post("/v1/completions", {"prompt": "a", "model": engine.server_args.model_path}).text
    )  # what came is no secret,
    for body in bodies:  # and yet no path is echoed
        for secret in (KEY, ADMIN, engine.server_args.model_path, "/root", "/home", "Traceback"):
            assert secret not in body
        assert not re.search(r"0x[0-9a-f]{8}", body)


def test_bodies_beyond_the_limits_are_refused(engine):
    with running(engine, max_body_bytes=4096) as server:
        big = json.dumps({"prompt": "a" * 5000}).encode()
        kind = {"content-type": "application/json"}
        assert (
            parse_error(server.client.post("/v1/completions", content=big, headers=kind), 413)["code"]
            == "body_too_large"
        )
        long = json.dumps({"prompt": "a" * 8_000_000}).encode()  # more than buffers between the two hold
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        answer = raw(server, head + b"Content-Length: %d\r\n\r\n%b" % (len(long), long), ends=False)
        assert answer.startswith(b"HTTP/1.1 413") and b"body_too_large" in answer
        for waits in (b"", b"Expect: 100-continue\r\n"):  # a client that sends nothing of it is answered, too
            answer = raw(server, head + waits + b"Content-Length: %d\r\n\r\n" % len(long), ends=False)
            assert answer.startswith(b"HTTP/1.1 413")
        chunked = (big[start : start + 512] for start in range(0, len(big), 512))
        assert parse_error(server.client.post("/v1/completions", content=chunked, headers=kind), 413)
        deep = b'{"prompt":' + b"[" * 65 + b"]" * 65 + b"}"
        assert (
            "deeper" in parse_error(server.client.post("/v1/completions", content=deep, headers=kind), 400)["message"]
        )
        text = json.dumps({"prompt": "[" * 200, "max_tokens": 1}).encode()
        assert server.client.post("/v1/completions", content=text, headers=kind).status_code == 200, (
            "brackets in a string are text"
        )


def json_depth(text):
    """The deepest nesting of a decoded JSON text."""
    if isinstance(text, dict | list):
        return 1 + max((json_depth(child) for child in (text.values() if isinstance(text, dict) else text)), default=0)
    return 0


def test_the_depth_is_that_of_the_json():
    rng = random.Random(3)

    def value(level):
        kind = rng.randrange(4) if level else 2
        if kind < 2:
            listed = [value(level - 1) for _ in range(rng.randrange(1, 3))]
            return listed if kind else {'k"[\\' + str(number): item for number, item in enumerate(listed)}
        return "".join(rng.choices('[]{}"\\ab\n', k=rng.randrange(12)))

    outcomes = set()
    for trial in range(300):
        sent = value(9)
        for _ in range(MAX_JSON_DEPTH - rng.randrange(12) if trial % 2 else 0):
            sent = [sent]
        text, deepest = json.dumps(sent).encode(), json_depth(sent)
        outcomes.add(deepest <= MAX_JSON_DEPTH)
        with contextlib.nullcontext() if deepest <= MAX_JSON_DEPTH else pytest.raises(ApiError, match="deeper"):
            check_depth(text)
    assert outcomes == {True, False}


@pytest.mark.parametrize("piece", [b'"', b'\\"', b'"\\', b'["'], ids=["quotes", "escaped", "backslashes", "brackets"])
def test_an_unended_string_costs_its_length(piece):
    """In CPU time of this thread. Where a search to the end begins again at each quote, 80 kB take ten seconds and 1 MB
    half an hour."""

    def cost(size):
        text = b"[" * 65 + b"]" * 65 + b'"' + (piece * size)[:size]
        start_time = time.thread_time()
        with contextlib.suppress(ApiError):
            check_depth(text[65:] + b"[" * 65)  # enough brackets to be looked at, none of them deep
        return time.thread_time() - start_time

    assert cost(80_000) < 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"{'a': 1}",
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"\xef\xbb\xbf{}",
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "temperature": Infinity}',
        b"[" * 100_000,
        b'{"a":' * 1000 + b"1" + b"}" * 1000,
    ],
)
def test_what_is_no_json_object_is_a_400(server, content):
    response = server.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    parse_error(response, 400)


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "image/json"]
)
def test_another_content_type_is_a_415(server, kind):
    headers = {} if kind is None else {"content-type": kind}
    assert (
        parse_error(server.client.post("/generate", content=b'{"text": "a"}', headers=headers), 415)["code"]
        == "unsupported_media_type"
    )


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/invocations"])
def test_a_compressed_body_is_a_415(server, path):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    body = gzip.compress(b'{"text": "a"}')
    error = parse_error(server.client.post(path, content=body, headers=headers), 415)
    assert error["code"] == "unsupported_media_type" and "gzip" in error["message"]
    headers["content-encoding"] = "identity"
    assert server.client.post("/generate", content=b'{"text": "a", "max_new_tokens": 1}', headers=headers).is_success


def test_after_a_413_the_connection_is_closed(engine):
    """A client that waits for `100 Continue` may send the body after all, or another request."""
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n"
    with running(engine, max_body_bytes=2000) as small:
        answer = raw(small, head + b"Expect: 100-continue\r\n\r\n", ends=False)
        assert answer.startswith(b"HTTP/1.1 413") and b"\r\nconnection: close\r\n" in answer.lower()


@pytest.mark.parametrize("value", [-1, 21, 10**20])
def test_a_number_of_alternatives_is_within_its_limits(server, value):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprobs": True, "top_logprobs": value}
    error = parse_error(server.post("/v1/chat/completions", body), 400)
    assert error["param"] == "top_logprobs" and "0..20" in error["message"]


def test_a_name_without_effect_is_named_in_a_header_and_a_typo_refused(server):
    unused = {"user": "me", "store": True, "brand_new_field": 5, "seed": None, "tools": None, "tool_choice": "none"}
    response = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, **unused})
    assert response.status_code == 200
    assert response.headers["x-ignored-params"] == "user, store, brand_new_field, tool_choice"
    for typo, meant in (
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("return_routed_expert", "return_routed_experts"),
    ):
        error = parse_error(server.post("/v1/completions", {"prompt": "a", typo: 1}), 400)
        assert error["param"] == typo and meant in error["message"] and error["code"] == "unknown_field"
    hostile = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "x\r\nSet-Cookie: a=b": 1, "y" * 500: 1})
    assert (
        hostile.status_code == 200 and "set-cookie" not in hostile.headers and "x-ignored-params" not in hostile.headers
    )


@pytest.mark.parametrize(
    ("path", "body", "fix"),
    [
        ("/generate", {"prompt": "a"}, "prompt is no parameter of this route; did you mean text?"),
        ("/v1/completions", {"text": "a"}, "text is no parameter of this route; did you mean prompt?"),
        ("/v1/chat/completions", {"prompt": "a"}, "prompt is no parameter of this route; did you mean messages?"),
        ("/v1/chat/completions", {"messages": "hi"}, 'send a value such as [{"role": "user", "content": "text"}]'),
    ],
)
def test_a_prompt_under_the_name_or_in_the_shape_of_another_route_is_refused_with_this_ones(server, path, body, fix):
    assert fix in parse_error(server.post(path, body), 400)["message"]


def test_strict_fields_refuse_every_unknown_name(engine):
    with running(engine, strict_fields=True) as server:
        assert parse_error(server.post("/v1/completions", {"prompt": "a", "user": "me"}), 400)["param"] == "user"


def test_a_name_without_effect_is_logged_once(engine, caplog):
    caplog.set_level(logging.INFO, logger="routed_experts.server")
    with running(engine) as server:
        for _ in range(3):
            assert (
                server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "seldom_seen_field": 1}).status_code
                == 200
            )
            sent = {"text": "a", "sampling_params": {"max_new_tokens": 1}, "seldom_seen_field": 1}
            assert server.post("/generate", sent).status_code == 200
    assert len([record for record in caplog.records if "seldom_seen_field" in record.getMessage()]) == 1


@pytest.mark.parametrize(
    "payload", ["{{ 7*7 }}", "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}"]
)
def test_a_template_in_a_message_is_text(server, engine, payload):
    tokens = server.post("/tokenize", {"messages": [{"role": "user", "content": payload}]}).json()["tokens"]
    assert payload in engine.tokenizer.decode(tokens, skip_special_tokens=False)
    refused = {"messages": [{"role": "user", "content": "a"}], "chat_template": payload}
    assert parse_error(server.post("/v1/chat/completions", refused), 400)["param"] == "chat_template"


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "%00", "a" * 5000, "stats/../x", "%2e%2e"]
)
def test_no_path_comes_from_a_request(server, name):
    assert server.client.get(f"/v1/routing/{name}").status_code in (400, 404)
    assert server.client.get(f"/v1/models/{name}").status_code in (400, 404)


def test_pickles_are_only_bytes(server):
    pickled = (  # os.system("id")
        b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00"
        b"\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94."
    )
    assert raw(server, pickled).startswith(b"HTTP/1.1 400")
    for kind in ("application/json", "application/octet-stream"):
        response = server.client.post("/generate", content=pickled, headers={"content-type": kind})
        assert response.status_code in (400, 415)


BODY = b'{"text": "a", "sampling_params": {"max_new_tokens": 2, "temperature": 0}}'
SIZED = b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
IN_CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize("body", [SIZED, IN_CHUNKS], ids=["sized", "in chunks"])
@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("cut", [None, 20, len(SIZED) - 5])
def test_an_upgrade_header_is_ignored(server, body, protocol, cut):
    """As clients of HTTP/2 send it: the body is that of the request, and no request of its own, in however many
    segments it comes."""
    plain = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    upgrade = (
        f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n".encode()
    )
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    sent = plain + upgrade + body
    cut = len(sent) if cut is None else len(plain + upgrade) + cut
    with socket.create_connection(server.address, timeout=15) as wire:
        wire.sendall(sent[:cut])
        server.client.get("/health")  # the first segment has arrived
        wire.sendall(sent[cut:] + last)
        answer = b""
        while chunk := wire.recv(65536):
            answer += chunk
    assert answer.count(b"HTTP/1.1 200") == answer.count(b"HTTP/1.1 ") == 2, answer
    assert b'"output_ids":[' in answer and b'"state":"serving"' in answer


def test_a_body_is_never_a_second_request(server):
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: Upgrade\r\n"
    answer = raw(server, head + b"Upgrade: h2c\r\nContent-Length: %d\r\n\r\n%b" % (len(hidden), hidden))
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 400") == 1 and b'"data":[' not in answer


def test_two_requests_with_upgrade_headers_are_two(server):
    request = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: %bUpgrade\r\nUpgrade: h2c\r\n\r\n"
    answer = raw(server, request % b"" + request % b"close, ", ends=False)
    assert answer.count(b"HTTP/1.1 200") == 2 and answer.count(b'"state":"serving"') == 2


def test_a_tunnel_is_refused(server):
    assert raw(server, b"CONNECT example.com:80 HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 400")


CHUNKED = b"POST /generate HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: "


@pytest.mark.parametrize(
    "begun",
    [b"GET /health HTTP/1.1\r\nX: ", b"GET /health HTTP/1.1\r\nX", b"GET /", CHUNKED],
    ids=["value", "name", "target", "trailer"],
)
def test_a_header_without_an_end_is_given_up_at_its_limit(server, begun):
    """What the parser must hold until it is whole. The answer comes before the time for headers, or for a body, is
    over."""
    wire = socket.create_connection(server.address, timeout=HEADER_TIMEOUT_S / 2)
    with wire, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        wire.sendall(begun)
        for _ in range(3 * MAX_HEADER_BYTES // 4096):
            wire.sendall(b"a" * 4096)
        assert wire.recv(12) == b"HTTP/1.1 400"
    server.wait_idle()


def test_requests_that_come_together_are_all_answered(server):
    """Large bodies and the head of the next one in the same bytes are no header without an end."""
    content = json.dumps({"prompt": "a " * 60_000}).encode()
    head = b"POST /detokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(
        content
    )
    answer = b""
    with socket.create_connection(server.address, timeout=15) as wire:
        wire.sendall((head + b"\r\n" + content) * 3 + head + b"Connection: close\r\n\r\n" + content)
        while chunk := wire.recv(65536):
            answer += chunk
    assert answer.count(b"HTTP/1.1 400") == answer.count(b'"code":"invalid_request"') == 4


@pytest.mark.parametrize("is_stream", [True, False])
def test_http_1_0_gets_a_body_that_ends_with_the_connection(server, is_stream):
    """HTTP/1.0 has no chunks: proxies and `ab` would read their sizes as text. A length that is known is told."""
    fields = {"text": "a", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}, "stream": is_stream}
    content = json.dumps(fields).encode()
    head = b"POST /generate HTTP/%s\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n"
    for version, extra in ((b"1.0", b""), (b"1.0", b"Connection: keep-alive\r\n"), (b"1.1", b"Connection: close\r\n")):
        with socket.create_connection(server.address, timeout=15) as wire:
            wire.sendall(head % (version, len(content), extra) + content)
            answer = b""
            while chunk := wire.recv(65536):  # until the server closes
                answer += chunk
        headers, _, body = answer.partition(b"\r\n\r\n")
        assert headers.startswith(b"HTTP/1.1 200 ") and b"\r\nconnection: close" in headers.lower()
        is_chunked = b"\r\ntransfer-encoding: chunked" in headers.lower()
        assert is_chunked is (is_stream and version == b"1.1")
        assert (b"\r\ncontent-length: " in headers.lower()) is not is_stream
        if version == b"1.0":
            lines = [line for line in body.decode().splitlines() if line]
            if is_stream:
                assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
                assert len(json.loads(lines[-2].removeprefix("data: "))["output_ids"]) == 3
            else:
                assert len(json.loads(body)["output_ids"]) == 3
    server.wait_idle()


@pytest.mark.parametrize("value", [10**6, 10**18, 10**30, -1, True, "5", 1.5, [], {}])
@pytest.mark.parametrize("field", ["n", "max_tokens", "logprobs", "seed", "top_k", "min_tokens"])
def test_fan_out_is_bounded(server, field, value):
    response = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, field: value})
    fine = [("seed", 10**6), ("seed", 10**18), ("seed", -1), ("top_k", 10**6), ("top_k", -1), ("logprobs", True)]
    if any(field == name and value == number and type(value) is type(number) for name, number in fine):
        assert response.status_code == 200
    else:
        assert parse_error(response, 400)["param"] == field


def test_an_error_never_echoes_a_large_value(server):
    for sent in ({"stop": "x" * 4000}, {"model": "m" * 4000}, {"user_" * 700: 1, "temperature": "y" * 4000}):
        response = server.post("/v1/completions", {"prompt": "a", **sent})
        assert response.status_code in (400, 404) and len(response.content) < 1300


def test_a_request_id_is_echoed_or_refused(server):
    response = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "my.id-1"})
    assert response.headers["x-request-id"] == response.json()["id"] == "my.id-1"
    response = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert response.headers["x-request-id"] == response.json()["id"]
    for good in ("x" * 256, "traj:3@step=12", "a+b,c~d", "...", "chatcmpl-0_1"):
        assert server.client.get("/v1/models", headers={"x-request-id": good}).headers["x-request-id"] == good
    for bad in (
        "a b",
        "x" * 257,
        "../x",
        "stats",
        ".",
        "..",
        "a/b",
        "a?b",
        "a#b",
        "a%20b",
        'a"b',
        "a\\b",
        "<b>",
        "a;b",
    ):
        assert (
            parse_error(server.client.get("/v1/models", headers={"x-request-id": bad}), 400)["code"]
            == "invalid_request_id"
        )


@pytest.mark.parametrize("reserved", ["stats", "reset", ".", ".."])
def test_a_reserved_request_id_is_refused_with_the_route_that_it_would_hide(server, reserved):
    folder = "in the path of its rows it names a folder"
    text = f"is reserved: {folder if '.' in reserved else f'/v1/routing/{reserved} is a route'}; choose another id"
    for path, field, body in (
        ("/generate", "rid", {"text": "a"}),
        ("/v1/completions", "request_id", {"prompt": "a"}),
        ("/v1/score", "request_id", {"token_ids": [1, 2]}),
    ):
        error = parse_error(server.post(path, {**body, field: reserved}), 400)
        assert (error["message"], error["param"]) == (f"{field}={reserved!r} {text}", field)
    error = parse_error(server.client.get("/v1/models", headers={"x-request-id": reserved}), 400)
    assert (error["message"], error["code"]) == (f"X-Request-Id={reserved!r} {text}", "invalid_request_id")


def test_unknown_routes_and_methods(server):
    assert parse_error(server.client.get("/v1/embeddings"), 404)["code"] == "not_found"
    response = server.client.get("/v1/completions")
    error = parse_error(response, 405)
    assert error["code"] == "method_not_allowed" and response.headers["allow"] == "POST"
    assert error["message"] == "this route does not support GET; use POST"
    assert set(server.client.post("/v1/routing/x").headers["allow"].split(", ")) == {"DELETE", "GET", "HEAD"}


def test_a_query_parameter_without_effect_is_named_and_a_typo_refused(server, engine):
    body = {"prompt": "a", "max_tokens": 1, "user": "me"}
    response = server.post("/v1/completions?beta=true&api-version=1", body)
    assert response.headers["x-ignored-params"] == "user, beta, api-version"
    with server.client.stream("POST", "/v1/completions?beta=true", json={**body, "stream": True}) as streamed:
        assert streamed.headers["x-ignored-params"] == "user, beta"
    for path, param in (
        ("/v1/loads?dp_rnk=0", "dp_rnk"),
        ("/v1/models?return_routed_experts=true", "return_routed_experts"),
    ):
        error = parse_error(server.client.get(path), 400)
        assert (error["param"], error["code"]) == (param, "unknown_field")
    with running(engine, strict_fields=True) as strict:
        assert strict.client.get("/v1/loads?include=core").status_code == 200
        assert parse_error(strict.client.get("/v1/models?beta=true"), 400)["param"] == "beta"
        message = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        assert strict.post("/v1/messages?beta=true", message).status_code == 200, "as Anthropic's client asks"
        ref = {"return_routed_experts": True, "routed_experts_format": "ref"}
        answer = strict.post("/v1/completions", {"prompt": "a", "max_tokens": 1, **ref}).json()
        url = answer["choices"][0]["meta_info"]["routed_experts_ref"]
        assert strict.client.get(url).status_code == 200 and strict.client.delete(url).status_code == 204


@pytest.mark.parametrize("path", ["/abort_request", "/pause_generation", "/continue_generation", "/resume"])
def test_routes_that_control_the_engine_name_fields_without_effect(server, path):
    body = {"user": "me"} | ({"rid": "no call"} if path == "/abort_request" else {})
    body |= {"mode": "in_place"} if path == "/pause_generation" else {}
    try:
        response = server.post(f"{path}?beta=true", body)
        assert response.status_code == 200 and response.headers["x-ignored-params"] == "user, beta"
        assert "x-ignored-params" not in server.post(path, body | {"user": None}).headers
    finally:
        server.post("/continue_generation", {})


@pytest.mark.parametrize("path", ["/", "/version", "/openapi.json"])
def test_routes_without_parameters_treat_a_query_as_all_routes_do(server, engine, path):
    plain, named = server.client.get(path), server.client.get(f"{path}?x=1")
    assert named.headers["x-ignored-params"] == "x" and named.content == plain.content
    assert "x-ignored-params" not in server.client.get(path).headers
    assert parse_error(server.client.get(f"{path}?return_routed_experts=true"), 400)["code"] == "unknown_field"
    with running(engine, strict_fields=True) as strict:
        assert strict.client.get(path).status_code == strict.client.head(path).status_code == 200
        assert parse_error(strict.client.get(f"{path}?x=1"), 400)["param"] == "x"


@pytest.mark.parametrize(
    "headers",
    [
        "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
        "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout",
        "anthropic-dangerous-direct-browser-access,anthropic-version,content-type,x-api-key",
    ],
)
def test_the_headers_of_browser_clients_pass_a_preflight(engine, headers):
    origin = {"origin": "https://app.example", "access-control-request-method": "POST"}
    with running(engine, cors_origin="https://app.example") as other:
        asked = {**origin, "access-control-request-headers": headers}
        assert other.client.options("/v1/messages", headers=asked).status_code == 200
        asked["access-control-request-headers"] = "x-unknown"
        assert other.client.options("/v1/messages", headers=asked).status_code == 400


def headers_read_by(source):
    """The names of headers that a module asks a request for: constants, and names of constants of the module."""
    tree = ast.parse(source)
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[name, *_]):
                pass
            case ast.Compare(left=name, ops=[ast.In() | ast.NotIn()], comparators=[owner]):
                pass
            case _:
                continue
        if ast.unparse(owner) in ("request.headers", "_headers(scope)"):
            value = constants[name.id] if isinstance(name, ast.Name) else name.value
            yield value.decode() if isinstance(value, bytes) else value


def test_every_header_that_the_server_reads_passes_a_preflight(engine):
    server = Path(routed_experts.server.__file__).parent
    read = {name for file in server.rglob("*.py") for name in headers_read_by(file.read_text(encoding="utf-8"))}
    assert {"authorization", "x-request-id", "if-none-match", "x-data-parallel-rank"} <= read
    read -= {"content-length", "expect"}  # a browser sets these itself
    read.remove("content-encoding")  # every value but identity is refused
    session = re.search(r"the header ([a-z-]+)", MEANINGS["routing_policy"])[1]  # Ray Serve reads it
    with running(engine, cors_origin="https://app.example") as other:
        for name in sorted({*read, session}):
            asked = {"access-control-request-method": "POST", "access-control-request-headers": name}
            answer = other.client.options("/generate", headers={"origin": "https://app.example", **asked})
            assert answer.status_code == 200, name


def test_cross_origin_is_off_unless_an_origin_is_named(server, engine):
    origin = {"origin": "https://app.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in server.client.get("/v1/models", headers=origin).headers
    with running(engine, cors_origin="https://app.example") as other:
        assert (
            other.client.options("/v1/models", headers=origin).headers["access-control-allow-origin"]
            == "https://app.example"
        )
        answer = other.client.get("/v1/models", headers={"origin": "https://app.example"})
        exposed = {name.strip() for name in answer.headers["access-control-expose-headers"].lower().split(",")}
        assert {"x-request-id", "x-ignored-params", "retry-after", "etag"} <= exposed
        evil = other.client.get("/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in evil.headers


def test_while_it_starts_only_probes_answer():
    with running(None) as server:
        for path, status in (("/health", 503), ("/ready", 503), ("/health/live", 200)):
            response = server.client.get(path)
            assert response.status_code == status and response.json()["state"] == "starting"
            assert ("retry-after" in response.headers) == (status == 503)
        for path, body in (
            ("/generate", {"text": "a"}),
            ("/v1/completions", {"prompt": "a"}),
            ("/tokenize", {"prompt": "a"}),
        ):
            response = server.post(path, body)
            assert parse_error(response, 503)["code"] == "starting" and response.headers["retry-after"]
        assert parse_error(server.client.get("/v1/models"), 503)


def test_while_it_drains_no_request_is_accepted(engine):
    with running(engine) as server:
        server.state.set_draining()
        for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"})):
            assert parse_error(server.post(path, body), 503)["code"] == "draining"
        assert server.client.get("/ready").status_code == 503 and server.client.get("/health/live").status_code == 200
        assert server.client.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    "settings",
    [
        {"port": 70000},
        {"api_key": ""},
        {"api_key": "has a blank"},
        {"request_timeout": 0},
        {"shutdown_timeout": -1},
        {"cors_origin": "*"},
        {"max_body_bytes": 5},
        {"routing_store_bytes": -1},
        {"routing_store_ttl": 0},
        {"port": "8000"},
        {"port": True},
        {"host": None},
        {"stall_timeout": "30"},
        {"strict_fields": 1},
        {"max_body_bytes": 2e6},
        {"api_key": 12345678},
        {"routed_experts_dialect": "vllm020"},
        {"routed_experts_format": "int16"},
        {"metrics_compat": "tgi"},
    ],
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ServerSettings(**settings)


def test_a_key_is_not_shown():
    assert KEY not in repr(ServerSettings(api_key=KEY, admin_api_key=KEY))
