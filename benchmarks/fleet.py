"""What a fleet's proxy costs: chunks a second at 16 streams and the latency of one token, through HAProxy and through
Ray Serve's Python proxy, over one server alone; and how long an update of weights holds requests back.

    python benchmarks/fleet.py [--streams 16] [--new 200] [--rounds 15] [--updates 20]

It needs the extra `ray`. A tiny MoE of two layers on CPU; each way has an engine of its own, and one works at a time.
The ways are interleaved, and each round is a ratio to the server alone. The client counts events and parses none. An
update's hold is the longest wait of a request of one token that is sent while the update runs, less the median wait of
such requests: of a fleet of two, over one server that swaps alone."""

import argparse
import asyncio
import contextlib
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from common import print_table, progress, write_result

from support.fleet_process import SIZES, FleetProcess, environment, ray_cluster
from support.tiny_checkpoint import write_tiny_checkpoint

ALONE, HAPROXY, PYTHON = "server alone", "HAProxy", "Python proxy"
FLAGS = ["--stream-interval", "0"]


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--updates", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fleet-") as name:
        root = Path(name)
        for seed in range(2):
            write_tiny_checkpoint(root / f"w{seed}", seed=seed, num_hidden_layers=2)
        rows = measure_proxies(root, args)
        holds = measure_holds(root, args)
    print_table(rows)
    print_table(holds)
    print(write_result("fleet_cpu", rows, holds=holds, streams=args.streams, new_tokens=args.new))


def measure_proxies(root: Path, args: argparse.Namespace) -> list[dict[str, object]]:
    """Chunks a second and latency by way."""
    with contextlib.ExitStack() as stack:
        ports = {ALONE: stack.enter_context(server_alone(root))}
        for way in (HAPROXY, PYTHON):
            progress(f"starting {way}")
            ports[way] = stack.enter_context(one_replica(root, way))
        rounds = []
        for turn in range(-1, args.rounds):  # the first one warms up
            progress(f"round {turn + 1} of {args.rounds}")
            ways = list(ports) if turn % 2 else list(reversed(ports))
            rounds.append({way: (chunks_per_s(ports[way], args), latency_ms(ports[way])) for way in ways})
        del rounds[0]
    rows: list[dict[str, object]] = []
    for way in ports:
        ratios = sorted(measured[way][0] / measured[ALONE][0] for measured in rounds)
        added = [measured[way][1] - measured[ALONE][1] for measured in rounds]
        rows.append(
            {
                "way": way,
                "chunks/s": statistics.median(measured[way][0] for measured in rounds),
                "of alone": statistics.median(ratios),
                "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
                "p50 ms": statistics.median(measured[way][1] for measured in rounds),
                "added p50 ms": statistics.median(added),
            }
        )
    return rows


def measure_holds(root: Path, args: argparse.Namespace) -> list[dict[str, object]]:
    """How long updates hold requests back: one server, and a fleet of two."""
    with contextlib.ExitStack() as stack:
        ports = {ALONE: stack.enter_context(server_alone(root))}
        process = FleetProcess(root / "w0", "--num-replicas", "2", "--weights-root", str(root), *FLAGS)
        stack.callback(process.close)
        ports["fleet of two"] = int(process.wait_ready().url.rsplit(":", 1)[1])
        holds: dict[str, list[float]] = {way: [] for way in ports}
        for turn in range(args.updates):
            progress(f"update {turn + 1} of {args.updates}")
            for way, port in ports.items():
                holds[way].append(hold_ms(port, f"w{1 - turn % 2}"))
    return [
        {"way": way, "hold p50 ms": statistics.median(values), "hold max ms": max(values)}
        for way, values in holds.items()
    ]


@contextlib.contextmanager
def server_alone(root: Path) -> Iterator[int]:
    """`routed-experts serve`; its port."""
    command = [sys.executable, "-m", "routed_experts", "serve", str(root / "w0"), "--port", "0", *SIZES, *FLAGS]
    command += ["--weights-root", str(root)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield int(process.stdout.readline().rsplit(":", 1)[1])
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


@contextlib.contextmanager
def one_replica(root: Path, way: str) -> Iterator[int]:
    """A fleet of one replica behind this proxy; its port."""
    variables = {"RAY_SERVE_ENABLE_HA_PROXY": "1" if way == HAPROXY else "0"}
    variables |= {"RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": "41000", "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": "42000"}
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
        ray_cluster(folder, num_cpus=2, **variables) as (address, _),
    ):
        process = FleetProcess(root / "w0", "--num-replicas", "1", "--ray-address", address, *FLAGS)
        try:
            process.wait_ready()
            assert process.proxy == way, process.proxy
            yield int(process.url.rsplit(":", 1)[1])
        finally:
            process.close()


def chunks_per_s(port: int, args: argparse.Namespace) -> float:
    """Events a second of so many streams at once."""
    bodies = [
        {
            "input_ids": [5 + number, 6, 7, 8],
            "stream": True,
            "sampling_params": {"max_new_tokens": args.new, "ignore_eos": True},
        }
        for number in range(args.streams)
    ]
    start = time.perf_counter()
    counts = asyncio.run(read_all(port, bodies))
    elapsed = time.perf_counter() - start
    assert all(count >= args.new // 2 for count in counts), counts
    return sum(counts) / elapsed


async def read_all(port: int, bodies: list[dict[str, object]]) -> list[int]:
    """How many events each stream had."""

    async def one(body: dict[str, object]) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        text = json.dumps(body).encode()
        head = ["POST /generate HTTP/1.1", "Host: x", "Connection: close", "Content-Type: application/json"]
        head += [f"Content-Length: {len(text)}", "", ""]
        writer.write("\r\n".join(head).encode() + text)
        count, tail = 0, b""
        while part := await reader.read(1 << 16):
            count += (tail + part).count(b"data: {")
            tail = part[-6:]
            if b"[DONE]" in tail + part:
                break
        writer.close()
        return count

    return await asyncio.gather(*map(one, bodies))


def latency_ms(port: int, calls: int = 60) -> float:
    """The median of requests of one token on one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times = [one_token(connection) for _ in range(calls)]
    connection.close()
    return 1e3 * statistics.median(times)


def one_token(connection: http.client.HTTPConnection) -> float:
    body = json.dumps({"input_ids": [5, 6, 7], "max_new_tokens": 1})
    start = time.perf_counter()
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.read()
    return time.perf_counter() - start


def hold_ms(port: int, folder: str) -> float:
    """The longest wait of a request while the weights are updated, less the usual one."""
    waits: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while not stop.is_set():
            waits.append(one_token(connection))
        connection.close()

    usual = latency_ms(port, 30)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"model_path": folder})
    connection.request("POST", "/update_weights_from_disk", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.read()
    connection.close()
    stop.set()
    for thread in threads:
        thread.join()
    return 1e3 * max(waits) - usual


if __name__ == "__main__":
    main()
