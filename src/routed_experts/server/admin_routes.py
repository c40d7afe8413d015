"""Admin routes: forget prefixes, abort requests. Knows no settings but the limits of a body."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.errors import InvalidRequestError
from routed_experts.server.body import read_struct
from routed_experts.server.errors import ApiError
from routed_experts.server.protocol import AbortRequest
from routed_experts.server.reply import json_reply
from routed_experts.server.service import Service


async def flush_cache(request: Request, service: Service) -> Response:
    """Forget all cached prefixes; refused while requests run, and then nothing is freed."""
    seen = service.open_door.snapshot()
    if seen.accepted > sum(seen.finished.values()):
        text = f"{seen.running} requests run and {seen.waiting} wait; try again when they have ended"
        raise ApiError(text, status=400, code="requests_running")
    freed = await asyncio.to_thread(service.door.engine.flush_cache)
    return json_reply({"success": True, "freed_pages": freed})


async def abort_request(request: Request, service: Service) -> Response:
    """End one call, or all, with what they have."""
    settings = service.settings
    body = await read_struct(request, AbortRequest, max_bytes=settings.max_body_bytes, strict=settings.strict_fields, empty=True)
    said, everything = body.value, body.value.abort_all is True
    if (not said.rid) != everything:
        raise InvalidRequestError("send either rid, or abort_all true", param="rid")
    count = await asyncio.to_thread(service.open_door.engine.abort, said.rid or None, abort_all=everything)
    return json_reply({"success": True, "aborted": count})
