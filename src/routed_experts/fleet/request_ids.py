"""Ids of the requests of a fleet: each is named after the replica that serves it, so that its rows are found again."""

import re
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from routed_experts.fleet.proxy_middleware import BY_CLIENT, ID_ORIGIN, REQUEST_ID
from routed_experts.server.middleware import random_id

_MADE_ID = re.compile(r"(?:[a-z]+[-_])?(r[0-9]+)-[0-9a-f]{32}")  # by a replica: prefix of a dialect, tag, random digits
_SERVE_ID = re.compile(rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # made by Ray Serve for a request without one


def request_id_maker(tag: str) -> Callable[[], str]:
    """A function that names requests after the replica that serves them."""
    return lambda: f"{tag}-{random_id()}"


def tag_of(request_id: str) -> str | None:
    """The tag of the replica that made this id; None for an id of another form."""
    made = _MADE_ID.fullmatch(request_id)
    return None if made is None else made[1]


class RequestIds:
    """ASGI app around the server: removes the X-Request-Id that Ray Serve gives to a request that has none. Behind
    `ResponseIds`, which knows where an id is from, the answer has the server's X-Request-Id. Without it an id that
    looks like Serve's (a UUID) is taken for one, and Serve's header, which it adds to every answer, is left alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        origin = next((value for name, value in scope["headers"] if name == ID_ORIGIN), None)

        def reaches_server(name: bytes, value: bytes) -> bool:
            if name != REQUEST_ID:
                return name != ID_ORIGIN
            return origin == BY_CLIENT or (origin is None and not _SERVE_ID.fullmatch(value))

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["x-request-id"]
            await send(message)

        headers = [entry for entry in scope["headers"] if reaches_server(*entry)]
        await self._app({**scope, "headers": headers}, receive, send_on if origin is None else send)
