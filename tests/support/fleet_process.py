"""A fleet as a user starts it, `routed-experts serve --num-replicas`, in a process of its own; its actors are found and
killed by the tree of processes below it."""

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from support.process_log import ProcessLog
from support.xla_options import FAST_FLAGS

ROOT = Path(__file__).parents[2]
SIZES = ["--page-size", "4", "--max-total-tokens", "4096", "--precompile-bs-paddings", "16"]
SIZES += ["--precompile-token-paddings", "64"]
CACHE = tempfile.TemporaryDirectory(prefix="programs-")  # of this run: its engines compile the same programs
READY = re.compile(r"ready in ([\d.]+) s · (\d+) replicas · weight version '([^']*)' · ([\w ]+) · (http://[\w.:]+)\n")
REPLICA, COORDINATOR, FOLLOWER = "ray::ServeReplica:", "ray::CoordinatorActor", "ray::FollowerActor"
START_S, END_S = 180, 60
KEY, ADMIN = "a-key-of-users", "a-key-of-admins"


def environment(**more):
    """Of every process of a fleet: programs compile fast, and once for all."""
    own = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", CACHE.name),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
        "PYTHONUNBUFFERED": "1",
        "XLA_FLAGS": FAST_FLAGS,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {**os.environ, **own, **more}


class FleetProcess:
    """One run of the command. `wait_ready` gives its URL."""

    def __init__(self, model, *flags, env=None):
        self._stderr = ProcessLog()
        command = [sys.executable, "-m", "routed_experts", "serve", str(model), "--port", "0", *SIZES, *flags]
        self.process = subprocess.Popen(
            command,
            env=env or environment(),
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            start_new_session=True,  # its process group can be sent a signal
        )
        self._lines = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.proxy = None
        self.root_pid = self.process.pid  # of the processes of its Ray

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_ready(self):
        deadline = time.monotonic() + START_S
        while True:
            line = self._lines.get(timeout=max(0.1, deadline - time.monotonic()))
            assert line is not None, self.log()[-4000:]
            if match := READY.fullmatch(line):
                self.proxy, self.url = match[4], match[5]
                return self

    def client(self, key=KEY, **options):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False, **options)

    def log(self):
        return self._stderr.text()

    def stop(self):
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_S)

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait(30)
        self._reader.join(10)
        self.process.stdout.close()
        self._stderr.close()


def actors(kind, root_pid):
    """Ids of the processes below `root_pid` that run actors of this kind."""
    parents, names = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                stat = (folder / "stat").read_text()
                parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
                names[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
    return sorted(pid for pid, name in names.items() if name.startswith(kind) and _is_below(pid, root_pid, parents))


def _is_below(pid, root, parents):
    while pid > 1:
        if pid == root:
            return True
        pid = parents.get(pid, 0)
    return False


def wait_until(condition, seconds=60, pause=0.1):
    """Poll with a deadline; returns what the condition gave."""
    deadline, clock = time.monotonic() + seconds, threading.Event()
    while True:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            if actual := condition():
                return actual
        assert time.monotonic() < deadline, "it did not come to that"
        clock.wait(pause)


@contextlib.contextmanager
def ray_cluster(folder, *, num_cpus, **variables):
    """A Ray of one node that is there before any fleet: its address, and the process that its actors are below."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = ["ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}"]
    command += [f"--num-cpus={num_cpus}", "--object-store-memory=120000000", "--include-dashboard=false"]
    command += [f"--temp-dir={folder}", "--disable-usage-stats"]
    command[0] = str(Path(sys.executable).parent / "ray")
    log = ProcessLog()
    process = subprocess.Popen(command, env=environment(**variables), stdout=log, stderr=subprocess.STDOUT, text=True)

    try:
        wait_until(lambda: "Ray runtime started" in log.text() or process.poll() is not None, seconds=60)
        assert process.poll() is None, log.text()[-2000:]
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        log.close()
