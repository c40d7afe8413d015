"""Gate: the outermost layer. Who may pass, how many at once, and no error leaves but in our form. Knows no route's
work.

Denied by default: without the key only the probes and the static page are answered. Which routes are for admins the
table of routes says; the gate notes what a key may do and `check_admin` stands before such a route itself, however its
path was spelled. Keys are compared in constant time."""

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
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from routed_experts.server.body import ClientGone
from routed_experts.server.errors import ApiError, ErrorAnswer, answer_of, busy
from routed_experts.server.limits import MAX_OPEN_REQUESTS, REQUEST_ID, RESERVED_IDS, ServerSettings

PROBES = frozenset({"/health", "/health/live", "/ready", "/ping"})
OPEN = PROBES | {"/", "/health_generate"}
logger = logging.getLogger("routed_experts.server.access")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_CLIENT_GONE = 499  # as logs of proxies have it; nobody reads this status


class RequestMiddleware:
    """An ASGI app around the routes. `open_requests` counts what is being answered, probes left out."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, *, on_idle: Callable[[], None]) -> None:
        self._app, self._on_idle = app, on_idle
        self._key, self._admin_key = _digest(settings.api_key), _digest(settings.admin_api_key)
        self.open_requests = 0
        self.idle = asyncio.Event()
        self.idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens."""
        if scope["type"] != "http":
            return
        scope["app"] = self  # the router raises 404 and 405 for an app to answer
        state = scope.setdefault("state", {})
        state["request_id"] = uuid.uuid4().hex
        reply = _Reply(send, state)
        began, counted = time.perf_counter(), scope["path"] not in PROBES
        self._count(1 if counted else 0)
        try:
            _name_request(scope)
            self._admit(scope)
            if _CONTROL.search(scope["path"]):  # a router may take "/x\n" for "/x"
                raise no_route()
            await self._app(scope, receive, reply.send)
        except ClientGone:
            reply.status = _CLIENT_GONE
        except Exception as error:
            await reply.fail(error)
        finally:
            self._count(-1 if counted else 0)
            took = 1000 * (time.perf_counter() - began)
            logger.info(
                "%s %s %d %.1f ms %s", scope["method"], _shown_path(scope), reply.status, took, reply.request_id
            )

    def _count(self, change: int) -> None:
        self.open_requests += change
        if self.open_requests:
            self.idle.clear()
        elif change < 0:
            self.idle.set()
            self._on_idle()

    def _admit(self, scope: Scope) -> None:
        """Let a request through, or raise 401 or 503; note whose it is and what keeps it from admin routes."""
        if self.open_requests > MAX_OPEN_REQUESTS:
            raise busy(f"{MAX_OPEN_REQUESTS} requests are being answered; try again later", code="too_many_requests")
        digest = _digest(_given_key(scope))
        is_users = _same(digest, self._key)
        is_admins = _same(digest, self._admin_key)
        unknown = _unknown_key(digest)
        if self._key is not None and not (is_users or is_admins or scope["path"] in OPEN):
            raise unknown
        may_administer = is_admins if self._admin_key is not None else is_users or self._key is None
        refusal = None if may_administer else _not_admins() if is_users else unknown
        owner = digest.hex() if digest is not None and self._key is not None and (is_users or is_admins) else ""
        scope["state"] |= {"owner": owner, "admin_refusal": refusal}


def check_admin(scope: Scope) -> None:
    """Raise 401 or 403 unless the gate let this request through with a key for admin routes. Every admin route begins
    with it."""
    refusal: ApiError | None = scope["state"]["admin_refusal"]
    if refusal is not None:
        raise refusal


def no_route() -> ApiError:
    """404 for a path that nothing answers."""
    return ApiError("there is no such route; GET /openapi.json lists them", status=404, code="not_found")


class _Reply:
    """One answer on its way out: its status and whether it has begun."""

    def __init__(self, send: Send, state: Mapping[str, object]) -> None:
        self._send, self._state = send, state
        self.status, self.has_begun = 500, False

    @property
    def request_id(self) -> str:
        """The client's, or the one that the route gave it."""
        return str(self._state["request_id"])

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun, self.status = True, message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        """Answer with an error; one that comes after the answer has begun can only be logged."""
        answer = _of_router(error) if isinstance(error, HTTPException) else answer_of(error)
        if answer.status == 500:
            logging.getLogger("routed_experts.server").error("request %s failed", self.request_id, exc_info=error)
        if not self.has_begun:
            body = msgspec.json.encode(answer.body)
            headers = {"content-type": "application/json", "content-length": str(len(body)), **answer.headers}
            raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
            await self.send({"type": "http.response.start", "status": answer.status, "headers": raw})
            await self.send({"type": "http.response.body", "body": body})


def _of_router(error: HTTPException) -> ErrorAnswer:
    if error.status_code == 405:
        answer = answer_of(ApiError("this route does not know the method", status=405, code="method_not_allowed"))
        return ErrorAnswer(answer.status, answer.body, {**answer.headers, **(error.headers or {})})
    return answer_of(no_route())


def _name_request(scope: Scope) -> None:
    """Take the client's X-Request-Id, if it sent one."""
    said = _headers(scope).get(b"x-request-id")
    if said is not None:
        text = said.decode("latin-1")
        if not REQUEST_ID.fullmatch(text) or text in RESERVED_IDS:
            raise ApiError(
                "X-Request-Id must be 1 to 64 of A-Z a-z 0-9 . _ -; change it", status=400, code="invalid_request_id"
            )
        scope["state"] |= {"request_id": text, "is_named": True}


def _headers(scope: Scope) -> Mapping[bytes, bytes]:
    return dict(scope["headers"])


def _given_key(scope: Scope) -> str | None:
    said = _headers(scope).get(b"authorization", b"").decode("latin-1")
    scheme, _, key = said.partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


def _digest(key: str | None) -> bytes | None:
    return None if key is None else hashlib.sha256(key.encode()).digest()


def _same(digest: bytes | None, key: bytes | None) -> bool:
    return digest is not None and key is not None and hmac.compare_digest(digest, key)


def _unknown_key(digest: bytes | None) -> ApiError:
    if digest is None:
        return ApiError("no key came; send the header Authorization: Bearer KEY", status=401, code="missing_api_key")
    return ApiError("the key is not one of this server's", status=401, code="invalid_api_key")


def _not_admins() -> ApiError:
    return ApiError("this key may not use admin routes; send the admin key", status=403, code="admin_key_required")


def _shown_path(scope: Scope) -> str:
    return repr(scope["path"][:200])[1:-1]
