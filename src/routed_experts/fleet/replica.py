"""Replica: one engine of a fleet, with the whole server around it, as a deployment of Ray Serve.

It serves once it has the weights of the fleet. It ends its process when its engine has ended; Ray starts another."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from routed_experts.core.errors import EngineDeadError, MachineError, RoutedExpertsError
from routed_experts.core.garbage import freeze_gc
from routed_experts.engine.async_engine import AsyncEngine
from routed_experts.engine.build.startup_phases import Phase
from routed_experts.engine.engine import Engine
from routed_experts.execution.absent_tpu import skip_absent_tpu
from routed_experts.fleet.fleet_routes import fleet_table
from routed_experts.fleet.follower_actor import start_followers
from routed_experts.fleet.link import Link, to_refusal
from routed_experts.fleet.messages import CoordinatorLost
from routed_experts.fleet.operations import Operations, weight_member
from routed_experts.fleet.ray_runtime import CoordinatorClient, actor_id, import_ray
from routed_experts.fleet.request_ids import RequestIds, request_id_maker
from routed_experts.fleet.row_reservations import RowReservations, max_retention_s
from routed_experts.fleet.serve_environment import HAPROXY, PYTHON_PROXY, check_proxy
from routed_experts.fleet.spec import ReplicaSpec
from routed_experts.server.app import make_app
from routed_experts.server.run import EXIT_DEAD, FINAL_FLUSH_S, STEP_GRACE_S
from routed_experts.server.state import ServerState

FAILING = ("stalled", "degraded", "dead")  # states in which a replica should be replaced
COMMAND_GRACE_S = 8.0  # for a command in the place of STEP_GRACE_S; with FINAL_FLUSH_S within what `serve` waits
logger = logging.getLogger(__name__)


class ReplicaApp:
    """The ASGI app that Ray Serve sees: the server of the replica in whose process it is."""

    def __init__(self) -> None:
        self._replica: Replica | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await _run_lifespan(receive, send)
        elif scope["type"] == "http":
            if self._replica is None:
                self._replica = import_ray("ray.serve").get_replica_context().servable_object
                assert isinstance(self._replica, Replica)
            await self._replica.serve(scope, receive, send)


async def _run_lifespan(receive: Receive, send: Send) -> None:
    """Agree to start and to end: the replica does both itself."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _proxy_name() -> str:
    """The proxy of this cluster's Serve, as its own module has it."""
    constants = import_ray("ray.serve._private.constants")
    return HAPROXY if getattr(constants, "RAY_SERVE_ENABLE_HA_PROXY", False) else PYTHON_PROXY


class Replica:
    """The deployment. Ray Serve calls `__init__` in every replica and `check_health` from time to time."""

    async def __init__(self, spec: ReplicaSpec, version: str) -> None:
        ray, settings = import_ray(), spec.fleet
        client = CoordinatorClient(
            spec.fleet_id,
            num_replicas=settings.num_replicas,
            weight_update_timeout=settings.weight_update_timeout,
        )
        self._followers: list[Any] = []
        try:
            proxy = _proxy_name()
            check_proxy(settings.routing_policy, proxy)
            engine = await asyncio.to_thread(self._build, spec)
            self._state = server = ServerState(
                spec.server,
                model_path=spec.args.model_path or "",
                tokenizer_path=spec.args.tokenizer_path,
                version=version,
            )
            server.set_ready(AsyncEngine(engine))
            weights = weight_member(engine, spec.server)
            rows = RowReservations(server.store, retention_s=max_retention_s(spec.server))
            operations = Operations(server, weights, rows, drain=self._drain, proxy=proxy)
            self._link = link = Link(
                client,
                handle=ray.get_runtime_context().current_actor,
                report=weights.report,
                operations=operations.by_name(),
                rows=rows.numbered,
            )
            rows.attach(link)
            server.on_rows_reserved = rows.reserve
            joined = await link.take_over(weights.load, settings.weight_update_timeout)
        except RoutedExpertsError as error:
            with contextlib.suppress(CoordinatorLost):
                await client.call("failed", to_refusal(error), isinstance(error, MachineError), timeout_s=30.0)
            raise
        table = fleet_table(link, update_s=settings.weight_update_timeout)
        app, self._middleware = make_app(server, table=table, new_request_id=request_id_maker(joined.tag))
        self._app: ASGIApp = RequestIds(app)
        self._engine = engine
        link.start()
        freeze_gc()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch_engine, args=(loop,), name="watch", daemon=True).start()
        logger.info("replica %s serves update %d of the weights", joined.tag, joined.version.update_count)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._app(scope, receive, send)

    def check_health(self) -> None:
        """Raise EngineDeadError where the replica should be replaced."""
        state = self._state.health().state
        if state in FAILING:
            raise EngineDeadError(f"the engine is {state}; Ray starts another replica")

    def _build(self, spec: ReplicaSpec) -> Engine:
        """Load and compile, with the followers of this engine, if it has some."""
        skip_absent_tpu()
        dist = None
        if spec.dist.is_group:
            group = import_ray("ray.util").get_current_placement_group()
            dist, self._followers = start_followers(
                spec, placement_group=group, bundle_indices=list(range(1, spec.dist.nnodes))
            )
        return Engine(
            **dataclasses.asdict(spec.args),
            **spec.parts,
            experts=spec.experts,
            dist=dist,
            self_check=True,
            seed_stream=actor_id(),
            on_phase=_print_phase,
        )

    async def _drain(self, grace_s: float) -> None:
        """`drain`. Where a step does not end, `_watch_engine` ends the process."""
        await drain(self._state, self._middleware.idle, grace_s)

    def _watch_engine(self, loop: asyncio.AbstractEventLoop) -> None:
        """End this process after the last responses, once the engine has ended by an error. A thread of its own."""
        cause = self._engine.thread.join()
        if cause is None:
            return
        logger.error("the engine has died; the replica ends with code %d", EXIT_DEAD)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(self._state.set_failed, cause)
        threading.Event().wait(FINAL_FLUSH_S)
        os._exit(EXIT_DEAD)


async def drain(server: ServerState, idle: asyncio.Event, grace_s: float) -> None:
    """Take nothing new, finish what runs, and end the rest with what it has. `idle` is set while no request runs. Where
    a step does not end, the rest ends with an error, and the engine with it."""
    server.set_draining()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(idle.wait(), max(grace_s, 0.001))
    if idle.is_set():
        return
    engine = server.engine.engine
    server.engine.flush_submissions()
    await end_requests(
        lambda: server.engine.abort_all("the replica shut down"),
        engine.thread.kill,
        idle,
        runs_command=lambda: engine.thread.runs_command,
    )


async def end_requests(
    abort: Callable[[], object],
    kill: Callable[[BaseException], object],
    idle: asyncio.Event,
    *,
    runs_command: Callable[[], bool],
) -> None:
    """Call `abort`, which waits for the engine thread, and wait until the last responses are sent, FINAL_FLUSH_S at
    most. An engine whose step does not end within STEP_GRACE_S is ended by `kill`, and with it the replica; a command
    that is carried out, such as a commit of weights, has COMMAND_GRACE_S. Raises what `abort` raises within that
    time."""
    work = asyncio.ensure_future(asyncio.to_thread(abort))
    kind, grace_s = "step", STEP_GRACE_S
    await asyncio.wait((work,), timeout=grace_s)
    if not work.done() and runs_command():
        kind, grace_s = "command", COMMAND_GRACE_S
        await asyncio.wait((work,), timeout=COMMAND_GRACE_S - STEP_GRACE_S)
    if work.done():
        await work
    else:
        work.cancel()  # its thread ends by `kill`
        logger.error("the engine has not ended its %s within %g s; the replica ends its requests", kind, grace_s)
        text = f"the engine has ended: its {kind} did not end within {grace_s:g} s when the replica was to end"
        cause = EngineDeadError(f"{text}; send the request again")
        threading.Thread(target=kill, args=(cause,), name="kill", daemon=True).start()  # it may wait for a lock
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(idle.wait(), FINAL_FLUSH_S)


def _print_phase(phase: Phase) -> None:
    """Ray keeps what a replica writes to standard error in a log of its own."""
    print(f"{phase.name:<12}{phase.seconds:7.2f} s  {phase.detail}", file=sys.stderr, flush=True)
