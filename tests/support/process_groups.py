"""Process groups for tests: free ports, and groups of real processes that are started, watched and reaped."""

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from support.fork_server import fork_server
from support.process_log import ProcessLog
from support.xla_options import FAST_FLAGS

ROOT = Path(__file__).parents[2]
FIRST_PORT, LAST_PORT = 20_000, 32_000  # below the range that the system gives to outgoing connections
START_S, ANSWER_S = 240, 120
SIZES = {
    "page_size": 4,
    "context_length": 128,
    "max_total_tokens": 512,
    "precompile_bs_paddings": [1, 4],
    "precompile_token_paddings": [32],
    "skip_tokenizer_init": True,
}


class CommandError(Exception):
    """An error that a command of the leader raised: class, code, text."""

    def __init__(self, kind, code, text):
        super().__init__(f"{kind}: {text}")
        self.kind, self.code, self.text = kind, code, text


def free_address():
    """An address of this machine whose port and the next one are free."""
    start = FIRST_PORT + 2 * (os.getpid() % 5_000)  # processes of one test run look in different places
    for port in [*range(start, LAST_PORT, 2), *range(FIRST_PORT, start, 2)]:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for number in (port, port + 1):
                sock = stack.enter_context(socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("127.0.0.1", number))
            return f"127.0.0.1:{port}"
    raise RuntimeError(f"no two neighbouring ports of {FIRST_PORT} to {LAST_PORT} are free")


class GroupProcess:
    """A process of `support.group_process`, or of another command. `spec`: fork the former, in place of a command."""

    def __init__(self, command=None, *, spec=None, devices=1, fast=False, env=None, namespace=None):
        flags = f"--xla_force_host_platform_device_count={devices} {FAST_FLAGS if fast else ''}"
        own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **(env or {})}
        self._stderr = ProcessLog()
        if spec is not None:
            self.process = fork_server().start(spec, own, self._stderr, namespace=namespace)
        else:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
            )
        self._messages, self.lines = queue.Queue(), queue.Queue()  # of standard output: JSON, and other lines
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @staticmethod
    def of_engine(rank, path, engine, dist=None, *, devices=1, fast=False, namespace=None, **spec):
        spec |= {"rank": rank, "path": str(path), "engine": engine, "dist": dist}
        return GroupProcess(spec=spec, devices=devices, fast=fast, namespace=namespace)

    def wait_ready(self, timeout_s=START_S):
        message = self._next(timeout_s)
        assert message == {"ready": True}, message

    def begin(self, name, **arguments):
        """Send a command."""
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()

    def result(self, timeout_s=ANSWER_S):
        """Wait for the answer of a command. Raises CommandError."""
        message = self._next(timeout_s)
        if "error" in message:
            raise CommandError(*message["error"])
        return message["result"]

    def call(self, name, **arguments):
        self.begin(name, **arguments)
        return self.result()

    def end(self):
        """End a leader; returns its exit code."""
        assert self.call("end") == "ended"
        return self.exit_code()

    def signal(self, number):
        self.process.send_signal(number)

    def exit_code(self, timeout_s=60):
        return self.process.wait(timeout_s)

    def is_alive(self):
        return self.process.poll() is None

    def wait_log(self, text, timeout_s=60, *, dead=False):
        """Wait until the log has this text; returns the log. `dead`: the process may have ended."""
        watch, pause = Stopwatch(), threading.Event()
        while text not in (log := self.log()):
            assert (dead or self.is_alive()) and watch.seconds < timeout_s, log
            pause.wait(0.05)
        return log

    def since_trap(self):
        """Seconds since its trap was sprung; the clock is the system's."""
        return time.monotonic() - float(re.search(r"TRAP ([0-9.]+)", self.wait_log("TRAP ", dead=True))[1])

    def log(self):
        """What it has written to standard error."""
        return self._stderr.text()

    def close(self):
        if self.is_alive():
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(30)
        self._reader.join(10)
        for file in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                file.close()
        self._stderr.close()

    def _read(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                self._messages.put(json.loads(line))
            else:
                self.lines.put(line)
        self._messages.put(None)
        self.lines.put(None)

    def _next(self, timeout_s):
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"no answer in {timeout_s} s\n{self.log()[-4000:]}") from None
        if message is None:
            raise AssertionError(f"the process has ended ({self.process.wait(30)})\n{self.log()[-4000:]}")
        return message


@contextlib.contextmanager
def processes(*started):
    """Processes that are reaped at the end of the block, and whose logs follow a failure."""
    try:
        yield started
    except BaseException:
        for number, process in enumerate(started):
            print(f"---- process {number}, exit code {process.process.poll()} ----\n{process.log()[-3000:]}")
        raise
    finally:
        for process in started:
            process.close()


@contextlib.contextmanager
def group(
    path,
    engine,
    *,
    devices=1,
    nnodes=2,
    fast=False,
    traps=None,
    address=None,
    ready=True,
    dist=None,
    namespaces=None,
    **spec,
):
    """A group of `nnodes` processes with `devices` each; yields them by rank. `traps`, `namespaces` (of the
    network): by rank."""
    settings = {"nnodes": nnodes, "dist_init_addr": address or free_address(), "dist_timeout": 200.0}
    settings |= {"watchdog_timeout": 60.0, **(dist or {})}  # some programs compile in a step
    started = [
        GroupProcess.of_engine(
            rank,
            path,
            {**SIZES, "tp_size": devices * nnodes, **engine},
            settings,
            devices=devices,
            fast=fast,
            trap=(traps or {}).get(rank),
            namespace=(namespaces or {}).get(rank),
            **spec,
        )
        for rank in range(nnodes)
    ]
    with processes(*started) as members:
        if ready:
            members[0].wait_ready()
        yield members


@contextlib.contextmanager
def one_process(path, engine, *, devices, fast=False, **spec):
    """The same engine in one process of so many devices."""
    started = GroupProcess.of_engine(
        None, path, {**SIZES, "tp_size": devices, **engine}, devices=devices, fast=fast, **spec
    )
    with processes(started) as (process,):
        yield process


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self):
        self._since = time.monotonic()

    @property
    def seconds(self):
        return time.monotonic() - self._since
