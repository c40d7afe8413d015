"""One server process: bind the port, load the model, serve, drain, exit.

The port is bound first, so that a port in use is found before the model loads; probes are answered while it loads. Exit
codes: 0 drained, 3 the engine died while serving, or did not end its step when the server was to end. Errors before
that are raised."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import HANDLED_SIGNALS

from routed_experts.core.errors import ConfigError, EngineDeadError, MachineError, RoutedExpertsError
from routed_experts.core.garbage import freeze_gc
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.server.app import make_app
from routed_experts.server.errors import unavailable
from routed_experts.server.http_protocol import LimitedProtocol
from routed_experts.server.limits import KEEP_ALIVE_S, MAX_UNSENT_BYTES, ServerSettings
from routed_experts.server.state import ServerState

FINAL_FLUSH_S = 1.5  # to send the responses of aborted requests
STEP_GRACE_S = 2.0  # for the step in flight to end, after the shutdown timeout or a second signal
THREADS_GRACE_S = 5.0  # for the threads of a drained server to end, such as that of a score
# Seconds after the shutdown timeout or a second signal (the first two: or after a step that ends later) at which
ANSWERS_END_S = 1.0  # requests end with an error that have not been answered, such as a score
SENDING_ENDS_S = 1.3  # connections are cut that have bytes left to send
EXIT_S = 1.6  # the process ends, whatever its threads do
EXIT_DEAD = 3
logger = logging.getLogger("routed_experts.server")


def bind(settings: ServerSettings) -> socket.socket:
    """Bind the port. Raises MachineError with a remedy."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio turns off Nagle's algorithm only for sockets that name TCP; with it a response in two writes takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit this limit. Megabytes in the system's send buffer would hide that a client does not read.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        text = f"cannot listen on {settings.host}:{settings.port} ({error.strerror}); choose another --port or --host"
        raise MachineError(text) from error
    listener.setblocking(False)
    return listener


def check_port(settings: ServerSettings) -> None:
    """Raise MachineError where the port is in use: for a proxy that binds it later, in a process of its own."""
    bind(settings).close()


def check_weights_root(settings: ServerSettings) -> None:
    """Raise ConfigError where new weights would come from a folder that is not there."""
    root = settings.weights_root
    if root is not None and not Path(root).is_dir():
        fault = "is no folder" if Path(root).exists() else f"is not there (looked for {Path(root).absolute()})"
        raise ConfigError(f"--weights-root {root!r} {fault}; make the folder, or name one that is there")


def listener_url(listener: socket.socket) -> str:
    """Return the URL of the server."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_config(app: ASGIApp) -> uvicorn.Config:
    """Configure uvicorn: HTTP only, our protocol class, no logs of its own."""
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


class ServerProcess:
    """Runs one server until a signal or the death of its engine. `load` builds the engine, in a thread of its own;
    `on_ready` is called when it serves.

    In the main thread it owns the process: signals after the drain are ignored, and threads that do not end are ended
    with the process. An engine whose step does not end ends the process from any thread."""

    def __init__(
        self,
        server: ServerState,
        listener: socket.socket,
        *,
        load: Callable[[], AsyncEngine],
        on_ready: Callable[[], None],
    ) -> None:
        self._state, self._listener = server, listener
        self._load, self._on_ready = load, on_ready
        app, self._middleware = make_app(server)
        self._server = _Server(server_config(app), self._on_signal)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exit_now = asyncio.Event()
        self._shutdown: asyncio.Task[None] | None = None
        self._has_signal = False
        self._deadline = float("inf")  # of requests that run, by the event loop's clock
        self._load_error: BaseException | None = None
        self._has_died = self._is_stuck = False

    def run(self) -> int:
        """Serve, and return the exit code. Raises what loading the model raised."""
        asyncio.run(self._run())
        if self._load_error is not None:
            raise self._load_error
        return self._exit_code

    @property
    def _exit_code(self) -> int:
        return EXIT_DEAD if self._has_died else 0

    def drain(self) -> None:
        """Begin to drain, once; never ends the drain, as a second signal of this process does. From any thread."""
        if self._loop is not None:
            _call_on(self._loop, self._begin_drain)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._load_and_join, args=(self._loop,), name="load", daemon=True).start()
        await self._server.serve(sockets=[self._listener])
        if self._shutdown is not None:
            await self._shutdown
        if self._load_error is None and threading.current_thread() is threading.main_thread():
            # asyncio and the interpreter wait for threads without limit, and the signals are ignored.
            remaining_s = max(self._deadline + EXIT_S - self._loop.time(), 0)
            timer = threading.Timer(min(THREADS_GRACE_S, remaining_s), _exit_process, (self._exit_code,))
            timer.daemon = True
            timer.start()

    def _load_and_join(self, loop: asyncio.AbstractEventLoop) -> None:
        """Build the engine, then wait for its end. A thread of its own."""
        try:
            engine = self._load()
        except BaseException as error:
            _call_on(loop, lambda error=error: self._on_load_error(error))
            return
        freeze_gc()
        _call_on(loop, lambda: self._on_loaded(engine))
        cause = engine.join()
        _call_on(loop, lambda: self._on_engine_end(cause))

    def _on_load_error(self, error: BaseException) -> None:
        self._load_error = error
        self._server.should_exit = True

    def _on_loaded(self, engine: AsyncEngine) -> None:
        self._state.set_ready(engine)
        self._on_ready()

    def _on_engine_end(self, cause: BaseException | None) -> None:
        """Exit with EXIT_DEAD after the last responses, unless the engine ended by our own shutdown."""
        if self._is_stuck or (self._shutdown is not None and cause is None):
            return
        self._has_died = True
        self._state.set_failed(cause)
        logger.error("the engine has died; the server ends with code %d", EXIT_DEAD)
        self._shutdown = asyncio.ensure_future(self._flush_and_exit())

    def _on_signal(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._take_signal)

    def _take_signal(self) -> None:
        """Drain at the first signal; exit at once at the second: after the step in flight, within STEP_GRACE_S."""
        if self._has_signal and self._loop is not None and not self._exit_now.is_set():
            self._exit_now.set()
            self._deadline = min(self._deadline, self._loop.time())
        self._has_signal = True
        self._begin_drain()

    def _begin_drain(self) -> None:
        if self._shutdown is not None:
            return
        self._state.set_draining()
        logger.info("draining: new requests get 503, running ones have %g s", self._state.settings.shutdown_timeout)
        self._deadline = asyncio.get_running_loop().time() + self._state.settings.shutdown_timeout
        self._shutdown = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        idle, timeout_s = self._middleware.idle, self._state.settings.shutdown_timeout
        await _wait_first(idle.wait(), self._exit_now.wait(), timeout_s=timeout_s)
        with contextlib.suppress(RoutedExpertsError):  # still loading, or already dead: no generation runs
            engine = self._state.engine
            if not idle.is_set():
                engine.flush_submissions()
                cause = "a second signal" if self._exit_now.is_set() else f"above --shutdown-timeout ({timeout_s:g} s)"
                await self._run_or_exit(lambda: engine.abort_all(f"the server shut down: {cause}"), engine)
        await self._end_requests()
        with contextlib.suppress(RoutedExpertsError):
            engine = self._state.engine
            await self._run_or_exit(engine.engine.thread.stop, engine)
            await asyncio.to_thread(engine.engine.shutdown)
        self._server.should_exit = True

    async def _end_requests(self) -> None:
        """Let aborted generations answer for ANSWERS_END_S after the deadline, or from now where the step in flight has
        ended after it. Then end what still runs with an error, and, SENDING_ENDS_S after the same moment, cut the
        connections of clients that do not read."""
        loop, idle = asyncio.get_running_loop(), self._middleware.idle
        aborted_at = max(self._deadline, loop.time())
        answers_end, sending_ends = aborted_at + ANSWERS_END_S, aborted_at + SENDING_ENDS_S
        loop.call_at(sending_ends, self._cut_connections)  # also those whose requests have ended
        await _wait_first(idle.wait(), timeout_s=answers_end - loop.time())
        if not idle.is_set():
            text = "the server has shut down before this request was done; send it to another"
            self._middleware.end_requests(unavailable(text, code="draining"))
            await _wait_first(idle.wait(), timeout_s=sending_ends - loop.time())

    def _cut_connections(self) -> None:
        """Drop every connection with what it has not sent: its client does not read, or not fast enough."""
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def _run_or_exit(self, call: Callable[[], object], engine: AsyncEngine) -> None:
        """Run a call that waits for the engine thread. Ends the process where that does not answer within STEP_GRACE_S
        after the deadline, in the time of the event loop, or after a second signal. Raises what the call raises."""
        work = asyncio.ensure_future(asyncio.to_thread(call))
        exit_now = asyncio.ensure_future(self._exit_now.wait())
        remaining_s = max(self._deadline - asyncio.get_running_loop().time(), 0)
        await asyncio.wait((work, exit_now), timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
        exit_now.cancel()
        await asyncio.wait((work,), timeout=STEP_GRACE_S)
        if not work.done():
            await self._exit_stuck(engine)
        await work

    async def _exit_stuck(self, engine: AsyncEngine) -> NoReturn:
        """End what waits for the engine with an error, then the process: its threads may never end."""
        self._is_stuck = True
        logger.error("the engine does not end its step; the server ends with code %d", EXIT_DEAD)
        text = f"the engine has ended: its step did not end within {STEP_GRACE_S:g} s when the server was to end"
        cause = EngineDeadError(f"{text}; send the request to another server")
        self._state.set_failed(cause)
        threading.Thread(target=engine.engine.thread.kill, args=(cause,), name="kill", daemon=True).start()
        await _wait_first(self._middleware.idle.wait(), timeout_s=FINAL_FLUSH_S)
        _exit_process(EXIT_DEAD)

    async def _flush_and_exit(self) -> None:
        await _wait_first(self._middleware.idle.wait(), timeout_s=FINAL_FLUSH_S)
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Passes signals to `on_signal` instead of stopping at once, and ignores them after `serve`."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Run as the signal handler of the main thread."""
        logger.info("received %s", signal.Signals(sig).name)
        self._on_signal()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals in `serve`, if it runs in the main thread. Afterwards they are ignored to the end of the
        process: with the handlers from before, a signal that comes late would change the exit code."""
        owns_signals = threading.current_thread() is threading.main_thread()
        for sig in HANDLED_SIGNALS if owns_signals else ():
            signal.signal(sig, self.handle_exit)
        try:
            yield
        finally:
            for sig in HANDLED_SIGNALS if owns_signals else ():
                signal.signal(sig, signal.SIG_IGN)


def _exit_process(code: int) -> NoReturn:
    """End the process at once. Threads may be blocked, for which a usual exit waits."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader is gone, or it is closed
            stream.flush()
    os._exit(code)


def _call_on(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop has ended
        loop.call_soon_threadsafe(call)


async def _wait_first(*waits: Coroutine[object, object, object], timeout_s: float) -> None:
    """Wait for the first of these, or until time is up."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
