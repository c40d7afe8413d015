"""The command line: `routed-experts COMMAND`. Knows the rooms below by their doors; the only file that reads the environment.

Flags of an engine are made from the fields of ServerArgs, so they cannot drift. A wrong use, or a model that cannot be served,
ends with exit code 2 and at most three lines. JAX is imported by the commands that compute, not by --help."""

import argparse
import dataclasses
import importlib.metadata
import io
import json
import os
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn, cast, get_args, get_origin

from routed_experts.core.errors import ConfigError, RoutedExpertsError
from routed_experts.core.server_args import ServerArgs
from routed_experts.demo import demo_model_path

PROGRAM = "routed-experts"
# Other spellings that users of vLLM and SGLang know.
_ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tokenizer_path": ("--tokenizer",),
        "context_length": ("--max-model-len",),
        "tp_size": ("--tensor-parallel-size",),
        "dp_size": ("--data-parallel-size",),
        "max_running_requests": ("--max-num-seqs",),
        "max_prefill_tokens": ("--max-num-batched-tokens",),
        "page_size": ("--block-size",),
        "mem_fraction_static": ("--gpu-memory-utilization",),
        "disable_radix_cache": ("--no-enable-prefix-caching",),
        "random_seed": ("--seed",),
        "enable_return_routed_experts": ("--return-routed-experts",),
    }
)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in two lines, not in a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nsee {self.prog} --help\n")


class _Refused(argparse.Action):
    """A flag that is known elsewhere and refused here; `const` says why."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None) -> NoReturn:
        parser.error(str(self.const))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    began = time.perf_counter()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no Δ shows ?, and the command goes on
    options = make_parser().parse_args(argv)
    try:
        return options.run(options, began)
    except RoutedExpertsError as error:
        return _complain(options.command, error, code=2)
    except BrokenPipeError:  # the reader of our output has left; nothing more may be written, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(options.command, error, code=1)
    except KeyboardInterrupt:
        return 130


def add_engine_flags(parser: argparse.ArgumentParser, *, leave_out: Sequence[str] = ()) -> None:
    """Add one flag a field of ServerArgs; those that are not given leave the field to its default."""
    group = parser.add_argument_group("engine")
    for field in dataclasses.fields(ServerArgs):
        if field.name not in leave_out:
            flags = (f"--{field.name.replace('_', '-')}", *_ALIASES.get(field.name, ()))
            told = "chosen by the engine" if field.default is None else field.default
            group.add_argument(*flags, dest=field.name, default=argparse.SUPPRESS, help=f"default: {told}", **_taking(field.type))
    why = "code that a checkpoint brings along is never run; use a model of a supported architecture without it"
    group.add_argument("--trust-remote-code", action=_Refused, nargs=0, const=why, help=argparse.SUPPRESS)


def engine_args(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ServerArgs that were given on the command line."""
    given = vars(options)
    fields = {field.name: given[field.name] for field in dataclasses.fields(ServerArgs) if field.name in given}
    return {name: tuple(cast("list[int]", value)) if isinstance(value, list) else value for name, value in fields.items()}


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description="Serve Mixture-of-Experts models and know which experts every token was routed to.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    demo = commands.add_parser("demo", help="generate with capture, replay it, draw it; no network, no accelerator", allow_abbrev=False)
    demo.add_argument("--model", type=Path, default=None, metavar="DIR", help="checkpoint to show (default: the one in the package)")
    demo.add_argument("--output", type=Path, default=Path("demo-output"), metavar="DIR", help="default: demo-output")
    demo.set_defaults(run=_demo)
    generate = commands.add_parser("generate", help="generate for prompts, with routed experts if asked", allow_abbrev=False)
    generate.add_argument("model_path", metavar="MODEL", help="checkpoint folder")
    generate.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="may be given several times")
    generate.add_argument("--max-new-tokens", type=int, default=None, metavar="N", help="default: 128")
    generate.add_argument("--temperature", type=float, default=None, metavar="T", help="default: 1; 0 is greedy")
    generate.add_argument("--output", type=Path, default=None, metavar="FILE", help="JSON lines, one an answer, with the rows")
    add_engine_flags(generate, leave_out=("model_path", "skip_tokenizer_init"))
    generate.set_defaults(run=_generate)
    return parser


def _demo(options: argparse.Namespace, began: float) -> int:
    cache = _start_jax(default_platform="cpu")
    from routed_experts.demo.story import DemoOptions, run_demo

    model = demo_model_path() if options.model is None else options.model
    told = DemoOptions(model=model, output=options.output, began=began, imported=time.perf_counter(), cache=cache, version=_version())
    return run_demo(told, sys.stdout)


def _generate(options: argparse.Namespace, began: float) -> int:
    args = ServerArgs(**engine_args(options))
    with ExitStack() as stack:
        lines = None if options.output is None else stack.enter_context(options.output.open("w", encoding="utf-8"))
        _start_jax(default_platform=None)
        from routed_experts.engine.engine import Engine

        bar = load_bar if sys.stderr.isatty() else None
        engine = stack.enter_context(Engine(**dataclasses.asdict(args), on_load=bar))
        print(f"ready in {time.perf_counter() - began:.1f} s", file=sys.stderr)
        answers = engine.generate(
            options.prompt,
            sampling_params=None if options.temperature is None else {"temperature": options.temperature},
            max_new_tokens=options.max_new_tokens,
            return_routed_experts=args.enable_return_routed_experts,
        )
        for prompt, answer in zip(options.prompt, cast("list[dict[str, Any]]", answers), strict=True):
            if lines is None:
                print(answer["text"])
            else:
                lines.write(json.dumps({"prompt": prompt, **answer}, ensure_ascii=False) + "\n")
            if args.enable_return_routed_experts:
                info = answer["meta_info"]["routed_experts_info"]
                print(f"routed_experts {tuple(info['shape'])} {info['dtype']}", file=sys.stderr)
    return 0


def load_bar(done: int, total: int) -> None:
    """Draw on standard error how far the loading of `total` bytes is, over the last drawing; the last one ends the line."""
    width = 30
    filled = width * done // max(total, 1)
    end = "\n" if done >= total else ""
    drawn = "#" * filled + "." * (width - filled)
    print(f"\rloading [{drawn}] {done / 1e9:.2f} of {total / 1e9:.2f} GB", end=end, file=sys.stderr, flush=True)


def _start_jax(*, default_platform: str | None) -> Path | None:
    """Import JAX, let it keep compiled programs, and find its devices; returns where programs are kept, or None."""
    cache = _cache_folder()
    import jax

    if default_platform is not None and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", default_platform)
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    try:
        jax.devices()
    except RuntimeError as error:
        raise ConfigError(f"JAX finds no device ({error}); set JAX_PLATFORMS to one of those that are there, such as cpu") from error
    return cache


def _cache_folder() -> Path | None:
    """JAX_COMPILATION_CACHE_DIR, else routed-experts/jax in the user's cache folder (XDG_CACHE_HOME, ~/.cache); made if need be."""
    said, xdg = os.environ.get("JAX_COMPILATION_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path(os.path.expanduser("~")) / ".cache"
    folder = Path(said) if said else base / "routed-experts" / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"compiled programs are not kept: {error}", file=sys.stderr)
        return None
    return folder if os.access(folder, os.W_OK) else None


def _taking(kind: object) -> dict[str, Any]:
    """What argparse is told of a field's type."""
    if isinstance(kind, types.UnionType):
        (kind,) = (one for one in get_args(kind) if one is not types.NoneType)
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is tuple:
        return {"type": get_args(kind)[0], "nargs": "+", "metavar": "N"}
    assert isinstance(kind, type), kind
    return {"type": cast("Callable[[str], object]", kind), "metavar": {int: "N", float: "X"}.get(kind, "NAME")}


def _complain(command: str, error: Exception, *, code: int) -> int:
    print(f"{PROGRAM} {command}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _version() -> str:
    try:
        return importlib.metadata.version(PROGRAM)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
