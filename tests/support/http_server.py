"""A real HTTP server over an engine of the test's process, on a loopback port: many settings, one engine."""

import asyncio
import contextlib
import dataclasses
import json
import threading

import httpx
import uvicorn

from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.server.app import make_app
from routed_experts.server.limits import ServerSettings
from routed_experts.server.middleware import RequestMiddleware
from routed_experts.server.run import bind, listener_url, server_config
from routed_experts.server.state import ServerState


@dataclasses.dataclass(frozen=True)
class Running:
    url: str
    state: ServerState
    middleware: RequestMiddleware
    client: httpx.Client
    loop: asyncio.AbstractEventLoop

    @property
    def address(self):
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def post(self, path, body, **options):
        return self.client.post(path, json=body, **options)

    def wait_idle(self, timeout=20):
        """Wait until every request has been answered or given up."""
        asyncio.run_coroutine_threadsafe(self.middleware.idle.wait(), self.loop).result(timeout)


@contextlib.contextmanager
def running(engine, *, model_path="tiny", **settings):
    """Serve `engine` until the block ends; with engine None the server stays in its start-up. Every token is an event
    of its own."""
    state = ServerState(
        ServerSettings(port=0, **{"stream_interval": 0.0, **settings}), model_path=model_path, version="0"
    )
    if engine is not None:
        state.set_ready(AsyncEngine(engine))
    listener = bind(state.settings)
    app, middleware = make_app(state)
    server = uvicorn.Server(server_config(app))
    started = threading.Event()
    loops = []

    async def serve():
        loops.append(asyncio.get_running_loop())
        asyncio.get_running_loop().call_soon(started.set)
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(10)
    headers = {"authorization": f"Bearer {state.settings.api_key}"} if state.settings.api_key else {}
    url = listener_url(listener)
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
        yield Running(url, state, middleware, client, loops[0])
    server.should_exit = True
    thread.join(15)
    assert not thread.is_alive(), "the server did not stop"


def events(response):
    """The JSON of each event of a stream; the last must be [DONE], and comments are left out."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1:]
    return [json.loads(line) for line in lines[:-1]]


def stream(server, path, body):
    """All events of a streamed answer."""
    with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response)


def parse_error(response, status):
    """The error of a refused request, whose form is checked."""
    assert response.status_code == status, (response.status_code, response.text[:300])
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= 1000
    assert "\n" not in error["message"] and "Traceback" not in error["message"] and "/src/" not in error["message"]
    return error
