"""`routed-experts serve` in a follower: it joins the group of process 0 and runs what that orders. With --port it
answers probes.

The main thread waits for signals, and another one does everything else: JAX's compiler would hold a signal back."""

import argparse
import concurrent.futures
import dataclasses
import importlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from routed_experts.cli.bootstrap import PROGRAM, LoadBar, start_jax
from routed_experts.core.dist_config import DistConfig
from routed_experts.core.installation import missing_library
from routed_experts.core.server_args import ServerArgs

if TYPE_CHECKING:
    from routed_experts.engine.build.startup_phases import Phase
    from routed_experts.engine.group.process_group import AnyGroup
    from routed_experts.engine.group.rendezvous import Rendezvous
    from routed_experts.server.probes import FollowerHealth, ProbeServer

_SERVER_FLAGS = (
    "api_key",
    "api_key_file",
    "admin_api_key",
    "admin_api_key_file",
    "routing_store_bytes",
)
_OWN_FLAGS = re.compile(r"--xla_(dump|force_host_platform_device_count)")  # may differ between processes


def join_processes(
    args: ServerArgs,
    dist: DistConfig,
    groups: dict[str, Any],
    on_joined: "Callable[[AnyGroup], None]",
    on_rendezvous: "Callable[[Rendezvous], None] | None" = None,
) -> "AnyGroup":
    """Join the process group; call it after `start_jax`. `groups`: as for `_load` of serve; `on_joined` receives the
    group as soon as all processes have met, `on_rendezvous` the rendezvous of process 0 before. Raises ConfigError,
    CheckpointError, MachineError or PeerLostError."""
    from routed_experts.engine.build.group_start import join_group
    from routed_experts.models.loading.model_source import with_local_model

    flags = sorted(flag for flag in os.environ.get("XLA_FLAGS", "").split() if not _OWN_FLAGS.match(flag))
    return join_group(
        with_local_model(args, weights=groups["load_format"] != "dummy"),
        dist,
        **groups,
        settings={"XLA_FLAGS": " ".join(flags)[:100]},
        on_rendezvous=on_rendezvous,
        on_joined=on_joined,
    )


def follow_group(
    args: ServerArgs, dist: DistConfig, groups: dict[str, Any], options: argparse.Namespace, start_time: float
) -> int:
    """Follow until process 0 ends the group, also before all have come; returns 0. A signal asks process 0 to
    drain."""
    from routed_experts.engine.group.rendezvous import GroupAbandonedError

    values = vars(options)
    flags = _SERVER_FLAGS if "port" in values else ("host", *_SERVER_FLAGS)
    ignored = [f"--{name.replace('_', '-')}" for name in flags if name in values]
    if ignored:
        print(
            f"{PROGRAM} serve: process {dist.node_rank} serves no requests; ignored: {', '.join(ignored)}",
            file=sys.stderr,
        )
    joined: list[AnyGroup] = []
    phases: list[str] = []  # that are over
    probes = _start_probes(values, dist, joined, phases) if "port" in values else None
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not joined:
            os._exit(0)
        _request_drain(joined[0])

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)

    def work() -> None:
        try:
            _follow(args, dist, groups, joined, phases, start_time)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=work, name="follow", daemon=True).start()
    try:
        done.result()
    except GroupAbandonedError as error:
        print(f"{PROGRAM} serve: {error}", file=sys.stderr, flush=True)
    if probes is not None:
        probes.close()
    return 0


def _follow(
    args: ServerArgs,
    dist: DistConfig,
    groups: dict[str, Any],
    joined: "list[AnyGroup]",
    phases: list[str],
    start_time: float,
) -> None:
    """The life of a follower: join, load, compile, obey. `joined` and `phases` receive how far it is."""
    start_jax(default_platform=None, find_devices=False)
    who = f"process {dist.node_rank} of {dist.nnodes}"
    _print_phase("import", time.perf_counter() - start_time, f"Python and JAX, {who}")
    since = time.perf_counter()
    group = join_processes(args, dist, groups, joined.append)
    _print_phase("rendezvous", time.perf_counter() - since, who)
    from routed_experts.engine.follower import follow
    from routed_experts.engine.group.process_group import FollowingGroup

    assert isinstance(group, FollowingGroup), "of another rank than 0"

    def on_phase(phase: "Phase") -> None:
        _print_phase(phase.name, phase.seconds, phase.detail)
        phases.append(phase.name)

    on_load = LoadBar() if sys.stderr.isatty() else None
    parts: dict[str, Any] = {name: groups[name] for name in ("load_format", "placement", "speculative")}
    follow(**dataclasses.asdict(args), **parts, dist=group, on_phase=on_phase, on_load=on_load)
    print(f"{who} has followed to the end", file=sys.stderr, flush=True)


def abandon_group(waiting: "Sequence[Rendezvous]", joined: "Sequence[AnyGroup]") -> None:
    """End a group that still starts, without an error, in process 0. `waiting`: its rendezvous, if there is one;
    `joined`: the group, once all have met."""
    for rendezvous in waiting:
        rendezvous.abandon()
    for group in joined:
        from routed_experts.engine.group.process_group import LeadingGroup

        if isinstance(group, LeadingGroup):
            group.abandon()


def drain_with(group: "AnyGroup", drain: Callable[[], None]) -> None:
    """Call `drain` whenever a follower was asked to end; of process 0."""
    from routed_experts.engine.group.process_group import LeadingGroup

    if isinstance(group, LeadingGroup):
        group.on_drain = drain


def _start_probes(
    values: dict[str, Any], dist: DistConfig, joined: "list[AnyGroup]", phases: list[str]
) -> "ProbeServer":
    """Answer probes from now on. Raises MachineError where the port is in use."""
    try:
        limits = importlib.import_module("routed_experts.server.limits")
        run = importlib.import_module("routed_experts.server.run")
        probes = importlib.import_module("routed_experts.server.probes")
    except ImportError as error:
        raise missing_library(error, purpose="answer probes (--port of a follower)", extra="serve") from error
    listener = run.bind(limits.ServerSettings(**{name: values[name] for name in ("host", "port") if name in values}))

    def health() -> "FollowerHealth":
        state = "starting" if "following" not in phases else "following"
        if joined and joined[0].error is not None:
            state = "dead"
        order = joined[0].last_order if joined else 0
        return probes.FollowerHealth(state=state, node_rank=dist.node_rank, nnodes=dist.nnodes, order=order)

    server: ProbeServer = probes.ProbeServer(listener, health)
    server.start()
    print(f"probes: {run.listener_url(listener)}/health", file=sys.stderr, flush=True)
    return server


def _request_drain(group: "AnyGroup") -> None:
    from routed_experts.engine.group.process_group import FollowingGroup

    if isinstance(group, FollowingGroup):
        group.request_drain()


def _print_phase(name: str, seconds: float, detail: str) -> None:
    print(f"{name:<12}{seconds:7.2f} s  {detail}", file=sys.stderr, flush=True)
