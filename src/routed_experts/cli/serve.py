"""`routed-experts serve MODEL`: the HTTP server. A flag of the server sets the field of ServerSettings of its name.

Keys may come from files or from the environment (ROUTED_EXPERTS_API_KEY, ROUTED_EXPERTS_ADMIN_API_KEY), because other
users can read a command line."""

import argparse
import dataclasses
import importlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from routed_experts.cli.bootstrap import PROGRAM, LoadBar, announce_compilation, start_jax, version
from routed_experts.cli.config_file import with_config
from routed_experts.cli.flags import (
    MODEL_HELP,
    add_dist_flags,
    add_engine_flags,
    add_expert_flags,
    add_fleet_flags,
    add_placement_flags,
    add_speculative_flags,
    dist_args,
    engine_args,
    expert_args,
    fleet_args,
    load_format,
    log_ignored_flags,
    placement_args,
    replica_dist_args,
    speculative_args,
)
from routed_experts.cli.follow import abandon_group, drain_with, follow_group, join_processes
from routed_experts.cli.serve_fleet import check_ray, serve_fleet
from routed_experts.core.dist_config import DistConfig
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import ConfigError, MachineError
from routed_experts.core.installation import missing_library
from routed_experts.core.keywords import own_value
from routed_experts.core.server_args import ServerArgs
from routed_experts.models.loading.model_source import local_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from routed_experts.engine.async_engine import AsyncEngine
    from routed_experts.engine.build.startup_phases import Phase
    from routed_experts.engine.group.process_group import AnyGroup
    from routed_experts.engine.group.rendezvous import Rendezvous
    from routed_experts.server.state import ServerState

logger = logging.getLogger(__name__)
LOG_LEVELS = ("debug", "info", "warning", "error")
_KEYS = ("api_key", "admin_api_key")
_DIALECTS, _FORMATS = ("sglang", "vllm021", "vllm"), ("int32", "npy", "packed", "list", "ref")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `serve`. A flag that is absent leaves the default of the settings."""
    parser.add_argument("model_path", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=MODEL_HELP)
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="flags as YAML or JSON; flags on the command line win",
    )
    add_file_flags(parser)


def add_file_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that a --config file may name as well."""
    group = parser.add_argument_group("server")

    def add(*flags: str, text: str, **options: Any) -> None:
        group.add_argument(*flags, default=argparse.SUPPRESS, help=text, **options)

    add("--host", metavar="ADDRESS", text="address to listen at; default: 127.0.0.1")
    add("--port", type=int, metavar="N", text="port to listen at; 0 lets the system choose; default: 30000")
    add("--served-model-name", metavar="NAME", text="the name in /v1/models; default: that of the folder, or the id")
    add("--api-key", metavar="KEY", text="required on routes but the probes and the page at / (or: --api-key-file)")
    add("--api-key-file", type=Path, metavar="FILE", text="file whose first line is the key of --api-key")
    add("--admin-api-key", metavar="KEY", text="required on admin routes (or: --admin-api-key-file)")
    admin_file = "file whose first line is the key of --admin-api-key"
    add("--admin-api-key-file", type=Path, metavar="FILE", text=admin_file)
    add("--routed-experts-dialect", choices=_DIALECTS, text="where /v1 has rows, and by whose names; default: sglang")
    form = "form of rows where a request names none; default: the dialect's"
    add("--routed-experts-format", choices=_FORMATS, text=form)
    add("--routing-store-bytes", type=_size, metavar="BYTES", text="memory for rows of the format ref; default: 1GiB")
    ttl = "seconds for which rows of the format ref are kept; default: 600"
    add("--routing-store-ttl", type=float, metavar="S", text=ttl)
    add("--metrics-compat", choices=("vllm", "sglang"), text="adds metrics under the names of vLLM or of SGLang")
    add("--expert-metrics", action="store_true", text="a series for every expert of every layer in /metrics")
    add("--cors-origin", metavar="URL", text="one origin that browsers may call from; default: none")
    add("--request-timeout", type=float, metavar="S", text="seconds of a request, which is then aborted; default: 600")
    add("--stream-interval", type=float, metavar="S", text="least seconds between two events; default: 0.025")
    add("--max-body-bytes", type=_size, metavar="BYTES", text="bytes of a body; a larger one gets 413; default: 16MiB")
    add("--shutdown-timeout", type=float, metavar="S", text="seconds for running requests after SIGTERM; default: 30")
    stall = "/health is 503 after so many seconds without a step while requests run; default: 30"
    add("--stall-timeout", type=float, metavar="S", text=stall)
    parsers = "auto (by the chat template), none, or a name such as {}; default: auto"
    add("--tool-call-parser", metavar="NAME", text=parsers.format("qwen25, qwen3_coder, glm45, deepseekv31, gpt-oss"))
    add("--reasoning-parser", metavar="NAME", text=parsers.format("qwen3, glm45, deepseek-r1, gpt-oss"))
    add("--weights-root", metavar="DIR", text="weights may be updated from folders below it; default: none")
    saver = "/server_info reports it, for trainers that ask; it has no other effect"
    add("--enable-memory-saver", action="store_true", text=saver)
    add(
        "--strict-fields",
        action="store_true",
        text="refuse every unknown field of a body, and every unknown query parameter",
    )
    by_id = "logprobs of /v1 name tokens by id: token_id:5"
    add("--return-tokens-as-token-ids", action="store_true", text=by_id)
    add("--enable-per-request-metrics", action="store_true", text="answers of /v1 tell their times, in metrics")
    add(
        "--enable-force-include-usage",
        action="store_true",
        text="every chunk of streams of /v1 has the usage, asked for or not",
    )
    new = "chunks of /generate hold what is new, not all so far"
    add("--incremental-streaming-output", "--stream-output", action="store_true", text=new)
    prefix = "a prefix such as /llm, with which routes answer too; default: none"
    add("--root-path", "--fastapi-root-path", type=lambda text: text.rstrip("/"), metavar="PATH", text=prefix)
    add("--log-level", choices=LOG_LEVELS, type=_log_level, text="least level of what is logged; default: info")
    add("--log-format", choices=("text", "json"), text="form of a line of the log; default: text")
    add_engine_flags(parser, leave_out=())
    add_expert_flags(parser)
    add_placement_flags(parser)
    add_speculative_flags(parser)
    add_dist_flags(parser)
    add_fleet_flags(parser)


def run(options: argparse.Namespace, start_time: float) -> int:
    """Serve, alone or as a fleet, or follow process 0 of a group, until SIGTERM (exit code 0) or the death of what
    serves (3)."""
    if "config" in options:
        options = with_config(options, options.config, add_file_flags)
    args = ServerArgs(**engine_args(options))
    groups: dict[str, Any] = {
        "load_format": load_format(options),
        "experts": expert_args(options),
        "placement": placement_args(options),
        "speculative": speculative_args(options),
    }
    fleet = fleet_args(options)
    dist = replica_dist_args(options) if fleet.is_fleet else dist_args(options)
    if fleet.is_fleet:
        check_ray()
    if args.model_path is None:
        raise ConfigError("no model was named; say routed-experts serve MODEL")
    _start_logs(options)
    if not dist.is_leader:
        return follow_group(args, dist, groups, options, start_time)
    try:
        limits = importlib.import_module("routed_experts.server.limits")
        run_module = importlib.import_module("routed_experts.server.run")
        state_module = importlib.import_module("routed_experts.server.state")
    except ImportError as error:
        raise missing_library(error, purpose="serve", extra="serve") from error
    names = {field.name for field in dataclasses.fields(limits.ServerSettings)}
    values = {name: value for name, value in vars(options).items() if name in names}
    values |= {name: key for name in _KEYS if (key := _key(options, name))}
    settings = limits.ServerSettings(**values)
    for name in settings.weak_keys:
        logger.warning(
            "--%s has fewer than %d characters and is easily guessed", name.replace("_", "-"), limits.MIN_KEY_CHARS
        )
    if settings.host not in ("127.0.0.1", "::1", "localhost") and settings.api_key is None:
        print(
            f"{PROGRAM} serve: warning: {settings.host} is no loopback address, and there is no --api-key",
            file=sys.stderr,
        )
    run_module.check_weights_root(settings)
    local_folder(args.model_path)  # raises for a name that is neither a folder nor an id, before anything starts
    if fleet.is_fleet:
        from routed_experts.fleet.spec import ReplicaSpec

        spec = ReplicaSpec(args=args, server=settings, fleet=fleet, dist=dist, **groups)
        return serve_fleet(spec, options, start_time)
    listener = run_module.bind(settings)
    server: ServerState = state_module.ServerState(
        settings, model_path=args.model_path, tokenizer_path=args.tokenizer_path, version=version()
    )
    waiting: list[Rendezvous] = []  # of the group, while its processes come
    joined: list[AnyGroup] = []  # the group, once all its processes have met

    def print_ready() -> None:
        print(_ready_line(server, time.perf_counter() - start_time, run_module.listener_url(listener)), flush=True)

    process = run_module.ServerProcess(
        server,
        listener,
        load=lambda: _load(args, groups, dist, waiting, joined, process.drain, server, start_time),
        on_ready=print_ready,
    )
    code = process.run()
    if server.health().state == "starting":  # the loading thread may be in the compiler, which cannot be interrupted
        abandon_group(waiting, joined)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _start_logs(options: argparse.Namespace) -> None:
    """Set up logs, and log what is to be known of the flags."""
    _set_up_logs(vars(options).get("log_level", "info"), vars(options).get("log_format", "text"))
    log_ignored_flags(options)
    if load_format(options) == "dummy":
        logger.warning("--load-format dummy: the weights are random, and so is what the model says")


def _load(
    args: ServerArgs,
    groups: dict[str, Any],
    dist: DistConfig,
    waiting: "list[Rendezvous]",
    joined: "list[AnyGroup]",
    drain: "Callable[[], None]",
    server: "ServerState",
    start_time: float,
) -> "AsyncEngine":
    """Start JAX and build the engine; print one line for each phase on standard error. `groups`: the load format, the
    offload and the placement of experts, and speculative decoding; `waiting` receives the rendezvous of process 0,
    `joined` the process group of `dist`, if it is one; `drain` is called when a follower was asked to end."""
    start_jax(default_platform=None, find_devices=not dist.is_group)
    if not dist.is_group:
        announce_compilation(args, offloads=groups["experts"].num_resident is not None)
    _log_phase(server, "import", time.perf_counter() - start_time, "Python and JAX")
    group = None
    if dist.is_group:
        since = time.perf_counter()

        def on_joined(group: "AnyGroup") -> None:
            joined.append(group)
            drain_with(group, drain)

        group = join_processes(args, dist, groups, on_joined, waiting.append)
        _log_phase(server, "rendezvous", time.perf_counter() - since, f"{dist.nnodes} processes")
    from routed_experts.engine.async_engine import AsyncEngine
    from routed_experts.engine.engine import Engine

    def on_phase(phase: "Phase") -> None:
        _log_phase(server, phase.name, phase.seconds, phase.detail)
        for line in phase.lines:
            print(f"  {line}", file=sys.stderr, flush=True)

    on_load = LoadBar() if sys.stderr.isatty() else None
    parts: dict[str, Any] = groups | {"dist": group}
    return AsyncEngine(Engine(**dataclasses.asdict(args), **parts, on_phase=on_phase, on_load=on_load, self_check=True))


def _log_phase(server: "ServerState", name: str, seconds: float, detail: str) -> None:
    server.set_phase(f"after {name}")
    print(f"{name:<12}{seconds:7.2f} s  {detail}", file=sys.stderr, flush=True)


def _ready_line(server: "ServerState", seconds: float, url: str) -> str:
    """Return the last line of start-up: what is served, and where."""
    engine = server.engine
    capture, num_ranks = engine.capture, engine.engine.server_args.dp_size
    tokens = f"{engine.kv_tokens:,} KV tokens{f' in each of {num_ranks} data ranks' if num_ranks > 1 else ''}"
    if capture is None:
        return f"ready in {seconds:.1f} s · {tokens} · capture off · {url}"
    layers = f"{capture.num_hidden_layers} layers ({capture.num_moe_layers} MoE)"
    experts = f"{capture.num_experts} experts top-{capture.top_k}"
    return f"ready in {seconds:.1f} s · {layers} × {experts} · {tokens} · capture on · {url}"


def _key(options: argparse.Namespace, name: str) -> str | None:
    """Return a key as it was given, from its file or from the environment."""
    given = vars(options)
    file: Path | None = given.get(f"{name}_file")
    if file is None:
        return given.get(name, os.environ.get(f"ROUTED_EXPERTS_{name.upper()}"))
    flag = f"--{name.replace('_', '-')}-file {file}"
    if name in given:
        raise ConfigError(f"{flag} and --{name.replace('_', '-')} are one key; give one of them")
    try:
        key = file.read_text(encoding="utf-8").split("\n", 1)[0].strip()
    except OSError as error:
        raise MachineError(
            f"{flag} cannot be read ({error.strerror}); name a file whose first line is the key"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} is no UTF-8 ({error}); write the key as text into its first line") from error
    if not key:
        raise ConfigError(f"{flag} is empty; write the key into its first line")
    return key


def _log_level(text: str) -> str:
    """A level by any server's name for it, in either case."""
    return str(own_value("log_level", text.lower()))


def _size(text: str) -> int:
    """Parse a number of bytes, with or without a unit: 16MiB, 1GiB, 4096."""
    for unit, factor in (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)):
        if text.endswith(unit):
            return _count(text.removesuffix(unit), text) * factor
    return _count(text, text)


def _count(digits: str, text: str) -> int:
    if not (digits.isascii() and digits.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{short_repr(text)} is no number of bytes; write it as 4096, 16KiB, 16MiB or 1GiB"
        )
    return int(digits)


class _JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one record as JSON."""
        fields = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def _set_up_logs(level: str, log_format: str) -> None:
    """Log to standard error; libraries from level WARNING."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonLines() if log_format == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("routed_experts").setLevel(cast("int", getattr(logging, level.upper())))
