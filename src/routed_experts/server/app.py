"""The table of routes, and the app around it. Knows what each route is called, not what it does."""

import dataclasses
from collections.abc import Awaitable, Callable

from msgspec import Struct
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from routed_experts.server.admin import control_routes, info_routes
from routed_experts.server.middleware import RequestMiddleware, check_admin
from routed_experts.server.openai.chat import chat_completions
from routed_experts.server.openai.completions import completions
from routed_experts.server.openapi import Operation, openapi_document
from routed_experts.server.playground import make_page
from routed_experts.server.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    ContinueRequest,
    DetokenizeRequest,
    GenerateRequest,
    PauseRequest,
    ScoreRequest,
    TokenizeRequest,
    UpdateWeightsRequest,
    UpdateWeightVersionRequest,
)
from routed_experts.server.reply import json_reply
from routed_experts.server.routing import routes
from routed_experts.server.routing.score import score
from routed_experts.server.sglang.generate import generate
from routed_experts.server.state import ServerState
from routed_experts.server.vllm import tokenize

Handler = Callable[[Request, ServerState], Awaitable[Response]]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One path: its methods, its handler and the struct of its body, if it takes one. `admin`: with an admin key, that
    one alone."""

    path: str
    methods: tuple[str, ...]
    handler: Handler
    body: type[Struct] | None = None
    admin: bool = False
    query: tuple[str, ...] = ()


TABLE = (
    Entry("/v1/completions", ("POST",), completions, CompletionRequest),
    Entry("/v1/chat/completions", ("POST",), chat_completions, ChatRequest),
    Entry("/generate", ("POST", "PUT"), generate, GenerateRequest),
    Entry("/v1/score", ("POST",), score, ScoreRequest),
    Entry("/tokenize", ("POST",), tokenize.tokenize, TokenizeRequest),
    Entry("/detokenize", ("POST",), tokenize.detokenize, DetokenizeRequest),
    Entry("/tokenizer_info", ("GET",), tokenize.tokenizer_info),
    Entry("/v1/models", ("GET",), info_routes.models),
    Entry("/v1/models/{name:path}", ("GET",), info_routes.model),
    Entry("/v1/routing/stats", ("GET",), routes.stats),
    Entry("/v1/routing/reset", ("POST",), routes.reset),
    Entry("/v1/routing/{name}", ("GET",), routes.fetch, query=("format", "choice")),
    Entry("/v1/routing/{name}", ("DELETE",), routes.delete),
    Entry("/get_model_info", ("GET",), info_routes.model_info),
    Entry("/model_info", ("GET",), info_routes.model_info),
    Entry("/get_server_info", ("GET",), info_routes.server_info),
    Entry("/server_info", ("GET",), info_routes.server_info),
    Entry("/get_weight_version", ("GET",), info_routes.weight_version),
    Entry("/metrics", ("GET",), info_routes.metrics),
    Entry("/health/live", ("GET",), info_routes.live),
    Entry("/health", ("GET",), info_routes.health),
    Entry("/ready", ("GET",), info_routes.ready),
    Entry("/ping", ("GET", "POST"), info_routes.health),
    Entry("/health_generate", ("GET",), info_routes.health_generate),
    Entry("/flush_cache", ("GET", "POST"), control_routes.flush_cache, admin=True),
    Entry("/abort_request", ("POST",), control_routes.abort_request, AbortRequest, admin=True),
    Entry("/pause_generation", ("POST",), control_routes.pause_generation, PauseRequest, admin=True),
    Entry("/continue_generation", ("POST",), control_routes.continue_generation, ContinueRequest, admin=True),
    Entry(
        "/update_weights_from_disk",
        ("POST",),
        control_routes.update_weights_from_disk,
        UpdateWeightsRequest,
        admin=True,
    ),
    Entry(
        "/update_weight_version",
        ("POST",),
        control_routes.update_weight_version,
        UpdateWeightVersionRequest,
        admin=True,
    ),
)


def make_app(service: ServerState, *, version: str) -> tuple[ASGIApp, RequestMiddleware]:
    """The whole app, and the gate that counts its open requests."""
    described = [Operation(one.path, one.methods, one.handler.__doc__ or "", one.body, one.query) for one in TABLE]
    document = openapi_document(described, version=version)

    async def openapi(request: Request) -> Response:
        return json_reply(document)

    async def told_version(request: Request) -> Response:
        return json_reply({"version": version})

    page = make_page()

    async def root(request: Request) -> Response:
        return page

    routes = [Route(one.path, _bound(one, service), methods=list(one.methods)) for one in _merged()]
    routes += [
        Route(path, told, methods=["GET"])
        for path, told in (("/", root), ("/openapi.json", openapi), ("/version", told_version))
    ]
    gate = RequestMiddleware(Router(routes, redirect_slashes=False), service.settings, on_idle=service.on_idle)
    origin = service.settings.cors_origin
    if origin is None:
        return gate, gate
    exposed = ["X-Request-Id", "X-Ignored-Params", "X-Routed-Experts-Info", "ETag", "Content-Range"]
    methods = ["GET", "POST", "PUT", "DELETE"]
    headers = ["Authorization", "Content-Type", "X-Request-Id", "Range", "If-Range"]
    app = CORSMiddleware(
        gate, allow_origins=[origin], allow_methods=methods, allow_headers=headers, expose_headers=exposed
    )
    return app, gate


def _merged() -> tuple[Entry, ...]:
    """Entries of one path as one, so that a wrong method is 405 with every right one named."""
    by_path: dict[str, list[Entry]] = {}
    for entry in TABLE:
        by_path.setdefault(entry.path, []).append(entry)
    return tuple(entries[0] if len(entries) == 1 else _joined(entries) for entries in by_path.values())


def _joined(entries: list[Entry]) -> Entry:
    handlers = {method: entry.handler for entry in entries for method in entry.methods}

    async def dispatch(request: Request, service: ServerState) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request, service)

    return Entry(entries[0].path, tuple(handlers), dispatch, admin=any(entry.admin for entry in entries))


def _bound(entry: Entry, service: ServerState) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        if entry.admin:
            check_admin(request.scope)
        return await entry.handler(request, service)

    return endpoint
