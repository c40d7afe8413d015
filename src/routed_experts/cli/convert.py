"""`routed-experts convert SOURCE TARGET`: converts routed experts between files and wire forms, without a model."""

import argparse
import io
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from routed_experts.cli.record_files import readable, split_lines
from routed_experts.core.atomic_write import atomic_write
from routed_experts.core.errors import ConfigError, RoutingFormatError
from routed_experts.core.npz_io import write_arrays
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats import FRAMEWORKS, WITH_MARK
from routed_experts.formats.archive import decode_answers, decode_record, encode_record, holds_answers
from routed_experts.formats.meta_info import record_from_response
from routed_experts.formats.wire import encode_as_lists, encode_meta_info

WIRE_FORMATS = ("int32", "npy", "packed", "list")
_T = TypeVar("_T")
_PAIRS = ("vllm021", "megatron")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `convert`."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="an answer (.json), a line of many (.jsonl), or a record (.safetensors)",
    )
    parser.add_argument(
        "target",
        type=Path,
        metavar="TARGET",
        help=".safetensors (the record), .json (a wire format), .npy or .npz (--to), which have no combine weights",
    )
    parser.add_argument("--choice", type=int, default=0, metavar="I", help="of an answer with several; default: 0")
    parser.add_argument(
        "--line", type=int, default=1, metavar="N", help="of a file of many answers, as generate writes; default: 1"
    )
    parser.add_argument("--format", choices=WIRE_FORMATS, default="int32", help="of a .json target; default: int32")
    parser.add_argument(
        "--layers",
        choices=("all", "moe"),
        default=None,
        help="of a .json target; default: all for int32 and packed, else moe",
    )
    parser.add_argument(
        "--to", choices=FRAMEWORKS, default="sglang", help="whose array a .npy target holds; default: sglang"
    )
    parser.add_argument(
        "--missing", choices=("error", "gate"), default="error", help="rows that are not known; default: error"
    )


def run(options: argparse.Namespace, start_time: float) -> int:
    """Read one record and write it."""
    record = _read(options.source, choice=options.choice, line=options.line)
    target: Path = options.target
    if target.suffix == ".safetensors":
        with atomic_write(target) as part:
            part.write_bytes(encode_record(record))
    elif target.suffix == ".json":
        with atomic_write(target) as part:
            part.write_text(json.dumps({"meta_info": _wire_fields(record, options)}) + "\n", encoding="utf-8")
    elif target.suffix in (".npy", ".npz"):
        _write_arrays(record, target, options)
    else:
        raise ConfigError(
            f"{target} ends in {target.suffix!r}; name a file that ends in .safetensors, .json, .npy or .npz"
        )
    model = f"{record.ids.shape[1]} MoE layers, top-{record.top_k}"
    print(f"wrote {target}: {record.num_rows} rows from token {record.start} on, {model}")
    return 0


def _read(source: Path, *, choice: int, line: int) -> RoutedExperts:
    if source.suffix == ".safetensors":
        with readable(source):
            encoded = source.read_bytes()
        if not holds_answers(encoded):
            return decode_record(encoded)
        return _require_record(_entry(decode_answers(encoded), source, line).record, source)
    with readable(source):
        encoded = source.read_bytes()
    try:
        text = encoded.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RoutingFormatError(f"{source} is no UTF-8 ({error}); give an answer of a server") from error
    if source.suffix == ".jsonl":
        text = _entry([entry for entry in split_lines(text) if entry.strip()], source, line)
    try:
        response = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RoutingFormatError(f"{source} is no JSON ({error}); give an answer of a server") from error
    if isinstance(response, list):  # several prompts or choices of /generate
        answers = cast("list[Any]", response)
        if not 0 <= choice < len(answers):
            raise ConfigError(f"--choice {choice}, but {source} has {len(answers)} answers")
        response, choice = answers[choice], 0
    return _require_record(record_from_response(response, choice), source)


def _entry(answers: Sequence[_T], source: Path, line: int) -> _T:
    if not answers:
        raise RoutingFormatError(f"{source} holds no answer; give what generate --output wrote")
    if not 1 <= line <= len(answers):
        raise ConfigError(f"--line {line}, but {source} has {len(answers)}; choose 1 to {len(answers)}")
    return answers[line - 1]


def _require_record(record: RoutedExperts | None, source: Path) -> RoutedExperts:
    if record is None:
        raise RoutingFormatError(f"{source} holds no routed experts; ask the server with return_routed_experts true")
    return record


def _wire_fields(record: RoutedExperts, options: argparse.Namespace) -> dict[str, object]:
    layers = options.layers or ("all" if options.format in ("int32", "packed") else "moe")
    if options.format == "list":
        return encode_as_lists(record, layers=layers)
    return encode_meta_info(record, payload_format=options.format, layers=layers)


def _write_arrays(record: RoutedExperts, target: Path, options: argparse.Namespace) -> None:
    """Write one array as .npy; the parts of a layout that has several as .npz."""
    framework = import_module(f"routed_experts.formats.{options.to}")
    arrays = framework.encode(record, **({"missing": options.missing} if options.to in WITH_MARK else {}))
    if (options.to in _PAIRS) != (target.suffix == ".npz"):
        suffix = ".npz" if options.to in _PAIRS else ".npy"
        raise ConfigError(f"--to {options.to} is written as {suffix}; {target} ends in {target.suffix}")
    if options.to == "vllm021":
        write_arrays(target, {"prompt": arrays[0], "generated": arrays[1]})
    elif options.to == "megatron":
        write_arrays(target, {"mask": arrays[1], **{f"layer_{index}": layer for index, layer in enumerate(arrays[0])}})
    else:
        encoded = io.BytesIO()  # NumPy does not check that the last bytes reach a file
        np.save(encoded, arrays, allow_pickle=False)
        with atomic_write(target) as part:
            part.write_bytes(encoded.getbuffer())
