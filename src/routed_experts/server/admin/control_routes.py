"""Admin routes: forget prefixes, abort, pause, new weights from disk. A path from a request is resolved under one root,
or refused."""

import asyncio
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.execution.model_runner import MAX_WEIGHT_VERSION
from routed_experts.server.body import read_struct
from routed_experts.server.errors import ApiError
from routed_experts.server.protocol import (
    AbortRequest,
    ContinueRequest,
    PauseRequest,
    UpdateWeightsRequest,
    UpdateWeightVersionRequest,
)
from routed_experts.server.reply import json_reply
from routed_experts.server.state import ServerState


async def flush_cache(request: Request, service: ServerState) -> Response:
    """Forget all cached prefixes; refused while requests run, and then nothing is freed."""
    seen = service.accepting_engine.engine.stats()
    if seen.accepted > sum(seen.finished.values()):
        text = f"{seen.running} requests run and {seen.waiting} wait; try again when they have ended"
        raise ApiError(text, status=400, code="requests_running")
    freed = await asyncio.to_thread(service.door.engine.flush_cache)
    return json_reply({"success": True, "freed_pages": freed})


async def abort_request(request: Request, service: ServerState) -> Response:
    """End one call, or all, with what they have."""
    settings = service.settings
    body = await read_struct(
        request, AbortRequest, max_bytes=settings.max_body_bytes, strict=settings.strict_fields, empty=True
    )
    said, everything = body.value, body.value.abort_all is True
    if (not said.rid) != everything:
        raise InvalidRequestError("send either rid, or abort_all true", param="rid")
    door = service.accepting_engine
    door.flush_submissions()
    count = await asyncio.to_thread(door.engine.abort, said.rid or None, abort_all=everything)
    return json_reply({"success": True, "aborted": count})


async def pause_generation(request: Request, service: ServerState) -> Response:
    """Hold generation; new requests queue until it continues."""
    settings = service.settings
    body = await read_struct(
        request, PauseRequest, max_bytes=settings.max_body_bytes, strict=settings.strict_fields, empty=True
    )
    mode = body.value.mode or "abort"
    door = service.accepting_engine
    door.flush_submissions()
    engine = door.engine
    if mode == "wait":  # for as long as what has started runs
        await service.pause_executor.wait(lambda: engine.pause(mode="wait"))
    else:
        await asyncio.to_thread(engine.pause, mode=mode)
    return json_reply({"success": True, "mode": mode})


async def continue_generation(request: Request, service: ServerState) -> Response:
    """End a pause."""
    settings = service.settings
    await read_struct(
        request, ContinueRequest, max_bytes=settings.max_body_bytes, strict=settings.strict_fields, empty=True
    )
    await asyncio.to_thread(service.accepting_engine.engine.resume)
    return json_reply({"success": True})


async def update_weights_from_disk(request: Request, service: ServerState) -> Response:
    """Serve the weights of another checkpoint of the same model; a refused one leaves the old ones serving."""
    settings = service.settings
    body = await read_struct(
        request, UpdateWeightsRequest, max_bytes=settings.max_body_bytes, strict=settings.strict_fields
    )
    said, door = body.value, service.accepting_engine
    folder = await asyncio.to_thread(_under_root, settings.weights_root, said.model_path)
    version = _version(said.weight_version, served=door.engine.stats().weight_version)
    cache = "keep" if said.flush_cache is False else "flush"
    await asyncio.to_thread(door.engine.update_weights_from_disk, folder, version=version, cache=cache)
    return json_reply({"success": True, "message": "updated", "weight_version": str(version)})


async def update_weight_version(request: Request, service: ServerState) -> Response:
    """Name the served weights anew."""
    settings = service.settings
    body = await read_struct(
        request, UpdateWeightVersionRequest, max_bytes=settings.max_body_bytes, strict=settings.strict_fields
    )
    said, door = body.value, service.accepting_engine
    version = _version(said.new_version, served=door.engine.stats().weight_version, param="new_version")
    if said.abort_all_requests is not False:
        door.flush_submissions()
        await asyncio.to_thread(door.engine.abort, abort_all=True)
    await asyncio.to_thread(door.engine.update_weight_version, version)
    return json_reply(
        {"success": True, "message": "updated", "new_version": str(version), "weight_version": str(version)}
    )


def _under_root(root: str | None, said: str) -> Path:
    """The folder that a request names, which must lie under the root once every link is followed."""
    if root is None:
        raise ApiError(
            "this server takes no weights; start it with --weights-root DIR", status=403, code="weights_root_unset"
        )
    if "\0" in said or len(said) > 1024:
        raise InvalidRequestError(f"model_path={short_repr(said)} is no path", param="model_path")
    base = Path(root).resolve()
    refusal = InvalidRequestError(
        f"model_path={short_repr(said)} is no folder under --weights-root", param="model_path"
    )
    try:
        folder = (base / said).resolve()
        is_folder = folder.is_relative_to(base) and folder.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, links in a circle, a lone surrogate
        raise refusal from error
    if not is_folder:
        raise refusal
    return folder


def _version(said: int | str | None, *, served: int, param: str = "weight_version") -> int:
    if said is None:
        return served + 1
    number = int(said) if isinstance(said, int) or (said.isascii() and said.isdecimal() and len(said) <= 10) else None
    if number is None or not served < number <= MAX_WEIGHT_VERSION:
        text = f"{param}={short_repr(said)} must be a number above the served version {served} and at most {MAX_WEIGHT_VERSION}; count updates"
        raise InvalidRequestError(text, param=param)
    return number
