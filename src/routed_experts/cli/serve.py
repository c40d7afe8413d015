"""`routed-experts serve MODEL`: the HTTP server. Flags of the server are made from the fields of its settings.

Keys may come from files or from the environment (ROUTED_EXPERTS_API_KEY, ROUTED_EXPERTS_ADMIN_API_KEY), so that they
need not stand on a command line that others can read."""

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

from routed_experts.cli.bootstrap import PROGRAM, load_bar, start_jax, version
from routed_experts.cli.config_file import with_config
from routed_experts.cli.flags import (
    MODEL_HELP,
    add_engine_flags,
    add_expert_flags,
    add_placement_flags,
    engine_args,
    expert_args,
    placement_args,
)
from routed_experts.core.errors import ConfigError
from routed_experts.core.installation import missing_library
from routed_experts.core.server_args import ServerArgs
from routed_experts.models.loading.model_source import local_folder

if TYPE_CHECKING:
    from routed_experts.engine.async_engine import AsyncEngine
    from routed_experts.engine.build.builder import Phase
    from routed_experts.server.state import ServerState

LOG_LEVELS = ("debug", "info", "warning", "error")
_KEYS = ("api_key", "admin_api_key")
_DIALECTS, _FORMATS = ("sglang", "vllm021", "vllm"), ("int32", "npy", "list", "ref")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `serve`. What is not given is left to the settings' own defaults."""
    parser.add_argument("model_path", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=MODEL_HELP)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", default=argparse.SUPPRESS, help="flags as YAML or JSON; those typed win"
    )
    add_file_flags(parser)


def add_file_flags(parser: argparse.ArgumentParser) -> None:
    """Those that a file may name as well."""
    group = parser.add_argument_group("server")

    def add(*flags: str, told: str, **taking: Any) -> None:
        group.add_argument(*flags, default=argparse.SUPPRESS, help=told, **taking)

    add("--host", metavar="ADDRESS", told="default: 127.0.0.1")
    add("--port", type=int, metavar="N", told="default: 30000; 0 lets the system choose")
    add("--served-model-name", metavar="NAME", told="default: the name of the folder, or the Hugging Face id")
    add("--api-key", metavar="KEY", told="needed on every route but the probes (also: --api-key-file)")
    add("--api-key-file", type=Path, metavar="FILE", told="holds the key in its first line")
    add("--admin-api-key", metavar="KEY", told="needed on admin routes (also: --admin-api-key-file)")
    add("--admin-api-key-file", type=Path, metavar="FILE", told="holds the key in its first line")
    add("--routed-experts-dialect", choices=_DIALECTS, told="what /v1 returns; default: sglang")
    add("--routed-experts-format", choices=_FORMATS, told="default: the dialect's")
    add("--routing-store-bytes", type=_size, metavar="BYTES", told="for format ref; default: 1GiB")
    add("--routing-store-ttl", type=float, metavar="S", told="default: 600")
    add("--metrics-compat", choices=("vllm", "sglang"), told="adds gauges under the other server's names")
    add("--expert-metrics", action="store_true", told="a series for every expert of every layer in /metrics")
    add("--cors-origin", metavar="URL", told="one origin that browsers may call from; default: none")
    add("--request-timeout", type=float, metavar="S", told="default: 600")
    add("--stream-interval", type=float, metavar="S", told="streams are told once in it; default: 0.025")
    add("--max-body-bytes", type=_size, metavar="BYTES", told="default: 16MiB")
    add("--shutdown-timeout", type=float, metavar="S", told="for running requests after SIGTERM; default: 30")
    add(
        "--stall-timeout",
        type=float,
        metavar="S",
        told="without a step while requests run, /health is 503; default: 30",
    )
    add("--weights-root", metavar="DIR", told="weights may be updated from folders below it; default: none")
    add("--strict-fields", action="store_true", told="refuse every unknown field of a body")
    add("--log-level", choices=LOG_LEVELS, told="default: info")
    add("--log-format", choices=("text", "json"), told="default: text")
    add_engine_flags(parser, leave_out=())
    add_expert_flags(parser)
    add_placement_flags(parser)


def run(options: argparse.Namespace, start_time: float) -> int:
    """Serve until SIGTERM (0) or the engine's death (3)."""
    if "config" in options:
        options = with_config(options, options.config, add_file_flags)
    args, shared = (
        ServerArgs(**engine_args(options)),
        {"experts": expert_args(options), "placement": placement_args(options)},
    )
    if args.model_path is None:
        raise ConfigError("no model was named; say routed-experts serve MODEL")
    _set_up_logs(vars(options).get("log_level", "info"), vars(options).get("log_format", "text"))
    try:
        limits = importlib.import_module("routed_experts.server.limits")
        run_module = importlib.import_module("routed_experts.server.run")
        service_module = importlib.import_module("routed_experts.server.state")
    except ImportError as error:
        raise missing_library(error, purpose="serve", extra="serve") from error
    names = {field.name for field in dataclasses.fields(limits.ServerSettings)}
    said = {name: value for name, value in vars(options).items() if name in names}
    settings = limits.ServerSettings(
        **said, **{name: key for name in _KEYS if name not in said and (key := _key(options, name))}
    )
    if settings.host not in ("127.0.0.1", "::1", "localhost") and settings.api_key is None:
        print(
            f"{PROGRAM} serve: warning: {settings.host} is no loopback address, and there is no --api-key",
            file=sys.stderr,
        )
    local_folder(args.model_path)  # a name that is neither a folder nor an id fails before anything starts
    listener = run_module.bind(settings)
    service: ServerState = service_module.ServerState(settings, model_path=args.model_path)

    def ready() -> None:
        print(_ready_line(service, time.perf_counter() - start_time, run_module.url_of(listener)), flush=True)

    process = run_module.ServerProcess(
        service, listener, version=version(), load=lambda: _load(args, shared, service, start_time), on_ready=ready
    )
    code = process.run()
    if service.health().state == "starting":  # the loading thread is in the compiler, and cannot be asked to stop
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _load(args: ServerArgs, shared: dict[str, Any], service: "ServerState", start_time: float) -> "AsyncEngine":
    """Start JAX and build the engine, a line a phase on standard error. `shared`: where its experts are."""
    start_jax(default_platform=None)
    _say_phase(service, "import", time.perf_counter() - start_time, "Python and JAX")
    from routed_experts.engine.async_engine import AsyncEngine
    from routed_experts.engine.engine import Engine

    def on_phase(phase: "Phase") -> None:
        _say_phase(service, phase.name, phase.seconds, phase.detail)
        for line in phase.lines:
            print(f"  {line}", file=sys.stderr, flush=True)

    bar = load_bar if sys.stderr.isatty() else None
    return AsyncEngine(Engine(**dataclasses.asdict(args), **shared, on_phase=on_phase, on_load=bar, self_check=True))


def _say_phase(service: "ServerState", name: str, seconds: float, detail: str) -> None:
    service.phase(f"after {name}")
    print(f"{name:<12}{seconds:7.2f} s  {detail}", file=sys.stderr, flush=True)


def _ready_line(service: "ServerState", seconds: float, url: str) -> str:
    """The last line of start-up: what is served, and where."""
    door = service.door
    capture = door.capture
    shape = "capture off"
    if capture is not None:
        moe = f"{capture.num_hidden_layers} layers ({capture.num_moe_layers} MoE) × {capture.num_experts} experts top-{capture.top_k}"
        shape = f"{moe} · {door.kv_tokens:,} KV tokens · capture on"
    else:
        shape = f"{door.kv_tokens:,} KV tokens · {shape}"
    return f"ready in {seconds:.1f} s · {shape} · {url}"


def _key(options: argparse.Namespace, name: str) -> str | None:
    """A key from its file or from the environment."""
    file: Path | None = getattr(options, f"{name}_file", None)
    if file is None:
        return os.environ.get(f"ROUTED_EXPERTS_{name.upper()}")
    key = file.read_text(encoding="utf-8").split("\n", 1)[0].strip()
    if not key:
        raise ConfigError(f"--{name.replace('_', '-')}-file {file} is empty; write the key into its first line")
    return key


def _size(text: str) -> int:
    """Bytes, with a unit if you like: 16MiB, 1GiB, 4096."""
    for unit, factor in (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)):
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    return int(text)


class _JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        said = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False)


def _set_up_logs(level: str, form: str) -> None:
    """Logs go to standard error; libraries are heard from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("routed_experts").setLevel(cast("int", getattr(logging, level.upper())))
