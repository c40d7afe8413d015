"""Read the records in files that commands and servers write."""

import contextlib
import dataclasses
import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

from routed_experts.core.errors import ConfigError, RoutingFormatError
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.archive import decode_answers, decode_record_and_tokens, holds_answers
from routed_experts.formats.meta_info import choices_of, record_from_response

SUFFIXES = (".jsonl", ".json", ".safetensors")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordFile:
    """One record and the other fields of its answer; of a file of one record its token ids, where it has them."""

    record: RoutedExperts
    answer: Mapping[str, object]


def read_records(files: Iterable[Path]) -> list[RoutedExperts]:
    """The records of `read_answers`."""
    return [entry.record for entry in read_answers(files)]


def read_answers(files: Iterable[Path]) -> list[RecordFile]:
    """Every record of .jsonl (`generate --output`: an answer a line), .json (an answer, or a list) and .safetensors
    files (a record, or what `generate --output` wrote), in order.

    Raises ConfigError for another suffix or a file that cannot be read, RoutingFormatError naming the file and what in
    it holds no routed experts."""
    return [entry for file in files for entry in _read_all(file)]


@contextlib.contextmanager
def readable(file: Path) -> Generator[None]:
    """Raise ConfigError where `file`, which holds answers, cannot be read."""
    try:
        yield
    except OSError as error:
        text = f"{file} cannot be read ({error.strerror})"
        raise ConfigError(f"{text}; name a file that generate --output or a server wrote") from error


def split_lines(text: str) -> list[str]:
    """Split a .jsonl file at line feeds alone: JSON may hold the other characters that `str.splitlines` splits at."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _read_all(file: Path) -> list[RecordFile]:
    try:
        with readable(file):
            records = list(_read_file(file))
    except (RoutingFormatError, UnicodeDecodeError, RecursionError) as error:
        raise RoutingFormatError(f"{file}: {error}; give what generate --output or a server wrote") from error
    if not records:
        raise RoutingFormatError(f"{file} holds no answer; give what generate --output or a server wrote")
    return records


def _read_file(file: Path) -> Iterator[RecordFile]:
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"{file} ends in {file.suffix!r}; name files that end in {', '.join(SUFFIXES)}")
    if file.suffix == ".safetensors":
        yield from _read_safetensors(file.read_bytes())
        return
    text = file.read_text(encoding="utf-8")
    for number, line in enumerate(split_lines(text) if file.suffix == ".jsonl" else [text], start=1):
        if line.strip():
            where = f"line {number}" if file.suffix == ".jsonl" else "the file"
            for answer in _answers(line, where):
                yield from _choices(answer, where)


def _read_safetensors(encoded: bytes) -> Iterator[RecordFile]:
    """One record, or those of a file of answers."""
    if not holds_answers(encoded):
        record, token_ids = decode_record_and_tokens(encoded)
        ids: dict[str, object] = {}
        if token_ids is not None:
            end = record.num_prompt_tokens
            ids = {"input_ids": token_ids[:end].tolist(), "output_ids": token_ids[end:].tolist()}
        yield RecordFile(record=record, answer=ids)
        return
    for number, archived in enumerate(decode_answers(encoded), start=1):
        if archived.record is None:
            raise RoutingFormatError(
                f"answer {number} holds no routed experts; generate with --enable-return-routed-experts"
            )
        yield RecordFile(record=archived.record, answer=archived.answer)


def _answers(text: str, where: str) -> list[object]:
    try:
        read: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RoutingFormatError(f"{where} is no JSON ({error})") from error
    return cast("list[object]", read) if isinstance(read, list) else [read]


def _choices(answer: object, where: str) -> Iterator[RecordFile]:
    """The records of all choices of an answer."""
    if not isinstance(answer, Mapping):
        raise RoutingFormatError(
            f"{where} holds no answer but a {type(answer).__name__}; expected the answer of a server as an object"
        )
    response = cast("Mapping[str, object]", answer)
    choices = choices_of(response)
    for choice in range(len(cast("list[object]", choices)) if isinstance(choices, list) else 1):
        record = record_from_response(response, choice)
        if record is None:
            raise RoutingFormatError(f"{where} holds no routed experts; generate with --enable-return-routed-experts")
        yield RecordFile(record=record, answer=response)
