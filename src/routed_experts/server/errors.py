"""Errors as clients see them: {"error": {message, type, param, code}} and a status. Knows nothing of where they arise.

A message is one line of at most 1 kB, and never holds a path, an address or a traceback."""

import dataclasses
import re

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
_STATUS_OF_CODE = {"duplicate_request_id": 409, "routing_not_found": 404, "routing_not_ready": 409}
_PATH = re.compile(r"(?<![\w.])(?:/[\w.@+-]+){2,}/?")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


class ApiError(RoutedExpertsError):
    """An error that only exists over HTTP."""

    def __init__(self, message: str, *, status: int, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Status, body and headers of an error."""

    status: int
    body: dict[str, object]
    headers: dict[str, str]


def answer_of(error: BaseException) -> ErrorAnswer:
    """What a client is told of an exception; of one that is not ours, only that it happened."""
    if not isinstance(error, RoutedExpertsError):
        return _answer(500, "the server met an error of its own; its log has the cause", "internal_error", None)
    status = _STATUS_OF_CODE.get(error.code, error.status)
    param = error.param if isinstance(error, InvalidRequestError | ApiError) else None
    return _answer(status, str(error), error.code, param)


def busy(message: str, *, code: str) -> ApiError:
    """503: try again soon."""
    return ApiError(message, status=503, code=code)


def _answer(status: int, message: str, code: str, param: str | None) -> ErrorAnswer:
    line = _ADDRESS.sub("<address>", _PATH.sub("<path>", " ".join(message.split())))
    line = line.encode("utf-8", "replace").decode()
    if len(line) > MAX_ERROR_CHARS:
        line = line[: MAX_ERROR_CHARS - 3] + "..."
    kind = _TYPES.get(status, "invalid_request_error")
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    told = param[:64].encode("utf-8", "replace").decode() if param else None
    return ErrorAnswer(status, {"error": {"message": line, "type": kind, "param": told, "code": code}}, headers)
