"""JSON in generated text: values that are passed on as they are written, and values whose schema gives their type.

A value is read leniently: quotes, escapes and brackets are followed, and nothing is corrected, because the caller must
see what the model wrote. `<`, which JSON has in strings alone, ends a value: a marker follows."""

import json
import math
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

from routed_experts.parsing.reader import Reader

_LITERAL_ENDS = ',}]<:"'
_MAX_NODES = 256  # of a schema, for the types of one value
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


def read_string(reader: Reader) -> Generator[None, None, str | None]:
    """Read a string with its quotes; the next character is the first of them. Returns None if it has no end."""
    parts = [reader.read()]
    while character := (yield from reader.peek()):
        parts.append(reader.read())
        if character == '"':
            return "".join(parts)
        if character == "\\":
            if not (yield from reader.peek()):
                return None
            parts.append(reader.read())
    return None


def decode_string(text: str) -> str | None:
    """Return the value of a string with its quotes; None for an escape that JSON does not have, and for half of a
    surrogate pair, which no answer in UTF-8 can hold."""
    try:
        value: str = json.loads(text, strict=False)
        value.encode()
    except ValueError:  # UnicodeEncodeError is one
        return None
    return value


def read_value(reader: Reader, emit: Callable[[str], None]) -> Generator[None, None, bool]:
    """Read any value and emit its text. Returns False for one without an end."""
    first = yield from reader.peek()
    if first == '"':
        string = yield from read_string(reader)
        emit(string or "")
        return string is not None
    if first in ("{", "["):
        return (yield from _read_container(reader, emit))
    while (character := (yield from reader.peek())) and character not in _LITERAL_ENDS and not character.isspace():
        emit(reader.read())
    return character != ""


def read_arguments(reader: Reader, emit: Callable[[str], None]) -> Generator[None, None, bool]:
    """Read the arguments of a call. An object is passed on while it arrives; a string is decoded, because it holds
    JSON; null is {}. Returns False for a value without an end."""
    first = yield from reader.peek()
    if first == "{":
        return (yield from _read_container(reader, emit))
    parts = list[str]()
    is_complete = yield from read_value(reader, parts.append)
    text = "".join(parts)
    if is_complete and text == "null":
        text = "{}"
    elif is_complete and text.startswith('"'):
        decoded = decode_string(text)
        text = text if decoded is None else decoded
    emit(text)
    return is_complete


def _read_container(reader: Reader, emit: Callable[[str], None]) -> Generator[None, None, bool]:
    depth, is_string, is_escaped = 0, False, False
    while character := (yield from reader.peek()):
        if is_string:
            if is_escaped:
                is_escaped = False
            elif character == "\\":
                is_escaped = True
            elif character == '"':
                is_string = False
        elif character == "<":
            return False
        elif character == '"':
            is_string = True
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
        emit(reader.read())
        if depth == 0:
            return True
    return False


def property_types(parameters: object, name: str) -> frozenset[str] | None:
    """Return the JSON types that the schema of a tool's parameters allows for one of them; None where it does not
    say."""
    if not isinstance(parameters, Mapping):
        return None
    schema = cast("Mapping[str, Any]", parameters)
    properties = schema.get("properties")
    return _TypeFinder(schema).types(properties.get(name)) if isinstance(properties, Mapping) else None


def value_to_json(text: str, types: frozenset[str] | None) -> str:
    """Write a value that came as plain text as JSON: as it stands if it is JSON of an allowed type, else as a
    string."""
    stripped = _PYTHON_LITERALS.get(text.strip(), text.strip())
    kind = _json_type(stripped)
    if kind is not None and (types is None or kind in types or (kind == "integer" and "number" in types)):
        return stripped
    return json.dumps(text, ensure_ascii=False)


def escape(text: str) -> str:
    """Return text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_type(text: str) -> str | None:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float) and not math.isfinite(value):  # 1e999
        return None
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


class _TypeFinder:
    """Finds the types of one value; a schema of more nodes than the limit, or a loop of references, does not say."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._num_left = root, _MAX_NODES

    def types(self, schema: object) -> frozenset[str] | None:
        """The JSON types that a schema allows; None where it does not say."""
        self._num_left -= 1
        if not isinstance(schema, Mapping) or self._num_left < 0:
            return None
        node = cast("Mapping[str, Any]", schema)
        if "type" in node:
            return _type_names(node["type"])
        if isinstance(reference := node.get("$ref"), str):
            return self.types(_resolve(reference, self._root))
        values = node.get("enum", [node["const"]] if "const" in node else None)
        if isinstance(values, list):
            return frozenset(kind for value in values if (kind := _json_type(json.dumps(value))))
        for name in ("anyOf", "oneOf"):
            if isinstance(choices := node.get(name), list):
                return self._union(choices)
        return None

    def _union(self, choices: list[object]) -> frozenset[str] | None:
        union = frozenset[str]()
        for choice in choices:
            kinds = self.types(choice)
            if kinds is None:
                return None
            union |= kinds
        return union


def _type_names(names: object) -> frozenset[str] | None:
    if isinstance(names, str):
        return frozenset([names])
    listed = cast("list[object]", names) if isinstance(names, list) else []
    return frozenset(name for name in listed if isinstance(name, str)) or None


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    node: Any = root
    for part in reference.removeprefix("#/").split("/"):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node
