"""Routes that control the engine: cached prefixes, aborts, pauses, new weights from disk.

A path in a request is resolved under --weights-root, or refused."""

import asyncio
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PARAM, CheckpointError, InvalidRequestError, WeightsMismatchError, field_names
from routed_experts.core.extra_key import combine_keys
from routed_experts.core.weight_version import WeightVersion, to_label
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.server.body import json_response, read_control
from routed_experts.server.errors import ApiError
from routed_experts.server.generation_handler import to_seed
from routed_experts.server.protocol import (
    AbortRequest,
    ContinueRequest,
    PauseRequest,
    RememberRolloutsRequest,
    UpdateWeightsRequest,
    UpdateWeightVersionRequest,
)
from routed_experts.server.state import ServerState

_MAX_PATH_CHARS = 1024
_MAX_SHOWN_CHARS = 256  # of a path in an error: a slip may be in its last part
_UPDATE_ABORTS = "the weights are updated, with abort_all_requests"


async def flush_cache(request: Request, server: ServerState) -> Response:
    """Drop all cached prefixes, and with `drafts` all answers that are remembered; refused while requests run."""
    drafts = parse_drafts(request)
    stats = server.accepting_engine.engine.stats()
    if stats.accepted > sum(stats.finished.values()):
        text = f"{stats.running} requests run and {stats.waiting} wait; try again when they have ended"
        raise ApiError(text, status=400, code="requests_running")
    freed = await asyncio.to_thread(server.engine.engine.flush_cache, drafts=drafts)
    return json_response({"success": True, "freed_pages": freed})


def parse_drafts(request: Request) -> bool:
    """Return whether a flush is to drop remembered answers too. Raises InvalidRequestError."""
    drafts = request.query_params.get("drafts", "false")
    if drafts not in ("true", "false"):
        raise InvalidRequestError(f"drafts={short_repr(drafts)} must be true or false", param="drafts")
    return drafts == "true"


async def remember_rollouts(request: Request, server: ServerState) -> Response:
    """Take an answer to a prompt as a draft of later ones."""
    rollout = await read_control(request, RememberRolloutsRequest, server.settings, strict=True)
    await asyncio.to_thread(
        server.accepting_engine.engine.remember_rollouts,
        rollout.prompt_ids,
        rollout.output_ids,
        seed=to_seed(rollout.seed),
        choice=rollout.choice or 0,
        extra_key=combine_keys(rollout.extra_key, rollout.cache_salt),
    )
    return json_response({"success": True})


async def abort_request(request: Request, server: ServerState) -> Response:
    """End one call, or all, with what they have."""
    body = await read_control(request, AbortRequest, server.settings, allow_empty=True)
    rid, abort_all = body.rid or None, body.abort_all is True
    if (rid is None) != abort_all:
        raise InvalidRequestError("send either rid, or abort_all true", param="rid")
    engine = server.accepting_engine
    engine.flush_submissions()
    count = await asyncio.to_thread(engine.engine.abort, rid, abort_all=abort_all)
    return json_response({"success": True, "aborted": count})


async def pause_generation(request: Request, server: ServerState) -> Response:
    """Hold generation; new requests queue until it continues."""
    body = await read_control(request, PauseRequest, server.settings, allow_empty=True)
    mode = body.mode or "abort"
    await pause_engine(server, server.accepting_engine, mode)
    return json_response({"success": True, "status": "ok", "message": "generation is paused", "mode": mode})


async def pause_engine(server: ServerState, engine: AsyncEngine, mode: str) -> None:
    """Pause the engine, after the calls that wait to be submitted."""
    engine.flush_submissions()
    if mode == "wait":  # blocks for as long as started requests run
        await server.pause_executor.run(lambda: engine.engine.pause(mode="wait"))
    else:
        await asyncio.to_thread(engine.engine.pause, mode=mode)


async def continue_generation(request: Request, server: ServerState) -> Response:
    """End a pause."""
    await read_control(request, ContinueRequest, server.settings, allow_empty=True)
    await asyncio.to_thread(server.accepting_engine.engine.resume)
    return json_response({"success": True, "status": "ok", "message": "generation continues"})


async def update_weights_from_disk(request: Request, server: ServerState) -> Response:
    """Serve the weights of another checkpoint of the same model; a refused one leaves the old ones serving."""
    fields = await read_control(request, UpdateWeightsRequest, server.settings)
    check_load_options(fields)
    version = await update_from_folder(
        server,
        fields.model_path,
        fields.weight_version,
        cache="keep" if fields.flush_cache is False else "flush",
        abort_first=fields.abort_all_requests is True,
    )
    return json_response({"success": True, "message": "updated", **version.to_json()})


def check_load_options(fields: UpdateWeightsRequest) -> None:
    """Raise ApiError for a way of loading that this server has not."""
    if fields.load_format not in (None, "auto", "safetensors"):
        text = f"load_format={short_repr(fields.load_format)} is not supported; send auto, or leave it out"
        raise ApiError(text, status=400, code="unsupported_parameter", param="load_format")
    if fields.is_async is True:
        text = "is_async=true is not supported: the call returns when the weights serve; leave it out"
        raise ApiError(text, status=400, code="unsupported_parameter", param="is_async")


async def update_from_folder(
    server: ServerState,
    path: str,
    weight_version: int | str | None,
    *,
    cache: str,
    abort_first: bool = False,
    param: str = "model_path",
) -> WeightVersion:
    """Serve the weights of a folder below --weights-root, and return their version. `abort_first`: end all
    requests before; a folder that is none ends none. `param`: the field of the route that names the folder."""
    engine = server.accepting_engine
    with field_names({"model_path": param}):
        folder = await asyncio.to_thread(folder_under_root, server.settings.weights_root, path)
        label = parse_label(weight_version, param="weight_version")
        if abort_first:
            engine.flush_submissions()
            await asyncio.to_thread(engine.abort_all, _UPDATE_ABORTS)
        try:
            return await asyncio.to_thread(engine.engine.update_weights_from_disk, folder, version=label, cache=cache)
        except (CheckpointError, WeightsMismatchError) as error:
            sent = short_repr(path, max_chars=_MAX_SHOWN_CHARS)
            text = f"{PARAM}={sent}: {error}"
            raise InvalidRequestError(text, param="model_path", code=error.code, sent=sent) from error


async def update_weight_version(request: Request, server: ServerState) -> Response:
    """Set the label of the served weights; also the same one again, which counts as an update."""
    body = await read_control(request, UpdateWeightVersionRequest, server.settings)
    engine = server.accepting_engine
    label = to_label(body.new_version, param="new_version")
    if body.abort_all_requests is not False:
        check_awake(engine)
        engine.flush_submissions()
        await asyncio.to_thread(engine.abort_all, _UPDATE_ABORTS)
    version = await asyncio.to_thread(engine.engine.update_weight_version, label)
    return json_response({"success": True, "message": "updated", "new_version": label, **version.to_json()})


def check_awake(engine: AsyncEngine) -> None:
    """Raise ApiError (409) while memory is released: before a call ends requests, and is refused then."""
    if engine.engine.released:
        text = f"{', '.join(engine.engine.released)} is released; call /resume_memory_occupation or /wake_up first"
        raise ApiError(text, status=409, code="memory_released")


def folder_under_root(root: str | None, model_path: str) -> Path:
    """Return the folder that a request names. It must be below the root after every link is followed."""
    if root is None:
        text = "this server takes no weights; start it with --weights-root DIR"
        raise ApiError(text, status=403, code="weights_root_unset")
    sent = short_repr(model_path, max_chars=_MAX_SHOWN_CHARS)
    if "\0" in model_path or len(model_path) > _MAX_PATH_CHARS:
        raise InvalidRequestError(f"{PARAM}={sent} is no path", param="model_path", sent=sent)
    base = Path(root).resolve()
    text = f"{PARAM}={sent} is no folder under --weights-root"
    refusal = InvalidRequestError(text, param="model_path", sent=sent)
    try:
        folder = (base / model_path).resolve()
        is_folder = folder.is_relative_to(base) and folder.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, a loop of links, a lone surrogate
        raise refusal from error
    if not is_folder:
        raise refusal
    return folder


def parse_label(value: int | str | None, *, param: str) -> str | None:
    """Return the label that a request gives the weights; None keeps the served one. Raises InvalidRequestError."""
    return None if value is None else to_label(value, param=param)
