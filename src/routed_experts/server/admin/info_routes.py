"""What a server says of itself: models, configuration, version, metrics, health. Knows nothing of generation but the
one-token probe.

Only names of an allow-list leave: no key, no path beyond the model's name, no address."""

import asyncio
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.server.errors import ApiError, busy
from routed_experts.server.limits import MAX_BACKLOG, RETRY_AFTER_S
from routed_experts.server.reply import json_reply
from routed_experts.server.routing.response import native_defaults
from routed_experts.server.state import Health, ServerState

# state -> statuses of /ready and /health; /health/live is 200 while anybody answers.
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
_TOLD = (
    "dtype random_seed tp_size ep_size page_size mem_fraction_static max_total_tokens max_running_requests max_queued_requests "
    "chunked_prefill_size max_prefill_tokens precompile_bs_paddings precompile_token_paddings disable_radix_cache attention_backend "
    "moe_backend enable_return_routed_experts logprobs_mode deterministic skip_tokenizer_init "
    "context_length memory_plan prefix_cache phases requests_accepted requests_finished weight_version"
).split()


async def models(request: Request, service: ServerState) -> Response:
    """List the one model."""
    return json_reply({"object": "list", "data": [_model(service)]})


async def model(request: Request, service: ServerState) -> Response:
    """Describe the model."""
    service.check_model(request.path_params["name"])
    return json_reply(_model(service))


async def model_info(request: Request, service: ServerState) -> Response:
    """Say what is served, in SGLang's words."""
    name, capture = service.model_name, service.door.capture
    said: dict[str, object] = {
        "model_path": name,
        "tokenizer_path": name,
        "served_model_name": name,
        "is_generation": True,
        "max_model_len": service.door.context_length,
        "vocab_size": service.door.vocab_size,
        "weight_version": _weight_version(service),
        "moe": None if capture is None else _moe(service),
    }
    return json_reply(said)


async def server_info(request: Request, service: ServerState) -> Response:
    """Say how the engine is set up and what it has done, by an allow-list."""
    told = service.door.engine.get_server_info()
    seen = service.door.engine.stats()
    state: dict[str, object] = {
        "num_running_reqs": seen.running,
        "num_queue_reqs": seen.waiting,
        "last_step_age_s": seen.last_step_age_s,
        "weight_version": str(seen.weight_version),
    }
    said = {name: told[name] for name in _TOLD if name in told}
    head = {"model_path": service.model_name, "served_model_name": service.model_name, "status": service.health().state}
    return json_reply({**head, **said, "internal_states": [state]})


async def weight_version(request: Request, service: ServerState) -> Response:
    """Say which weights are served."""
    return json_reply({"weight_version": _weight_version(service)})


async def metrics(request: Request, service: ServerState) -> Response:
    """Prometheus text."""
    service.store.expire()
    service.health()  # notices a stall
    routing = await service.stats.soon()
    text = await asyncio.to_thread(lambda: service.metrics.text(routing))
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def live(request: Request, service: ServerState) -> Response:
    """The process answers."""
    return _probe(service.health(), 200)


async def ready(request: Request, service: ServerState) -> Response:
    """Send traffic here, or elsewhere."""
    health = service.health()
    return _probe(health, _STATUSES[health.state][0])


async def health(request: Request, service: ServerState) -> Response:
    """It makes progress, or should be restarted."""
    found = service.health()
    return _probe(found, _STATUSES[found.state][1])


async def health_generate(request: Request, service: ServerState) -> Response:
    """Run one token through the engine."""

    async def one_token() -> None:
        said = GenerateReqInput(input_ids=[0], max_new_tokens=1)
        requests = await service.admit(
            said, default_max_tokens=1, routing=native_defaults(service.settings), num_bytes=0
        )
        call = service.accepting_engine.generate(requests, max_backlog=MAX_BACKLOG)
        try:
            await call.submit()
            async for _ in call.outputs():
                continue
        finally:
            call.abort()

    try:
        async with asyncio.timeout(service.settings.stall_timeout):
            await service.probe(lambda: asyncio.create_task(one_token()))
    except TimeoutError as late:
        raise busy("no token came in time; the engine is stalled or full", code="stalled") from late
    return json_reply({"status": "ok"})


def _probe(found: Health, status: int) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    body: dict[str, object] = {
        "state": found.state,
        "phase": found.phase,
        "last_step_age_s": found.last_step_age_s,
        "running": found.running,
        "waiting": found.waiting,
    }
    if found.broken:
        body["broken"] = list(found.broken)
    return json_reply(body, status=status, headers=headers)


def _model(service: ServerState) -> dict[str, object]:
    capture = service.door.capture
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "routed-experts",
        "max_model_len": service.door.context_length,
        "moe": None if capture is None else _moe(service),
    }


def _moe(service: ServerState) -> dict[str, object]:
    capture = service.door.capture
    if capture is None:
        raise ApiError("this server records no routing", status=404, code="capture_disabled")
    return {
        "num_layers": capture.num_hidden_layers,
        "moe_layer_ids": list(capture.layer_ids),
        "num_experts": capture.num_experts,
        "top_k": capture.top_k,
    }


def _weight_version(service: ServerState) -> str:
    return str(service.door.engine.stats().weight_version)
