"""`routed-experts bench throughput|serve|startup|buckets`: what a model does on this machine, as a table and as JSON.

Prompts are random, decoding is greedy and to the full length. The figures are of one run on one machine: repeat them.

throughput: an engine with capture on, off, and on again, so that drift of the machine shows as a difference.
serve: a running server over HTTP, with and without rows.
startup: the phases of a start with an empty and with a full compilation cache.
buckets: padded sizes of steps (cli/bench_buckets.py)."""

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from routed_experts.cli import bench_buckets
from routed_experts.cli.bootstrap import start_jax
from routed_experts.cli.flags import MODEL_HELP, add_engine_flags, engine_args, load_format, log_ignored_flags
from routed_experts.core.atomic_write import atomic_write
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import ConfigError, MachineError
from routed_experts.core.server_args import ServerArgs

Row = dict[str, object]
_PHASE = re.compile(r"(\S+) +([\d.]+) s ")
_READY = re.compile(r"ready in ([\d.]+) s")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The kinds of `bench` with their flags."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)

    def add(
        name: str, purpose: str, run: Callable[[argparse.Namespace], list[Row]], *, loads: bool
    ) -> argparse.ArgumentParser:
        kind = kinds.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        kind.set_defaults(measure=run)
        kind.add_argument(
            "--output", type=Path, default=None, metavar="FILE", help="JSON of the table and of the command"
        )
        if loads:
            kind.add_argument("model_path", metavar="MODEL", help=MODEL_HELP)
        return kind

    throughput = add(
        "throughput", "tokens a second of an engine, with capture on, off and on again", run_throughput, loads=True
    )
    serve = add(
        "serve", "tokens a second and latencies of a running server, with and without rows", run_serve, loads=False
    )
    serve.add_argument("--base-url", required=True, metavar="URL", help="such as http://127.0.0.1:30000")
    serve.add_argument("--api-key", default=None, metavar="KEY")
    for kind in (throughput, serve):
        kind.add_argument("--num-prompts", type=int, default=32, metavar="N", help="at once; default: 32")
        kind.add_argument("--input-len", type=int, default=64, metavar="N", help="tokens; default: 64")
        kind.add_argument("--output-len", type=int, default=64, metavar="N", help="tokens; default: 64")
        kind.add_argument("--rounds", type=int, default=3, metavar="N", help="after one that warms up; default: 3")
    startup = add(
        "startup", "seconds until ready, with an empty and with a full compilation cache", run_startup, loads=True
    )
    startup.add_argument("--rounds", type=int, default=1, metavar="N", help="default: 1")
    buckets = add(
        "buckets",
        "cost of steps by padded size, and the sizes that are worth compiling",
        bench_buckets.run_buckets,
        loads=True,
    )
    bench_buckets.add_flags(buckets)
    for kind in (throughput, startup):
        add_engine_flags(kind, leave_out=("model_path", "enable_return_routed_experts"))


def run(options: argparse.Namespace, start_time: float) -> int:
    """Measure, print, write."""
    for name in ("num_prompts", "input_len", "output_len", "rounds"):
        value = getattr(options, name, 1)
        if not 1 <= value <= 100_000:
            raise ConfigError(f"--{name.replace('_', '-')} {short_repr(value)} must be in 1..100000")
    with contextlib.ExitStack() as stack:
        part = None if options.output is None else stack.enter_context(atomic_write(options.output))
        rows = options.measure(options)
        print_table(rows)
        if part is not None:
            command = {
                name: str(value) for name, value in vars(options).items() if name not in ("run", "measure", "api_key")
            }
            part.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def run_throughput(options: argparse.Namespace) -> list[Row]:
    """Tokens a second by capture: on, off, on."""
    start_jax(default_platform=None)
    rows: list[Row] = []
    for capture in (True, False, True):
        log_ignored_flags(options)
        args = ServerArgs(**engine_args(options), enable_return_routed_experts=capture)
        rows += _engine_rows(args, options)
    return rows


def _engine_rows(args: ServerArgs, options: argparse.Namespace) -> list[Row]:
    from routed_experts.engine.async_engine import AsyncEngine
    from routed_experts.engine.engine import Engine

    rows: list[Row] = []
    with Engine(**dataclasses.asdict(args), load_format=load_format(options)) as engine:
        vocab, rng = AsyncEngine(engine).vocab_size, random.Random(0)
        for with_rows in (False, True) if args.enable_return_routed_experts else (False,):
            speeds: list[float] = []
            for _ in range(options.rounds + 1):
                engine.flush_cache()
                prompts = _prompts(rng, vocab, options)
                start_time = time.perf_counter()
                sampling = {"temperature": 0.0, "ignore_eos": True}
                engine.generate(
                    input_ids=prompts,
                    sampling_params=sampling,
                    max_new_tokens=options.output_len,
                    return_routed_experts=with_rows,
                )
                speeds.append(options.num_prompts * options.output_len / (time.perf_counter() - start_time))
            on = "on" if args.enable_return_routed_experts else "off"
            rows.append({"capture": on, "rows asked": with_rows, **_spread("output tokens/s", speeds[1:])})
    return rows


def run_serve(options: argparse.Namespace) -> list[Row]:
    """Latencies and tokens a second over HTTP, without and with rows."""
    _check_key(options.api_key)
    model, vocab = _model_info(options)
    rng, rows = random.Random(0), list[Row]()
    for with_rows in (False, True) if model.get("moe") else (False,):
        prompts = [_prompts(rng, vocab, options) for _ in range(options.rounds + 1)]
        rounds = [_one_round(options, some, with_rows=with_rows) for some in prompts][1:]
        first = sorted(seconds for _, firsts, _ in rounds for seconds in firsts)
        between = [seconds for _, _, gaps in rounds for seconds in gaps]
        speed = _spread("output tokens/s", [speed for speed, _, _ in rounds])
        latency = {"first token p50 ms": 1e3 * first[len(first) // 2], "p99 ms": 1e3 * first[len(first) * 99 // 100]}
        rows.append({"rows asked": with_rows, **speed, **latency, "between tokens ms": 1e3 * statistics.mean(between)})
    return rows


def _check_key(key: str | None) -> None:
    """Raise ConfigError for a key that no header can carry, and no server of `serve` has."""
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        text = f"--api-key has {len(key)} characters, not all of them printable ASCII other than spaces"
        raise ConfigError(f"{text if key else '--api-key is empty'}; give the key that serve has")


def _model_info(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """What the server serves, and the size of its vocabulary. Raises ConfigError for another server, and MachineError
    where its answer is cut short."""
    method, path = "GET", "/get_model_info"
    with _network_errors(options, method, path):
        body = _request(options, method, path).read()
    try:
        model: Any = json.loads(body)
        vocab = int(model["vocab_size"])
        if vocab < 1:
            raise ValueError(f"vocab_size={vocab}")
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        text = f"--base-url {options.base_url}: {path} names no vocab_size ({error!r})"
        raise ConfigError(f"{text}; name a server of routed-experts serve") from error
    return model, vocab


def _one_round(
    options: argparse.Namespace, prompts: Sequence[Sequence[int]], *, with_rows: bool
) -> tuple[float, list[float], list[float]]:
    """Tokens a second, seconds to each first token, and mean seconds between the tokens of each stream. Raises
    ConfigError for a stream that ends early, and MachineError where the connection does."""
    method, path = "POST", "/generate"
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": options.output_len}
    start_time = time.perf_counter()

    def request(prompt: Sequence[int]) -> tuple[float, float]:
        body = {
            "input_ids": prompt,
            "sampling_params": sampling,
            "stream": True,
            "return_routed_experts": with_rows or None,
        }
        response = _request(options, method, path, body)
        first, last = 0.0, b""
        with _network_errors(options, method, path):
            while line := response.readline():
                if line.startswith(b"data: {"):
                    first, last = first or time.perf_counter() - start_time, line
        output = last.removeprefix(b"data: ")
        if _num_completion_tokens(output) != options.output_len:
            shown = output[:300].decode(errors="replace")
            raise ConfigError(f"a stream ended early: {shown or 'it has no events'}")
        return first, (time.perf_counter() - start_time - first) / max(options.output_len - 1, 1)

    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = list(pool.map(request, prompts))
    speed = len(prompts) * options.output_len / (time.perf_counter() - start_time)
    return speed, [first for first, _ in streams], [gap for _, gap in streams]


def _num_completion_tokens(output: bytes) -> object:
    """The count in the last event of a stream, or None."""
    try:
        return json.loads(output)["meta_info"]["completion_tokens"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _split_url(base_url: str) -> tuple[urllib.parse.SplitResult, int | None]:
    """The parts of a URL of HTTP, and its port. Raises ConfigError for another."""
    with contextlib.suppress(ValueError):  # of a port that is no number, or half an IPv6 address
        url = urllib.parse.urlsplit(base_url)
        port = url.port
        if url.scheme in ("http", "https") and url.hostname:
            return url, port
    raise ConfigError(f"--base-url {short_repr(base_url)} must be such as http://127.0.0.1:30000")


def _request(options: argparse.Namespace, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
    """A response of the server, whose body is still to be read. Raises ConfigError for any status but 200, and
    MachineError where there is no answer."""
    url, port = _split_url(options.base_url)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if options.api_key is not None:
        headers["Authorization"] = f"Bearer {options.api_key}"
    connection = kind(url.hostname or "", port, timeout=600)
    with _network_errors(options, method, path):
        connection.request(method, url.path.rstrip("/") + path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        reason = b"" if response.status == 200 else response.read(500)
    if response.status != 200:
        raise ConfigError(f"{method} {path}: {response.status} {reason.decode(errors='replace')}")
    return response


@contextlib.contextmanager
def _network_errors(options: argparse.Namespace, method: str, path: str) -> Generator[None]:
    """Raise MachineError for what fails while a request is sent or its answer is read."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        text = f"--base-url {options.base_url}: {method} {path} failed ({reason})"
        raise MachineError(f"{text}; name a server that runs") from error


def run_startup(options: argparse.Namespace) -> list[Row]:
    """Seconds of each phase of `serve`; each start is a process."""
    rows: list[Row] = []
    for number in range(1, options.rounds + 1):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("empty", "full"):
                rows.append({"cache": state, "round": number, **_start(options, cache)})
    return rows


def _start(options: argparse.Namespace, cache: str) -> Row:
    """Start a server, wait until it is ready, and end it."""
    command = [
        sys.executable,
        "-m",
        "routed_experts",
        "serve",
        options.model_path,
        "--port",
        "0",
        "--enable-return-routed-experts",
    ]
    for name, value in {**engine_args(options), "load_format": load_format(options)}.items():
        if name != "model_path":
            values: Sequence[object] = [] if value is True else value if isinstance(value, tuple) else [value]
            command += [f"--{name.replace('_', '-')}", *map(str, values)]
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        assert process.stdout is not None, "a pipe was requested"
        phases, lines = Row(), list[str]()
        for line in process.stdout:
            lines.append(line)
            if (phase := _PHASE.match(line)) is not None:
                phases[phase[1]] = float(phase[2])
            if (ready := _READY.match(line)) is not None:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=60)
                return {"ready": float(ready[1]), **phases}
    raise ConfigError(f"the server did not start: {' '.join(lines[-1:]).strip()}")


def _prompts(rng: random.Random, vocab: int, options: argparse.Namespace) -> list[list[int]]:
    return [[rng.randrange(vocab) for _ in range(options.input_len)] for _ in range(options.num_prompts)]


def _spread(name: str, values: Sequence[float]) -> dict[str, Any]:
    return {name: statistics.median(values), "lowest": min(values), "highest": max(values)}


def print_table(rows: Sequence[Row]) -> None:
    """Rows as aligned columns."""
    cells = [[f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    table = [list(rows[0]), *cells]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(part.rjust(width) for part, width in zip(line, widths, strict=True)))
