"""A request's body: read within its limits, decoded, and turned into a struct. Knows no engine."""

import asyncio
import dataclasses
import re
from typing import Any, Generic, TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect, Request

from routed_experts.server.errors import ApiError
from routed_experts.server.executors import run_in_thread_if_large
from routed_experts.server.fields import screen
from routed_experts.server.limits import BODY_TIMEOUT_S, MAX_JSON_DEPTH

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_BRACKETS = re.compile(
    rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL
)  # possessive: a string that never ends is read once
_MISSING = re.compile(r"missing required field `(\w+)`")
_JSON_PATH = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`")


class ClientGone(Exception):
    """The client closed the connection before it was answered."""


@dataclasses.dataclass(frozen=True, slots=True)
class Body(Generic[_Struct]):
    """A decoded body, the names in it that have no effect, and its size."""

    value: _Struct
    ignored: list[str]
    num_bytes: int


async def read_struct(
    request: Request, kind: type[_Struct], *, max_bytes: int, strict: bool, empty: bool = False
) -> Body[_Struct]:
    """Read a JSON body. `empty`: none at all means {}. Raises ApiError: 400 (with the path in the JSON), 408, 413 or
    415."""
    raw = await _read(request, max_bytes)
    if not raw.strip() and empty:
        return Body(kind(), [], 0)
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        text = (
            f"content-type is {media[:60]!r}; wanted application/json; send the header Content-Type: application/json"
        )
        raise ApiError(text, status=415, code="unsupported_media_type")
    return await run_in_thread_if_large(len(raw), lambda: _decode(raw, kind, strict))


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                chunks.append(chunk)
    except ClientDisconnect as gone:
        raise ClientGone from gone
    except TimeoutError as late:
        text = f"the body did not arrive within {BODY_TIMEOUT_S:g} s; send it at once"
        raise ApiError(text, status=408, code="body_timeout") from late
    return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        f"the body is above the limit of {max_bytes} bytes; send less (--max-body-bytes)",
        status=413,
        code="body_too_large",
    )


def _decode(raw: bytes, kind: type[_Struct], strict: bool) -> Body[_Struct]:
    _check_depth(raw)
    try:
        said = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"the body is no JSON ({error}); send a JSON object in UTF-8"
        raise ApiError(text, status=400, code="invalid_json") from error
    if not isinstance(said, dict):
        text = f"the body is a JSON {type(said).__name__}; wanted an object"
        raise ApiError(text, status=400, code="invalid_json")
    kept, ignored = screen(cast("dict[str, Any]", said), kind.__struct_fields__, strict=strict)
    return Body(_convert(kept, kind), ignored, len(raw))


def _convert(kept: dict[str, object], kind: type[_Struct]) -> _Struct:
    try:
        return msgspec.convert(kept, kind, strict=True)
    except msgspec.ValidationError as error:
        found = _JSON_PATH.search(str(error))
        path = found[1] if found else ""
        text = f"{path or 'the body'}: {_JSON_PATH.sub('', str(error))}; correct the value"
        missing = _MISSING.search(str(error))
        param = re.split(r"[.\[]", path, maxsplit=1)[0] or (missing[1] if missing else None)
        raise ApiError(text, status=400, code="invalid_request", param=param) from error
    except (OverflowError, RecursionError) as error:
        raise ApiError(
            f"the body holds a number that is too large ({error})", status=400, code="invalid_request"
        ) from error


def _check_depth(raw: bytes) -> None:
    """Refuse nesting beyond the limit, in one pass over the brackets outside strings."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_JSON_DEPTH:
        return
    depth = 0
    for match in _BRACKETS.finditer(raw):
        mark = match[0]
        depth += mark in (b"[", b"{")
        depth -= mark in (b"]", b"}")
        if depth > MAX_JSON_DEPTH:
            text = f"the body nests deeper than {MAX_JSON_DEPTH} levels; send it flatter"
            raise ApiError(text, status=400, code="invalid_json")
