"""Routes that describe the server: models, configuration, version, metrics, health.

Configuration leaves by an allow-list: no key, no path but those of the model and its tokenizer, and the addresses of
followers to administrators alone."""

import asyncio
import datetime
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError, QueueFullError
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.server.body import json_response
from routed_experts.server.errors import unavailable
from routed_experts.server.limits import MAX_BACKLOG, RETRY_AFTER_S
from routed_experts.server.middleware import is_admin
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
Load = Mapping[str, Any]  # of one data rank, in the fields of SGLang
_SUMMED = ("num_running_reqs", "num_waiting_reqs", "num_total_reqs", "num_used_tokens")
_SERVER_INFO_FIELDS = (
    "dtype quantization kv_cache_dtype random_seed tp_size ep_size dp_size page_size mem_fraction_static "
    "max_total_tokens max_running_requests max_queued_requests chunked_prefill_size max_prefill_tokens "
    "precompile_bs_paddings precompile_token_paddings "
    "disable_radix_cache attention_backend moe_backend enable_return_routed_experts "
    "enable_return_routed_experts_weights routed_experts_weights_dtype "
    "logprobs_mode deterministic skip_tokenizer_init context_length memory_plan "
    "prefix_cache phases requests_accepted requests_finished weight_version update_count internal_states "
    "nnodes followers"
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
        "model_path": server.model_path,
        "tokenizer_path": server.tokenizer_path,
        "served_model_name": server.model_name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "max_model_len": server.engine.context_length,
        "vocab_size": server.engine.vocab_size,
        **_weight_version(server),
        "moe": _moe(server),
    }
    return json_response(fields)


async def server_info(request: Request, server: ServerState) -> Response:
    """Describe the configuration of the engine and what it has done, by an allow-list."""
    info = server.engine.engine.get_server_info()
    by_rank = _loads(server)
    total = sum(load["max_total_num_tokens"] for load in by_rank)
    allowed = {name: info[name] for name in _SERVER_INFO_FIELDS if name in info}
    if not is_admin(request):  # ids are of requests of others, too
        for state in cast("list[dict[str, object]]", allowed["internal_states"]):
            state["running_batch_rids"] = []
        if "followers" in allowed:  # where they are concerns administrators
            followers = cast("list[dict[str, object]]", allowed["followers"])
            allowed["followers"] = [
                {name: value for name, value in entry.items() if name != "address"} for entry in followers
            ]
    head = {
        "model_path": server.model_path,
        "tokenizer_path": server.tokenizer_path,
        "served_model_name": server.model_name,
        "status": server.health().state,
        "version": server.version,
        "max_total_num_tokens": total,
        "pp_size": 1,
        "is_embedding": False,
        "disaggregation_mode": "null",
        "enable_memory_saver": server.settings.enable_memory_saver,  # slime compares it with its own
    }
    return json_response({**head, **allowed})


async def get_load(request: Request, server: ServerState) -> Response:
    """Tell the load of every data rank, in SGLang's older form."""
    return get_load_response(_loads(server))


def get_load_response(by_rank: Sequence[Load]) -> Response:
    """The body of GET /get_load."""
    return json_response(
        [
            {
                "dp_rank": load["dp_rank"],
                "num_reqs": load["num_total_reqs"],
                "num_waiting_reqs": load["num_waiting_reqs"],
                "num_tokens": load["num_used_tokens"],
            }
            for load in by_rank
        ]
    )


async def loads(request: Request, server: ServerState) -> Response:
    """Tell the load of every data rank, or of ?dp_rank=, and the sums. ?include= is taken: every section is sent."""
    return loads_response(request, server, _loads(server))


def loads_response(request: Request, server: ServerState, by_rank: Sequence[Load]) -> Response:
    """The body of GET /v1/loads. Raises InvalidRequestError for a data rank that does not exist."""
    asked = request.query_params.get("dp_rank")
    if asked is not None:
        ranks = sorted({int(load["dp_rank"]) for load in by_rank})
        if asked not in map(str, ranks):
            text = f"dp_rank={short_repr(asked)} must be one of {', '.join(map(str, ranks))}"
            raise InvalidRequestError(text, param="dp_rank")
        by_rank = [load for load in by_rank if load["dp_rank"] == int(asked)]
    sums = {f"total_{name.removeprefix('num_')}": sum(load[name] for load in by_rank) for name in _SUMMED}
    usage = sum(load["num_used_tokens"] for load in by_rank) / sum(load["max_total_num_tokens"] for load in by_rank)
    body = {
        "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
        "version": server.version,
        "dp_rank_count": len(by_rank),
        "loads": by_rank,
        "aggregate": {**sums, "avg_token_usage": round(usage, 4)},
    }
    return json_response(body)


async def load(request: Request, server: ServerState) -> Response:
    """Tell how many requests run or wait, in vLLM's form."""
    return load_response(_loads(server))


def load_response(by_rank: Sequence[Load]) -> Response:
    """The body of GET /load."""
    return json_response({"server_load": sum(load["num_total_reqs"] for load in by_rank)})


def _loads(server: ServerState) -> list[Load]:
    """Return the load of every data rank, in SGLang's fields."""
    engine = server.engine.engine
    stats, args = engine.stats(), engine.server_args
    ranks = stats.data_ranks or (stats,)
    loads = list[Load]()
    for number, rank in enumerate(ranks):
        used, total = rank.total_pages - rank.free_pages - rank.cached_pages, rank.total_pages
        loads.append(
            {
                "dp_rank": number,
                "num_running_reqs": rank.running,
                "num_waiting_reqs": rank.waiting,
                "num_total_reqs": rank.running + rank.waiting,
                "num_used_tokens": used * args.page_size,
                "max_total_num_tokens": total * args.page_size,
                "token_usage": round(used / total, 4),
                "max_running_requests": args.running_limit,
            }
        )
    return loads


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
    """Run one token through the engine. While requests are held back, or the queue is full, answer as /health does.
    Raises ApiError (503) without a token in time."""

    async def generate_one_token() -> None:
        requests = await server.process(
            GenerateReqInput(input_ids=[0], max_new_tokens=1),
            default_max_tokens=1,
            routing=sglang_defaults(server.settings),
            num_bytes=0,
        )
        async with asyncio.timeout(server.settings.stall_timeout):  # for all callers; it aborts the request
            await server.accepting_engine.generate(requests, max_backlog=MAX_BACKLOG).run()

    if server.holds_requests:
        return await health(request, server)
    try:
        await server.run_probe(lambda: asyncio.create_task(generate_one_token()))
    except QueueFullError:  # a full queue is no stall: /health judges by the last step
        return await health(request, server)
    except TimeoutError as error:
        if server.holds_requests:
            return await health(request, server)
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
        "root": server.model_path,
        "parent": None,
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
