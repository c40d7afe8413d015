"""/v1/routing: rows of a request that asked for format ref, fetched once it has ended, and counts of all routing. Knows
no generation."""

import hashlib

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.formats.archive import encode_record
from routed_experts.formats.metadata import to_metadata
from routed_experts.formats.wire import npy_bytes
from routed_experts.server.executors import run_in_thread_if_large
from routed_experts.server.reply import json_reply
from routed_experts.server.routing.ranges import partial
from routed_experts.server.routing.stats import stats_reply, with_timeout
from routed_experts.server.routing.store import KeptRows, Told
from routed_experts.server.state import ServerState

FORMATS = ("npy", "safetensors")


async def fetch(request: Request, service: ServerState) -> Response:
    """The rows of one choice: a .npy of the canonical ids, or ?format=safetensors with the token ids beside them. Parts
    by Range."""
    form, choice = request.query_params.get("format", "npy"), request.query_params.get("choice", "0")
    if form not in FORMATS:
        text = f"format={short_repr(form)} is unknown; choose one of {', '.join(FORMATS)}"
        raise InvalidRequestError(text, param="format", code="unknown_format")
    if not (choice.isascii() and choice.isdecimal() and len(choice) <= 6):
        raise InvalidRequestError(f"choice={short_repr(choice)} must be an index", param="choice")
    kept = service.store.get(request.path_params["name"], int(choice), owner=_owner(request))
    body: bytes | None = None
    if form not in kept.told:
        body, kept.told[form] = await run_in_thread_if_large(kept.nbytes, lambda: _encoded(kept, form))
    told = kept.told[form]
    if told.headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=told.headers)
    if request.method == "HEAD":
        return Response(
            headers={**told.headers, "Content-Length": str(told.num_bytes)}, media_type="application/octet-stream"
        )
    if body is None:
        body = await run_in_thread_if_large(kept.nbytes, lambda: _body(kept, form))
    return partial(request, body, Response(body, headers=told.headers, media_type="application/octet-stream"))


async def stats(request: Request, service: ServerState) -> Response:
    """How often each expert was chosen since the start or the last reset, prompts and generated tokens apart, and how
    evenly."""
    return stats_reply(request, await with_timeout(service.stats, service.settings.stall_timeout))


async def reset(request: Request, service: ServerState) -> Response:
    """Begin to count anew."""
    await with_timeout(service.resets, service.settings.stall_timeout)
    return json_reply({"success": True})


async def delete(request: Request, service: ServerState) -> Response:
    """Free the rows of a request."""
    service.store.delete(request.path_params["name"], owner=_owner(request))
    return Response(status_code=204)


def _body(kept: KeptRows, form: str) -> bytes:
    return npy_bytes(kept.record.ids) if form == "npy" else encode_record(kept.record, kept.token_ids)


def _encoded(kept: KeptRows, form: str) -> tuple[bytes, Told]:
    """The rows in a form, and what is said of them."""
    body = _body(kept, form)
    info = to_metadata(kept.record, payload_format="ref").to_json()
    headers = {
        "ETag": f'"{hashlib.sha256(body).hexdigest()}.{form}"',
        "X-Routed-Experts-Info": msgspec.json.encode(info).decode("ascii"),
        "Cache-Control": "private, no-store",
        "Accept-Ranges": "bytes",
    }
    return body, Told(headers, len(body))


def _owner(request: Request) -> str:
    return str(request.scope["state"]["owner"])
