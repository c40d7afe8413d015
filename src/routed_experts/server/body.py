"""JSON bodies: read a request body within its limits, check its field names, decode it into a struct; write a response.

Every route refuses misspelled, reserved and unsupported fields; fields without effect are named in X-Ignored-Params. A
field that is null counts as absent."""

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncGenerator, Collection, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from routed_experts.core.error_text import nearest_name, short_repr
from routed_experts.server.errors import ApiError, ClientGone
from routed_experts.server.executors import run_in_thread_if_large
from routed_experts.server.limits import (
    BODY_TIMEOUT_S,
    DISCARD_IDLE_S,
    DISCARD_S,
    DISCARDED_BYTES,
    MAX_JSON_DEPTH,
    MAX_NAMED_FIELDS,
    MAX_UNKNOWN_NAMES,
    ServerSettings,
)

# Fields of other servers that would change the output and are not supported: refused, but for these values.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "suffix": ("",),
        "best_of": (1,),
        "use_beam_search": (False,),
        "chat_template": (),
        "prompt_embeds": ([],),
        "input_embeds": (),
        "truncate_prompt_tokens": (),
        "allowed_token_ids": ([],),
        "bad_words": ([],),
        "return_hidden_states": (False,),
        "token_ids_logprob": ([],),
        "logprob_token_ids": ([],),
        "image_data": ([], ""),
        "audio_data": ([], ""),
        "video_data": ([], ""),
        "image_url": (),
        "modalities": (["text"], []),
        "audio": (),
        "lora_path": ("", []),
        "lora_request": (),
        "custom_logit_processor": ("",),
        "logits_processors": ([],),
        "session_params": ({},),
        "documents": ([],),
        "web_search_options": (),
        "prediction": (),
        "output_format": (),
        "structured_outputs": (),
        "json_schema": ("",),
        "regex": ("",),
        "ebnf": ("",),
        "stop_regex": ([], ""),
        "structural_tag": ("",),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "kv_transfer_params": (),
        "ec_transfer_params": (),
        "features": (),
        "content_parts": ([],),
    }
)
# Fields that clients of other servers always send. They have no effect and are never taken for a typo.
IGNORED = frozenset(
    (
        "user store metadata parallel_tool_calls service_tier safety_identifier prompt_cache_key "
        "prompt_cache_retention verbosity  reasoning_effort reasoning priority spaces_between_special_tokens "
        "length_penalty early_stopping custom_params return_logprobs_text  logprobs_mode log_metrics "
        "include_reasoning separate_reasoning stream_reasoning mm_processor_kwargs modalities_config background "
        "data_parallel_rank bootstrap_host bootstrap_port bootstrap_room return_bytes stream_interval "
        "repetition_detection no_logs  chat_template_content_format return_prompt_token_ids return_meta_info"
    ).split()
)
_OTHER_ROUTES: Mapping[str, tuple[str, ...]] = MappingProxyType(  # names of the prompt on other routes
    {
        "prompt": ("text", "messages", "token_ids"),
        "text": ("prompt", "messages", "token_ids"),
        "messages": ("text", "prompt"),
    }
)
_SHAPES: Mapping[str, str] = MappingProxyType({"messages": '[{"role": "user", "content": "text"}]'})
_RESERVED = ("routed_", "return_rout")
_NUMBERS = ("temperature", "top_p", "min_p")  # fields that some clients send as text, such as "0.5"
_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?([eE]-?[0-9]{1,2})?")
_WITHOUT_EFFECT = "routed_experts.fields_without_effect"  # of the scope of a request
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# The quantifier is possessive, so that a string without an end is scanned once.
_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`")
_JSON_PATH = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`")
_TYPES = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")  # msgspec's own text
_TYPE_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "int": "an integer",
        "float": "a number",
        "str": "text",
        "bool": "true or false",
        "array": "an array",
        "object": "an object",
    }
)
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Struct_co = TypeVar("_Struct_co", bound=msgspec.Struct, covariant=True)


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedBody(Generic[_Struct_co]):
    """A decoded body, the fields in it that have no effect, and its size."""

    value: _Struct_co
    ignored: list[str]
    num_bytes: int


async def read_body(
    request: Request,
    kind: type[_Struct],
    settings: ServerSettings,
    *,
    allow_empty: bool = False,
    strict: bool = False,
) -> ParsedBody[_Struct]:
    """Read a JSON body. `allow_empty`: no body means {}. `strict`: unknown fields are refused, whatever the settings
    say. Raises ApiError: 400 (with the path in the JSON), 408, 413 or
    415."""
    raw = await read_raw(request, settings)
    if not raw.strip() and allow_empty:
        return ParsedBody(kind(), [], 0)
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        text = f"content-type is {media[:60]!r}, not application/json; send the header Content-Type: application/json"
        raise ApiError(text, status=415, code="unsupported_media_type")
    return await run_in_thread_if_large(len(raw), lambda: _decode(raw, kind, strict=strict or settings.strict_fields))


async def read_control(
    request: Request,
    kind: type[_Struct],
    settings: ServerSettings,
    *,
    allow_empty: bool = False,
    strict: bool = False,
) -> _Struct:
    """Read the JSON body of a route that controls the engine, as `read_body` does; the endpoint reports the fields
    without effect."""
    body = await read_body(request, kind, settings, allow_empty=allow_empty, strict=strict)
    request.scope[_WITHOUT_EFFECT] = body.ignored
    return body.value


def fields_without_effect(request: Request) -> list[str]:
    """Return the fields that `read_control` met in the body of this request, and that have no effect."""
    return request.scope.get(_WITHOUT_EFFECT, [])


async def read_raw(request: Request, settings: ServerSettings) -> bytes:
    """Read a body within its limits. Raises ApiError: 408, 413, or 415 for one that is compressed."""
    raw = await _read(request, settings.max_body_bytes)
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        text = f"content-encoding is {encoding[:60]!r}; send the body without compression"
        raise ApiError(text, status=415, code="unsupported_media_type")
    return raw


def field_names_of(raw: bytes) -> frozenset[str]:
    """The names at the top of a JSON object but those of null, which count as absent; none of anything else."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return frozenset(name for name, value in fields.items() if bytes(value).strip() != b"null")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return frozenset()


def json_response(body: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Build a response with a JSON body; numbers that JSON cannot express become null."""
    return Response(msgspec.json.encode(body), status_code=status, headers=headers, media_type="application/json")


def check_fields(
    fields: Mapping[str, object], known: Collection[str], *, strict: bool
) -> tuple[dict[str, object], list[str]]:
    """Split a body into its known fields and the names of fields without effect.

    Raises ApiError (400) for a misspelled, reserved or unsupported field; with `strict` for every unknown field."""
    values = {name: value for name, value in fields.items() if value is not None and name in known}
    others = {name: value for name, value in fields.items() if value is not None and name not in known}
    if len(others) > MAX_UNKNOWN_NAMES:
        text = f"{len(others)} fields of the body are unknown, above the limit of {MAX_UNKNOWN_NAMES}; leave them out"
        raise ApiError(text, status=400, code="too_many_fields")
    for name, value in others.items():
        if name in UNSUPPORTED:
            if not any(type(value) is type(harmless) and value == harmless for harmless in UNSUPPORTED[name]):
                text = f"{name}={short_repr(value)} is not supported by this server; leave it out"
                raise ApiError(text, status=400, code="unsupported_parameter", param=name)
        elif (other := next((other for other in _OTHER_ROUTES.get(name, ()) if other in known), None)) is not None:
            if other not in values:
                text = f"{name} is no parameter of this route; did you mean {other}?"
                raise ApiError(text, status=400, code="unknown_field", param=name)
        elif strict or name not in IGNORED:
            _check_unknown(name, known, strict=strict)
    return values, list(others)


def check_query(names: Collection[str], known: Collection[str], *, strict: bool) -> list[str]:
    """Return the names of query parameters without effect. Raises ApiError (400) for a misspelled or reserved one; with
    `strict` for every unknown one."""
    unknown = [name for name in dict.fromkeys(names) if name not in known]
    if len(unknown) > MAX_UNKNOWN_NAMES:
        text = f"{len(unknown)} query parameters are unknown, above the limit of {MAX_UNKNOWN_NAMES}; leave them out"
        raise ApiError(text, status=400, code="too_many_fields")
    for name in unknown:
        if strict or name not in IGNORED:
            _check_unknown(name, known, strict=strict)
    return unknown


def ignored_params_header(ignored: Collection[str]) -> dict[str, str]:
    """Build the response header that names the fields without effect."""
    names = [name for name in ignored if _NAME.fullmatch(name)][:MAX_NAMED_FIELDS]
    return {"X-Ignored-Params": ", ".join(names)} if names else {}


def _check_unknown(name: str, known: Collection[str], *, strict: bool) -> None:
    nearest = nearest_name(name, known)
    if strict or nearest is not None or name.startswith(_RESERVED):
        fix = f"did you mean {nearest}?" if nearest else "leave it out"
        text = f"{short_repr(name)} is no parameter of this route; {fix}"
        raise ApiError(text, status=400, code="unknown_field", param=name[:64])


async def _read(request: Request, max_bytes: int) -> bytes:
    length, stream = request.headers.get("content-length", "0"), request.stream()
    if length.isascii() and length.isdecimal() and int(length[:20]) > max_bytes:
        if "expect" not in request.headers:  # else the client waits for this answer
            await _discard(stream)
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in stream:
                size += len(chunk)
                if size > max_bytes:
                    await _discard(stream)
                    raise _too_large(max_bytes)
                chunks.append(chunk)
    except ClientDisconnect as error:
        raise ClientGone from error
    except TimeoutError as error:
        text = f"the body did not arrive within {BODY_TIMEOUT_S:g} s; send it at once"
        raise ApiError(text, status=408, code="body_timeout") from error
    return b"".join(chunks)


async def _discard(stream: AsyncGenerator[bytes, None]) -> None:
    """Receive and drop what a client is still sending, within limits of bytes and time: where a connection is closed
    before, the system resets it, and the client loses the answer."""
    left = DISCARDED_BYTES
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(DISCARD_S):
            while left > 0 and (chunk := await asyncio.wait_for(anext(stream, b""), DISCARD_IDLE_S)):
                left -= len(chunk)


def _too_large(max_bytes: int) -> ApiError:
    text = f"the body is above the limit of {max_bytes} bytes; send less (--max-body-bytes)"
    return ApiError(text, status=413, code="body_too_large")


def _decode(raw: bytes, kind: type[_Struct], *, strict: bool) -> ParsedBody[_Struct]:
    check_depth(raw)
    try:
        decoded = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"the body is no JSON ({error}); send a JSON object in UTF-8"
        raise ApiError(text, status=400, code="invalid_json") from error
    if not isinstance(decoded, dict):
        text = f"the body is a JSON {type(decoded).__name__}; send an object"
        raise ApiError(text, status=400, code="invalid_json")
    values, ignored = check_fields(cast("dict[str, Any]", decoded), kind.__struct_fields__, strict=strict)
    return ParsedBody(_convert(with_numbers(values), kind), ignored, len(raw))


def with_numbers(values: Mapping[str, object]) -> dict[str, object]:
    """Return fields with the numbers that some clients send as text."""
    return {
        name: float(value) if name in _NUMBERS and isinstance(value, str) and _NUMBER.fullmatch(value) else value
        for name, value in values.items()
    }


def _convert(values: dict[str, object], kind: type[_Struct]) -> _Struct:
    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        match = _JSON_PATH.search(str(error))
        path = match[1] if match else ""
        missing = _MISSING.search(str(error))
        param = re.split(r"[.\[]", path, maxsplit=1)[0] or (missing[1] if missing else None)
        shape = _SHAPES.get(param or "")
        fix = "correct the value" if shape is None else f"send a value such as {shape}"
        is_scalar = path in values and not isinstance(values[path], dict | list)
        field = f"{path}={short_repr(values[path])}" if is_scalar else path or "the body"
        text = f"{field}: {_TYPES.sub(_in_words, _JSON_PATH.sub('', str(error)))}; {fix}"
        raise ApiError(text, status=400, code="invalid_request", param=param) from error
    except (OverflowError, RecursionError) as error:
        text = f"the body holds a number that is too large ({error})"
        raise ApiError(text, status=400, code="invalid_request") from error


def _in_words(types: re.Match[str]) -> str:
    """What msgspec expected and received, in words: "expected an integer or null, received text"."""
    expected, received = (
        " or ".join(_TYPE_WORDS.get(kind, kind) for kind in kinds.split(" | ")) for kinds in types.groups()
    )
    return f"expected {expected}, received {received}"


def check_depth(raw: bytes) -> None:
    """Raise ApiError for JSON that nests too deep, in one pass over the brackets outside strings."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_JSON_DEPTH:
        return
    depth = 0
    for match in _BRACKETS.finditer(raw):
        bracket = match[0]
        depth += bracket in (b"[", b"{")
        depth -= bracket in (b"]", b"}")
        if depth > MAX_JSON_DEPTH:
            text = f"the body nests deeper than {MAX_JSON_DEPTH} levels; send it flatter"
            raise ApiError(text, status=400, code="invalid_json")
