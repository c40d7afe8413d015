"""What HTTP adds: tokens a second through /generate streams over the same engine in process, first byte, cost of rows.

    python benchmarks/http_overhead.py [--batch 32] [--new 256] [--rounds 20] [--small]

The demo model on CPU. The client is a process of its own that reads bytes and parses none. Each way runs between two
calls that wait for all answers at once, and is compared with their mean, because the speed of a shared machine changes
within a second. Every run has new prompts. On two cores the client takes CPU time from the engine: its CPU seconds are
given. The cost of rows is that of a synthetic record of 4,096 tokens, 48 layers, top-8 of 128 experts."""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import uvicorn
from common import print_table, progress, write_result

from routed_experts import Engine
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.demo import demo_model_path
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.formats.wire import encode_meta_info
from routed_experts.server.app import make_app
from routed_experts.server.limits import ServerSettings
from routed_experts.server.run import bind, freeze_gc, listener_url, server_config
from routed_experts.server.state import ServerState

PROMPT = 16


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="one short round: does it run")
    parser.add_argument(
        "--client", metavar="PORT", type=int, help="be the client: lists of bodies come on standard input"
    )
    args = parser.parse_args()
    if args.small:
        vars(args).update(batch=4, new=16, rounds=1)
    if args.client:
        for line in sys.stdin:
            print(json.dumps(asyncio.run(read_all(args.client, json.loads(line)))), flush=True)
        return
    sizes = {
        "precompile_bs_paddings": (args.batch,),
        "precompile_token_paddings": (512,),
        "max_running_requests": args.batch,
    }
    with Engine(str(demo_model_path()), enable_return_routed_experts=True, max_total_tokens=32_768, **sizes) as engine:
        command = [sys.executable, __file__, "--client", str(serve(engine))]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            rng = np.random.default_rng(0)
            rounds = []
            for turn in range(-2, args.rounds):  # the first two warm up
                progress(f"round {turn + 1} of {args.rounds}")
                rounds.append(one_round(engine, client, args, rng))
            del rounds[:2]
            client.stdin.close()
    rows: list[dict[str, object]] = []
    for name in rounds[0]:
        speed = [measured[name]["tokens/s"] for measured in rounds]
        ratio = [measured[name]["of at once"] for measured in rounds]
        first = [seconds for measured in rounds for seconds in measured[name].get("first", ())]
        rows.append(
            {
                "how": name,
                "tokens/s": statistics.median(speed),
                "of at once": statistics.median(ratio),
                "quartiles": [float(np.percentile(ratio, share)) for share in (25, 75)],
                "first byte p50 ms": 1e3 * float(np.percentile(first, 50)) if first else "-",
                "first byte p99 ms": 1e3 * float(np.percentile(first, 99)) if first else "-",
                "client CPU s": statistics.median(measured[name].get("cpu", 0.0) for measured in rounds),
            }
        )
    print_table(rows)
    costs = encoding_costs()
    print_table(costs)
    print(write_result("http_cpu", rows, encoding=costs, batch=args.batch, new_tokens=args.new, prompt_tokens=PROMPT))


def serve(engine: Engine) -> int:
    """A server over this engine, in a thread; its port."""
    service = ServerState(ServerSettings(port=0), model_path="demo")
    service.set_ready(AsyncEngine(engine))
    freeze_gc()
    listener = bind(service.settings)
    server = uvicorn.Server(server_config(make_app(service)[0]))
    threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True).start()
    return int(listener_url(listener).rsplit(":", 1)[1])


def one_round(
    engine: Engine, client: subprocess.Popen, args: argparse.Namespace, rng: np.random.Generator
) -> dict[str, dict]:
    """Every way once, each between two calls at once."""

    def prompts() -> list[list[int]]:
        return rng.integers(0, 2000, size=(args.batch, PROMPT)).tolist()

    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": args.new}

    def in_process(**options: object) -> dict[str, object]:
        start = time.perf_counter()
        result = engine.generate(input_ids=prompts(), sampling_params=sampling, **options)
        if options.get("stream"):
            for _ in result:
                continue
        return {"tokens/s": args.batch * args.new / (time.perf_counter() - start)}

    def through_http(**options: object) -> dict[str, object]:
        bodies = [
            json.dumps({"input_ids": ids, "sampling_params": sampling, "stream": True, **options}) for ids in prompts()
        ]
        client.stdin.write(json.dumps(bodies) + "\n")
        client.stdin.flush()
        measured = json.loads(client.stdout.readline())
        return {
            "tokens/s": args.batch * args.new / measured["seconds"],
            "first": measured["first"],
            "cpu": measured["cpu"],
        }

    methods: dict[str, Callable[[], dict[str, object]]] = {
        "streamed in process": lambda: in_process(stream=True),
        "rows too, in process": lambda: in_process(return_routed_experts=True),
        "HTTP": through_http,
        "HTTP with rows": lambda: through_http(return_routed_experts=True),
    }

    def run(method: Callable[[], dict[str, object]]) -> dict[str, object]:
        engine.flush_cache()
        return method()

    before = run(in_process)
    measured: dict[str, dict[str, object]] = {"at once": {**before, "of at once": 1.0}}
    for name, method in methods.items():
        result, after = run(method), run(in_process)
        seconds = [1 / run_["tokens/s"] for run_ in (before, result, after)]
        measured[name] = {**result, "of at once": (seconds[0] + seconds[2]) / 2 / seconds[1]}
        before = after
    return measured


async def read_all(port: int, bodies: list[str]) -> dict[str, object]:
    """Send every body on a connection of its own, at once, and read to the ends."""
    wires = [await asyncio.open_connection("127.0.0.1", port, limit=1 << 22) for _ in bodies]
    start, cpu = time.perf_counter(), time.process_time()

    async def read_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: str) -> float:
        head = "POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json"
        writer.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await reader.readuntil(b"data: ")
        first, last = time.perf_counter() - start, b""
        while chunk := await reader.read(1 << 18):
            last = (last + chunk)[-32:]
        assert b"data: [DONE]" in last, last
        return first

    first = await asyncio.gather(*(read_one(*wire, body) for wire, body in zip(wires, bodies, strict=True)))
    return {"seconds": time.perf_counter() - start, "first": sorted(first), "cpu": time.process_time() - cpu}


def encoding_costs() -> list[dict[str, object]]:
    """CPU milliseconds to make the fields of an answer from a record."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((4095, 48, 128), np.float32), axis=2)[:, :, :8].astype(np.uint8)
    record = RoutedExperts(
        ids=ids,
        start=0,
        num_tokens=4096,
        num_prompt_tokens=3072,
        layer_ids=tuple(range(48)),
        num_hidden_layers=48,
        num_experts=128,
        version_spans=((0, 4095, 0),),
    )
    rows: list[dict[str, object]] = []
    for form in ("npy", "int32"):
        times_ms = []
        for _ in range(20):
            start = time.thread_time()
            encode_meta_info(record, payload_format=form, layers="all" if form == "int32" else "moe")
            times_ms.append(1e3 * (time.thread_time() - start))
        limit = 5 if form == "npy" else 25
        rows.append(
            {
                "format": form,
                "median ms": statistics.median(times_ms),
                "p90 ms": sorted(times_ms)[17],
                "at most ms": limit,
            }
        )
    return rows


if __name__ == "__main__":
    main()
