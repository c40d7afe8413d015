"""Tools of a request: their check, and which of them the model may or must call.

Every dialect turns its own form of tools into `Tool` and of the choice into `ToolChoice`; what follows is the same for
all. A faulty tool is refused with its index, before anything is tokenised."""

import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, cast

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.server.protocol import Tool

MAX_TOOLS = 512
MAX_NAME_CHARS, _NAME = 64, re.compile(r"[A-Za-z0-9_.:/-]+")
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_KEYWORDS: Mapping[str, tuple[type, str]] = MappingProxyType(
    {"required": (list, "a list of names"), "enum": (list, "a list"), "$ref": (str, "text")}
    | dict.fromkeys(_SCHEMA_LISTS, (list, "a list of schemas"))
    | dict.fromkeys(_SCHEMA_MAPS, (dict, "an object of schemas"))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which tools are called: `auto` any or none, `none` none, `required` at least one, `named` the one of `name`."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """The tools of a request, which are checked, and how they may be called. `schema_field`: the field of a tool that
    holds the schema of its arguments."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    schema_field: str = "function.parameters"

    @property
    def must_call(self) -> bool:
        """Whether the whole response is calls."""
        return self.choice.mode in ("required", "named")

    @property
    def callable(self) -> Sequence[Tool]:
        """The tools that the model may call."""
        return () if self.choice.mode == "none" else self.tools

    @property
    def parameters(self) -> Mapping[str, object]:
        """The schemas of parameters of the tools that may be called, by name."""
        return {tool.function.name: tool.function.parameters for tool in self.callable}

    def to_template(self) -> list[dict[str, object]] | None:
        """Return the tools as chat templates read them; None without any."""
        return [_to_template(tool) for tool in self.callable] or None


def check_tools(
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    *,
    parallel: bool,
    schema_field: str = "function.parameters",
) -> ToolOptions:
    """Check the tools of a request. Raises InvalidRequestError."""
    names = set[str]()
    if tools and len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools holds {len(tools)}; send at most {MAX_TOOLS}", param="tools")
    for index, tool in enumerate(tools or ()):
        name = tool.function.name
        if tool.type != "function":
            text = f"tools[{index}].type={short_repr(tool.type)} is not supported; send tools of type function"
            raise InvalidRequestError(text, param="tools")
        if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
            text = (
                f"tools[{index}] has the name {short_repr(name)}; take 1 to {MAX_NAME_CHARS} of A-Z a-z 0-9 _ . : / -"
            )
            raise InvalidRequestError(text, param="tools")
        if name in names:
            raise InvalidRequestError(
                f"tools[{index}] has the name {name!r} of an earlier one; rename it", param="tools"
            )
        names.add(name)
        if tool.function.parameters is not None:
            _check_parameters(tool.function.parameters, f"tools[{index}].{schema_field}")
    choice = choice or ToolChoice()
    if choice.mode in ("required", "named") and not names:
        raise InvalidRequestError("tool_choice demands a call, but there are no tools; send tools", param="tool_choice")
    if choice.mode == "named" and choice.name not in names:
        known = ", ".join(sorted(names))[:200]
        text = f"tool_choice names {short_repr(choice.name)}, which is none of tools; known are {known}"
        raise InvalidRequestError(text, param="tool_choice")
    return ToolOptions(tools=tuple(tools or ()), choice=choice, parallel=parallel, schema_field=schema_field)


def _to_template(tool: Tool) -> dict[str, object]:
    function = tool.function
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def _check_parameters(schema: Mapping[str, Any], path: str) -> None:
    if schema.get("type", "object") != "object":
        text = f"{path}.type is {short_repr(schema['type'])}; arguments are an object, so it must be 'object'"
        raise InvalidRequestError(text, param="tools")
    _check_schema(schema, path)


def _check_schema(schema: object, path: str) -> None:
    """Check the form of a JSON Schema: keywords that would break what reads them."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{path} is {short_repr(schema)}; a schema is an object", param="tools")
    node = cast("dict[str, Any]", schema)
    kinds = node.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in _TYPES for kind in kinds):
        text = f"{path}.type is {short_repr(node['type'])}; JSON Schema has {', '.join(sorted(_TYPES))}"
        raise InvalidRequestError(text, param="tools")
    for name, (kind, word) in _KEYWORDS.items():
        if name in node and not isinstance(node[name], kind):
            raise InvalidRequestError(f"{path}.{name} is {short_repr(node[name])}, not {word}", param="tools")
    if not all(isinstance(name, str) for name in node.get("required", ())):
        raise InvalidRequestError(f"{path}.required holds what is no name; list names of properties", param="tools")
    for part, name in _subschemas(node):
        _check_schema(part, f"{path}.{name}")


def _subschemas(node: Mapping[str, Any]) -> Generator[tuple[object, str]]:
    """Yield the schemas in a schema, with where they stand."""
    for name in _SCHEMAS:
        if name in node and not (name == "items" and isinstance(node[name], list)):  # a list in older drafts
            yield node[name], name
    for name in _SCHEMA_LISTS:
        for index, part in enumerate(node.get(name, ())):
            yield part, f"{name}[{index}]"
    for name in _SCHEMA_MAPS:
        for key, part in node.get(name, {}).items():
            yield part, f"{name}.{key[:40]}"


def parse_arguments(arguments: str | Mapping[str, Any] | None, path: str, *, param: str) -> dict[str, Any]:
    """Return the arguments of an earlier call as an object. Raises InvalidRequestError."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        text = (
            f"{path} is no JSON ({str(error)[:80]}); send the arguments as the model wrote them, or leave the call out"
        )
        raise InvalidRequestError(text, param=param) from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} is JSON of {short_repr(value)}; arguments are an object", param=param)
    return cast("dict[str, Any]", value)
