"""One server process: bind, load, serve, drain, exit. Knows signals and exit codes; the engine is made by whoever
calls.

The port is bound first, so that a port in use costs no loading, and probes are answered while the model loads.
Exit codes: 0 drained, 3 the engine died after it was ready; what goes wrong before is raised."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from routed_experts.core.errors import RoutedExpertsError
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.server.app import make_app
from routed_experts.server.http_protocol import LimitedProtocol
from routed_experts.server.limits import KEEP_ALIVE_S, MAX_UNSENT_BYTES, ServerSettings
from routed_experts.server.state import ServerState

FINAL_FLUSH_S = 1.5  # for answers of aborted requests to leave
EXIT_DEAD = 3
logger = logging.getLogger("routed_experts.server")


def bind(settings: ServerSettings) -> socket.socket:
    """Take the port. Raises OSError with a sentence if it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Named TCP, for asyncio turns off Nagle's algorithm only where it is: without that an answer in two writes waits 40
    # ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it: megabytes of unsent bytes in the system's buffer would hide whether a slow reader reads.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        told = f"cannot listen on {settings.host}:{settings.port} ({error.strerror}); choose another --port or --host"
        raise OSError(error.errno, told) from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Where the server is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_config(app: ASGIApp) -> uvicorn.Config:
    """How uvicorn runs the app: one process, HTTP alone, our protocol, no logs of its own."""
    return uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )


def freeze_gc() -> None:
    """What start-up made stays: full collections of garbage pass over it from now on. They would stop the engine and
    the server for 0.1 s and more. What is no longer referred to is freed all the same; cycles of it are not: those that
    there are go first."""
    gc.collect()
    gc.freeze()


class ServerProcess:
    """Runs one app until it is told to stop. `load` makes the engine, in a thread of its own; `on_ready` hears that it
    serves."""

    def __init__(
        self,
        service: ServerState,
        listener: socket.socket,
        *,
        version: str,
        load: Callable[[], AsyncEngine],
        on_ready: Callable[[], None],
    ) -> None:
        self._service, self._listener = service, listener
        self._load, self._on_ready = load, on_ready
        app, self._gate = make_app(service, version=version)
        self._server = _Server(server_config(app), self._on_signal)
        self._events: asyncio.AbstractEventLoop | None = None
        self._hurry = asyncio.Event()
        self._drain: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._has_died = False

    def run(self) -> int:
        """Serve until a signal or the engine's death; the exit code. Raises what loading the model raised."""
        asyncio.run(self._run())
        if self._failure is not None:
            raise self._failure
        return EXIT_DEAD if self._has_died else 0

    async def _run(self) -> None:
        self._events = asyncio.get_running_loop()
        threading.Thread(target=self._loading, name="load", daemon=True).start()
        await self._server.serve(sockets=[self._listener])
        if self._drain is not None:
            await self._drain

    def _loading(self) -> None:
        """Make the engine, then wait for its end. A thread of its own."""
        events = self._events
        assert events is not None
        try:
            door = self._load()
        except BaseException as error:
            self._tell(events, lambda error=error: self._failed(error))
            return
        freeze_gc()
        self._tell(events, lambda: self._ready(door))
        cause = door.join()
        self._tell(events, lambda: self._ended(cause))

    def _tell(self, events: asyncio.AbstractEventLoop, news: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended: nobody is left to be told
            events.call_soon_threadsafe(news)

    def _failed(self, error: BaseException) -> None:
        self._failure = error
        self._server.should_exit = True

    def _ready(self, door: AsyncEngine) -> None:
        self._service.serve(door)
        self._on_ready()

    def _ended(self, cause: BaseException | None) -> None:
        """The engine's thread is gone: by our own shutdown, or it died, and then the process ends once the last have
        been told."""
        if self._drain is not None and cause is None:
            return
        self._has_died = True
        self._service.die(cause)
        logger.error("the engine has died; the server ends with code %d", EXIT_DEAD)
        self._drain = asyncio.ensure_future(self._exit_process())

    def _on_signal(self) -> None:
        """First signal: drain. Second: at once."""
        events = self._events
        if events is not None:
            events.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        if self._drain is not None:
            self._hurry.set()
            return
        self._service.drain()
        logger.info("draining: new requests get 503, running ones have %g s", self._service.settings.shutdown_timeout)
        self._drain = asyncio.ensure_future(self._drain_and_leave())

    async def _drain_and_leave(self) -> None:
        await _first(self._gate.idle.wait(), self._hurry.wait(), timeout_s=self._service.settings.shutdown_timeout)
        with contextlib.suppress(RoutedExpertsError):  # still loading, or already dead: nothing runs
            door = self._service.door
            engine = door.engine
            if not self._gate.idle.is_set():
                door.flush_submissions()
                await asyncio.to_thread(engine.abort, abort_all=True)
                await _first(self._gate.idle.wait(), timeout_s=FINAL_FLUSH_S)
            await asyncio.to_thread(engine.shutdown)
        self._server.should_exit = True

    async def _exit_process(self) -> None:
        await _first(self._gate.idle.wait(), timeout_s=FINAL_FLUSH_S)
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Hands signals to us instead of stopping at once."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the interpreter, between two instructions of the main thread."""
        logger.info("%s came", signal.Signals(sig).name)
        self._on_signal()


async def _first(*waits: Coroutine[object, object, object], timeout_s: float) -> None:
    """Wait for the first of these, or until time is up."""
    tasks = [asyncio.ensure_future(one) for one in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
