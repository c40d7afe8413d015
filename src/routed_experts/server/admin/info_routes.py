"""Routes that describe the server: models, configuration, version, metrics, health.

Configuration leaves by an allow-list: no key, no path beyond the model's name, no address."""

import asyncio
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.server.body import json_response
from routed_experts.server.errors import unavailable
from routed_experts.server.limits import MAX_BACKLOG, RETRY_AFTER_S
from routed_experts.server.routing.response import sglang_defaults
from routed_experts.server.state import Health, ServerState

# state -> statuses of /ready and /health; /health/live is always 200.
_STATUSES = MappingProxyType(
    {
        "starting": (503, 503),
        "serving": (200, 200),
        "paused": (503, 200),
        "stalled": (503, 503),
        "degraded": (503, 503),
        "draining": (503, 503),
        "dead": (503, 503),
    }
)
_SERVER_INFO_FIELDS = (
    "dtype random_seed tp_size ep_size dp_size page_size mem_fraction_static max_total_tokens max_running_requests "
    "max_queued_requests chunked_prefill_size max_prefill_tokens precompile_bs_paddings precompile_token_paddings "
    "disable_radix_cache attention_backend moe_backend enable_return_routed_experts "
    "logprobs_mode deterministic skip_tokenizer_init context_length memory_plan "
    "prefix_cache phases requests_accepted requests_finished weight_version update_count"
).split()


async def models(request: Request, server: ServerState) -> Response:
    """List the one model."""
    return json_response({"object": "list", "data": [_model(server)]})


async def model(request: Request, server: ServerState) -> Response:
    """Describe the model."""
    server.check_model(request.path_params["name"])
    return json_response(_model(server))


async def model_info(request: Request, server: ServerState) -> Response:
    """Describe the model in SGLang's fields."""
    fields: dict[str, object] = {
        "model_path": server.model_name,
        "tokenizer_path": server.model_name,
        "served_model_name": server.model_name,
        "is_generation": True,
        "max_model_len": server.engine.context_length,
        "vocab_size": server.engine.vocab_size,
        **_weight_version(server),
        "moe": _moe(server),
    }
    return json_response(fields)


async def server_info(request: Request, server: ServerState) -> Response:
    """Describe the configuration of the engine and what it has done, by an allow-list."""
    info = server.engine.engine.get_server_info()
    stats = server.engine.engine.stats()
    state: dict[str, object] = {
        "num_running_reqs": stats.running,
        "num_queue_reqs": stats.waiting,
        "last_step_age_s": stats.last_step_age_s,
        "weight_version": stats.weight_version,
        "update_count": stats.update_count,
    }
    if stats.speculative is not None:
        state["avg_spec_accept_length"] = stats.speculative.requests.accept_length
    allowed = {name: info[name] for name in _SERVER_INFO_FIELDS if name in info}
    head = {"model_path": server.model_name, "served_model_name": server.model_name, "status": server.health().state}
    return json_response({**head, **allowed, "internal_states": [state]})


async def weight_version(request: Request, server: ServerState) -> Response:
    """Say which weights are served."""
    return json_response(_weight_version(server))


async def metrics(request: Request, server: ServerState) -> Response:
    """Prometheus text."""
    server.store.expire()
    server.health()  # counts a stall
    routing = await server.routing_stats.get_or_last()
    text = await asyncio.to_thread(lambda: server.metrics.text(routing))
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def live(request: Request, server: ServerState) -> Response:
    """The process answers."""
    return _probe_response(server.health(), 200)


async def ready(request: Request, server: ServerState) -> Response:
    """Send traffic here, or elsewhere."""
    health = server.health()
    return _probe_response(health, _STATUSES[health.state][0])


async def health(request: Request, server: ServerState) -> Response:
    """It makes progress, or should be restarted."""
    health = server.health()
    return _probe_response(health, _STATUSES[health.state][1])


async def health_generate(request: Request, server: ServerState) -> Response:
    """Run one token through the engine."""

    async def generate_one_token() -> None:
        requests = await server.process(
            GenerateReqInput(input_ids=[0], max_new_tokens=1),
            default_max_tokens=1,
            routing=sglang_defaults(server.settings),
            num_bytes=0,
        )
        await server.accepting_engine.generate(requests, max_backlog=MAX_BACKLOG).run()

    try:
        async with asyncio.timeout(server.settings.stall_timeout):
            await server.run_probe(lambda: asyncio.create_task(generate_one_token()))
    except TimeoutError as error:
        raise unavailable("no token arrived in time; the engine is stalled or full", code="stalled") from error
    return json_response({"status": "ok"})


def _probe_response(health: Health, status: int) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    body: dict[str, object] = {
        "state": health.state,
        "phase": health.phase,
        "last_step_age_s": health.last_step_age_s,
        "running": health.running,
        "waiting": health.waiting,
    }
    if health.broken:
        body["broken"] = list(health.broken)
    return json_response(body, status=status, headers=headers)


def _model(server: ServerState) -> dict[str, object]:
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "routed-experts",
        "max_model_len": server.engine.context_length,
        "moe": _moe(server),
    }


def _moe(server: ServerState) -> dict[str, object] | None:
    """Return the shape of the routing; None without capture."""
    capture = server.engine.capture
    if capture is None:
        return None
    return {
        "num_layers": capture.num_hidden_layers,
        "moe_layer_ids": list(capture.layer_ids),
        "num_experts": capture.num_experts,
        "top_k": capture.top_k,
    }


def _weight_version(server: ServerState) -> dict[str, object]:
    return server.engine.engine.get_weight_version().to_json()
