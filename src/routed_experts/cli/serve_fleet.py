"""`routed-experts serve --num-replicas`: several engines behind one endpoint, with Ray Serve."""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from routed_experts.cli.bootstrap import PROGRAM
from routed_experts.core.installation import import_optional
from routed_experts.fleet.host_processes import end_users_of

if TYPE_CHECKING:
    from routed_experts.fleet.spec import ReplicaSpec
    from routed_experts.fleet.start import Fleet

EXIT_LOST = 3
PURPOSE = "serve --num-replicas"


def check_ray() -> None:
    """Raise ConfigError, with the command that installs it, where Ray is missing."""
    import_optional("ray", purpose=PURPOSE, extra="ray")


def serve_fleet(spec: "ReplicaSpec", options: argparse.Namespace, start_time: float) -> int:
    """Start a fleet and serve until SIGTERM (exit code 0), or until Ray has ended, also in a drain (3). Raises
    ConfigError and MachineError."""
    check_ray()
    from routed_experts.server.run import check_port

    if spec.fleet.ray_address is None:  # in a Ray that runs the port may be its Serve's, which is another error
        check_port(spec.server)
    with _work_folder() as folder:
        from routed_experts.fleet.serve_environment import SHARED_VARIABLES, serve_environment

        variables = {name: os.environ.get(name, value) for name, value in SHARED_VARIABLES.items()}
        if spec.fleet.ray_address is None:  # read by Ray's modules when they are imported, and by its processes
            os.environ.update(variables | serve_environment(spec, work_folder=folder))
        import_optional("ray.serve", purpose=PURPOSE, extra="ray")
        from routed_experts.fleet.start import Fleet

        last = time.perf_counter()

        def on_phase(name: str, detail: str) -> None:
            nonlocal last
            _take_signals(fleet)  # Ray sets a handler of its own when it starts
            now = time.perf_counter()
            print(f"{name:<12}{now - last:7.2f} s  {detail}", file=sys.stderr, flush=True)
            last = now

        fleet = Fleet(spec, variables=variables, on_phase=on_phase)
        _take_signals(fleet)
        try:
            ready = fleet.start(quiet=vars(options).get("log_level") != "debug")
            if ready is None:
                return 0
            print(f"ready in {time.perf_counter() - start_time:.1f} s · {ready.summary} · {ready.url}", flush=True)
            return 0 if fleet.wait() else EXIT_LOST
        finally:
            fleet.end()
            if fleet.has_lost_ray:
                _leave(folder)
            end_users_of(folder)  # HAProxy, where a second signal came before Serve had ended it


def _leave(folder: str) -> NoReturn:
    """End HAProxy, which Ray has left behind, and then at once: what Ray does at the exit would wait for Ray."""
    print(f"{PROGRAM} serve: error: Ray has ended before the replicas had drained", file=sys.stderr)
    end_users_of(folder)
    shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_LOST)


def _take_signals(fleet: "Fleet") -> None:
    def on_signal(number: int, frame: FrameType | None) -> None:
        if fleet.stop.is_set():
            fleet.hurry.set()
        fleet.stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


@contextlib.contextmanager
def _work_folder() -> Generator[str, None, None]:
    """A folder for HAProxy's files, removed at the end. Its name is short: sockets are in it."""
    folder = tempfile.mkdtemp(prefix="rexp-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
