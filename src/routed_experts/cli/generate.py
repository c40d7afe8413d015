"""`routed-experts generate`: prompts in, text or JSON lines out. Knows the engine by its public door."""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from routed_experts.cli.bootstrap import load_bar, start_jax
from routed_experts.cli.flags import (
    MODEL_HELP,
    add_engine_flags,
    add_expert_flags,
    add_placement_flags,
    engine_args,
    expert_args,
    placement_args,
)
from routed_experts.core.atomic_write import atomic_write
from routed_experts.core.errors import ConfigError
from routed_experts.core.server_args import ServerArgs
from routed_experts.formats.archive import ArchivedAnswer, encode_answers
from routed_experts.formats.meta_info import record_from_meta_info

if TYPE_CHECKING:
    from routed_experts.engine.engine import Engine

BATCH = 256  # prompts of one call


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `generate`."""
    parser.add_argument("model_path", metavar="MODEL", help=MODEL_HELP)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    prompts.add_argument(
        "--input", type=Path, metavar="FILE", help='JSON lines: {"prompt": TEXT} or {"input_ids": [...]}, - for stdin'
    )
    parser.add_argument("--max-new-tokens", type=int, default=None, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=None, metavar="T", help="default: 1; 0 is greedy")
    parser.add_argument(
        "--output", type=Path, default=None, metavar="FILE", help="JSON lines with the rows, or .safetensors"
    )
    add_engine_flags(parser, leave_out=("model_path", "skip_tokenizer_init"))
    add_expert_flags(parser)
    add_placement_flags(parser)


def run(options: argparse.Namespace, start_time: float) -> int:
    """Generate for all prompts, in order."""
    args, experts, placement = ServerArgs(**engine_args(options)), expert_args(options), placement_args(options)
    prompts = (
        [_checked({"prompt": text}, "--prompt") for text in options.prompt]
        if options.prompt
        else list(_read(options.input))
    )
    filed = options.output is not None and options.output.suffix == ".safetensors"
    with ExitStack() as stack:
        lent = None if options.output is None else atomic_write(options.output) if filed else _new_lines(options.output)
        part = None if lent is None else stack.enter_context(lent)
        start_jax(default_platform=None)
        from routed_experts.engine.engine import Engine

        bar = load_bar if sys.stderr.isatty() else None
        engine = stack.enter_context(
            Engine(**dataclasses.asdict(args), experts=experts, placement=placement, on_load=bar)
        )
        print(f"ready in {time.perf_counter() - start_time:.1f} s", file=sys.stderr)
        answers = _answers(engine, prompts, options, wants_rows=args.enable_return_routed_experts)
        if part is None:
            for answer in answers:
                print(answer["text"])
        elif filed:
            part.write_bytes(encode_answers([_filed(engine, answer) for answer in answers]))
        else:
            with part.open("w", encoding="utf-8") as lines:
                lines.writelines(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
    return 0


@contextlib.contextmanager
def _new_lines(path: Path) -> Generator[Path, None, None]:
    """A new file of which an error or Ctrl-C leaves the whole lines; where they are is told on standard error."""
    part: Path | None = None
    try:
        with atomic_write(path, keep=True) as part:
            yield part
    except BaseException:
        if part is not None and part.is_file() and part != Path(os.path.realpath(path)):
            _keep_lines(part)
        raise


def _keep_lines(part: Path) -> None:
    """Cut a last line that is not whole, which takes no room on a disk that is full."""
    whole = num_lines = 0
    with part.open("rb+") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                whole, num_lines = whole + len(line), num_lines + 1
        if num_lines:
            stream.truncate(whole)
            print(f"{num_lines} answers so far are kept, a line each, in {part}", file=sys.stderr)


def _filed(engine: "Engine", answer: dict[str, Any]) -> ArchivedAnswer:
    """An answer with the ids of its whole sequence."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None, "generate has no --skip-tokenizer-init"
    prompt = answer["input_ids"] if "input_ids" in answer else tokenizer.encode(answer["prompt"])
    token_ids = np.array([*prompt, *answer["output_ids"]], np.int32)
    return ArchivedAnswer(answer=answer, token_ids=token_ids, record=record_from_meta_info(answer))


def _answers(
    engine: "Engine", prompts: list[dict[str, Any]], options: argparse.Namespace, *, wants_rows: bool
) -> Iterator[dict[str, Any]]:
    """Each prompt's fields with those of its answer. Prompts of one kind that follow each other share a call."""
    place = 0
    while place < len(prompts):
        kind = "prompt" if "prompt" in prompts[place] else "input_ids"
        some = [prompts[place]]
        for prompt in prompts[place + 1 : place + BATCH]:
            if kind not in prompt:
                break
            some.append(prompt)
        said = [prompt[kind] for prompt in some]
        answers = engine.generate(
            said if kind == "prompt" else None,
            None if options.temperature is None else {"temperature": options.temperature},
            said if kind == "input_ids" else None,
            max_new_tokens=options.max_new_tokens,
            return_routed_experts=wants_rows,
        )
        for prompt, answer in zip(some, cast("list[dict[str, Any]]", answers), strict=True):
            if wants_rows:
                info = answer["meta_info"]["routed_experts_info"]
                print(f"routed_experts {tuple(info['shape'])} {info['dtype']}", file=sys.stderr)
            yield {**prompt, **answer}
        place += len(some)
        if len(prompts) > BATCH:
            print(f"{place} of {len(prompts)} prompts", file=sys.stderr)


def _read(file: Path) -> Iterator[dict[str, Any]]:
    """The prompts of a file, or of standard input."""
    with ExitStack() as stack:
        source = sys.stdin if str(file) == "-" else stack.enter_context(file.open(encoding="utf-8"))
        for number, line in enumerate(source, start=1):
            if line.strip():
                yield _prompt(line, f"{file}, line {number}")


def _prompt(line: str, where: str) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'{where} is no JSON ({error}); write one object a line: {{"prompt": "text"}}') from error
    if not isinstance(said, dict) or ("prompt" in said) == ("input_ids" in said):
        raise ConfigError(f"{where} must be an object with prompt or input_ids; correct the line")
    return _checked(cast("dict[str, Any]", said), where)


def _checked(said: dict[str, Any], where: str) -> dict[str, Any]:
    """A prompt, if the engine can take it and its fields can be written beside its answer."""
    ids: object = said.get("input_ids")
    if not isinstance(said.get("prompt", ""), str) or not ("prompt" in said or _are_ids(ids)):
        raise ConfigError(f"{where} must hold prompt as text or input_ids as a list of token ids; correct the line")
    try:
        json.dumps(said, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where} holds {error.object[error.start]!a}, half a character, which no file can hold; take it out"
        ) from error
    return said


def _are_ids(ids: object) -> bool:
    return isinstance(ids, list) and all(type(one) is int and one >= 0 for one in cast("list[object]", ids))
