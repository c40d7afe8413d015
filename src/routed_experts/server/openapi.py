"""GET /openapi.json: the OpenAPI document, built from the table of routes and the structs of their bodies."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from routed_experts.server.protocol import ErrorBody

_ERRORS = ("400", "401", "403", "404", "405", "408", "409", "413", "415", "429", "500", "503")


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """A path with its methods, its description, the struct of its body and the names of its query parameters."""

    path: str
    methods: tuple[str, ...]
    description: str
    body: type[msgspec.Struct] | None
    query: tuple[str, ...] = ()
    etag: bool = False  # the response may be 304


def openapi_document(operations: Sequence[Operation], *, version: str) -> dict[str, Any]:
    """Build an OpenAPI 3.1 document."""
    bodies = [operation.body for operation in operations if operation.body is not None]
    structs = list(dict.fromkeys([*bodies, ErrorBody]))
    schemas, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    by_struct = dict(zip(structs, schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in operations:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", operation.path)
        methods = {method.lower(): _describe(operation, method, by_struct) for method in operation.methods}
        paths[path] = {**paths.get(path, {}), **methods}
    return {
        "openapi": "3.1.0",
        "info": {"title": "routed-experts", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _describe(operation: Operation, method: str, by_struct: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    """Describe one method of one path."""
    error = {"description": "an error", "content": {"application/json": {"schema": by_struct[ErrorBody]}}}
    responses: dict[str, Any] = {"200": {"description": "success"}, **dict.fromkeys(_ERRORS, error)}
    if method == "DELETE":
        responses["204"] = {"description": "freed"}
    if operation.etag:
        responses["304"] = {"description": "not modified"}
    if operation.query:  # the routes with query parameters answer Range requests
        responses |= {"206": {"description": "a range"}, "416": error}
    path_names = re.findall(r"\{(\w+)(?::\w+)?\}", operation.path)
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in path_names
    ]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in operation.query]
    described: dict[str, Any] = {
        "summary": operation.description.strip().splitlines()[0],
        "operationId": f"{method.lower()}{re.sub(r'[^A-Za-z0-9]+', '_', operation.path).rstrip('_')}",
        "responses": responses,
        "parameters": parameters,
    }
    if operation.body is not None:
        schema = by_struct[operation.body]
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return described
