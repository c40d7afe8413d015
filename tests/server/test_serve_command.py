"""`routed-experts serve` as a process: its start, real clients against it, and its ends. The model is the one in the
package."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jax
import numpy as np
import openai
import pybase64
import pytest

import routed_experts
from routed_experts.cli import main, make_parser
from routed_experts.demo import demo_model_path
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.formats import record_from_response
from routed_experts.server.limits import ServerSettings
from routed_experts.server.run import (
    EXIT_DEAD,
    STEP_GRACE_S,
    ServerProcess,
    bind,
    listener_url,
)
from routed_experts.server.state import ServerState
from support.engines import SMALL
from support.http_server import parse_error
from support.lazy_compile import lazy_compilation
from support.stuck_server import RID, STUCK
from support.tiny_checkpoint import write_tiny_checkpoint
from support.xla_options import FAST_FLAGS

SRC = Path(routed_experts.__file__).parents[1]
TESTS = Path(__file__).parents[1]
SIZES = ["--precompile-bs-paddings", "4", "--precompile-token-paddings", "64"]
KEY = "a-key-for-tests"
READY = re.compile(
    r"ready in [\d.]+ s · 6 layers \(5 MoE\) × 32 experts top-4 · [\d,]+ KV tokens · capture on · (http://127\.0\.0\.1:\d+)\n"
)


def start(*flags, model=None, program="routed_experts"):
    env = {**os.environ, "PYTHONPATH": f"{SRC}{os.pathsep}{TESTS}", "PYTHONUNBUFFERED": "1", "XLA_FLAGS": FAST_FLAGS}
    if jax.config.jax_compilation_cache_dir:
        env["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir
    command = [
        sys.executable,
        "-m",
        program,
        "serve",
        str(model or demo_model_path()),
        "--port",
        "0",
        *SIZES,
        *flags,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.fixture(scope="module")
def process():
    running = start(
        *("--enable-return-routed-experts", "--api-key", KEY, "--served-model-name", "demo"),
        *("--shutdown-timeout", "0.5", "--trust-remote-code", "--attention-backend", "fa", "--max-num-seqs", "5"),
    )
    log_lines, planned = [], threading.Event()

    def read():  # a full pipe would stop it
        for line in running.stderr:
            log_lines.append(line)
            if line.startswith("self-check"):  # the last phase
                planned.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    line = running.stdout.readline()
    assert READY.fullmatch(line), (line, log_lines)
    assert planned.wait(10)
    yield running, READY.fullmatch(line)[1], log_lines
    if running.poll() is None:
        running.kill()
        running.wait(20)
    reader.join(20)
    running.stdout.close()
    running.stderr.close()


@pytest.fixture(scope="module")
def client(process):
    with openai.OpenAI(base_url=f"{process[1]}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def test_phases_and_the_memory_plan_are_printed_before_the_server_is_ready(process):
    names = [line.split()[0] for line in process[2] if re.match(r"[\w-]+ +[\d.]+ s ", line)]
    assert names == ["import", "config", "kernels", "plan", "load", "allocate", "compile", "self-check"]
    first = [line.split()[0] for line in process[2]]
    assert first.index("plan") < first.index("weights") < first.index("KV") < first.index("allocate"), (
        "before anything is allocated"
    )


def test_openai_lists_and_completes(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    first = client.completions.create(
        model="demo", prompt="The sea was", max_tokens=6, temperature=0, logprobs=1, seed=3, n=2
    )
    assert first.choices[0].text and first.choices[0].text == first.choices[1].text
    assert first.usage.completion_tokens == 12 and len(first.choices[0].logprobs.tokens) == 6
    again = client.completions.create(model="demo", prompt="The sea was", max_tokens=6, temperature=0)
    assert again.choices[0].text == first.choices[0].text
    ids = client.completions.create(model="demo", prompt=[5, 6, 7], max_tokens=3, temperature=0)
    assert ids.usage.prompt_tokens == 3


def test_openai_gets_routed_experts_through_extra_body(client):
    output = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=5,
        extra_body={"return_routed_experts": True},
    )
    record = record_from_response(output.model_dump())
    assert record.num_rows == output.usage.total_tokens - 1
    meta = output.choices[0].meta_info
    assert meta["routed_experts_info"]["shape"] == [record.num_rows, 6, 4]
    text = client.completions.create(
        model="demo",
        prompt="a",
        max_tokens=5,
        stream=True,
        extra_body={"return_routed_experts": True, "routed_experts_format": "npy"},
    )
    holders = [chunk for chunk in text if chunk.choices[0].model_dump().get("routed_experts")]
    assert len(holders) == 1 and holders[0].choices[0].finish_reason


def test_openai_streams_chat_with_usage(client):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    whole = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    stream = client.chat.completions.create(
        model="demo",
        messages=messages,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    with client.chat.completions.stream(model="demo", messages=messages, max_tokens=8, temperature=0) as events:
        assert events.get_final_completion().choices[0].message.content == whole.choices[0].message.content


def test_openai_meets_typed_errors(client, process):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="a", temperature=-1)
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        "temperature",
        "invalid_request",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt", prompt="a")
    assert caught.value.code == "model_not_found"
    with (
        openai.OpenAI(base_url=f"{process[1]}/v1", api_key="wrong-key", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()


def test_a_stream_that_openai_closes_is_aborted(client, process):
    stream = client.completions.create(
        model="demo", prompt="a", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    with httpx.Client(
        base_url=process[1], headers={"authorization": f"Bearer {KEY}"}, timeout=30, trust_env=False
    ) as http:
        for _ in range(2_000):  # each look is a round trip; the abort takes two steps
            info = http.get("/get_server_info").json()
            if info["requests_accepted"] == sum(info["requests_finished"].values()):
                break
        assert info["requests_finished"]["abort"] >= 1
        assert http.get("/flush_cache").status_code == 200


def test_int32_through_httpx_is_the_users_own_snippet(process):
    with httpx.Client(
        base_url=process[1], headers={"authorization": f"Bearer {KEY}"}, timeout=30, trust_env=False
    ) as http:
        body = {"text": "The sea", "sampling_params": {"max_new_tokens": 4}, "return_routed_experts": True}
        output = http.post("/generate", json=body).json()
    meta = output["meta_info"]
    rows = np.frombuffer(pybase64.b64decode(meta["routed_experts"].encode()), np.int32).reshape(-1, 6, 4)
    assert rows.shape[0] == meta["prompt_tokens"] + meta["completion_tokens"] - 1


def test_a_port_in_use_ends_with_one(process):
    port = process[1].rsplit(":", 1)[1]
    done = subprocess.run(
        [sys.executable, "-m", "routed_experts", "serve", str(demo_model_path()), "--port", port],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert (
        done.returncode == 1 and done.stderr.count("\n") <= 3 and port in done.stderr and "Traceback" not in done.stderr
    )


def test_sigterm_lets_the_running_end_with_what_they_have_and_exits_0(process):
    """The last test of this process: long requests run when the signal comes, and end as aborts with their rows."""
    running, url, log_lines = process
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=30, trust_env=False) as http:
        body = {
            "input_ids": [5],
            "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True},
            "return_routed_experts": True,
        }
        with http.stream("POST", "/generate", json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            with httpx.Client(base_url=url, headers=http.headers, timeout=30, trust_env=False) as other:
                other.get("/health/live")
                running.send_signal(signal.SIGTERM)
                while (health := other.get("/health").json())["state"] == "serving":
                    continue
                assert health["state"] == "draining"
                assert parse_error(other.post("/generate", json={"text": "a"}), 503)["code"] == "draining"
            answers = [line for line in lines if line.startswith("data: ")]
    assert answers[-1] == "data: [DONE]"
    last = httpx.Response(200, content=answers[-2].removeprefix("data: ")).json()
    reason = last["meta_info"]["finish_reason"]
    assert reason["type"] == "length" or reason["message"].startswith("the server shut down")
    record = record_from_response(last)
    assert record.num_rows == len(last["output_ids"])  # one prompt token
    assert running.wait(10) == 0
    assert not [line for line in log_lines if "Traceback" in line]


def test_a_killed_server_leaves_nothing_in_the_way_of_the_next_on_its_port():
    port = "0"
    for ending in (signal.SIGKILL, signal.SIGTERM):
        weights = "auto" if ending is signal.SIGKILL else "dummy"
        running = start("--enable-return-routed-experts", "--port", port, "--load-format", weights)
        ready = READY.fullmatch(running.stdout.readline())
        assert ready, running.communicate(timeout=20)
        assert port in ("0", ready[1].rsplit(":", 1)[1])
        port = ready[1].rsplit(":", 1)[1]
        with httpx.Client(base_url=ready[1], timeout=30, trust_env=False) as http:
            assert (
                http.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 2}}).status_code == 200
            )
        running.send_signal(ending)
        _, err = running.communicate(timeout=20)
        assert err.count("the weights are random") == (weights == "dummy")
        assert running.returncode == (0 if ending is signal.SIGTERM else -signal.SIGKILL)


def test_a_signal_while_the_model_loads_ends_at_once():
    running = start()
    line = running.stderr.readline()  # the first phase: the port is bound, the engine is being built
    assert line.startswith("import"), line
    running.send_signal(signal.SIGTERM)
    out, err = running.communicate(timeout=20)
    assert running.returncode == 0 and "Traceback" not in err and out == ""


@pytest.mark.parametrize("ending", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_signals_until_the_process_has_ended_leave_the_exit_code_0(ending):
    """Many while it leaves: some come when uvicorn has returned, and some when the interpreter ends."""
    running = start("--load-format", "dummy")
    assert running.stdout.readline().startswith("ready in "), running.communicate(timeout=20)
    for _ in range(4_000):
        running.send_signal(ending)  # without effect once it is a zombie
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, err = running.communicate(timeout=0.005)
            break
    else:
        running.kill()
    assert running.wait(20) == 0 and "Traceback" not in err


@contextlib.contextmanager
def stuck_server(path, body, *flags):
    """A server with a call of which the device hangs: the process, and the future of the response."""
    running = start(*flags, program="support.stuck_server")
    try:
        url = running.stdout.readline().split()[-1]
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http, ThreadPoolExecutor(1) as pool:
            try:
                response = pool.submit(http.post, path, json=body)
                while STUCK not in (line := running.stderr.readline()):
                    assert line, "the server has ended"
                yield running, response
            finally:
                running.kill()  # ends the response, too
    finally:
        running.communicate(timeout=20)


@pytest.mark.parametrize(("timeout_s", "num_signals"), [(0.5, 1), (600, 2)])
def test_a_step_that_never_ends_is_ended_by_the_timeout_or_a_second_signal_with_3(timeout_s, num_signals):
    flags = ("--shutdown-timeout", str(timeout_s))
    with stuck_server("/generate", {"text": "a", "rid": RID}, *flags) as (running, response):
        running.send_signal(signal.SIGTERM)
        while "draining" not in (line := running.stderr.readline()):
            assert line, "the server has ended"
        for _ in range(num_signals - 1):
            running.send_signal(signal.SIGTERM)
        _, err = running.communicate(timeout=20)
        assert running.returncode == EXIT_DEAD and "Traceback" not in err
        assert "the engine does not end its step; the server ends with code 3" in err
        assert parse_error(response.result(20), 503)["code"] == "engine_dead"


def test_a_score_that_never_ends_gets_an_error_and_does_not_hold_a_drained_process():
    """It runs on a thread of its own, which the interpreter would wait for."""
    flags = ("--shutdown-timeout", "0.1")
    with stuck_server("/v1/score", {"token_ids": [5, 6]}, *flags) as (running, response):
        running.send_signal(signal.SIGTERM)
        start_time = time.monotonic()
        _, err = running.communicate(timeout=30)
        assert time.monotonic() - start_time < 5.0, "2 s after the deadline, and time for a machine under load"
        assert running.returncode == 0 and "Traceback" not in err
        assert parse_error(response.result(20), 503)["code"] == "draining"


@pytest.mark.parametrize("late_s", [0.0, STEP_GRACE_S])
def test_generations_have_a_second_to_answer_also_after_a_step_that_has_ended_late(late_s):
    """Two requests that do not end: what is still unanswered after that second gets an error, or is cut."""

    async def run():
        settings, loop, times = ServerSettings(port=0), asyncio.get_running_loop(), {}
        with bind(settings) as listener:
            state = ServerState(settings, model_path="tiny")
            process = ServerProcess(state, listener, load=pytest.fail, on_ready=pytest.fail)
            process._middleware.idle.clear()
            process._middleware.end_requests = lambda error: times.setdefault(error.code, loop.time())
            process._cut_connections = lambda: times.setdefault("cut", loop.time())
            start_time, process._deadline = loop.time(), loop.time() - late_s
            await process._end_requests()
            while "cut" not in times:
                await asyncio.sleep(0.01)
        assert 0.9 < times["draining"] - start_time < times["cut"] - start_time

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["serve"], 2, "MODEL"),
        (["serve", "/no/such/model"], 2, "no checkpoint folder"),
        (["serve", "x", "--quantization", "awq"], 2, "invalid choice: 'awq'"),
        (["serve", "x", "--port", "many"], 2, "many"),
        (["serve", ".", "--port", "99999"], 2, "--port 99999"),
        (["serve", ".", "--api-key", "a b"], 2, "--api-key"),
        (["serve", ".", "--routed-experts-dialect", "klingon"], 2, "klingon"),
        (["serve", ".", "--api-key-file", "/no/such/file"], 1, "/no/such/file"),
    ],
)
def test_a_wrong_start_ends_with_a_sentence(argv, code, message, capsys):
    try:
        exit_code = main(argv)
    except SystemExit as exit_:
        exit_code = exit_.code
    err = capsys.readouterr().err
    assert exit_code == code and message in err and err.count("\n") <= 3 and "Traceback" not in err


def test_placeholders_for_keys_start_with_a_warning_and_other_servers_flags_with_one_line(capsys):
    """Clients send EMPTY where a server wants no key; the model that is missing ends this start."""
    flags = ["--api-key", "EMPTY", "--admin-api-key", "sk-1234", "--trust-remote-code", "--disable-cuda-graph"]
    assert main(["serve", "/no/such/model", *flags]) == 2
    err = capsys.readouterr().err
    assert err.count("accepted without effect: --trust-remote-code, --disable-cuda-graph (docs/flags.md says why)") == 1
    for flag in ("--api-key", "--admin-api-key"):
        assert err.count(f" {flag} has fewer than 8 characters and is easily guessed") == 1
    assert "EMPTY" not in err and "sk-1234" not in err, "a log is no place for keys"
    assert main(["serve", "/no/such/model", "--api-key", "a-long-key"]) == 2
    assert "guessed" not in capsys.readouterr().err


def test_a_folder_that_is_no_model_ends_with_two(tmp_path):
    running = start(model=tmp_path)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 2 and "config.json" in err and "Traceback" not in err and out == ""


def test_flags_of_others_are_known():
    flags = (
        "--max-model-len 64 --max-num-seqs 4 --block-size 8 --no-enable-prefix-caching --seed 3 "
        "--routing-store-bytes 2MiB --host ::1"
    )
    options = make_parser().parse_args(["serve", "MODEL", *flags.split()])
    assert (options.context_length, options.max_running_requests, options.page_size, options.random_seed) == (
        64,
        4,
        8,
        3,
    )
    assert options.routing_store_bytes == 2 << 20 and options.host == "::1"
    assert make_parser().parse_args(["serve", "--model-path", "MODEL"]).model_path == "MODEL"


def serve_in_thread(tmp_path, **options):
    """A server of this process that is ready: its address, engine and process, its thread, and a list for the exit
    code."""
    settings = ServerSettings(port=0, **options)
    listener = bind(settings)
    ready, codes = threading.Event(), []
    with lazy_compilation():
        opened = routed_experts.Engine(str(write_tiny_checkpoint(tmp_path)), **SMALL)
    state = ServerState(settings, model_path="tiny")
    process = ServerProcess(state, listener, load=lambda: AsyncEngine(opened), on_ready=ready.set)
    thread = threading.Thread(target=lambda: codes.append(process.run()), daemon=True)
    thread.start()
    assert ready.wait(30)
    return listener_url(listener), opened, process, thread, codes


def test_an_engine_that_dies_ends_its_requests_once_and_the_process_with_3(tmp_path):
    """In this process: an exception in a step."""
    url, opened, _, thread, codes = serve_in_thread(tmp_path)
    assert gc.get_freeze_count() > 100_000, "what start-up made is set aside from full collections"
    gc.unfreeze()  # this process is that of the tests
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
        assert http.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 2}}).status_code == 200

        def fall(*_):
            raise MemoryError("the device is out of memory at 0x7f00deadbeef in /root/secret/file.py")

        opened.components.core.ranks[0].choose = fall
        response = http.post("/generate", json={"text": "a"})
        error = parse_error(response, 503)
        assert error["code"] == "engine_dead" and "0x7f00" not in error["message"] and "/root" not in error["message"]
    thread.join(20)
    assert codes == [EXIT_DEAD]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(url.rsplit(":", 1)[1]))) != 0


@pytest.mark.parametrize(
    ("timeout_s", "num_signals", "cause"), [(0.2, 1, "above --shutdown-timeout (0.2 s)"), (60, 2, "a second signal")]
)
def test_an_answer_that_a_shutdown_ends_says_so(tmp_path, timeout_s, num_signals, cause):
    url, opened, process, thread, codes = serve_in_thread(tmp_path, shutdown_timeout=timeout_s)
    gc.unfreeze()  # this process is that of the tests
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as http, ThreadPoolExecutor(1) as pool:
        opened.pause(mode="in_place")  # it cannot end by itself
        running = pool.submit(http.post, "/generate", json=body)
        while opened.thread.is_idle:
            assert not running.done()
        for _ in range(num_signals):
            process._server.handle_exit(signal.SIGTERM, None)
        reason = running.result(30).json()["meta_info"]["finish_reason"]
    assert reason == {"type": "abort", "message": f"the server shut down: {cause}"}
    thread.join(20)
    assert codes == [0]


def receive_all(wire):
    """The bytes up to the end of a connection, which may be a reset."""
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while chunk := wire.recv(65536):
            received += chunk
    return bytes(received)


def connect(url, *, slow=False):
    wire = socket.socket()
    if slow:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.settimeout(30)
    host, port = url.removeprefix("http://").split(":")
    wire.connect((host, int(port)))
    return wire


@pytest.mark.parametrize("num_signals", [1, 2])
def test_what_a_shutdown_does_not_wait_for_gets_the_error_of_its_dialect_or_is_cut(tmp_path, caplog, num_signals):
    """Bodies that are still sent, and a stream that is not read, when the time is up. uvicorn has nothing to cancel."""
    caplog.set_level(logging.INFO)
    url, _, process, thread, codes = serve_in_thread(tmp_path, shutdown_timeout=0.1 if num_signals == 1 else 60)
    gc.unfreeze()  # this process is that of the tests
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(connect(url, slow=is_slow)) for is_slow in (False, False, True)]
        half = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        for wire, path in zip(wires, (b"/generate", b"/v1/messages"), strict=False):
            wire.sendall(half % path)
        sampling = {"n": 4, "max_new_tokens": 480, "ignore_eos": True}
        options = {"return_logprob": True, "top_logprobs_num": 20, "stream": True}
        body = json.dumps({"input_ids": [5] * 8, "sampling_params": sampling, **options}).encode()
        wires[2].sendall(half[:-1].replace(b"99", b"%d") % (b"/generate", len(body)) + body)
        while not any(connection._is_write_paused for connection in list(process._server.server_state.connections)):
            assert not codes
        assert process._middleware.open_requests == 3
        for _ in range(num_signals):
            process._server.handle_exit(signal.SIGTERM, None)
        openai_error, anthropic_error = map(receive_all, wires[:2])
        thread.join(20)
        cut = receive_all(wires[2])
    assert codes == [0]
    for received in (openai_error, anthropic_error):
        assert received.startswith(b"HTTP/1.1 503 ") and b"retry-after" in received
    error = json.loads(openai_error.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["code"]) == ("service_unavailable_error", "draining")
    answer = json.loads(anthropic_error.partition(b"\r\n\r\n")[2])
    assert (answer["type"], answer["error"]["type"]) == ("error", "overloaded_error")
    assert cut.startswith(b"HTTP/1.1 200 ") and not cut.endswith(b"0\r\n\r\n")
    assert not [record.message for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_a_drain_that_another_process_asks_for_does_not_count_as_a_signal(tmp_path):
    """Before and after a signal of this process, as when all processes of a group are asked to end at once."""
    url, opened, process, thread, codes = serve_in_thread(tmp_path)
    gc.unfreeze()  # this process is that of the tests
    body = {"text": "a", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as http, ThreadPoolExecutor(1) as pool:
        opened.pause(mode="in_place")
        running = pool.submit(http.post, "/generate", json=body)
        while opened.thread.is_idle:
            continue
        process.drain()
        process._server.handle_exit(signal.SIGTERM, None)
        process.drain()
        assert http.get("/ready").status_code == 503  # after them: the event loop has taken all three
        opened.resume()
        assert running.result(30).json()["meta_info"]["finish_reason"]["type"] == "length"
    thread.join(20)
    assert codes == [0]
