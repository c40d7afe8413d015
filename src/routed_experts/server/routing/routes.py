"""/v1/routing: rows of finished requests in format ref, whole or by Range (RFC 9110 §14), and expert counts."""

import hashlib
import json
import re

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.load_metrics import load_entropy, load_imbalance, num_unused
from routed_experts.core.routing_stats import PHASES, RoutingStats
from routed_experts.formats.archive import encode_record
from routed_experts.formats.metadata import to_metadata
from routed_experts.formats.wire import npy_bytes
from routed_experts.server.body import json_response
from routed_experts.server.errors import ApiError, to_response
from routed_experts.server.executors import run_in_thread_if_large
from routed_experts.server.middleware import request_owner
from routed_experts.server.routing_store import HttpMeta, StoredRows
from routed_experts.server.state import ServerState

ENCODINGS = ("npy", "safetensors")
_MEDIA_TYPE = "application/octet-stream"
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


async def fetch(request: Request, server: ServerState) -> Response:
    """The rows of one choice: a .npy of the canonical ids, or ?format=safetensors with the token ids beside them. Parts
    by Range."""
    encoding, choice = request.query_params.get("format", "npy"), request.query_params.get("choice", "0")
    if encoding not in ENCODINGS:
        text = f"format={short_repr(encoding)} is unknown; choose one of {', '.join(ENCODINGS)}"
        raise InvalidRequestError(text, param="format", code="unknown_format")
    if not (choice.isascii() and choice.isdecimal() and len(choice) <= 6):
        raise InvalidRequestError(f"choice={short_repr(choice)} must be an index", param="choice")
    rows = server.store.get(request.path_params["name"], int(choice), owner=request_owner(request))
    body: bytes | None = None
    if encoding not in rows.meta:
        body, rows.meta[encoding] = await run_in_thread_if_large(rows.nbytes, lambda: _encode_with_meta(rows, encoding))
    meta = rows.meta[encoding]
    if meta.headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=meta.headers)
    if request.method == "HEAD":
        return Response(headers={**meta.headers, "Content-Length": str(meta.num_bytes)}, media_type=_MEDIA_TYPE)
    if body is None:
        body = await run_in_thread_if_large(rows.nbytes, lambda: _encode(rows, encoding))
    return partial_response(request, body, Response(body, headers=meta.headers, media_type=_MEDIA_TYPE))


async def stats(request: Request, server: ServerState) -> Response:
    """How often each expert was chosen since the start or the last reset, prompts and generated tokens apart, and how
    evenly."""
    return stats_response(request, await server.routing_stats.get_within(server.settings.stall_timeout))


async def reset(request: Request, server: ServerState) -> Response:
    """Reset the counts."""
    await server.routing_resets.get_within(server.settings.stall_timeout)
    return json_response({"success": True})


async def delete(request: Request, server: ServerState) -> Response:
    """Free the rows of a request."""
    server.store.delete(request.path_params["name"], owner=request_owner(request))
    return Response(status_code=204)


def partial_response(request: Request, body: bytes, full: Response) -> Response:
    """Return the range of the body that the request asks for (206), 416 for one outside it, or `full`.

    Several ranges, or another unit, give `full`. `If-Range` is the ETag that the body must have."""
    match = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
    if_range = request.headers.get("if-range")
    if match is None or match[0] == "bytes=-" or if_range not in (None, full.headers.get("etag")):
        return full
    size = len(body)
    if match[1]:
        first, last = int(match[1]), min(int(match[2]), size - 1) if match[2] else size - 1
        if match[2] and int(match[2]) < first:
            return full  # not a range
    else:  # the last so many bytes
        first, last = max(size - int(match[2]), 0), size - 1
    if first > last:
        text = f"Range begins at byte {first} of {size}; ask for bytes 0 to {size - 1}"
        error = to_response(ApiError(text, status=416, code="range_not_satisfiable"))
        return json_response(error.body, status=416, headers={"Content-Range": f"bytes */{size}"})
    headers = {name: value for name, value in full.headers.items() if name != "content-length"}
    headers["Content-Range"] = f"bytes {first}-{last}/{size}"
    return Response(body[first : last + 1], status_code=206, headers=headers)


def _encode(rows: StoredRows, encoding: str) -> bytes:
    return npy_bytes(rows.record.ids) if encoding == "npy" else encode_record(rows.record, rows.token_ids)


def _encode_with_meta(rows: StoredRows, encoding: str) -> tuple[bytes, HttpMeta]:
    """Return the encoded rows and their headers."""
    body = _encode(rows, encoding)
    metadata = to_metadata(rows.record, payload_format="ref").to_json()
    headers = {
        "ETag": f'"{hashlib.sha256(body).hexdigest()}.{encoding}"',
        "X-Routed-Experts-Info": json.dumps(metadata, separators=(",", ":")),  # ASCII alone, also of a label
        "Cache-Control": "private, no-store",
        "Accept-Ranges": "bytes",
    }
    return body, HttpMeta(headers, len(body))


def stats_response(request: Request, stats: RoutingStats) -> Response:
    """Build the response with the counts; its ETag lets a client skip counts that have not changed."""
    tag = hashlib.sha256(stats.counts.tobytes()).hexdigest()[:32]
    headers = {"ETag": f'"{tag}"', "Cache-Control": "no-cache"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    load, newest = stats.load, stats.windows[-1] if len(stats.windows) else np.zeros_like(stats.counts)
    body: dict[str, object] = {
        "layer_ids": stats.layer_ids,
        "num_experts": stats.num_experts,
        "top_k": stats.top_k,
        "num_tokens": dict(zip(PHASES, stats.num_tokens.tolist(), strict=True)),
        "counts": dict(zip(PHASES, stats.counts.tolist(), strict=True)),
        "imbalance": load_imbalance(load).tolist(),
        "entropy": load_entropy(load).tolist(),
        "dead_experts": num_unused(load).tolist(),
        "window": {
            "num_tokens": int(newest[:, :1].sum()) // stats.top_k,
            "counts": dict(zip(PHASES, newest.tolist(), strict=True)),
        },
    }
    return json_response(body, headers=headers)
