"""GET /openapi.json: made from the table of routes and the structs of their bodies, so that it cannot drift. Knows no
handler."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from routed_experts.server.protocol import ErrorBody

_ERRORS = ("400", "401", "403", "404", "405", "408", "409", "413", "415", "429", "500", "503")


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """A path with its methods, one line on it, and the struct of its body."""

    path: str
    methods: tuple[str, ...]
    told: str
    body: type[msgspec.Struct] | None
    query: tuple[str, ...] = ()


def openapi_document(operations: Sequence[Operation], *, version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    bodies = [one.body for one in operations if one.body is not None]
    structs = list(dict.fromkeys([*bodies, ErrorBody]))
    schemas, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    by_struct = dict(zip(structs, schemas, strict=True))
    paths: dict[str, Any] = {}
    for one in operations:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", one.path)
        described = {method.lower(): _described(one, method, by_struct) for method in one.methods}
        paths[path] = {**paths.get(path, {}), **described}
    return {
        "openapi": "3.1.0",
        "info": {"title": "routed-experts", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _described(one: Operation, method: str, by_struct: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    """One method of one path."""
    error = {"description": "what went wrong", "content": {"application/json": {"schema": by_struct[ErrorBody]}}}
    described: dict[str, Any] = {
        "summary": one.told.strip().splitlines()[0],
        "operationId": f"{method.lower()}{re.sub(r'[^A-Za-z0-9]+', '_', one.path).rstrip('_')}",
        "responses": {"200": {"description": "done"}, **dict.fromkeys(_ERRORS, error)},
    }
    if method == "DELETE":
        described["responses"]["204"] = {"description": "freed"}
    if one.told.startswith("How often"):
        described["responses"]["304"] = {"description": "as you have it"}
    if one.query:  # what can be fetched can be fetched in parts, and need not be when it is there already
        described["responses"] |= {
            "206": {"description": "a part"},
            "304": {"description": "as you have it"},
            "416": error,
        }
    names = re.findall(r"\{(\w+)(?::\w+)?\}", one.path)
    described["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    described["parameters"] += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in one.query]
    if one.body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": by_struct[one.body]}}}
    return described
