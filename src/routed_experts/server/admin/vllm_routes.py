"""Control routes under vLLM's names, which prime-rl and SkyRL call: pause, new weights, sleep, world size.

They do what the routes of SGLang's names do. `keep` of vLLM is the mode `in_place`. Options may be query parameters or
fields of a JSON body; one that is in both must agree. Weights come from folders below --weights-root alone."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.engine.engine import Engine
from routed_experts.server.admin import memory_routes
from routed_experts.server.admin.control_routes import pause_engine, update_from_folder
from routed_experts.server.body import json_response, read_control
from routed_experts.server.errors import ApiError
from routed_experts.server.limits import RETRY_AFTER_S
from routed_experts.server.protocol import (
    AbortRequestsRequest,
    ContinueRequest,
    ResetPrefixCacheRequest,
    SleepRequest,
    UpdateFromFolderRequest,
    VllmPauseRequest,
    WakeUpRequest,
)
from routed_experts.server.state import ServerState

PAUSE_QUERY = ("mode", "clear_cache", "wait_for_inflight_requests")
MAX_ABORT_IDS = 1024
_MODES: Mapping[str, str] = MappingProxyType({"abort": "abort", "wait": "wait", "keep": "in_place"})
_RUNNING: Mapping[str, str] = MappingProxyType({"abort": "abort", "wait": "wait", "keep": "retract"})
_LEVELS: Mapping[str, tuple[str, ...]] = MappingProxyType({"1": ("kv_cache",), "2": ("kv_cache", "weights")})
_MAX_LEVEL_CHARS = 64
_UNRESPONSIVE = ("stalled", "dead")
_Body = TypeVar("_Body", bound=msgspec.Struct)


async def pause(request: Request, server: ServerState) -> Response:
    """Hold generation; new requests queue until it resumes."""
    mode, clears = await parse_pause(request, server)
    await pause_engine(server, server.accepting_engine, mode)
    if clears:
        await asyncio.to_thread(server.accepting_engine.engine.flush_cache)
    return json_response(paused_body(mode))


async def parse_pause(request: Request, server: ServerState) -> tuple[str, bool]:
    """Return the engine's mode, and whether cached prefixes are dropped. Raises ApiError and InvalidRequestError."""
    options = await read_options(request, VllmPauseRequest, server)
    mode = options.mode
    if options.wait_for_inflight_requests is True:
        if mode not in (None, "wait"):
            text = f"wait_for_inflight_requests=true, but mode={short_repr(mode)}; send mode=wait alone"
            raise InvalidRequestError(text, param="mode", code="conflicting_parameters")
        mode = "wait"
    mode = "abort" if mode is None else mode
    if mode not in _MODES:
        text = f"mode={short_repr(mode)} is unknown; choose one of {', '.join(_MODES)}"
        raise InvalidRequestError(text, param="mode")
    return _MODES[mode], mode != "keep" and options.clear_cache is not False


def paused_body(mode: str) -> dict[str, object]:
    """The body of a response to /pause. `mode`: the engine's."""
    return {"status": "paused", "mode": mode}


async def resume(request: Request, server: ServerState) -> Response:
    """End a pause."""
    await read_control(request, ContinueRequest, server.settings, allow_empty=True)
    await asyncio.to_thread(server.accepting_engine.engine.resume)
    return json_response({"status": "resumed"})


async def is_paused(request: Request, server: ServerState) -> Response:
    """Say whether generation is held."""
    mode = server.engine.engine.paused
    return json_response({"is_paused": mode is not None, "mode": mode})


async def update_weights(request: Request, server: ServerState) -> Response:
    """Serve the weights of another checkpoint of the same model; a refused one leaves the old ones serving."""
    fields, folder = await read_weight_dir(request, server)
    cache = "flush" if fields.flush_cache is True else "keep"
    version = await update_from_folder(server, folder, fields.weight_version, cache=cache, param="weight_dir")
    return json_response({"status": "ok", "success": True, **version.to_json()})


async def read_weight_dir(request: Request, server: ServerState) -> tuple[UpdateFromFolderRequest, str]:
    """Return the body and its folder. Raises ApiError for the body of vLLM's transfer engine."""
    fields = await read_control(request, UpdateFromFolderRequest, server.settings)
    if fields.update_info is not None:
        text = "update_info is of a weight transfer engine, which this server has not; write a checkpoint below "
        text += '--weights-root and send {"weight_dir": its folder}'
        raise ApiError(text, status=400, code="unsupported_parameter", param="update_info")
    if fields.weight_dir is None:
        text = 'weight_dir is missing; send {"weight_dir": a folder below --weights-root}'
        raise InvalidRequestError(text, param="weight_dir")
    return fields, fields.weight_dir


async def reset_prefix_cache(request: Request, server: ServerState) -> Response:
    """Drop all cached prefixes; running requests keep their pages unless they are reset too."""
    options = await read_options(request, ResetPrefixCacheRequest, server)
    engine, resets = server.accepting_engine, options.reset_running_requests is True
    freed = await reset_prefixes(engine, resets_running=resets)
    return json_response({"success": True, "freed_pages": freed})


async def reset_prefixes(engine: AsyncEngine, *, resets_running: bool) -> int:
    """Drop cached prefixes; returns the pages freed. `resets_running`: running requests prefill again; they keep their
    tokens and rows. A pause stays."""
    if resets_running:
        engine.flush_submissions()
    return await asyncio.to_thread(engine.engine.flush_cache, retract=resets_running)


async def get_world_size(request: Request, server: ServerState) -> Response:
    """Tell the number of devices of the engine, or of one of its data ranks."""
    args = server.engine.engine.server_args  # tp_size counts the devices of all data ranks
    include_dp = _parse_bool("include_dp", request.query_params.get("include_dp"))
    size = args.tp_size if include_dp is not False else args.tp_size // args.dp_size
    return json_response({"world_size": size})


async def abort_requests(request: Request, server: ServerState) -> Response:
    """End the calls of these ids, or all, with what they have."""
    ids = await read_abort_ids(request, server)
    engine = server.accepting_engine
    engine.flush_submissions()
    return json_response(aborted_body(await asyncio.to_thread(abort_each, engine.engine, ids)))


async def abort_named_requests(request: Request, server: ServerState) -> Response:
    """End the calls of these ids with what they have; without ids none is meant."""
    ids = await read_named_ids(request, server)
    engine = server.accepting_engine
    engine.flush_submissions()
    return json_response(aborted_body(await asyncio.to_thread(abort_each, engine.engine, ids)))


async def read_named_ids(request: Request, server: ServerState) -> list[str]:
    """Return the ids. Raises ApiError and InvalidRequestError, also for none."""
    ids = await read_abort_ids(request, server)
    if ids is None:
        raise InvalidRequestError("request_ids is empty; send at least one id", param="request_ids")
    return ids


async def read_abort_ids(request: Request, server: ServerState) -> list[str] | None:
    """Return the ids, or None for all. Raises ApiError and InvalidRequestError."""
    body = await read_control(request, AbortRequestsRequest, server.settings, allow_empty=True)
    ids = list(dict.fromkeys(body.request_ids or ()))
    if len(ids) > MAX_ABORT_IDS:
        text = f"request_ids has {len(ids)} ids, above the limit of {MAX_ABORT_IDS}; send fewer, or none for all"
        raise InvalidRequestError(text, param="request_ids")
    return ids or None


def abort_each(engine: Engine, ids: Sequence[str] | None) -> int:
    """End the calls of these ids, or (None) all; returns how many sequences."""
    return engine.abort(abort_all=True) if ids is None else sum(engine.abort(rid) for rid in ids)


def aborted_body(count: int) -> dict[str, object]:
    """The body of a response to /abort_requests."""
    return {"status": "aborted", "aborted": count}


async def liveness(request: Request, server: ServerState) -> Response:
    """The engine makes progress, or is about to start."""
    state = server.health().state
    if state in _UNRESPONSIVE:
        body = {"status": "engine_unresponsive", "state": state}
        return json_response(body, status=503, headers={"Retry-After": str(RETRY_AFTER_S)})
    return json_response({"status": "ok", "state": state})


async def sleep(request: Request, server: ServerState) -> Response:
    """Free device memory: level 1 the KV pages, level 2 the weights too; requests wait until the server wakes up."""
    tags, running = await parse_sleep(request, server)
    released = await memory_routes.release(server, server.accepting_engine, tags, running=running)
    return json_response({"status": "sleeping", "released": list(released)})


async def parse_sleep(request: Request, server: ServerState) -> tuple[list[str], str]:
    """Return the tags that are released, and what becomes of running requests, as `Engine.release_memory_occupation`
    has it. Raises ApiError and InvalidRequestError."""
    options = await read_options(request, SleepRequest, server)
    level = "1" if options.level is None else str(options.level)[:_MAX_LEVEL_CHARS]
    mode = "keep" if options.mode is None else options.mode
    if level not in _LEVELS:
        text = f"level={short_repr(level)} must be 1 (KV pages) or 2 (weights too); to hold requests alone use /pause"
        raise InvalidRequestError(text, param="level")
    if mode not in _RUNNING:
        text = f"mode={short_repr(mode)} is unknown; choose one of {', '.join(_RUNNING)}"
        raise InvalidRequestError(text, param="mode")
    tags = memory_routes.parse_tags(options.tags)
    return list(_LEVELS[level]) if tags is None else tags, _RUNNING[mode]


async def wake_up(request: Request, server: ServerState) -> Response:
    """Allocate what was freed and continue; released weights come by an update before."""
    tags = await parse_wake_up(request, server)
    released = await memory_routes.resume(server.accepting_engine, tags)
    return json_response({"status": "sleeping" if released else "awake", "released": list(released)})


async def parse_wake_up(request: Request, server: ServerState) -> list[str] | None:
    """Return the tags that are allocated again, or None for all. Raises ApiError and InvalidRequestError."""
    return memory_routes.parse_tags((await read_options(request, WakeUpRequest, server)).tags)


async def is_sleeping(request: Request, server: ServerState) -> Response:
    """Say whether device memory is released."""
    released = server.engine.engine.released
    return json_response({"is_sleeping": bool(released), "released": list(released)})


async def read_options(request: Request, kind: type[_Body], server: ServerState) -> _Body:
    """Return the fields of a body and of the query, which must agree. Raises ApiError and InvalidRequestError."""
    body = await read_control(request, kind, server.settings, allow_empty=True)
    merged: dict[str, object] = {}
    for name, in_body in msgspec.structs.asdict(body).items():
        in_query = _QUERY_READERS.get(name, _read_bool)(request, name)
        if in_query is not None and in_body is not None and _to_comparable(in_query) != _to_comparable(in_body):
            text = f"{name}={short_repr(in_query)} in the query, but {short_repr(in_body)} in the body; send it once"
            raise InvalidRequestError(text, param=name, code="conflicting_parameters")
        merged[name] = in_body if in_query is None else in_query
    return kind(**merged)


def _read_text(request: Request, name: str) -> str | None:
    return request.query_params.get(name)


def _to_comparable(value: object) -> object:
    """A number as its text, which a query has for both; any other value as it is."""
    return str(value) if type(value) is int else value


def _read_list(request: Request, name: str) -> list[str] | None:
    return request.query_params.getlist(name) or None


def _read_bool(request: Request, name: str) -> bool | None:
    return _parse_bool(name, request.query_params.get(name))


_QUERY_READERS: Mapping[str, Callable[[Request, str], object]] = MappingProxyType(
    {"mode": _read_text, "level": _read_text, "tags": _read_list}
)


def _parse_bool(name: str, text: str | None) -> bool | None:
    if text is None:
        return None
    value = {"true": True, "false": False, "1": True, "0": False}.get(text.lower())
    if value is None:
        raise InvalidRequestError(f"{name}={short_repr(text)} must be true or false", param=name)
    return value
