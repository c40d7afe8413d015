"""Records out of the files that commands and servers write, all that a file holds. Knows no plan and no model."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

from routed_experts.core.errors import ConfigError, RoutingFormatError
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.answer_archive import decode_answers, holds_answers
from routed_experts.formats.meta_info import record_from_response

SUFFIXES = (".jsonl", ".json", ".safetensors")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordFile:
    """One record, and the answer that it came in: its fields beside the rows, none for a file that is a record
    alone."""

    record: RoutedExperts
    answer: Mapping[str, object]


def read_records(files: Iterable[Path]) -> list[RoutedExperts]:
    """The records of `read_answers`."""
    return [one.record for one in read_answers(files)]


def read_answers(files: Iterable[Path]) -> list[RecordFile]:
    """Every record of .jsonl (`generate --output`: an answer a line), .json (an answer, or a list) and .safetensors
    files (a record, or what `generate --output` wrote), in order.

    Raises ConfigError for another suffix, RoutingFormatError naming the file and what in it holds no routed experts."""
    return [one for file in files for one in _all_of(file)]


def lines_of(text: str) -> list[str]:
    """The lines of a .jsonl file. They end at line feeds alone: JSON may hold the other characters that
    `str.splitlines` cuts at."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _all_of(file: Path) -> list[RecordFile]:
    try:
        records = list(_records_of(file))
    except (RoutingFormatError, UnicodeDecodeError, RecursionError) as error:
        raise RoutingFormatError(f"{file}: {error}; give what generate --output or a server wrote") from error
    if not records:
        raise RoutingFormatError(f"{file} holds no answer; give what generate --output or a server wrote")
    return records


def _records_of(file: Path) -> Iterator[RecordFile]:
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"{file} ends in {file.suffix!r}; name files that end in {', '.join(SUFFIXES)}")
    if file.suffix == ".safetensors":
        yield from _in_tensors(file.read_bytes())
        return
    text = file.read_text(encoding="utf-8")
    for number, said in enumerate(lines_of(text) if file.suffix == ".jsonl" else [text], start=1):
        if said.strip():
            where = f"line {number}" if file.suffix == ".jsonl" else "the file"
            for answer in _answers(said, where):
                yield from _choices(answer, where)


def _in_tensors(encoded: bytes) -> Iterator[RecordFile]:
    """One record, or those of a file of answers."""
    if not holds_answers(encoded):
        yield RecordFile(record=RoutedExperts.from_bytes(encoded), answer={})
        return
    for number, filed in enumerate(decode_answers(encoded), start=1):
        if filed.record is None:
            raise RoutingFormatError(
                f"answer {number} holds no routed experts; generate with --enable-return-routed-experts"
            )
        yield RecordFile(record=filed.record, answer=filed.answer)


def _answers(said: str, where: str) -> list[object]:
    try:
        read: object = json.loads(said)
    except ValueError as error:
        raise RoutingFormatError(f"{where} is no JSON ({error})") from error
    return cast("list[object]", read) if isinstance(read, list) else [read]


def _choices(answer: object, where: str) -> Iterator[RecordFile]:
    """The records of all choices of an answer."""
    if not isinstance(answer, Mapping):
        raise RoutingFormatError(
            f"{where} holds no answer but a {type(answer).__name__}; wanted the answer of a server as an object"
        )
    said = cast("Mapping[str, object]", answer)
    choices = said.get("choices")
    for choice in range(len(cast("list[object]", choices)) if isinstance(choices, list) else 1):
        record = record_from_response(said, choice)
        if record is None:
            raise RoutingFormatError(f"{where} holds no routed experts; generate with --enable-return-routed-experts")
        yield RecordFile(record=record, answer=said)
