"""Errors as clients see them: {"error": {message, type, param, code}} and a status.

A message is one line of at most 1 kB, without file paths, addresses or tracebacks. A path that the client sent is shown
to it where the error says that it is the client's: `InvalidRequestError.sent`."""

import dataclasses
import re
from collections.abc import Mapping
from typing import cast

from routed_experts.core.errors import InvalidRequestError, RoutedExpertsError
from routed_experts.server.limits import MAX_ERROR_CHARS, RETRY_AFTER_S

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_STATUS_BY_CODE = {
    "duplicate_request_id": 409,
    "routing_not_found": 404,
    "routing_not_ready": 409,
    "memory_released": 409,
    "weights_prepared": 409,
    "weights_released": 409,
}
# Routes of this server of more than one part, without those that have a parameter: hints name them.
OWN_PATHS = frozenset(
    (
        "/v1/completions /v1/chat/completions /v1/responses /v1/messages /v1/messages/count_tokens "
        "/inference/v1/generate /skyrl/v1/generate /v1/score /v1/tokenize /v1/detokenize /v1/models /v1/routing/stats "
        "/v1/routing/reset /v1/loads /health/live /inference/v1/abort_requests"
    ).split()
)
_MAX_PARAM_CHARS = 64
_PATH = re.compile(r"(?<![\w.])(?:/[\w.@+-]+){2,}/?")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


class ApiError(RoutedExpertsError):
    """An error that only exists over HTTP."""

    def __init__(self, message: str, *, status: int, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class ClientGone(Exception):
    """The client closed the connection before the response was complete."""


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorResponse:
    """Status, body and headers of an error."""

    status: int
    body: dict[str, object]
    headers: dict[str, str]


def to_response(error: BaseException) -> ErrorResponse:
    """Build the response for an exception; one that is not ours becomes a 500 without its text."""
    if not isinstance(error, RoutedExpertsError):
        return _response(500, "internal error; the server log has the cause", "internal_error", None)
    status = _STATUS_BY_CODE.get(error.code, error.status)
    param = error.param if isinstance(error, InvalidRequestError | ApiError) else None
    sent = error.sent if isinstance(error, InvalidRequestError) else None
    return _response(status, str(error), error.code, param, sent=sent)


def to_anthropic(response: ErrorResponse) -> ErrorResponse:
    """Return an error in Anthropic's form, which has a type at the top and fewer types of errors."""
    kinds = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
    error: dict[str, object] = dict(cast("Mapping[str, object]", response.body["error"]))
    error["type"] = kinds.get(response.status, error["type"])
    return dataclasses.replace(response, body={"type": "error", "error": error})


def unavailable(message: str, *, code: str) -> ApiError:
    """Build a 503 with Retry-After."""
    return ApiError(message, status=503, code=code)


def _response(status: int, message: str, code: str, param: str | None, *, sent: str | None = None) -> ErrorResponse:
    line, shown = " ".join(message.split()), " ".join((sent or "").split())
    line = shown.join(map(_redact, line.split(shown))) if shown else _redact(line)
    line = line.encode("utf-8", "replace").decode()
    if len(line) > MAX_ERROR_CHARS:
        line = line[: MAX_ERROR_CHARS - 3] + "..."
    kind = _TYPES.get(status, "invalid_request_error")
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    if status == 413:  # what is left of the body would be read as the next request
        headers["Connection"] = "close"
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    field = param[:_MAX_PARAM_CHARS].encode("utf-8", "replace").decode() if param else None
    return ErrorResponse(status, {"error": {"message": line, "type": kind, "param": field, "code": code}}, headers)


def _redact(text: str) -> str:
    return _ADDRESS.sub("<address>", _PATH.sub(_redact_path, text))


def _redact_path(match: re.Match[str]) -> str:
    return match[0] if match[0].rstrip("/.") in OWN_PATHS else "<path>"
