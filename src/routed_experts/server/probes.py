"""Probes of a follower: /health, /health/live, /ready and /liveness of a process that serves nothing else.

They are answered by a thread of their own, from the state of the group alone: never from a device, and never by process
0. So a supervisor can watch each process."""

import asyncio
import dataclasses
import socket
import threading
from collections.abc import Callable
from typing import Literal

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from routed_experts.server.body import json_response
from routed_experts.server.limits import RETRY_AFTER_S
from routed_experts.server.run import server_config


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FollowerHealth:
    """What a follower is doing. `order`: the number of the last one that it has carried out."""

    state: Literal["starting", "following", "dead"]
    node_rank: int
    nnodes: int
    order: int = 0


def make_probe_app(health: Callable[[], FollowerHealth]) -> Starlette:
    """An app with the routes. /health/live is 200, and /liveness 503 where the process is dead; the others are 503
    unless it follows."""

    def response(status: int) -> Response:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
        return json_response(dataclasses.asdict(health()), status=status, headers=headers)

    async def live(request: Request) -> Response:
        return response(200)

    async def ready(request: Request) -> Response:
        return response(200 if health().state == "following" else 503)

    async def liveness(request: Request) -> Response:
        return response(503 if health().state == "dead" else 200)

    routes = [Route("/health", ready), Route("/ready", ready), Route("/health/live", live)]
    return Starlette(routes=[*routes, Route("/liveness", liveness)])


class ProbeServer:
    """Answers probes on a socket that is bound already, until the process ends."""

    def __init__(self, listener: socket.socket, health: Callable[[], FollowerHealth]) -> None:
        self._listener = listener
        self._server = uvicorn.Server(server_config(make_probe_app(health)))
        self._thread = threading.Thread(target=self._run, name="probes", daemon=True)

    def start(self) -> None:
        """Answer from now on: connections wait until the thread takes them."""
        self._listener.listen()
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))
