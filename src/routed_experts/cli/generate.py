"""`routed-experts generate`: prompts in, text or JSON lines out. Knows the engine by its public door."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from routed_experts.capture.answer_file import FiledAnswer, encode_answers
from routed_experts.capture.meta_info import record_from_meta_info
from routed_experts.cli.flags import add_engine_flags, add_expert_flags, add_placement_flags, engine_args, expert_args, placement_args
from routed_experts.cli.start import load_bar, start_jax
from routed_experts.core.errors import ConfigError
from routed_experts.core.new_file import new_file
from routed_experts.core.server_args import ServerArgs

if TYPE_CHECKING:
    from routed_experts.engine.engine import Engine

BATCH = 256  # prompts of one call


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `generate`."""
    parser.add_argument("model_path", metavar="MODEL", help="checkpoint folder")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    prompts.add_argument("--input", type=Path, metavar="FILE", help='JSON lines: {"prompt": TEXT} or {"input_ids": [...]}, - for stdin')
    parser.add_argument("--max-new-tokens", type=int, default=None, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=None, metavar="T", help="default: 1; 0 is greedy")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE", help="JSON lines with the rows, or .safetensors")
    add_engine_flags(parser, leave_out=("model_path", "skip_tokenizer_init"))
    add_expert_flags(parser)
    add_placement_flags(parser)


def run(options: argparse.Namespace, began: float) -> int:
    """Generate for all prompts, in order."""
    args, experts, placement = ServerArgs(**engine_args(options)), expert_args(options), placement_args(options)
    prompts = [{"prompt": text} for text in options.prompt] if options.prompt else list(_read(options.input))
    with ExitStack() as stack:
        part = None if options.output is None else stack.enter_context(new_file(options.output))
        start_jax(default_platform=None)
        from routed_experts.engine.engine import Engine

        bar = load_bar if sys.stderr.isatty() else None
        engine = stack.enter_context(Engine(**dataclasses.asdict(args), experts=experts, placement=placement, on_load=bar))
        print(f"ready in {time.perf_counter() - began:.1f} s", file=sys.stderr)
        answers = _answers(engine, prompts, options, wants_rows=args.enable_return_routed_experts)
        if part is None:
            for answer in answers:
                print(answer["text"])
        elif part.suffix == ".safetensors":
            part.write_bytes(encode_answers([_filed(engine, answer) for answer in answers]))
        else:
            with part.open("w", encoding="utf-8") as lines:
                lines.writelines(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
    return 0


def _filed(engine: "Engine", answer: dict[str, Any]) -> FiledAnswer:
    """An answer with the ids of its whole sequence."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None, "generate has no --skip-tokenizer-init"
    prompt = answer["input_ids"] if "input_ids" in answer else tokenizer.encode(answer["prompt"])
    token_ids = np.array([*prompt, *answer["output_ids"]], np.int32)
    return FiledAnswer(answer=answer, token_ids=token_ids, record=record_from_meta_info(answer))


def _answers(engine: "Engine", prompts: list[dict[str, Any]], options: argparse.Namespace, *, wants_rows: bool) -> Iterator[dict[str, Any]]:
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
    except ValueError as error:
        raise ConfigError(f'{where} is no JSON ({error}); write one object a line: {{"prompt": "text"}}') from error
    if not isinstance(said, dict) or ("prompt" in said) == ("input_ids" in said):
        raise ConfigError(f"{where} must be an object with prompt or input_ids; correct the line")
    return cast("dict[str, Any]", said)
