"""Formats of tool calls: one generator a format, which reads content with calls in it.

    json          <tool_call>{"name": NAME, "arguments": VALUE}</tool_call>                          Hermes, Qwen
    xml           <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>  Qwen3-Coder
    glm           <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>      GLM-4.5
    deepseek-v3   CALLS_BEGIN CALL_BEGIN function SEPARATOR NAME, fenced JSON, CALL_END CALLS_END
    deepseek-v31  CALLS_BEGIN CALL_BEGIN NAME SEPARATOR VALUE CALL_END CALLS_END

Rules of all formats:

* A call starts when its name is known and its arguments begin. Before that, text that turns out to be no call is
  content, its marker included; but where max_tokens or another limit cuts that text behind a call, it is left out.
  After that, the arguments end where the text stops to be what the format says, and what follows is content. Text that
  ends within a call leaves its arguments as they are; where it ends within a marker of XML, the cut marker is no
  content.
* Any name is a call, also one that the request does not have.
* JSON arguments are passed on as they are written. A call without any has `{}`.
* VALUEs of XML have the types of the tool's schema. One that must be a string is passed on while it arrives; another is
  passed on when it is complete: as JSON if it is JSON of an allowed type, else as a string. Qwen3-Coder writes a line
  break on either side of a VALUE. At the end of a text that a limit cuts, the beginning of the end marker of a VALUE is
  no part of it, and neither is the line break before that.
* The end marker of a call that has started is never content, even where other text stands before it. Nor is, behind a
  call, the beginning of any marker of calls at the end of a text that a limit cuts. Where the model ends the text, it
  is content."""

from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType

from routed_experts.parsing.deltas import DeltaWriter
from routed_experts.parsing.json_values import (
    decode_string,
    escape,
    property_types,
    read_arguments,
    read_string,
    read_value,
    value_to_json,
)
from routed_experts.parsing.reader import MAX_NAME_CHARS, Reader, Steps

# The name of each tool, and the schema of its parameters.
Tools = Mapping[str, object]

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE = "```"
_FENCE_JSON = _FENCE + "json"


def _read_content(reader: Reader, writer: DeltaWriter, markers: Sequence[str]) -> Generator[None, None, str | None]:
    """Read content up to one of `markers`, which is read, too, and returned; None at the end of the text."""
    return (yield from reader.read_until(markers, writer.content, silent=markers if writer.num_calls else ()))


def _add_record(reader: Reader, writer: DeltaWriter, expected: Sequence[str] = ()) -> Steps:
    """Add the record, which is no call, as content. It is left out where it is behind a call and a limit cuts it, be it
    within one of `expected`."""
    if writer.num_calls:
        yield from reader.peek()
        if reader.is_cut and reader.read_cut_marker(["", *expected]):
            return
    writer.content(reader.record)


def json_calls(reader: Reader, writer: DeltaWriter, tools: Tools) -> Steps:
    """Read the calls of Hermes and Qwen."""
    ends: list[str] = []
    while (marker := (yield from _read_content(reader, writer, [_CALL, *ends]))) is not None:
        if marker == _CALL_END:
            ends = []
            continue
        reader.start_record(_CALL)
        if (yield from _JsonCall(reader, writer).read()):
            ends = [_CALL_END]
        else:
            yield from _add_record(reader, writer)


class _JsonCall:
    """The object of a call."""

    def __init__(self, reader: Reader, writer: DeltaWriter) -> None:
        self._reader, self._writer = reader, writer
        self._name: str | None = None
        self._arguments: str | None = None  # of an object that has its name after them
        self._has_started = False

    def read(self) -> Generator[None, None, bool]:
        """Read the object. Returns whether the call has started."""
        if (yield from self._reader.skip_whitespace()) != "{":
            return False
        self._reader.read()
        while (yield from self._read_member()):
            pass
        return self._has_started

    def _read_member(self) -> Generator[None, None, bool]:
        """Read a member or the end. Returns whether another may follow."""
        reader = self._reader
        character = yield from reader.skip_whitespace()
        if character == "}":
            reader.read()
            if self._name is not None and not self._has_started:
                self._start("{}")
            return False
        if character != '"' or (key := (yield from _read_key(reader))) is None:
            return False
        first = yield from reader.skip_whitespace()
        if first in ("", *",:}]<"):
            return False
        is_arguments = key in ("arguments", "parameters") and self._arguments is None and not self._has_started
        read = self._read_arguments() if is_arguments else self._read_other(is_name=key == "name")
        if not (yield from read):
            return False
        character = yield from reader.skip_whitespace()
        if character == ",":
            reader.read()
        return character in (",", "}")

    def _read_arguments(self) -> Generator[None, None, bool]:
        if self._name is not None:
            self._start("")
            return (yield from read_arguments(self._reader, self._writer.arguments))
        parts = list[str]()
        is_complete = yield from read_arguments(self._reader, parts.append)
        self._arguments = "".join(parts)
        return is_complete

    def _read_other(self, *, is_name: bool) -> Generator[None, None, bool]:
        parts = list[str]()
        if not (yield from read_value(self._reader, parts.append)):
            return False
        if not is_name or self._name is not None:
            return True
        text = "".join(parts)
        name = decode_string(text) if text.startswith('"') else None
        if not name or len(name) > MAX_NAME_CHARS:
            return False
        self._name = name
        if self._arguments is not None:
            self._start(self._arguments)
        return True

    def _start(self, arguments: str) -> None:
        assert self._name is not None
        self._has_started = True
        self._writer.start_call(self._name)
        self._writer.arguments(arguments)


def _read_key(reader: Reader) -> Generator[None, None, str | None]:
    """Read the key of a member and its colon; "" for a key with a faulty escape."""
    key = yield from read_string(reader)
    if key is None or (yield from reader.skip_whitespace()) != ":":
        return None
    reader.read()
    return decode_string(key) or ""


def listed_calls(reader: Reader, writer: DeltaWriter) -> Steps:
    """Read a list of calls that a grammar has forced: `[{"name": NAME, "parameters": VALUE}, ...]`. A first one that
    is cut before its arguments is content, with the bracket before it; a further one that is cut there is left out."""
    has_calls = False
    while True:
        reader.start_record("")
        while (character := (yield from reader.skip_whitespace())) in ("[", ",", "]"):
            reader.read()
        if not character:
            return
        if not (yield from _JsonCall(reader, writer).read()):
            break
        has_calls = True
    if has_calls and not (yield from reader.peek()):
        return
    writer.content(reader.record)
    yield from reader.read_until([], writer.content)


def named_call(reader: Reader, writer: DeltaWriter, name: str) -> Steps:
    """Read the arguments of the one call that a grammar has forced."""
    if (yield from reader.skip_whitespace()):
        writer.start_call(name)
    yield from reader.read_until([], writer.arguments)


def xml_calls(reader: Reader, writer: DeltaWriter, tools: Tools) -> Steps:
    """Read the calls of Qwen3-Coder. `<tool_call>` may be missing, as the model leaves it out at times."""
    ends: list[str] = []
    while (marker := (yield from _read_content(reader, writer, [_CALL, _FUNCTION, *ends]))) is not None:
        if marker in ends:
            ends = [] if marker == _CALL_END else [_CALL_END]
            continue
        reader.start_record(marker)
        if marker == _CALL:
            yield from reader.skip_whitespace()
            if (yield from reader.read_marker([_FUNCTION])) is None:
                yield from _add_record(reader, writer, (_FUNCTION,))
                continue
        name = yield from reader.read_name(">")
        if name is None:
            yield from _add_record(reader, writer)
            continue
        reader.read()
        writer.start_call(name)
        ends = [_CALL_END, *([] if (yield from _xml_arguments(reader, writer, tools.get(name))) else [_FUNCTION_END])]


def _xml_arguments(reader: Reader, writer: DeltaWriter, parameters: object) -> Generator[None, None, bool]:
    """Read parameters. Returns whether the end marker of the function is read."""
    start = "{"
    while True:
        yield from reader.skip_whitespace()
        marker = yield from reader.read_marker([_PARAMETER, _FUNCTION_END])
        reader.start_record(_PARAMETER)
        key = (yield from reader.read_name(">")) if marker == _PARAMETER else None
        if key is None:
            is_cut = marker == _PARAMETER and not (yield from reader.peek())
            if is_cut or (marker is None and reader.read_cut_marker([_PARAMETER, _FUNCTION_END])):
                return False
            writer.arguments("{}" if start == "{" else "}")
            if marker == _PARAMETER:
                writer.content(reader.record)
            return marker == _FUNCTION_END
        reader.read()
        writer.arguments(f'{start}"{escape(key)}": ')
        start = ", "
        if not (yield from _xml_value(reader, writer, _PARAMETER_END, property_types(parameters, key), has_lines=True)):
            return False


def glm_calls(reader: Reader, writer: DeltaWriter, tools: Tools) -> Steps:
    """Read the calls of GLM-4.5."""
    ends: list[str] = []
    while (marker := (yield from _read_content(reader, writer, [_CALL, *ends]))) is not None:
        if marker == _CALL_END:
            ends = []
            continue
        reader.start_record(_CALL)
        yield from reader.skip_whitespace()
        name = yield from reader.read_name("\n<")
        marker = None
        if name is not None:
            yield from reader.skip_whitespace()
            marker = yield from reader.read_marker([_KEY, _CALL_END])
        if name is None or marker is None:
            yield from _add_record(reader, writer, () if name is None else (_KEY, _CALL_END))
            continue
        writer.start_call(name)
        is_closed = yield from _glm_arguments(reader, writer, tools.get(name), marker)
        ends = [] if is_closed else [_CALL_END]


def _glm_arguments(
    reader: Reader, writer: DeltaWriter, parameters: object, marker: str | None
) -> Generator[None, None, bool]:
    """Read arguments from `marker` on. Returns whether the end marker of the call is read."""
    start, expected = "{", [_KEY, _CALL_END]
    while marker == _KEY:
        parts = list[str]()
        if (yield from reader.read_until([_KEY_END], parts.append)) is None:
            return False
        yield from reader.skip_whitespace()
        if (yield from reader.read_marker([_VALUE])) is None:
            marker, expected = None, [_VALUE]
            break
        key = "".join(parts).strip()
        writer.arguments(f'{start}"{escape(key)}": ')
        start = ", "
        if not (yield from _xml_value(reader, writer, _VALUE_END, property_types(parameters, key), has_lines=False)):
            return False
        yield from reader.skip_whitespace()
        marker = yield from reader.read_marker(expected)
    if marker is None and reader.read_cut_marker(expected):
        return False
    writer.arguments("{}" if start == "{" else "}")
    return marker == _CALL_END


def _xml_value(
    reader: Reader, writer: DeltaWriter, end: str, types: frozenset[str] | None, *, has_lines: bool
) -> Generator[None, None, bool]:
    """Read a value and its end marker. `has_lines`: a line break on either side is none of it. Returns False at the end
    of the text."""
    ends = ["\n" + end, end] if has_lines else [end]
    if types is not None and types == frozenset({"string"}):
        text = _ValueText(writer.arguments, has_lines=has_lines)
        writer.arguments('"')
        if (yield from reader.read_until(ends, text.push, silent=ends)) is None:
            return False
        writer.arguments('"')
        return True
    parts = list[str]()
    if (yield from reader.read_until(ends, parts.append)) is None:
        return False
    value = "".join(parts)
    writer.arguments(value_to_json(value.removeprefix("\n") if has_lines else value, types))
    return True


class _ValueText:
    """The text of a value that is passed on while it arrives. `has_lines`: a line break at its start is none of it."""

    def __init__(self, emit: Callable[[str], None], *, has_lines: bool) -> None:
        self._emit, self._is_line_start = emit, has_lines

    def push(self, text: str) -> None:
        if self._is_line_start:
            text, self._is_line_start = text.removeprefix("\n"), False
        self._emit(escape(text))


def deepseek_calls(reader: Reader, writer: DeltaWriter, tools: Tools, *, has_kind: bool) -> Steps:
    """Read the calls of DeepSeek V3, whose calls begin with their kind and have a fenced block, or of V3.1. The markers
    of the section of calls are never content."""
    markers, ends = [CALLS_BEGIN, CALLS_END, CALL_BEGIN], list[str]()
    while (marker := (yield from _read_content(reader, writer, [*markers, *ends]))) is not None:
        ends = []
        if marker != CALL_BEGIN:
            continue
        reader.start_record(CALL_BEGIN)
        name, expected = yield from _deepseek_head(reader, has_kind=has_kind)
        first = yield from reader.skip_whitespace()
        if name is None or not first:
            yield from _add_record(reader, writer, expected)
            continue
        writer.start_call(name)
        if first == "<":
            writer.arguments("{}")
            is_complete = True
        else:
            is_complete = yield from read_arguments(reader, writer.arguments)
        if is_complete and (yield from reader.skip_whitespace()) == "`" and has_kind:
            has_fence = yield from reader.read_marker([_FENCE])
            if not has_fence and reader.is_cut:
                reader.read_cut_marker([_FENCE])
        yield from reader.skip_whitespace()
        if (yield from reader.read_marker([CALL_END])) is None:
            ends = [CALL_END]


def _deepseek_head(reader: Reader, *, has_kind: bool) -> Generator[None, None, tuple[str | None, Sequence[str]]]:
    """Read the head of a call, up to its arguments. Returns its name; or None, and the marker that is missing."""
    name = yield from reader.read_name("<")
    if name is None:
        return None, ()
    if (yield from reader.read_marker([SEPARATOR])) is None:
        return None, (SEPARATOR,)
    if not has_kind:
        return name, ()
    name = yield from reader.read_name("\n`{<")
    if name is not None and (yield from reader.skip_whitespace()) == "`":
        has_fence = yield from reader.read_marker([_FENCE_JSON])
        if not has_fence and reader.ends_within([_FENCE_JSON]):
            return None, (_FENCE_JSON,)
    return name, ()


CALL_FORMATS: Mapping[str, Callable[[Reader, DeltaWriter, Tools], Steps]] = MappingProxyType(
    {
        "json": json_calls,
        "xml": xml_calls,
        "glm": glm_calls,
        "deepseek-v3": lambda reader, writer, tools: deepseek_calls(reader, writer, tools, has_kind=True),
        "deepseek-v31": lambda reader, writer, tools: deepseek_calls(reader, writer, tools, has_kind=False),
    }
)
