"""The table of commands, and `main`, which runs one.

A wrong use, or a model that cannot be served, exits with 2 and at most three lines; a model that does not fit this
machine with 1. Libraries are imported by the command that needs them."""

import argparse
import io
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from routed_experts.cli import analyze, bench, chat, convert, doctor, generate, inspect_model, placement, serve, tiny
from routed_experts.cli.bootstrap import PROGRAM, start_jax, version
from routed_experts.cli.flags import Parser
from routed_experts.core.errors import (
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    MachineError,
    PeerLostError,
    RoutedExpertsError,
    WriteError,
)
from routed_experts.models.loading.model_source import DEMO, find_model

_ERRNO = re.compile(r"^\[Errno -?\d+\] ")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    start_time = time.perf_counter()
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Δ shows ? instead
    parser = make_parser()
    options = _parse(parser, argv)
    try:
        code = options.run(options, start_time)
        sys.stdout.flush()  # reports a full disk now
        return code
    except PeerLostError as error:
        return _report_error(options.command, error, code=error.exit_code)
    except RoutedExpertsError as error:
        text = str(error)
        if isinstance(error, ConfigError | InvalidRequestError) and not isinstance(error, CheckpointError):
            text = parser.command_parser(options.command).name_flags(text)
        return _report_error(options.command, text, code=1 if isinstance(error, MachineError) else 2)
    except BrokenPipeError:  # the reader closed standard output
        _close_stdout()
        return 1
    except OSError as error:
        _close_stdout()
        return _report_error(options.command, _ERRNO.sub("", str(error)), code=1)
    except KeyboardInterrupt:
        return 130


def _parse(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. --help and --version end the program: with 1 where their text cannot be written."""
    try:
        try:
            return parser.parse_args(argv)
        except SystemExit:
            sys.stdout.flush()
            raise
    except BrokenPipeError:
        _close_stdout()
        sys.exit(1)
    except OSError as error:
        _close_stdout()
        sys.exit(_report_error(None, _ERRNO.sub("", str(error)), code=1))


def make_parser() -> Parser:
    """All commands with their flags."""
    parser = Parser(
        prog=PROGRAM, description="Serve Mixture-of-Experts models and know which experts every token was routed to."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)

    def add(name: str, purpose: str, run: Callable[[argparse.Namespace, float], int]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        command.set_defaults(run=run)
        return command

    demo = add("demo", "generate with capture, replay it, draw it; no network, no accelerator", _demo)
    demo.add_argument(
        "--model",
        default=DEMO,
        metavar="MODEL",
        help="checkpoint folder or Hugging Face id to show; default: demo, the model of the package",
    )
    demo.add_argument("--output", type=Path, default=Path("demo-output"), metavar="DIR", help="default: demo-output")
    serve.add_flags(add("serve", "answer HTTP in the dialects of OpenAI, SGLang and vLLM", serve.run))
    generate.add_flags(add("generate", "generate for prompts, with routed experts if asked", generate.run))
    chat.add_flags(add("chat", "talk to a model in the terminal", chat.run))
    inspect_model.add_flags(
        add("inspect", "shapes and memory plan of a checkpoint, without loading it", inspect_model.run)
    )
    bench.add_flags(add("bench", "tokens a second, latencies, time until ready", bench.run))
    doctor.add_flags(add("doctor", "versions, devices, and capture == replay on this machine", doctor.run))
    convert.add_flags(add("convert", "turn routed experts from one file or wire form into another", convert.run))
    analyze.add_flags(add("analyze", "numbers and pictures of recorded routing", analyze.run))
    placement.add_flags(
        add("placement", "plan where experts live from recorded routing, and what it would have done", placement.run)
    )
    tiny.add_flags(add("tiny", "write a small checkpoint with tokenizer and chat template", tiny.run))
    return parser


def _demo(options: argparse.Namespace, start_time: float) -> int:
    model = find_model(options.model)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"--output {options.output} cannot be made a folder ({error.strerror})"
        raise WriteError(f"{text}; name a folder, or one that does not exist") from error
    cache = start_jax(default_platform="cpu")
    from routed_experts.demo.run import DemoOptions, run_demo

    demo = DemoOptions(
        model=model,
        output=options.output,
        start_time=start_time,
        imported=time.perf_counter(),
        cache=cache,
        version=version(),
    )
    return run_demo(demo, sys.stdout)


def _open_missing_streams() -> None:
    """Open the null device for each standard stream that the shell has closed (`>&-`): Python has None for it. Its
    descriptor is taken too, so that no other file gets its number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                try:
                    os.fstat(number)
                except OSError:  # still closed
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                    descriptor = number
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))


def _close_stdout() -> None:
    """Discard output after the reader closed the pipe, also at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_error(command: str | None, error: Exception | str, *, code: int) -> int:
    name = PROGRAM if command is None else f"{PROGRAM} {command}"
    print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code
