"""The table of routes, and the ASGI app that serves them."""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from routed_experts.server.admin import control_routes, info_routes, memory_routes, refused_routes, vllm_routes
from routed_experts.server.anthropic import messages
from routed_experts.server.body import check_query, fields_without_effect, ignored_params_header, json_response
from routed_experts.server.middleware import RequestMiddleware, check_admin, random_id
from routed_experts.server.openai.chat import chat_completions
from routed_experts.server.openai.completions import completions
from routed_experts.server.openai.invocations import invocations
from routed_experts.server.openai.responses import responses
from routed_experts.server.openapi import Operation, openapi_document
from routed_experts.server.playground import make_page
from routed_experts.server.protocol import (
    AbortRequest,
    AbortRequestsRequest,
    ChatRequest,
    CompletionRequest,
    ContinueRequest,
    CountTokensRequest,
    DetokenizeRequest,
    GenerateRequest,
    InvocationRequest,
    MemoryRequest,
    MessagesRequest,
    PauseRequest,
    RememberRolloutsRequest,
    ResetPrefixCacheRequest,
    ResponsesRequest,
    ScoreRequest,
    SleepRequest,
    TokenizeRequest,
    TokensRequest,
    UpdateFromFolderRequest,
    UpdateWeightsRequest,
    UpdateWeightVersionRequest,
    VllmPauseRequest,
    WakeUpRequest,
)
from routed_experts.server.routing import routes as routing_routes
from routed_experts.server.routing.score import score
from routed_experts.server.sglang.generate import generate
from routed_experts.server.state import ServerState
from routed_experts.server.vllm import generate as tokens
from routed_experts.server.vllm import tokenize

# Of a browser's request: those that this server reads, X-Session-Id, which a fleet routes by, and those that clients of
# OpenAI and Anthropic add.
_CLIENT_HEADERS = (
    "Authorization Content-Type X-Request-Id X-Data-Parallel-Rank X-Session-Id Range If-Range If-None-Match "
    "Idempotency-Key OpenAI-Organization OpenAI-Project X-Api-Key Anthropic-Version Anthropic-Beta "
    "Anthropic-Dangerous-Direct-Browser-Access "
    "X-Stainless-Arch X-Stainless-Custom-Poll-Interval X-Stainless-Helper X-Stainless-Helper-Method X-Stainless-Lang "
    "X-Stainless-OS X-Stainless-Package-Version X-Stainless-Poll-Helper X-Stainless-Read-Timeout "
    "X-Stainless-Retry-Count X-Stainless-Runtime X-Stainless-Runtime-Version X-Stainless-Timeout"
).split()
_BETA = ("beta",)  # of Anthropic's own client, for its newer fields; it changes nothing here
Handler = Callable[[Request, ServerState], Awaitable[Response]]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One route: path, methods, handler and the struct of its body. `admin`: needs the admin key, if there is one;
    `query`: names of query parameters; `etag`: the response may be 304."""

    path: str
    methods: tuple[str, ...]
    handler: Handler
    body: type[Struct] | None = None
    admin: bool = False
    query: tuple[str, ...] = ()
    etag: bool = False


TABLE = (
    Entry("/v1/completions", ("POST",), completions, CompletionRequest),
    Entry("/v1/chat/completions", ("POST",), chat_completions, ChatRequest),
    Entry("/invocations", ("POST",), invocations, InvocationRequest),
    Entry("/v1/responses", ("POST",), responses, ResponsesRequest),
    Entry("/v1/messages", ("POST",), messages.messages, MessagesRequest, query=_BETA),
    Entry("/v1/messages/count_tokens", ("POST",), messages.count_tokens, CountTokensRequest, query=_BETA),
    Entry("/generate", ("POST", "PUT"), generate, GenerateRequest),
    Entry("/inference/v1/generate", ("POST",), tokens.generate, TokensRequest),
    Entry("/skyrl/v1/generate", ("POST",), tokens.skyrl_generate, TokensRequest),
    Entry("/v1/score", ("POST",), score, ScoreRequest),
    Entry("/tokenize", ("POST",), tokenize.tokenize, TokenizeRequest),
    Entry("/detokenize", ("POST",), tokenize.detokenize, DetokenizeRequest),
    Entry("/v1/tokenize", ("POST",), tokenize.tokenize, TokenizeRequest),
    Entry("/v1/detokenize", ("POST",), tokenize.detokenize, DetokenizeRequest),
    Entry("/tokenizer_info", ("GET",), tokenize.tokenizer_info),
    Entry("/v1/models", ("GET",), info_routes.models),
    Entry("/v1/models/{name:path}", ("GET",), info_routes.model),
    Entry("/v1/routing/stats", ("GET",), routing_routes.stats, etag=True),
    Entry("/v1/routing/reset", ("POST",), routing_routes.reset, admin=True),
    Entry("/v1/routing/{name}", ("GET",), routing_routes.fetch, query=("format", "choice"), etag=True),
    Entry("/v1/routing/{name}", ("DELETE",), routing_routes.delete),
    Entry("/get_model_info", ("GET",), info_routes.model_info),
    Entry("/model_info", ("GET",), info_routes.model_info),
    Entry("/get_server_info", ("GET",), info_routes.server_info),
    Entry("/server_info", ("GET",), info_routes.server_info),
    Entry("/get_load", ("GET",), info_routes.get_load),
    Entry("/v1/loads", ("GET",), info_routes.loads, query=("include", "dp_rank")),
    Entry("/load", ("GET",), info_routes.load),
    Entry("/get_weight_version", ("GET",), info_routes.weight_version),
    Entry("/metrics", ("GET",), info_routes.metrics),
    Entry("/health/live", ("GET",), info_routes.live),
    Entry("/health", ("GET",), info_routes.health),
    Entry("/ready", ("GET",), info_routes.ready),
    Entry("/ping", ("GET", "POST"), info_routes.health),
    Entry("/health_generate", ("GET",), info_routes.health_generate),
    Entry("/liveness", ("GET",), vllm_routes.liveness),
    Entry("/is_paused", ("GET",), vllm_routes.is_paused),
    Entry("/is_sleeping", ("GET",), vllm_routes.is_sleeping),
    Entry("/get_world_size", ("GET",), vllm_routes.get_world_size, query=("include_dp",)),
    Entry("/flush_cache", ("GET", "POST"), control_routes.flush_cache, query=("drafts",), admin=True),
    Entry("/remember_rollouts", ("POST",), control_routes.remember_rollouts, RememberRolloutsRequest, admin=True),
    Entry("/abort_request", ("POST",), control_routes.abort_request, AbortRequest, admin=True),
    Entry("/pause_generation", ("POST",), control_routes.pause_generation, PauseRequest, admin=True),
    Entry("/continue_generation", ("POST",), control_routes.continue_generation, ContinueRequest, admin=True),
    Entry("/pause", ("POST",), vllm_routes.pause, VllmPauseRequest, query=vllm_routes.PAUSE_QUERY, admin=True),
    Entry("/resume", ("POST",), vllm_routes.resume, ContinueRequest, admin=True),
    Entry("/update_weights", ("POST",), vllm_routes.update_weights, UpdateFromFolderRequest, admin=True),
    Entry(
        "/reset_prefix_cache",
        ("POST",),
        vllm_routes.reset_prefix_cache,
        ResetPrefixCacheRequest,
        query=("reset_running_requests",),
        admin=True,
    ),
    Entry("/abort_requests", ("POST",), vllm_routes.abort_requests, AbortRequestsRequest, admin=True),
    Entry(
        "/inference/v1/abort_requests", ("POST",), vllm_routes.abort_named_requests, AbortRequestsRequest, admin=True
    ),
    Entry("/sleep", ("POST",), vllm_routes.sleep, SleepRequest, query=("level", "tags", "mode"), admin=True),
    Entry("/wake_up", ("POST",), vllm_routes.wake_up, WakeUpRequest, query=("tags",), admin=True),
    Entry(
        "/release_memory_occupation",
        ("POST",),
        memory_routes.release_memory_occupation,
        MemoryRequest,
        admin=True,
    ),
    Entry("/resume_memory_occupation", ("POST",), memory_routes.resume_memory_occupation, MemoryRequest, admin=True),
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


def make_app(
    server: ServerState,
    *,
    table: Sequence[Entry] = TABLE,
    new_request_id: Callable[[], str] = random_id,
) -> tuple[ASGIApp, RequestMiddleware]:
    """Build the app, and return its RequestMiddleware too, which counts the open requests. `table`: the routes;
    `new_request_id` names the requests that bring no id."""
    operations = [
        Operation(entry.path, entry.methods, entry.handler.__doc__ or "", entry.body, entry.query, etag=entry.etag)
        for entry in table
    ]
    document = openapi_document(operations, version=server.version)
    page = make_page()

    async def openapi(request: Request, server: ServerState) -> Response:
        return json_response(document)

    async def get_version(request: Request, server: ServerState) -> Response:
        return json_response({"version": server.version})

    async def root(request: Request, server: ServerState) -> Response:
        return Response(page.body, headers=page.headers)

    undocumented = (
        Entry("/", ("GET",), root),
        Entry("/openapi.json", ("GET",), openapi),
        Entry("/version", ("GET",), get_version),
    )
    by_path = _by_path((*table, *undocumented))
    routes = [Route(path, _endpoint(entries, server), methods=_methods(entries)) for path, entries in by_path]
    routes += [Route(path, refused_routes.refuse, methods=["POST"]) for path in refused_routes.REFUSED]
    router = Router(routes, redirect_slashes=False)
    middleware = RequestMiddleware(router, server.settings, on_idle=server.on_idle, new_request_id=new_request_id)
    origin = server.settings.cors_origin
    if origin is None:
        return middleware, middleware
    app = CORSMiddleware(
        middleware,
        allow_origins=[origin],
        allow_methods=["GET", "POST", "PUT", "DELETE"],
        allow_headers=_CLIENT_HEADERS,
        expose_headers=[
            "X-Request-Id",
            "X-Ignored-Params",
            "X-Routed-Experts-Info",
            "ETag",
            "Content-Range",
            "Retry-After",
        ],
    )
    return app, middleware


def _by_path(table: Sequence[Entry]) -> list[tuple[str, list[Entry]]]:
    """Group the entries by path, so that a wrong method is 405 with every right one named."""
    by_path: dict[str, list[Entry]] = {}
    for entry in table:
        by_path.setdefault(entry.path, []).append(entry)
    return list(by_path.items())


def _methods(entries: list[Entry]) -> list[str]:
    return [method for entry in entries for method in entry.methods]


def _endpoint(entries: list[Entry], server: ServerState) -> Callable[[Request], Awaitable[Response]]:
    by_method = {method: entry for entry in entries for method in entry.methods}
    known = {name for entry in entries for name in entry.query}  # the URL of a ref is fetched and deleted

    async def endpoint(request: Request) -> Response:
        entry = by_method["GET" if request.method == "HEAD" else request.method]
        if entry.admin:
            check_admin(request)
        ignored = check_query(request.query_params.keys(), known, strict=server.settings.strict_fields)
        response = await entry.handler(request, server)
        ignored = [*fields_without_effect(request), *ignored]
        if ignored:
            server.metrics.ignored(ignored)
            in_body = [name for name in response.headers.get("X-Ignored-Params", "").split(", ") if name]
            response.headers.update(ignored_params_header([*in_body, *ignored]))
        return response

    return endpoint
