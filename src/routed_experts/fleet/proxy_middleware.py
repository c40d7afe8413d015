"""Middleware of Ray Serve's HTTP servers, through which an answer has one X-Request-Id: that of its request.

Serve makes an id for each request without one, and adds to every answer the header that the request had. This
middleware is around that: it tells the replica whether the client gave the id, and drops Serve's header where the
replica has sent its own. `serve` names `proxy_middlewares` in Serve's environment; it runs where Serve's HTTP server
does, in its Python proxy or, behind HAProxy, in the replica, so it imports Starlette alone."""

from collections.abc import Iterable

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"  # the environment variable, and what it names
CALLBACK_PATH = "routed_experts.fleet.proxy_middleware:proxy_middlewares"
REQUEST_ID, ID_ORIGIN = b"x-request-id", b"x-routed-experts-id-origin"
BY_CLIENT, BY_SERVE = b"client", b"serve"


def proxy_middlewares() -> list[Middleware]:
    """The middlewares around Serve's own."""
    return [Middleware(ResponseIds)]


class ResponseIds:
    """ASGI app around Serve's: says in ID_ORIGIN where the id of a request is from, and leaves one in the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = [entry for entry in scope["headers"] if entry[0] != ID_ORIGIN]
        origin = BY_CLIENT if any(name == REQUEST_ID for name, _ in headers) else BY_SERVE

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": _with_one_id(message.get("headers", ()))}
            await send(message)

        await self._app({**scope, "headers": [*headers, (ID_ORIGIN, origin)]}, receive, send_on)


def _with_one_id(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of an answer without all ids but the first: Serve appends its own."""
    entries = list(headers)
    others = [index for index, (name, _) in enumerate(entries) if name.lower() == REQUEST_ID][1:]
    return [entry for index, entry in enumerate(entries) if index not in others]
