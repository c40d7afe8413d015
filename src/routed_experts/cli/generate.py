"""`routed-experts generate MODEL`: prompts in, text or JSON lines out.

A line of --input is a JSON object with `prompt` (or `text`, as in /generate) or `input_ids`. Its other fields are
copied to its line of --output, before those of the answer. `meta_info` and `output_ids` are fields of the answer, and
refused here:

    {"prompt": "Once upon a time", "id": 7}
    {"input_ids": [12, 7, 256]}"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from routed_experts.cli.bootstrap import LoadBar, announce_compilation, interrupt_on_sigterm, start_jax
from routed_experts.cli.flags import (
    MODEL_HELP,
    add_engine_flags,
    add_expert_flags,
    add_placement_flags,
    add_speculative_flags,
    check_sampling_flags,
    engine_args,
    expert_args,
    load_format,
    log_ignored_flags,
    placement_args,
    speculative_args,
)
from routed_experts.core.atomic_write import atomic_write
from routed_experts.core.error_text import nearest_name, short_repr, short_text
from routed_experts.core.errors import ConfigError, InvalidRequestError
from routed_experts.core.interrupts import hold_interrupts
from routed_experts.core.server_args import ServerArgs
from routed_experts.formats.archive import ArchivedAnswer, encode_answers
from routed_experts.formats.meta_info import record_from_meta_info
from routed_experts.formats.wire import INFO_KEY

if TYPE_CHECKING:
    from routed_experts.engine.engine import Engine

BATCH_SIZE = 256  # prompts of one call, where the queue holds them
_PROMPT_KEYS = ("prompt", "text", "input_ids")
_OUTPUT_SUFFIXES = (".jsonl", ".safetensors")  # of files that other commands read
_ANSWER_KEYS = ("output_ids", "meta_info")  # text is a prompt
_INPUT_HELP = """a JSON object a line, - for standard input: {"prompt": "text"} (or "text", as in /generate) or
{"input_ids": [1, 2, 3]}; other fields but output_ids and meta_info are copied to the line of the answer"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """The fields of one line, and where it is."""

    fields: dict[str, Any]
    location: str


@dataclasses.dataclass(slots=True, kw_only=True)
class _Summary:
    """What the answers of a run hold, for the line at its end."""

    num_answers: int = 0
    num_rows: int = 0
    model: str = ""

    def add(self, answer: dict[str, Any]) -> None:
        """Count an answer and its rows."""
        self.num_answers += 1
        rows_info = answer["meta_info"].get(INFO_KEY)
        if rows_info is not None:
            num_rows, _, top_k = rows_info["shape"]
            self.num_rows += num_rows
            self.model = f"{len(rows_info['moe_layer_ids'])} MoE layers, top-{top_k}"

    def __str__(self) -> str:
        answers = f"{self.num_answers} answer{'' if self.num_answers == 1 else 's'}"
        return f"{answers}, {self.num_rows} rows, {self.model}" if self.model else answers


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `generate`."""
    parser.add_argument("model_path", metavar="MODEL", help=MODEL_HELP)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    prompts.add_argument("--input", type=Path, metavar="FILE", help=_INPUT_HELP)
    parser.add_argument("--max-new-tokens", type=int, default=None, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=None, metavar="T", help="default: 1; 0 is greedy")
    parser.add_argument(
        "--output",
        type=Path,
        default=None,
        metavar="FILE",
        help="the answers: JSON lines (.jsonl), or an archive (.safetensors); default: text on standard output",
    )
    add_engine_flags(parser, leave_out=("model_path", "skip_tokenizer_init"))
    add_expert_flags(parser)
    add_placement_flags(parser)
    add_speculative_flags(parser)


def run(options: argparse.Namespace, start_time: float) -> int:
    """Generate for all prompts, in order."""
    log_ignored_flags(options)
    args, experts = ServerArgs(**engine_args(options)), expert_args(options)
    groups: dict[str, Any] = {
        "load_format": load_format(options),
        "experts": experts,
        "placement": placement_args(options),
        "speculative": speculative_args(options),
    }
    check_sampling_flags(options)
    _check_output(options.output, options.input)
    prompts = list(_read(options.input) if options.prompt is None else _from_flags(options.prompt))
    output: Path | None = options.output
    as_archive = output is not None and output.suffix == ".safetensors"
    with ExitStack() as stack:
        stack.enter_context(interrupt_on_sigterm())
        part: Path | None = None
        if output is not None:
            part = stack.enter_context(atomic_write(output) if as_archive else _new_lines(output))
        start_jax(default_platform=None)
        announce_compilation(args, offloads=experts.num_resident is not None)
        with hold_interrupts():
            from routed_experts.engine.engine import Engine

        bar = LoadBar() if sys.stderr.isatty() else None
        engine = stack.enter_context(Engine(**dataclasses.asdict(args), **groups, on_load=bar))
        print(f"ready in {time.perf_counter() - start_time:.1f} s", file=sys.stderr)
        summary = _Summary()
        answers = _answers(engine, prompts, options, args, summary)
        if part is None:
            for answer in answers:
                print(answer["text"])
        elif as_archive:
            part.write_bytes(encode_answers([_archived(engine, answer) for answer in answers]))
        else:
            with part.open("w", encoding="utf-8") as lines:
                lines.writelines(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
    if output is not None:  # the file has its name
        print(f"wrote {output}: {summary}", file=sys.stderr)
    elif summary.num_rows:
        print(f"{summary}; --output FILE keeps the rows", file=sys.stderr)
    return 0


def _check_output(output: Path | None, source: Path | None) -> None:
    """Raise ConfigError for a file whose ending no command reads, and for the file of the prompts, also by a link or as
    standard input. A device or a pipe is neither."""
    if output is None or (output.exists() and not output.is_file()):
        return
    if source is not None and _is_same_file(0 if str(source) == "-" else source, output):
        text = f"--output {short_text(str(output))} is the file of --input, and the answers would replace the prompts"
        raise ConfigError(f"{text}; name another file")
    if output.suffix in _OUTPUT_SUFFIXES:
        return
    lines, archive = _OUTPUT_SUFFIXES
    text = f"--output {short_text(str(output))} ends in {output.suffix!r}, which analyze, convert and placement do not"
    raise ConfigError(f"{text} read; name a file that ends in {lines} (JSON lines) or {archive} (an archive)")


def _is_same_file(source: Path | int, output: Path) -> bool:
    """Whether both are one file. `source`: a path, or a descriptor."""
    try:
        return os.path.samefile(source, output)
    except OSError:  # one of them does not exist
        return False


@contextlib.contextmanager
def _new_lines(path: Path) -> Generator[Path, None, None]:
    """A new file. After an error, Ctrl-C or SIGTERM its whole lines are kept, in a file that standard error names."""
    part: Path | None = None
    try:
        with atomic_write(path, keep=True) as part:
            yield part
    except BaseException:
        if part is not None and part.is_file() and part != Path(os.path.realpath(path)):
            _keep_lines(part)
        raise


def _keep_lines(part: Path) -> None:
    """Cut an incomplete last line, which needs no space on a full disk."""
    num_bytes = num_lines = 0
    with part.open("rb+") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                num_bytes, num_lines = num_bytes + len(line), num_lines + 1
        if num_lines:
            stream.truncate(num_bytes)
            print(f"{num_lines} answers so far are kept, a line each, in {part}", file=sys.stderr)


def _archived(engine: "Engine", answer: dict[str, Any]) -> ArchivedAnswer:
    """An answer with the token ids of its prompt and output."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None, "generate has no --skip-tokenizer-init"
    prompt = answer["input_ids"] if "input_ids" in answer else tokenizer.encode(answer["prompt"])
    token_ids = np.array([*prompt, *answer["output_ids"]], np.int32)
    return ArchivedAnswer(answer=answer, token_ids=token_ids, record=record_from_meta_info(answer))


def _answers(
    engine: "Engine", prompts: list[_Prompt], options: argparse.Namespace, args: ServerArgs, summary: _Summary
) -> Iterator[dict[str, Any]]:
    """Each prompt's fields with those of its answer, and what the engine records; `summary` counts them. Consecutive
    prompts of one kind share a call."""
    first, wants_rows = 0, args.enable_return_routed_experts
    most = min(BATCH_SIZE, args.max_queued_requests)
    while first < len(prompts):
        kind = "prompt" if "prompt" in prompts[first].fields else "input_ids"
        batch = [prompts[first]]
        for prompt in prompts[first + 1 : first + most]:
            if kind not in prompt.fields:
                break
            batch.append(prompt)
        values = [prompt.fields[kind] for prompt in batch]
        with _named_line(batch):
            answers = engine.generate(
                values if kind == "prompt" else None,
                None if options.temperature is None else {"temperature": options.temperature},
                values if kind == "input_ids" else None,
                max_new_tokens=options.max_new_tokens,
                return_routed_experts=wants_rows,
                return_routed_experts_weights=args.enable_return_routed_experts_weights,
            )
        for prompt, answer in zip(batch, cast("list[dict[str, Any]]", answers), strict=True):
            summary.add(answer)
            yield {**prompt.fields, **answer}
        first += len(batch)
        if len(prompts) > most:
            print(f"{first} of {len(prompts)} prompts", file=sys.stderr)


@contextlib.contextmanager
def _named_line(batch: list[_Prompt]) -> Generator[None, None, None]:
    """Name the prompt of a call that is refused."""
    try:
        yield
    except InvalidRequestError as error:
        index = 0 if len(batch) == 1 else error.index
        if index is None:  # of every prompt
            raise
        raise ConfigError(f"{batch[index].location}: {error.at_prompt(None)}") from error


def _from_flags(texts: list[str]) -> Iterator[_Prompt]:
    for number, text in enumerate(texts, start=1):
        yield _checked({"prompt": text}, "--prompt" if len(texts) == 1 else f"--prompt {number} of {len(texts)}")


def _read(file: Path) -> Iterator[_Prompt]:
    """The prompts of a file, or of standard input."""
    with ExitStack() as stack:
        try:
            source = _standard_input() if str(file) == "-" else stack.enter_context(file.open("rb"))
        except OSError as error:
            text = f"--input {file} cannot be read ({error.strerror})"
            raise ConfigError(f"{text}; name a file of JSON lines, or - for standard input") from error
        for number, line in enumerate(source, start=1):
            if line.strip():
                yield _prompt(line, f"{file}, line {number}")


def _standard_input() -> Iterable[str | bytes]:
    """Lines of standard input, as bytes where it has them."""
    return getattr(sys.stdin, "buffer", sys.stdin)


def _prompt(line: str | bytes, location: str) -> _Prompt:
    try:
        fields: Any = json.loads(line if isinstance(line, str) else line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'{location} is no JSON ({error}); write one object a line: {{"prompt": "text"}}') from error
    prompts = [name for name in _PROMPT_KEYS if isinstance(fields, dict) and name in fields]
    if len(prompts) > 1:
        raise ConfigError(f"{location} has {' and '.join(prompts)}, each of which is its prompt; give one of them")
    if not prompts:
        text = f"{location} must be an object with prompt (or text) or input_ids"
        raise ConfigError(f"{text}{_keys_found(fields)}; correct the line")
    prompt = cast("dict[str, Any]", fields)
    if "text" in prompt:  # the answer has a field of that name
        prompt = {"prompt" if name == "text" else name: value for name, value in prompt.items()}
    return _checked(prompt, location)


def _keys_found(fields: object) -> str:
    """The keys of a line that is no prompt, and the nearest known one."""
    if not isinstance(fields, dict):
        return ""
    keys = [str(key) for key in cast("dict[object, object]", fields)]
    nearest = next((name for key in keys if (name := nearest_name(key, _PROMPT_KEYS)) not in (None, key)), None)
    listed = ", ".join(short_repr(key) for key in keys[:5]) or "no key"
    return f"; it has {listed}" + ("" if nearest is None else f": did you mean {nearest}?")


def _checked(prompt: dict[str, Any], location: str) -> _Prompt:
    """A prompt that the engine accepts, whose fields can be written next to its output."""
    ids: object = prompt.get("input_ids")
    if not isinstance(prompt.get("prompt", ""), str) or not ("prompt" in prompt or _are_ids(ids)):
        raise ConfigError(f"{location} must hold prompt as text or input_ids as a list of token ids; correct the line")
    if not prompt.get("prompt", ids):
        raise ConfigError(f"{location} holds an empty prompt; give at least one character, or one token id")
    if taken := next((name for name in _ANSWER_KEYS if name in prompt), None):
        raise ConfigError(f"{location} has a field {taken}, which is one of its answer; rename it")
    try:
        json.dumps(prompt, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        text = f"{location} holds {error.object[error.start]!a}, half a character, which no file can hold"
        raise ConfigError(f"{text}; remove it") from error
    except (ValueError, RecursionError) as error:
        text = f"{location} holds NaN, Infinity or a value too deep to be written as JSON ({error})"
        raise ConfigError(f"{text}; write null or text instead") from error
    return _Prompt(fields=prompt, location=location)


def _are_ids(ids: object) -> bool:
    return isinstance(ids, list) and all(type(token) is int and token >= 0 for token in cast("list[object]", ids))
