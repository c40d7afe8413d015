"""`routed-experts convert SOURCE TARGET`: converts routed experts between files and wire forms, without a model."""

import argparse
import io
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import numpy as np
from jaxtyping import Int32

from routed_experts.cli.record_files import readable, split_lines
from routed_experts.core.atomic_write import atomic_write
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import ConfigError, RoutingFormatError
from routed_experts.core.npz_io import write_arrays
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats import FRAMEWORKS, WITH_MARK
from routed_experts.formats.archive import decode_answers, decode_record_and_tokens, encode_record, holds_answers
from routed_experts.formats.meta_info import choices_of, record_from_response
from routed_experts.formats.wire import encode_as_lists, encode_meta_info

WIRE_FORMATS = ("int32", "npy", "packed", "list")
_T = TypeVar("_T")
_PAIRS = ("vllm021", "megatron")
_TO = "sglang"  # unless --to says otherwise
_TARGET_FLAGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {".safetensors": (), ".json": ("format", "layers"), ".npy": ("to", "missing"), ".npz": ("to", "missing")}
)


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
        help=".safetensors (the record), .json (a wire format), .npy or .npz (--to), which have no combine weights; "
        "token ids of SOURCE stay in .safetensors alone",
    )
    parser.add_argument("--choice", type=int, default=None, metavar="I", help="of an answer with several; default: 0")
    parser.add_argument(
        "--line", type=int, default=None, metavar="N", help="of a file of many answers, as generate writes; default: 1"
    )
    parser.add_argument("--format", choices=WIRE_FORMATS, default=None, help="of a .json target; default: int32")
    parser.add_argument(
        "--layers",
        choices=("all", "moe"),
        default=None,
        help="of a .json target; default: all for int32 and packed, else moe",
    )
    parser.add_argument(
        "--to", choices=FRAMEWORKS, default=None, help="whose array a .npy target holds; default: sglang"
    )
    parser.add_argument(
        "--missing", choices=("error", "gate"), default=None, help="rows that are not known; default: error"
    )


def run(options: argparse.Namespace, start_time: float) -> int:
    """Read one record and write it."""
    target: Path = options.target
    _check_target_flags(target, options)
    record, token_ids = _read(options)
    if target.suffix == ".safetensors":
        with atomic_write(target) as part:
            part.write_bytes(encode_record(record, token_ids))
    elif target.suffix == ".json":
        with atomic_write(target) as part:
            part.write_text(json.dumps({"meta_info": _wire_fields(record, options)}) + "\n", encoding="utf-8")
    else:
        _write_arrays(record, target, options)
    model = f"{record.ids.shape[1]} MoE layers, top-{record.top_k}"
    print(f"wrote {target}: {record.num_rows} rows from token {record.start} on, {model}")
    return 0


def _check_target_flags(target: Path, options: argparse.Namespace) -> None:
    """Raise ConfigError for a target of no known form, and for flags of targets of other forms."""
    if target.suffix not in _TARGET_FLAGS:
        *most, last = _TARGET_FLAGS
        raise ConfigError(f"{target} ends in {target.suffix!r}; name a file that ends in {', '.join(most)} or {last}")
    unused = {name for names in _TARGET_FLAGS.values() for name in names} - {*_TARGET_FLAGS[target.suffix]}
    _refuse(sorted(unused), options, f"{target}, a {target.suffix} target")
    if options.missing == "gate" and (options.to or _TO) not in WITH_MARK:
        text = f"--missing gate has no effect on --to {options.to or _TO}, which has no mark for such rows"
        raise ConfigError(f"{text}; choose one of {', '.join(WITH_MARK)}, or leave it out")


def _refuse(names: Sequence[str], options: argparse.Namespace, file: str) -> None:
    """Raise ConfigError for flags that were given and have no effect on `file`."""
    for name in names:
        if (value := getattr(options, name)) is not None:
            raise ConfigError(f"--{name} {short_repr(value)} has no effect on {file}; leave it out")


def _read(options: argparse.Namespace) -> tuple[RoutedExperts, Int32[np.ndarray, " S"] | None]:
    """The record of the source, and the token ids that travel with it, or None."""
    source: Path = options.source
    choice, line = (default if value is None else value for value, default in ((options.choice, 0), (options.line, 1)))
    with readable(source):
        encoded = source.read_bytes()
    if source.suffix == ".safetensors":
        _refuse(["choice"], options, f"{source}, a .safetensors source")
        if not holds_answers(encoded):
            _refuse(["line"], options, f"{source}, which holds one record")
            return decode_record_and_tokens(encoded)
        entry = _entry(decode_answers(encoded), source, line)
        return _require_record(entry.record, source), entry.token_ids
    if source.suffix != ".jsonl":
        _refuse(["line"], options, f"{source}, which is no .jsonl file")
    return _read_answer(source, encoded, choice=choice, line=line), None


def _read_answer(source: Path, encoded: bytes, *, choice: int, line: int) -> RoutedExperts:
    """The record of an answer of a server, or of one in a file of many."""
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
        if not answers:
            raise RoutingFormatError(f"{source} holds no answer; give an answer of a server")
        if not 0 <= choice < len(answers):
            most = len(answers) - 1
            raise ConfigError(f"--choice {short_repr(choice)}, but {source} has answers 0 to {most}; choose one")
        response, choice = answers[choice], 0
    where = f"{source}, line {line}" if source.suffix == ".jsonl" else str(source)
    if choice != 0 and isinstance(response, Mapping) and choices_of(cast("Mapping[str, object]", response)) is None:
        text = f"--choice {short_repr(choice)}, but {where} is one answer without choices"
        raise ConfigError(f"{text}; leave --choice out, and choose among answers with --line")
    try:
        return _require_record(record_from_response(response, choice), source)
    except RoutingFormatError as error:
        raise RoutingFormatError(f"{where}: {str(error).replace('choice=', '--choice ')}") from error


def _entry(answers: Sequence[_T], source: Path, line: int) -> _T:
    if not answers:
        raise RoutingFormatError(f"{source} holds no answer; give what generate --output wrote")
    if not 1 <= line <= len(answers):
        raise ConfigError(f"--line {short_repr(line)}, but {source} has {len(answers)}; choose 1 to {len(answers)}")
    return answers[line - 1]


def _require_record(record: RoutedExperts | None, source: Path) -> RoutedExperts:
    if record is None:
        raise RoutingFormatError(f"{source} holds no routed experts; ask the server with return_routed_experts true")
    return record


def _wire_fields(record: RoutedExperts, options: argparse.Namespace) -> dict[str, object]:
    form = options.format or "int32"
    layers = options.layers or ("all" if form in ("int32", "packed") else "moe")
    if form == "list":
        return encode_as_lists(record, layers=layers)
    return encode_meta_info(record, payload_format=form, layers=layers)


def _write_arrays(record: RoutedExperts, target: Path, options: argparse.Namespace) -> None:
    """Write one array as .npy; the parts of a layout that has several as .npz."""
    to = options.to or _TO
    framework = import_module(f"routed_experts.formats.{to}")
    arrays = framework.encode(record, **({"missing": options.missing or "error"} if to in WITH_MARK else {}))
    if (to in _PAIRS) != (target.suffix == ".npz"):
        suffix = ".npz" if to in _PAIRS else ".npy"
        text = f"--to {to} is written as {suffix}; {target} ends in {target.suffix}"
        raise ConfigError(f"{text}; name a file such as {target.with_suffix(suffix).name}")
    if to == "vllm021":
        write_arrays(target, {"prompt": arrays[0], "generated": arrays[1]})
    elif to == "megatron":
        write_arrays(target, {"mask": arrays[1], **{f"layer_{index}": layer for index, layer in enumerate(arrays[0])}})
    else:
        encoded = io.BytesIO()  # NumPy does not check that the last bytes reach a file
        np.save(encoded, arrays, allow_pickle=False)
        with atomic_write(target) as part:
            part.write_bytes(encoded.getbuffer())
