"""Routes that release device memory for a trainer on the same devices, and allocate it again, under SGLang's names.

The two tags are kv_cache and weights. Weights that were released come back by an update alone, so to resume them waits
for one and is no error; to resume the rest before they have come is a 409. SGLang's third tag, cuda_graph, has no
memory here."""

import asyncio
import functools
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.engine.control.memory_control import MEMORY_TAGS
from routed_experts.server.body import json_response, read_control
from routed_experts.server.errors import ApiError
from routed_experts.server.protocol import MemoryRequest
from routed_experts.server.state import ServerState

_WITHOUT_MEMORY = ("cuda_graph",)


async def release_memory_occupation(request: Request, server: ServerState) -> Response:
    """Free the memory of KV pages, weights or both; requests wait until it is taken back."""
    tags = await read_tags(request, server)
    return json_response(memory_body(await release(server, server.accepting_engine, tags)))


async def resume_memory_occupation(request: Request, server: ServerState) -> Response:
    """Allocate what was released and continue; released weights come by an update before."""
    tags = await read_tags(request, server)
    return json_response(memory_body(await resume(server.accepting_engine, tags)))


async def read_tags(request: Request, server: ServerState) -> list[str] | None:
    """Return the tags of a body; None where it names none. Raises ApiError and InvalidRequestError."""
    body = await read_control(request, MemoryRequest, server.settings, allow_empty=True)
    return parse_tags(body.tags)


def parse_tags(tags: Sequence[str] | None) -> list[str] | None:
    """Return the tags that have memory; None for none at all. Raises InvalidRequestError for an unknown one."""
    if tags is None:
        return None
    known = (*MEMORY_TAGS, *_WITHOUT_MEMORY)
    unknown = [tag for tag in tags if tag not in known]
    if not tags or unknown:
        fault = f"tags has {short_repr(unknown[0])}; it" if unknown else "tags=[]"
        text = f"{fault} must be some of {', '.join(known)}; leave it out for all"
        raise InvalidRequestError(text, param="tags")
    return [tag for tag in MEMORY_TAGS if tag in tags]


def memory_body(released: Sequence[str]) -> dict[str, object]:
    """The body of a response. `released`: what is released now."""
    return {"success": True, "status": "ok", "released": list(released)}


async def release(
    server: ServerState, engine: AsyncEngine, tags: Sequence[str] | None, *, running: str = "retract"
) -> tuple[str, ...]:
    """Release these tags, or (None) both; returns what is released now. `running`: what becomes of running requests,
    as for `Engine.release_memory_occupation`. Without a tag that has memory nothing happens."""
    chosen = MEMORY_TAGS if tags is None else tags
    if chosen:
        engine.flush_submissions()
        call = functools.partial(engine.engine.release_memory_occupation, chosen, running=running)
        if running == "wait":  # blocks for as long as started requests run
            await server.pause_executor.run(call)
        else:
            await asyncio.to_thread(call)
    return engine.engine.released


async def resume(engine: AsyncEngine, tags: Sequence[str] | None) -> tuple[str, ...]:
    """Allocate these tags, or (None) all that is released; returns what is still released. Weights alone are left to
    the update that brings them. Raises ApiError (409) while weights are missing for the rest."""
    released = engine.engine.released
    if not released or (tags is not None and "kv_cache" not in tags):
        return released
    if "weights" in released:
        text = "the weights are released; bring new ones first, by POST /update_weights_from_disk or /update_weights"
        raise ApiError(text, status=409, code="weights_released", param="tags")
    await asyncio.to_thread(engine.engine.resume_memory_occupation)
    return engine.engine.released
