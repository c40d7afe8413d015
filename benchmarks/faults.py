"""Faults of a server process with their trials: slow readers and clients, SIGTERM idle and busy,
SIGKILL and a new start on the same port. After each kind every accepted request has one outcome, nothing is held,
and a request is served. The demo model, on CPU.

    python benchmarks/faults.py [--only NAME]

Faults of the engine, aborts, disconnects, pauses and updates under load are in the tests, with all their trials."""

import argparse
import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from common import print_table, write_result

from routed_experts.demo import demo_model_path
from routed_experts.formats import record_from_response

READY = re.compile(r"ready in .* http://127\.0\.0\.1:(\d+)\n")
SHORT = {"text": "The sea", "sampling_params": {"max_new_tokens": 4, "temperature": 0}, "return_routed_experts": True}
LONG = {
    "text": "The sea",
    "sampling_params": {"max_new_tokens": 900, "ignore_eos": True},
    "return_routed_experts": True,
}
GROUP = 10  # slow ones at a time
Row = dict[str, object]


class Server:
    """A process of `serve`, ready."""

    def __init__(self, *flags: str, port: int = 0) -> None:
        command = [sys.executable, "-m", "routed_experts", "serve", str(demo_model_path()), "--port", str(port)]
        command += ["--enable-return-routed-experts", "--max-num-seqs", "16", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        ready = READY.fullmatch(self.process.stdout.readline())
        assert ready, "the server did not start"
        self.port = int(ready[1])

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict]:
        """An answer: its status and its JSON."""
        wire = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(wire):
            wire.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            answer = wire.getresponse()
            return answer.status, json.loads(answer.read() or b"{}")

    def connect(self, content: bytes, *, buffer: int | None = None) -> socket.socket:
        """A raw connection on which this has been sent."""
        wire = socket.socket()
        if buffer is not None:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        wire.connect(("127.0.0.1", self.port))
        wire.sendall(content)
        return wire

    def check_intact(self) -> None:
        """Every accepted request has ended once, all pages can be freed, and a request is served with its rows."""
        deadline = time.monotonic() + 30
        while (info := self.ask("GET", "/get_server_info")[1])["requests_accepted"] != sum(
            info["requests_finished"].values()
        ):
            assert time.monotonic() < deadline, info
        assert self.ask("GET", "/flush_cache")[0] == 200, "pages are held"
        status, answer = self.ask("POST", "/generate", SHORT)
        assert status == 200 and record_from_response(answer) is not None
        assert self.ask("GET", "/health")[1]["state"] == "serving"

    def end(self, *signals: signal.Signals) -> int:
        """Send these, wait, give the exit code."""
        for signal_number in signals:
            self.process.send_signal(signal_number)
        self.process.communicate(timeout=60)
        return self.process.returncode


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[Server]:
    server = Server(*flags)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGTERM)


def post(body: object) -> bytes:
    content = json.dumps(body).encode()
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(content) + content


def latencies(server: Server, count: int = 20) -> list[float]:
    """Milliseconds of short requests, one after another, sorted."""
    latencies_ms = []
    for _ in range(count):
        start = time.perf_counter()
        assert server.ask("POST", "/generate", SHORT)[0] == 200
        latencies_ms.append(1e3 * (time.perf_counter() - start))
    return sorted(latencies_ms)


def slow_readers() -> Row:
    """50 streams that are not read: each ends as an abort, other requests are served meanwhile."""
    with serving("--stream-interval", "0") as server:
        alone, among = latencies(server), []
        body = {**LONG, "stream": True, "return_logprob": True}
        for _ in range(50 // GROUP):
            wires = [server.connect(post(body), buffer=4096) for _ in range(GROUP)]
            among += latencies(server)
            for wire in wires:
                wire.close()
            server.check_intact()
        ended = server.ask("GET", "/get_server_info")[1]["requests_finished"]
        assert ended.get("abort", 0) + ended["length"] + ended.get("stop", 0) == sum(ended.values()), ended
        return {
            "trials": 50,
            "aborted": ended.get("abort", 0),
            "others p50 ms, alone": alone[10],
            "among them": sorted(among)[50],
        }


def slow_headers() -> Row:
    """50 connections that send half a header, or a byte now and then: closed after 10 s, other requests are served
    meanwhile."""
    with serving() as server:
        start, half = time.monotonic(), b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Ty"
        wires = [server.connect(half) for _ in range(50)]
        among, closed = [], 0
        while wires and time.monotonic() - start < 30:
            among += latencies(server, 5)
            for wire in wires[::2]:
                with contextlib.suppress(OSError):
                    wire.send(b"p")
            for wire in select.select(wires, [], [], 0)[0]:
                with contextlib.suppress(ConnectionResetError):
                    wire.recv(4096)
                wires.remove(wire)
                closed += 1
        assert closed == 50, f"{len(wires)} connections are open after 30 s"
        took = time.monotonic() - start
        server.check_intact()
        return {"trials": 50, "closed after s": took, "others p99 ms": sorted(among)[len(among) * 99 // 100]}


def sigterm() -> Row:
    """12: idle and busy, with 0 and 30 s for running requests to end. Exit 0; each answer is complete, or an abort with
    its rows."""
    ends = []
    for busy, timeout in ((False, 0), (False, 30), (True, 0), (True, 30)) * 3:
        server = Server("--shutdown-timeout", str(timeout))
        wire = server.connect(post(LONG)) if busy else None
        while busy and server.ask("GET", "/get_server_info")[1]["requests_accepted"] < 1:
            continue
        server.process.send_signal(signal.SIGTERM)
        start, received = time.monotonic(), b""
        while wire is not None and (part := wire.recv(1 << 20)):
            received += part
        assert server.end() == 0
        assert time.monotonic() - start < timeout + 4
        if busy:
            answer = json.loads(received.partition(b"\r\n\r\n")[2])
            reason, tokens = answer["meta_info"]["finish_reason"]["type"], len(answer["output_ids"])
            assert reason == "length" if timeout else reason in ("abort", "length"), reason
            record = record_from_response(answer)
            assert tokens == 0 or (
                record is not None and record.num_rows == answer["meta_info"]["prompt_tokens"] + tokens - 1
            )
            ends.append(reason)
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", server.port)) != 0
    return {"trials": 12, "busy ones ended": ", ".join(ends)}


def sigkill() -> Row:
    """5: killed while it generates, started anew on the same port."""
    port = 0
    for _ in range(5):
        server = Server(port=port)
        port = server.port
        server.check_intact()
        with server.connect(post({**LONG, "stream": True})) as wire:
            wire.recv(4096)
            assert server.end(signal.SIGKILL) == -signal.SIGKILL
    last = Server(port=port)
    last.check_intact()
    assert last.end(signal.SIGTERM) == 0
    return {"trials": 5, "starts": 6}


KINDS: dict[str, Callable[[], Row]] = {
    "slow reader": slow_readers,
    "half-open or slow header": slow_headers,
    "SIGTERM": sigterm,
    "SIGKILL and restart": sigkill,
}


def main() -> int:
    """Run all kinds; a failure is reported and the other kinds still run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS, action="append")
    chosen = parser.parse_args().only or list(KINDS)
    rows: list[dict[str, object]] = []
    for name in chosen:
        start = time.monotonic()
        try:
            figures, failed = KINDS[name](), ""
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            figures, failed = {"trials": "?"}, f"{type(error).__name__}: {error}"[:300]
        text = "; ".join(
            f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
        )
        rows.append({"fault": name, "failed": failed or "none", "figures": text, "s": time.monotonic() - start})
        print_table(rows[-1:])
    if chosen == list(KINDS):
        print(write_result("faults_cpu", rows, cores=os.cpu_count()))
    return 1 if any(row["failed"] != "none" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
