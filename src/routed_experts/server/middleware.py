"""Middleware around every route: API keys, the limit on open requests, request ids, error responses, the access log.

Routes are denied by default: without a key only the probes and the static page answer. The middleware notes what the
key of a request may do; `check_admin` runs before every admin route, for every spelling of its path. Keys are compared
in constant time."""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.request_id import REQUEST_ID, REQUEST_ID_RULE
from routed_experts.server.connection import abort_connection
from routed_experts.server.errors import ApiError, ClientGone, ErrorResponse, to_anthropic, to_response, unavailable
from routed_experts.server.limits import MAX_OPEN_REQUESTS, RESERVED_IDS, ServerSettings

PROBES = frozenset({"/health", "/health/live", "/ready", "/ping", "/liveness"})
_LOGGED_AT_DEBUG = PROBES | {"/health_generate"}
PUBLIC = _LOGGED_AT_DEBUG | {"/"}
_ANTHROPIC = "/v1/messages"  # errors have another form there
access_logger = logging.getLogger("routed_experts.server.access")
logger = logging.getLogger("routed_experts.server")
_CONTROL_CHARS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_STATUS_CLIENT_GONE = 499  # only logged, as proxies log it: the client has disconnected


def random_id() -> str:
    """Return an id that no other request has: 32 hexadecimal digits."""
    return uuid.uuid4().hex


class RequestMiddleware:
    """ASGI app around the routes. `open_requests` counts the requests in progress, without probes."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        *,
        on_idle: Callable[[], None],
        new_request_id: Callable[[], str] = random_id,
    ) -> None:
        self._app, self._on_idle, self._new_request_id = app, on_idle, new_request_id
        self._root_path = settings.root_path
        self._key, self._admin_key = _digest(settings.api_key), _digest(settings.admin_api_key)
        self.open_requests = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._tasks = set[asyncio.Task[object]]()
        self._end_error: Exception | None = None

    def end_requests(self, error: Exception) -> None:
        """End every request in progress, and those that come later: with this error, or, where the response has begun,
        by a cut of its connection. Event loop only."""
        self._end_error = error
        for task in self._tasks:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; every error becomes a response."""
        if scope["type"] != "http":
            return
        if self._root_path and scope["path"].startswith(f"{self._root_path}/"):  # a proxy may have left it in place
            scope["path"] = scope["path"].removeprefix(self._root_path)
        scope["app"] = self  # makes the router raise 404 and 405 instead of answering them
        state = scope.setdefault("state", {})
        state["request_id"] = self._new_request_id()
        sender = _ResponseSender(send, state, method=scope["method"], path=scope["path"])
        start_time, is_probe = time.perf_counter(), scope["path"] in PROBES
        self._count(0 if is_probe else 1)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._respond(scope, receive, sender)
        except asyncio.CancelledError:
            if self._end_error is None:
                raise
            task.uncancel()
            await sender.end(scope, self._end_error)
        finally:
            self._tasks.discard(task)
            self._count(0 if is_probe else -1)
            elapsed_ms = 1000 * (time.perf_counter() - start_time)
            access_logger.log(
                logging.DEBUG if scope["path"] in _LOGGED_AT_DEBUG else logging.INFO,
                "%s %s %d %.1f ms %s",
                scope["method"],
                repr(scope["path"][:200])[1:-1],
                sender.status,
                elapsed_ms,
                sender.request_id,
            )

    async def _respond(self, scope: Scope, receive: Receive, sender: "_ResponseSender") -> None:
        try:
            if self._end_error is not None:
                raise self._end_error
            _read_request_id(scope)
            self._authorize(scope)
            if _CONTROL_CHARS.search(scope["path"]):  # a router may match "/x\n" as "/x"
                raise _not_found()
            await self._app(scope, receive, sender.send)
        except ClientGone:
            sender.status = _STATUS_CLIENT_GONE
        except Exception as error:
            await sender.send_error(error)

    def _count(self, change: int) -> None:
        self.open_requests += change
        if self.open_requests:
            self.idle.clear()
        elif change < 0:
            self.idle.set()
            self._on_idle()

    def _authorize(self, scope: Scope) -> None:
        """Raise 401 or 503, or note the owner of the request and whether its key may use admin routes."""
        if self.open_requests > MAX_OPEN_REQUESTS:
            text = f"{MAX_OPEN_REQUESTS} requests are in progress; try again later"
            raise unavailable(text, code="too_many_requests")
        digest = _digest(_bearer_key(scope))
        is_user = _same(digest, self._key)
        is_admin = _same(digest, self._admin_key)
        unknown = _unknown_key(digest)
        if self._key is not None and not (is_user or is_admin or scope["path"] in PUBLIC):
            raise unknown
        may_administer = is_admin if self._admin_key is not None else is_user or self._key is None
        refusal = None if may_administer else _not_admin() if is_user else unknown
        owner = digest.hex() if digest is not None and self._key is not None and (is_user or is_admin) else ""
        scope["state"] |= {"owner": owner, "admin_refusal": refusal}


def check_admin(request: Request) -> None:
    """Raise 401 or 403 unless the key of this request may use admin routes. Every admin route begins with it."""
    refusal: ApiError | None = request.scope["state"]["admin_refusal"]
    if refusal is not None:
        raise refusal


def is_admin(request: Request) -> bool:
    """Whether the key of this request may use admin routes."""
    return request.scope["state"]["admin_refusal"] is None


def request_owner(request: Request) -> str:
    """Return the digest of the key of a request, empty without keys: rows are returned to their owner only."""
    return str(request.scope["state"]["owner"])


def resolve_request_id(request: Request, named: str | None, *, prefix: str, param: str = "request_id") -> str:
    """Return the id of a call: the one in the body, the X-Request-Id of the client, or a new one.

    It becomes the id of the response and its X-Request-Id."""
    state: dict[str, object] = request.scope["state"]
    if named is not None:
        if (problem := _id_problem(named)) is not None:
            raise InvalidRequestError(f"{param}={short_repr(named)} {problem}", param=param)
        state |= {"request_id": named, "client_named_id": True}
    elif not state.get("client_named_id"):
        state["request_id"] = prefix + str(state["request_id"])
    return str(state["request_id"])


def _id_problem(request_id: str) -> str | None:
    """Why a client may not give this id, and what to do; None where it may."""
    if not REQUEST_ID.fullmatch(request_id):
        return f"must be {REQUEST_ID_RULE}; change it"
    if request_id in RESERVED_IDS:
        reason = (
            "in the path of its rows it names a folder" if "." in request_id else f"/v1/routing/{request_id} is a route"
        )
        return f"is reserved: {reason}; choose another id"
    return None


def has_made_id(request: Request) -> bool:
    """Whether the id that `resolve_request_id` has returned was made for this call, and is not one of the client."""
    return not request.scope["state"].get("client_named_id")


class _ResponseSender:
    """Sends one response and remembers its status."""

    def __init__(self, send: Send, state: Mapping[str, object], *, method: str, path: str) -> None:
        self._send, self._state, self._method = send, state, method
        self._is_anthropic = path.startswith(_ANTHROPIC)
        self.status, self._has_started, self._is_complete = 500, False, False

    @property
    def request_id(self) -> str:
        """The id that the client or the route gave to the request."""
        return str(self._state["request_id"])

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_started, self.status = True, message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_complete = True

    async def end(self, scope: Scope, error: Exception) -> None:
        """Respond with an error; after the response has started, and before it is complete, cut the connection."""
        if not self._has_started:
            await self.send_error(error)
        elif not self._is_complete:
            if not abort_connection(scope):
                raise error
            await asyncio.sleep(0)  # the protocol notes that the connection is lost

    async def send_error(self, error: Exception) -> None:
        """Respond with an error; after the response has started the error can only be logged."""
        response = _router_error(error, self._method) if isinstance(error, HTTPException) else to_response(error)
        if self._is_anthropic:
            response = to_anthropic(response)
        if response.status == 500:
            logger.error("request %s failed", self.request_id, exc_info=error)
        if not self._has_started:
            body = msgspec.json.encode(response.body)
            headers = {"content-type": "application/json", "content-length": str(len(body)), **response.headers}
            raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
            await self.send({"type": "http.response.start", "status": response.status, "headers": raw})
            await self.send({"type": "http.response.body", "body": body})


def _router_error(error: HTTPException, method: str) -> ErrorResponse:
    if error.status_code == 405:
        text = f"this route does not support {method}; use {(error.headers or {}).get('Allow', 'another method')}"
        response = to_response(ApiError(text, status=405, code="method_not_allowed"))
        return ErrorResponse(response.status, response.body, {**response.headers, **(error.headers or {})})
    return to_response(_not_found())


def _not_found() -> ApiError:
    return ApiError("there is no such route; GET /openapi.json lists them", status=404, code="not_found")


def _read_request_id(scope: Scope) -> None:
    """Take the client's X-Request-Id, if it sent one."""
    header = _headers(scope).get(b"x-request-id")
    if header is not None:
        text = header.decode("latin-1")
        if (problem := _id_problem(text)) is not None:
            raise ApiError(f"X-Request-Id={short_repr(text)} {problem}", status=400, code="invalid_request_id")
        scope["state"] |= {"request_id": text, "client_named_id": True}


def _headers(scope: Scope) -> Mapping[bytes, bytes]:
    return dict(scope["headers"])


def _bearer_key(scope: Scope) -> str | None:
    """Return the key of a request; Anthropic's clients send it in a header of its own."""
    if (key := _headers(scope).get(b"x-api-key")) is not None and scope["path"].startswith(_ANTHROPIC):
        return key.decode("latin-1").strip() or None
    header = _headers(scope).get(b"authorization", b"").decode("latin-1")
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


def _digest(key: str | None) -> bytes | None:
    return None if key is None else hashlib.sha256(key.encode()).digest()


def _same(digest: bytes | None, key: bytes | None) -> bool:
    return digest is not None and key is not None and hmac.compare_digest(digest, key)


def _unknown_key(digest: bytes | None) -> ApiError:
    if digest is None:
        text = "the request has no key; send the header Authorization: Bearer KEY"
        return ApiError(text, status=401, code="missing_api_key")
    return ApiError("the key is not one of this server's", status=401, code="invalid_api_key")


def _not_admin() -> ApiError:
    return ApiError("this key may not use admin routes; send the admin key", status=403, code="admin_key_required")
