"""Grammars for tool_choice `required` and `named`: the whole response is JSON, whatever the format of the family is.

    named     the arguments of the tool
    required  [{"name": NAME, "parameters": ARGUMENTS}, ...], at least one

The arguments follow the schema of their tool. There is neither reasoning nor content."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, cast

from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.grammar_spec import SCHEMA_OPTIONS, GrammarSpec
from routed_experts.server.tools import ToolOptions

_PARAM = "tool_choice"


def forced_call_grammar(options: ToolOptions) -> GrammarSpec | None:
    """Return the grammar of a response that must call; None where it may do without. Raises InvalidRequestError."""
    if not options.must_call:
        return None
    schemas = {name: _arguments_schema(parameters) for name, parameters in options.parameters.items()}
    parts = {
        name: _part(f"tools[{index}].{options.schema_field}", schema)
        for index, (name, schema) in enumerate(schemas.items())
    }
    if options.choice.mode == "named":
        own = parts[options.choice.name or ""]
        return dataclasses.replace(own[1], param=_PARAM, parts=(own,))
    more = '(", " call)*' if options.parallel else ""
    rules = [f'start: "[" call {more} "]"', "call: " + " | ".join(f"call_{index}" for index in range(len(schemas)))]
    for index, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(f'{{"name": "{name}", "parameters": ')
        # `::=` would make it a grammar in GBNF
        text = json.dumps(schema, ensure_ascii=False).replace("::=", "\\u003a\\u003a=")
        rules += [f'call_{index}: {head} arguments_{index} "}}"', f"arguments_{index}: %json {text}"]
    return dataclasses.replace(GrammarSpec.grammar("\n".join(rules), param=_PARAM), parts=tuple(parts.values()))


def _part(path: str, schema: Mapping[str, Any]) -> tuple[str, GrammarSpec]:
    """Where a tool has its schema, and the grammar of that alone."""
    try:
        return path, dataclasses.replace(GrammarSpec.json_schema(schema, param=path), param="tools")
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error), param="tools", code=error.code) from error


def _arguments_schema(parameters: object) -> dict[str, Any]:
    schema = cast("Mapping[str, Any]", parameters) if isinstance(parameters, Mapping) else {}
    return {"type": "object", "x-guidance": SCHEMA_OPTIONS, **schema}
